"""Matrix products: wgmma on Hopper, tcgen05 on Blackwell, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from .asyncops import AsyncBuilder, Finished
from .memory import View
from .numerics import matmul, narrow, operand, poison_like, widen
from .places import here
from .runtime import KernelError, machine
from .scheduler import Operation, Stage

SCALE_BLOCK = 32  # elements of K that share a scale


class Pending(TensorHandle):  # type: ignore[misc]
    """A result of wgmma. Its values are poison until it has been waited for."""

    def __init__(self, shape: tuple[int, ...], dtype: tl.dtype) -> None:
        self.values: np.ndarray | None = None
        self.operation: Operation | None = None
        self.waited = False
        self.shape = shape
        self.dtype = dtype
        self.attr: dict[str, Any] = {}

    @property
    def data(self) -> np.ndarray:
        if not self.waited:
            machine().complain("poison", "the result of async_dot is used before async_dot_wait")
            return np.full(self.shape, np.nan, dtype=np.float32)
        assert self.values is not None
        return self.values


class MatmulBuilder(AsyncBuilder):
    """The tensor cores."""

    # wgmma

    def create_warp_group_dot(
        self, a: Any, b: View, acc: Any, _precision: Any, _imprecise: Any, _async: bool
    ) -> Pending:
        """``a @ b + acc``; ``a`` in registers or shared memory. Runs in the order of issue, after this returns."""
        sim = machine()
        task = sim.scheduler.current
        rows, columns = (a.shape if isinstance(a, View) else a.data.shape)[0], b.shape[1]
        result = Pending((rows, columns), tl.float32)
        chained = acc if isinstance(acc, Pending) and not acc.waited else None
        start = None if chained is not None else acc.data
        left = None if isinstance(a, View) else operand(a.data, a.dtype)

        def multiply(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            defects: list[View] = []
            first = left if left is not None else operand(_values(a, actor, defects), a.dtype)
            product = matmul(first, operand(_values(b, actor, defects), b.dtype))
            result.values = _poisoned_by(defects, product + (chained.values if chained is not None else start))

        operation = sim.new_operation("wgmma", [multiply], in_order=True)
        operation.after = task.matmuls[-1] if task.matmuls else None
        result.operation = operation
        task.matmuls.append(operation)
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()
        return result

    def create_warp_group_dot_wait(self, inputs: list[Any], pendings: int) -> list[Any]:
        sim = machine()
        task = sim.scheduler.current
        older = task.matmuls[: len(task.matmuls) - pendings] if pendings else list(task.matmuls)
        waits_for = Finished(older, 1, "matmuls")
        sim.scheduler.wait(waits_for, waits_for, here())
        for operation in older:
            task.clock.join(operation.clock)
        task.matmuls = task.matmuls[len(older) :]
        return [self._waited(handle, task) for handle in inputs]

    @staticmethod
    def _waited(handle: Any, task: Any) -> Any:
        """The same values, which may be used if their matmul has been waited for."""
        if not isinstance(handle, Pending) or handle.operation in task.matmuls:
            return handle
        done = Pending(handle.shape, handle.dtype)
        done.values, done.operation, done.waited = handle.values, handle.operation, True
        return done

    # tcgen05: operations of one task run in the order of their issue

    def create_tcgen5_dot(
        self, a: View, b: View, d: View, use_acc: Any, pred: Any, two_ctas: Any, bars: list[View], is_async: bool
    ) -> None:
        """``d = a @ b (+ d)``; with ``two_ctas`` of a pair of CTAs, each of which has half of the columns of ``b``."""

        def product(cta: Any, actor: Any, defects: list[Any]) -> np.ndarray:
            left = _values(a.on(cta), actor, defects)
            right = np.concatenate([_values(b.on(half), actor, defects) for half in self._pair(b, two_ctas)], axis=1)
            return matmul(operand(left, a.dtype), operand(right, b.dtype))

        self._multiply(product, d, use_acc, pred, bool(getattr(two_ctas, "value", two_ctas)), bars, is_async)

    def create_tcgen5_dot_scaled(
        self,
        a: View,
        b: View,
        d: View,
        a_scale: View,
        b_scale: View,
        a_type: Any,
        b_type: Any,
        use_acc: Any,
        pred: Any,
        two_ctas: Any,
        bars: list[View],
        is_async: bool,
    ) -> None:
        """The same with a scale, a power of two, for every 32 elements of K of a row of ``a`` or column of ``b``."""
        if "E2M1" in f"{a_type} {b_type}".upper():
            raise KernelError("async_dot_scaled with e2m1 operands cannot be simulated")

        def product(cta: Any, actor: Any, defects: list[Any]) -> np.ndarray:
            left = operand(_values(a.on(cta), actor, defects), a.dtype) * _scales(a_scale.on(cta), actor, defects)
            halves = [_values(b.on(half), actor, defects) for half in self._pair(b, two_ctas)]
            right = operand(np.concatenate(halves, axis=1), b.dtype)
            scales = _scales(b_scale.on(cta), actor, defects).T
            if scales.shape[1] * 2 == right.shape[1]:  # each CTA of a pair holds the scales of its own columns
                scales = np.concatenate([_scales(b_scale.on(h), actor, defects).T for h in self._pair(b, True)], axis=1)
            return matmul(left, right * scales[:, : right.shape[1]])

        self._multiply(product, d, use_acc, pred, bool(getattr(two_ctas, "value", two_ctas)), bars, is_async)

    def _pair(self, view: View, two_ctas: Any) -> list[Any]:
        """The CTAs that work together with a view's, the even one first."""
        rank = view.cta.rank & ~1
        return (
            [self.peer(view, rank), self.peer(view, rank + 1)] if getattr(two_ctas, "value", two_ctas) else [view.cta]
        )

    def _multiply(
        self,
        product: Callable[[Any, Any, list[Any]], np.ndarray],
        d: View,
        use_acc: Any,
        pred: Any,
        two_ctas: bool,
        bars: list[View],
        is_async: bool,
    ) -> None:
        sim = machine()
        if two_ctas and d.cta.rank % 2:
            return  # the even CTA of a pair issues
        if pred is not None and not _flag(pred):
            return
        accumulate = use_acc is None or _flag(use_acc)
        pair = self._pair(d, two_ctas)
        barriers = [self.barrier(bar.on(cta)) for bar in bars for cta in pair]

        def multiply(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            for cta in pair:
                defects: list[Any] = []
                values = product(cta, actor, defects)
                if accumulate:
                    values = widen(_values(d.on(cta), actor, defects), d.dtype) + values
                sim.write(d.on(cta), narrow(_poisoned_by(defects, values), d.dtype), actor)
            for barrier in barriers:
                barrier.arrive(1, operation.clock)

        operation = self._enqueue("tcgen05.mma", multiply)
        if not is_async:  # the compiler waits for it
            self._wait_for(operation)

    def _enqueue(self, what: str, stage: Stage) -> Operation:
        sim = machine()
        operation = sim.new_operation(what, [stage], in_order=True)
        task = sim.scheduler.current
        operation.after = task.tensor_queue
        task.tensor_queue = operation
        sim.scheduler.issue(operation)
        sim.scheduler.give_way()
        return operation

    @staticmethod
    def _wait_for(operation: Operation) -> None:
        sim = machine()
        waits_for = Finished([operation], 1, "operation of the tensor cores")
        sim.scheduler.wait(waits_for, waits_for, here())
        sim.scheduler.current.clock.join(operation.clock)

    def commit(self, bar: View, two_ctas: bool) -> None:
        """``tcgen05_commit``: arrive at the barrier, of both CTAs of a pair, when all that was issued is done."""
        if two_ctas and bar.cta.rank % 2:
            return
        barriers = [self.barrier(bar.on(cta)) for cta in self._pair(bar, two_ctas)]

        def arrive(operation: Operation) -> None:
            for barrier in barriers:
                barrier.arrive(1, operation.clock)

        self._enqueue("tcgen05.commit", arrive)

    def create_tmem_copy(self, src: View, dst: View) -> None:
        sim = machine()

        def copy(operation: Operation) -> None:
            actor = sim.operation_actor(operation)
            defects: list[Any] = []
            values = _values(src, actor, defects)
            if len(dst.shape) == 5:
                values = _unpacked_scales(values, dst.shape)
            sim.write(dst, values, actor)

        self._enqueue("tcgen05.cp", copy)


def _flag(value: Any) -> bool:
    value = getattr(value, "value", value)
    handle = getattr(value, "handle", value)
    return bool(handle.data.item()) if hasattr(handle, "data") else bool(handle)


def _values(view: View, actor: Any, defects: list[Any]) -> np.ndarray:
    """The elements; if some were never written, that is noted, and what is computed from them is as undefined."""
    values, whole = machine().read(view, actor)
    if not whole:
        defects.append(view)
        machine().note_poison(view.label, actor.where)
    return values


def _poisoned_by(defects: list[View], values: np.ndarray) -> np.ndarray:
    """A product with poison in it, where it shows; everywhere, if what was never written is not floating-point."""
    if not defects:
        return values
    everywhere = any(not view.dtype.is_floating() for view in defects)
    return np.where(everywhere | np.isnan(values), poison_like(values), values)


def _unpacked_scales(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """From the order in which scales lie in shared memory, ``[rows / 128, K / 4, 32, 4, 4]``, to that of a view.

    A view of scales in tensor memory is ``[rows / 128, 4, 32, K / 4, 4]``: row = (128-block, quarter, lane).
    """
    row_blocks, _, _, groups, _ = shape
    return blocks.reshape(row_blocks, groups, 32, 4, 4).transpose(0, 3, 2, 1, 4)


def _scales(view: View, actor: Any, defects: list[Any]) -> np.ndarray:
    """E8M0 scales as float32, repeated for every element of K: ``[rows, K]``."""
    values = _values(view, actor, defects)
    if len(view.logical_shape) != 2:
        raise KernelError(f"scales of shape {list(view.shape)} in shared memory cannot be simulated")
    exponents = values.astype(np.uint8).astype(np.int32) - 127
    return np.repeat(np.ldexp(np.float32(1), exponents).astype(np.float32), SCALE_BLOCK, axis=1)
