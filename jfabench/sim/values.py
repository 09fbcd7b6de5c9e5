"""Arithmetic and ordinary global memory: what the stock interpreter's builder does differently from the hardware.

It adds the raw bits of bfloat16, truncates conversions to it, multiplies 8-bit floats wrongly, and has no inline PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from . import ptx
from .numerics import BITS, matmul, narrow, numpy_type, operand, widen
from .places import here
from .runtime import KernelError, machine

if TYPE_CHECKING:
    Handle = Any  # Triton is untyped
else:
    Handle = TensorHandle


class Options:
    """What front ends ask of their target."""

    sanitize_overflow = False
    debug = False
    extern_libs = None
    supported_fp8_dtypes = ("fp8e5", "fp8e4nv", "fp8e4b15")
    deprecated_fp8_dot_operand_dtypes = ()
    default_dot_input_precision = "tf32"
    allowed_dot_input_precisions = ("tf32", "tf32x3", "ieee")
    max_num_imprecise_acc_default = 0
    backend_name = "cuda"
    warp_size = 32

    @property
    def arch(self) -> str:
        return machine().target.triton_arch

    @property
    def num_warps(self) -> int:
        return machine().scheduler.current.threads // 32


class ValueBuilder(InterpreterBuilder):  # type: ignore[misc]
    """Values of the GPU as NumPy arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.options = Options()

    # Where am I

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return machine().scheduler.current.cta.index  # type: ignore[no-any-return]

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return machine().grid

    # Constants: front ends pass unsigned values, too

    def get_int32(self, value: int) -> Handle:
        return Handle(np.array([(value + 2**31) % 2**32 - 2**31], dtype=np.int32), tl.int32)

    def get_int64(self, value: int) -> Handle:
        return Handle(np.array([(value + 2**63) % 2**64 - 2**63], dtype=np.int64), tl.int64)

    def get_bf16(self, value: float) -> Handle:
        return Handle(narrow(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    def get_null_value(self, type: Any) -> Handle:  # noqa: A002
        return Handle(np.zeros(1, numpy_type(type.scalar)), type.scalar)

    def get_all_ones_value(self, type: Any) -> Handle:  # noqa: A002
        return Handle(np.array([-1]).astype(numpy_type(type.scalar)), type.scalar)

    # Arithmetic

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Handle:
        dtype = lhs.dtype.scalar
        if dtype.name in BITS:
            result = op(widen(lhs.data, dtype), widen(rhs.data, dtype))
            if result.dtype == np.bool_:
                return Handle(result, tl.int1)
            return Handle(narrow(result, dtype), dtype)
        result = op(lhs.data, rhs.data)
        if result.dtype == np.bool_:
            return Handle(result, tl.int1)
        return Handle(result.astype(lhs.data.dtype, copy=False), dtype)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Handle:
        dtype = arg.dtype.scalar
        return Handle(narrow(np.asarray(op(widen(arg.data, dtype))), dtype), dtype)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Handle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Handle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_fma(self, x: Any, y: Any, z: Any) -> Handle:
        dtype = z.dtype.scalar
        product = widen(x.data, dtype).astype(np.float64) * widen(y.data, dtype)
        return Handle(narrow((product + widen(z.data, dtype)).astype(np.float32), dtype), dtype)

    def create_fabs(self, arg: Any) -> Handle:
        return self.unary_op(arg, np.abs)

    def create_rsqrt(self, arg: Any) -> Handle:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_clampf(self, arg: Any, lo: Any, hi: Any, _propagate: Any) -> Handle:
        dtype = arg.dtype.scalar
        data, low, high = (widen(x.data, dtype) for x in (arg, lo, hi))
        return Handle(narrow(np.fmin(np.fmax(data, low), high), dtype), dtype)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Handle:
        return Handle(np.where(cond.data, lhs.data, rhs.data), rhs.dtype.scalar)

    def create_ashr(self, lhs: Any, rhs: Any) -> Handle:
        signed = lhs.data.view(np.dtype(f"i{lhs.data.itemsize}")) if lhs.data.dtype.kind == "u" else lhs.data
        return Handle((signed >> rhs.data).view(lhs.data.dtype), lhs.dtype.scalar)

    def create_lshr(self, lhs: Any, rhs: Any) -> Handle:
        kind = np.dtype(f"u{lhs.data.itemsize}")
        return Handle((lhs.data.view(kind) >> rhs.data.astype(kind)).view(lhs.data.dtype), lhs.dtype.scalar)

    # Conversions

    def cast_impl(self, src: Any, dst_type: Any) -> Handle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source.name in BITS or target.name in BITS:
            return Handle(narrow(np.asarray(widen(src.data, source), np.float32), target), target)
        return Handle(src.data.astype(numpy_type(target)), target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, _rounding: Any) -> Handle:
        return self.cast_impl(src, dst_type)

    def create_bitcast(self, src: Any, dst_type: Any) -> Handle:
        return Handle(np.ascontiguousarray(src.data).view(numpy_type(dst_type.scalar)), dst_type.scalar)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    # Shapes

    def create_splat(self, ret_ty: Any, arg: Any) -> Handle:
        shape = tuple(int(getattr(n, "value", n)) for n in ret_ty.shape)
        return Handle(np.full(shape, arg.data.reshape(-1)[0], arg.data.dtype), arg.dtype.scalar)

    def create_unsplat(self, arg: Any) -> Handle:
        return Handle(arg.data.reshape(-1)[:1].copy(), arg.dtype.scalar)

    def create_reshape(self, arg: Any, shape: Any, _reorder: Any) -> Handle:
        return Handle(arg.data.reshape([int(getattr(n, "value", n)) for n in shape]), arg.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *_: Any) -> Handle:
        product = matmul(operand(a.data, a.dtype.scalar), operand(b.data, b.dtype.scalar))
        return Handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def create_inline_asm(self, asm: str, constraints: str, values: Any, types: Any, _pure: Any, pack: int) -> Any:
        return ptx.execute(asm, constraints, values, types, int(pack))

    def create_extern_elementwise(
        self, _name: str, _path: str, symbol: str, args: Any, ret_type: Any, _pure: Any
    ) -> Handle:
        return ptx.libdevice(symbol, args, ret_type)

    # Global memory

    def create_load(self, ptr: Any, cache: Any, eviction: Any, is_volatile: Any) -> Handle:
        mask = Handle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        return self.create_masked_load(ptr, mask, None, cache, eviction, is_volatile)

    def create_store(self, ptr: Any, val: Any, cache: Any, eviction: Any) -> None:
        self.create_masked_store(ptr, val, Handle(np.ones_like(ptr.data, dtype=bool), tl.int1), cache, eviction)

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, _cache: Any, _eviction: Any, is_volatile: Any
    ) -> Handle:
        dtype = ptrs.get_element_ty()
        kind = np.dtype(numpy_type(dtype))
        result = (
            np.zeros(ptrs.data.shape, kind) if other is None else np.broadcast_to(other.data, ptrs.data.shape).copy()
        )
        sim = machine()
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if addresses.size:
            storage = sim.locate(addresses, kind.itemsize)
            if storage is not None:
                actor = sim.actor()
                if is_volatile:
                    sim.globals.synchronise(int(addresses[0]), actor.clock, acquire=True, release=False)
                sim.mark_addresses(storage, addresses, "atomic" if is_volatile else "read", actor)
                result[np.broadcast_to(mask.data, result.shape)] = storage.elements(addresses, kind)
                if is_volatile:
                    sim.scheduler.give_way()
        return Handle(result.astype(kind, copy=False), dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, _cache: Any, _eviction: Any) -> None:
        chosen = np.broadcast_to(mask.data, ptrs.data.shape)
        addresses = ptrs.data[chosen]
        if not addresses.size:
            return
        sim = machine()
        kind = np.dtype(numpy_type(ptrs.get_element_ty()))
        storage = sim.locate(addresses, kind.itemsize)
        if storage is None:
            return
        actor = sim.actor()
        values = np.broadcast_to(value.data, ptrs.data.shape)[chosen].astype(kind, copy=False)
        changes = not np.array_equal(storage.elements(addresses, kind), values)
        sim.mark_addresses(storage, addresses, "write", actor, changes=changes)
        sim.refuse_poison(values, ptrs.get_element_ty(), storage.name, actor)
        storage.store(addresses, values)
        sim.scheduler.give_way()

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, _scope: Any) -> Handle:
        actor = self._atomic(ptr, mask, sem)
        before = super().create_atomic_rmw(op, ptr, val, mask, sem, _scope) if actor else val
        machine().scheduler.changed()
        machine().scheduler.give_way()
        return before

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, _scope: Any) -> Handle:
        actor = self._atomic(ptr, Handle(np.ones_like(ptr.data, dtype=bool), tl.int1), sem)
        before = super().create_atomic_cas(ptr, cmp, val, sem, _scope) if actor else val
        machine().scheduler.changed()
        machine().scheduler.give_way()
        return before

    @staticmethod
    def _atomic(ptr: Any, mask: Any, sem: Any) -> bool:
        """Bounds, races, and what an atomic access orders."""
        addresses = ptr.data[np.broadcast_to(mask.data, ptr.data.shape)]
        if not addresses.size:
            return True
        sim = machine()
        storage = sim.locate(addresses, 4)
        if storage is None:
            return False
        task = sim.scheduler.current
        acquire = sem in (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
        release = sem in (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
        for address in set(addresses.tolist()):
            sim.globals.synchronise(address, task.clock, acquire=acquire, release=release)
        sim.mark_addresses(storage, addresses, "atomic", sim.actor())
        if release:
            task.tick()
        return True

    def create_assert(self, condition: Any, message: str) -> None:
        if not condition.data.all():
            machine().find("wrong-result", f"device_assert failed: {message}", [here()])

    def create_print(self, *_: Any) -> None:
        """Nothing is printed."""

    def create_barrier(self) -> None:
        """Threads of a warp group run in step here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("make_", "get_")):  # layouts and their types: the simulator has none
            return lambda *_, **__: None
        if name.startswith(("create_", "clc_", "vote_")):
            raise KernelError(f"the operation {name.removeprefix('create_')} cannot be simulated")
        raise AttributeError(name)
