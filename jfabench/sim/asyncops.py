"""Asynchronous copies, by TMA and without it. Each is issued now and happens later, see :mod:`.scheduler`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle

from .barriers import Barrier
from .memory import View
from .numerics import narrow, numpy_type
from .places import here
from .runtime import KernelError, machine
from .scheduler import Operation
from .values import ValueBuilder


@dataclass(eq=False)
class Descriptor:
    """What TMA knows of a tensor. ``strides`` are in elements."""

    base: int
    dtype: tl.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    pad_nan: bool = False

    def check(self) -> None:
        size = self.dtype.primitive_bitwidth // 8
        if self.base % 16:
            raise KernelError("a TMA descriptor's base is no multiple of 16 bytes")
        if any(stride * size % 16 for stride in self.strides[:-1]):
            raise KernelError(f"a TMA descriptor's strides {list(self.strides)} are no multiples of 16 bytes")
        if any(n > 256 for n in self.block_shape[:-1]):
            raise KernelError(f"a TMA box of {list(self.block_shape)}: a side has at most 256 elements")


class AsyncBuilder(ValueBuilder):
    """Copies between global, shared and a peer's shared memory."""

    # Shared by all

    @staticmethod
    def peer(view: View, rank: int) -> Any:
        """The CTA of this rank in the cluster of a view's CTA."""
        ctas = view.cta.cluster.ctas
        if not 0 <= rank < len(ctas):
            raise KernelError(f"rank {rank} in a cluster of {len(ctas)} CTAs")
        return ctas[rank]

    @staticmethod
    def barrier(view: View) -> Barrier:
        """A CTA's barrier; one of a peer may have to be initialised first, which the compiler waits for."""
        barrier = view.cta.barrier(view)
        if barrier is None:
            waits_for = _Initialised(view)
            machine().scheduler.wait(waits_for, waits_for, here())
            barrier = view.cta.barrier(view)
        return barrier  # type: ignore[no-any-return]

    @staticmethod
    def check_types(view: View, shape: tuple[int, ...], dtype: tl.dtype) -> None:
        """What the compiler asks of a value and the buffer that it goes to."""
        same = (
            dtype.primitive_bitwidth == view.dtype.primitive_bitwidth
            and dtype.is_floating() == view.dtype.is_floating()
        )
        if not same or (dtype.is_floating() and dtype.name != view.dtype.name) or shape != view.logical_shape:
            raise KernelError(
                f"{dtype} of shape {list(shape)} goes to {view.label}, which holds {view.dtype} of shape "
                f"{list(view.logical_shape)}"
            )

    # Descriptors

    def create_make_tensor_descriptor(self, base: Any, shape: Any, strides: Any, *rest: Any) -> Descriptor:
        *place, block_shape, _signed, padding = rest  # an address to keep it at may come first
        made = Descriptor(
            int(base.data.item()),
            base.dtype.element_ty,
            tuple(int(n.data.item()) for n in shape),
            tuple(int(n.data.item()) for n in strides),
            tuple(int(n) for n in block_shape),
            padding == ir.PADDING_OPTION.PAD_NAN,
        )
        made.check()
        if place:
            machine().descriptors[int(place[0].data.item())] = made
        return made

    def create_reinterpret_tensor_descriptor(self, address: Any, block_type: Any) -> Descriptor:
        made = machine().descriptors.get(int(address.data.item()))
        if made is None:
            raise KernelError("reinterpret_tensor_descriptor: no descriptor was made at this address")
        shape = tuple(int(getattr(n, "value", n)) for n in block_type.shape)
        return Descriptor(made.base, made.dtype, made.shape, made.strides, shape, made.pad_nan)

    def create_global_scratch_alloc(self, size: int, alignment: int) -> TensorHandle:
        address = machine().globals.new_scratch(size, alignment)
        return TensorHandle(np.array([address], np.uint64), tl.pointer_type(tl.int8))

    # TMA

    def _check_block(self, desc: Descriptor, view: View) -> None:
        """A descriptor's block and a buffer hold the same, but for leading dimensions of 1."""
        if math.prod(desc.block_shape) == math.prod(view.shape):
            self.check_types(view, view.logical_shape, desc.dtype)
        else:
            self.check_types(view, desc.block_shape, desc.dtype)

    def create_async_TMA_load(  # noqa: N802
        self, targets: Any, desc: Descriptor, offsets: Any, bar: View, pred: Any, view: View, *rest: Any
    ) -> None:
        if not bool(pred.data.item()):
            return
        *_, two_ctas = rest
        place = [int(offset.data.item()) for offset in offsets]
        if not targets:
            self._load(desc, place, view, self.barrier(bar), "TMA load")
            return
        for target in targets:  # each copy lands when it lands, and signals its own CTA's barrier, or its pair's
            rank = int(target.data.item())
            signalled = self.peer(view, rank & ~1 if two_ctas else rank)
            self._load(
                desc, place, view.on(self.peer(view, rank)), self.barrier(bar.on(signalled)), "TMA multicast load"
            )

    def _load(self, desc: Descriptor, offsets: list[int], view: View, barrier: Barrier, what: str) -> None:
        sim = machine()
        self._check_block(desc, view)

        def land(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            block = _loaded(desc, offsets, actor)
            sim.write(view, block, actor)
            barrier.bytes_came(block.nbytes, operation.clock)

        operation = sim.new_operation(what, [land])
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()

    def create_async_TMA_store(self, desc: Descriptor, offsets: Any, view: View, *_: Any) -> None:  # noqa: N802
        self._store("TMA store", desc, offsets, view, None)

    def create_async_TMA_reduce(self, kind: Any, desc: Descriptor, offsets: Any, view: View, *_: Any) -> None:  # noqa: N802
        self._store("TMA reduction", desc, offsets, view, kind)

    def _store(self, what: str, desc: Descriptor, offsets: Any, view: View, kind: Any) -> None:
        """Shared memory is read late, and global memory written later still."""
        sim = machine()
        self._check_block(desc, view)
        place = [int(offset.data.item()) for offset in offsets]
        read: list[np.ndarray] = []

        def take(operation: Operation) -> None:
            values, whole = sim.read(view, sim.operation_actor(operation))
            if not whole:
                sim.note_poison(view.label, operation.where)
            read.append(values.reshape(desc.block_shape))

        def put(operation: Operation) -> None:
            sim.write_global(operation, desc, place, read[0], kind)

        operation = sim.new_operation(what, [take, put])
        sim.scheduler.current.stores.append(operation)
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()

    def create_async_TMA_store_wait(self, pendings: int) -> None:  # noqa: N802
        """Until all but the last ``pendings`` stores of this task have read their shared memory."""
        sim = machine()
        task = sim.scheduler.current
        older = task.stores[: len(task.stores) - pendings] if pendings else list(task.stores)
        waits_for = Finished(older, 1, "asynchronous stores to read shared memory")
        sim.scheduler.wait(waits_for, waits_for, here())
        for operation in older:
            task.clock.join(operation.clock)
            task.stores.remove(operation)

    # Copies without a descriptor

    def create_async_load(self, src: Any, view: View, mask: Any, other: Any, *rest: Any) -> None:
        """``cp.async``, which its task waits for by groups; or in bulk, with a barrier."""
        *_, size, bar, bulk = rest
        if bulk:
            self._bulk_load(int(src.data.item()), view, int(size.data.item()), self.barrier(bar))
            return
        sim = machine()
        mask = mask if mask is not None else TensorHandle(np.ones_like(src.data, dtype=bool), tl.int1)
        addresses = src.data[np.broadcast_to(mask.data, src.data.shape)]
        if addresses.size and sim.locate(addresses, view.itemsize) is None:
            return

        def land(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            sim.write(view, sim.gather(src, mask, other, actor).reshape(view.shape), actor)

        operation = sim.new_operation("cp.async", [land])
        sim.scheduler.current.copies.append(operation)
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()

    def _bulk_load(self, address: int, view: View, size: int, barrier: Barrier) -> None:
        sim = machine()
        storage = sim.locate(np.array([address, address + size - 1], np.uint64), 1)
        if storage is None:
            return
        part = replace(view, dtype=tl.uint8, shape=(size,), strides=(1,))

        def land(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            start = address - storage.start
            sim.mark_addresses(storage, address + np.arange(0, size, storage.granule).astype(np.uint64), "read", actor)
            sim.write(part, storage.bytes[start : start + size], actor)
            barrier.bytes_came(size, operation.clock)

        operation = sim.new_operation("bulk load", [land])
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()

    def create_async_commit_group(self, _tokens: Any) -> None:
        task = machine().scheduler.current
        task.copy_groups.append(task.copies)
        task.copies = []

    def create_async_wait(self, _tokens: Any, pendings: int) -> None:
        """Until all but the last ``pendings`` groups of ``cp.async`` of this task are complete."""
        sim = machine()
        task = sim.scheduler.current
        count = max(0, len(task.copy_groups) - pendings)
        older = [operation for group in task.copy_groups[:count] for operation in group]
        waits_for = Finished(older, 1, "copies")
        sim.scheduler.wait(waits_for, waits_for, here())
        for operation in older:
            task.clock.join(operation.clock)
        del task.copy_groups[:count]

    def create_async_store(self, view: View, dst: Any, size: Any) -> None:
        """Bulk copy of ``size`` bytes from shared to global memory."""
        sim = machine()
        address, nbytes = int(dst.data.item()), int(size.data.item())
        desc = Descriptor(address, tl.uint8, (nbytes,), (1,), (nbytes,))
        part = replace(view, dtype=tl.uint8, shape=(nbytes,), strides=(1,))
        if sim.locate(np.array([address, address + nbytes - 1], np.uint64), 1) is not None:
            self._store("bulk store", desc, [self.get_int32(0)], part, None)

    def create_async_remote_store(self, view: View, values: Any, rank: Any, bar: View) -> None:
        """Registers to a peer's shared memory; the peer's barrier gets the bytes."""
        cta = self.peer(view, int(rank.data.item()))
        data = values.data.copy()
        self._remote(view.on(cta), self.barrier(bar.on(cta)), "remote store", lambda _actor: data)

    def create_async_remote_copy(self, src: View, view: View, rank: Any, bar: View) -> None:
        """Shared memory to a peer's; the peer's barrier gets the bytes."""
        cta = self.peer(view, int(rank.data.item()))
        self._remote(view.on(cta), self.barrier(bar.on(cta)), "remote copy", lambda actor: self._taken(src, actor))

    @staticmethod
    def _taken(view: View, actor: Any) -> np.ndarray:
        values, whole = machine().read(view, actor)
        if not whole:
            machine().note_poison(view.label, actor.where)
        return values

    @staticmethod
    def _remote(view: View, barrier: Barrier, what: str, take: Callable[[Any], np.ndarray]) -> None:
        sim = machine()

        def land(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            sim.write(view, take(actor).reshape(view.shape), actor)
            barrier.bytes_came(view.nbytes, operation.clock)

        operation = sim.new_operation(what, [land])
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()

    # Descriptors used like ordinary loads and stores: the compiler stages them through shared memory, and waits

    def create_descriptor_load(self, desc: Descriptor, offsets: Any, *_: Any) -> TensorHandle:
        sim = machine()
        sim.scheduler.give_way()
        return TensorHandle(_loaded(desc, [int(o.data.item()) for o in offsets], sim.actor()), desc.dtype)

    def create_descriptor_store(self, desc: Descriptor, value: Any, offsets: Any, kind: Any = None) -> None:
        sim = machine()
        actor = sim.actor()
        if kind is ir.DESCRIPTOR_REDUCE_KIND.NONE or kind == ir.DESCRIPTOR_REDUCE_KIND.NONE:
            kind = None
        sim.put_block(actor, desc, [int(o.data.item()) for o in offsets], value.data.reshape(desc.block_shape), kind)
        sim.scheduler.give_way()

    def create_descriptor_reduce(self, kind: Any, desc: Descriptor, value: Any, offsets: Any) -> None:
        self.create_descriptor_store(desc, value, offsets, kind)


@dataclass
class Finished:
    operations: list[Operation]
    stages: int
    what: str

    def __call__(self) -> bool:
        return all(operation.finished >= self.stages for operation in self.operations)

    def describe(self) -> str:
        return f"{sum(o.finished < self.stages for o in self.operations)} {self.what}"


@dataclass
class _Initialised:
    view: View

    def __call__(self) -> bool:
        return self.view.cta.barrier(self.view) is not None

    def describe(self) -> str:
        return f"the initialisation of {self.view.label}{self.view.cta.name}"


def _loaded(desc: Descriptor, offsets: list[int], actor: Any) -> np.ndarray:
    """A block of a tensor; what lies outside is zero, or NaN."""
    sim = machine()
    kind = np.dtype(numpy_type(desc.dtype))
    box = sim.box(desc, offsets, kind)
    block = np.zeros(desc.block_shape, kind)
    if desc.pad_nan:
        block[...] = narrow(np.array(np.nan, np.float32), desc.dtype)
    block[box.inside] = box.data
    sim.mark_box(box, "read", actor)
    return block
