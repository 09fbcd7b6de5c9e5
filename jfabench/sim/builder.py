"""The builder that TLX's front end calls: buffers, barriers and fences. Asynchronous operations: :mod:`.asyncops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from . import memory
from .barriers import Barrier, PhaseWait
from .matmuls import MatmulBuilder
from .memory import AliasSpec, Allocation, Group, View
from .places import here
from .runtime import KernelError, machine, semantic
from .scheduler import Operation


def constant(value: Any) -> int:
    return int(getattr(value, "value", value))


def scalar(handle: Any) -> int:
    return int(handle.data.item())


class Builder(MatmulBuilder):
    """Creates nothing: carries each operation out, or issues it."""

    # Layouts say how data is spread over threads and banks, which is not simulated

    def create_require_layout(self, handle: Any, _layout: Any, **_: Any) -> Any:
        return handle

    def create_release_layout(self, handle: Any) -> Any:
        return handle

    def create_assert_same_layout(self, *_: Any) -> None: ...
    def create_assert_same_layout_expected(self, *_: Any) -> None: ...
    def create_dump_layout(self, *_: Any) -> None: ...

    # Allocations

    def create_local_alloc(self, shape: Any, dtype: Any, _layout: Any, alias: Any, spec: Any) -> View:
        count, *block = (int(n) for n in shape)
        itemsize = max(1, dtype.primitive_bitwidth // 8)
        strides = memory.contiguous_strides(block, itemsize)
        size = int(np.prod(block)) * itemsize
        return self._allocate("smem", size, count, dtype, tuple(block), strides, alias, spec)

    def create_tmem_alloc(self, shape: Any, dtype: Any, _layout: Any, alias: Any, spec: Any) -> View:
        count, rows, columns = (int(n) for n in shape)
        itemsize = max(1, dtype.primitive_bitwidth // 8)
        if (
            dtype.name in ("int8", "uint8") and rows % 128 == 0 and columns % 4 == 0
        ):  # scales: 16 bytes of 32 lanes each
            groups = columns // 4
            strides5 = (groups * 16, 4, memory.TMEM_PITCH, 16, 1)
            shape5 = (rows // 128, 4, 32, groups, 4)
            return self._allocate("tmem", rows // 128 * groups * 16, count, dtype, shape5, strides5, alias, spec)
        if rows == 64 and len(machine().scheduler.current.cta.cluster.ctas) % 2 == 0 and columns % 2 == 0:
            half = columns // 2  # as the matmuls of a pair of CTAs have it
            strides3 = (memory.TMEM_PITCH, 64 * memory.TMEM_PITCH, itemsize)
            return self._allocate("tmem", half * itemsize, count, dtype, (64, 2, half), strides3, alias, spec)
        if rows > memory.TMEM_LANES:
            raise KernelError(f"a tensor-memory buffer of {rows} rows: there are {memory.TMEM_LANES} lanes")
        strides = (memory.TMEM_PITCH, itemsize)
        view = self._allocate("tmem", columns * itemsize, count, dtype, (rows, columns), strides, alias, spec)
        view.allocation.share = rows / memory.TMEM_LANES
        return view

    @staticmethod
    def _allocate(
        space: str, size: int, count: int, dtype: Any, shape: Any, strides: Any, alias: Any, spec: AliasSpec | None
    ) -> View:
        cta = machine().scheduler.current.cta
        allocation = Allocation(space, size, count, here(), alias=alias and alias.allocation, spec=spec)
        if spec is not None:
            spec.members.append(allocation)
        return View(cta.allocate(allocation), cta, dtype, shape, strides)

    def create_storage_alias_spec(self, storage: str, size: int | None) -> AliasSpec:
        return AliasSpec(storage, size)

    def create_reuse_group(self, elements: Any, kind: str, size: int) -> Group:
        return Group([e.allocation if isinstance(e, View) else e for e in elements], kind, size)

    def create_set_buffer_overlap(self, spec: AliasSpec, tree: Group) -> None:
        spec.tree = tree

    def create_alloc_barriers(self, count: int, arrive_count: int, _layout: Any) -> View:
        sim = machine()
        cta = sim.scheduler.current.cta
        allocation = cta.allocate(Allocation("smem", 8, count, here(), is_barrier=True))

        def label(i: int) -> Callable[[], str]:
            number = f"[{i}]" if count > 1 else ""
            return lambda: f"{allocation.name or 'barrier'}{number}{cta.name}"

        for i in range(count):
            cta.barriers[allocation.number, i] = Barrier(
                label(i), arrive_count, sim.complain, sim.scheduler.changed, allocation.where
            )
        return View(allocation, cta, tl.int64, (1,), (8,))

    # Views

    def create_memdesc_subview(self, view: View, index: Any) -> View:
        return view.index(scalar(index))

    def create_memdesc_subslice(self, view: View, offsets: Any, shape: Any) -> View:
        return view.slice([constant(n) for n in offsets], [constant(n) for n in shape])

    def create_tmem_subslice(self, view: View, offset: Any, size: Any) -> View:
        offset, size = (constant(n) for n in (offset, size))
        return view.columns(offset, size)

    def create_memdesc_trans(self, view: View, dims: Any) -> View:
        return view.permute([constant(d) for d in dims])

    def create_memdesc_reshape(self, view: View, shape: Any) -> View:
        return view.reinterpret(view.dtype, [constant(n) for n in shape])

    def create_memdesc_reinterpret(self, view: View, dtype: Any, shape: Any) -> View:
        return view.reinterpret(dtype, [constant(n) for n in shape])

    def create_map_to_remote_buffer(self, view: View, rank: Any) -> View:
        return view.on(self.peer(view, scalar(rank)))

    # Ordinary loads and stores

    def create_local_load(self, view: View, _token: Any = None, layoutEncoding: Any = None) -> TensorHandle:
        sim = machine()
        sim.scheduler.give_way()
        values, whole = sim.read(view, sim.actor())
        if not whole:
            sim.note_poison(view.label, here())
            if not view.dtype.is_floating():  # nothing tells such a value from others
                sim.complain("poison", f"{view.label} is read, of which bytes were never written")
        return TensorHandle(values, view.dtype)

    def create_local_store(self, view: View, values: Any, stores_by: str = "store") -> None:
        self.check_types(view, values.data.shape, values.dtype.scalar)
        sim = machine()
        sim.scheduler.give_way()
        sim.write(view, values.data, sim.actor(stores_by))

    def create_tmem_load(self, view: View, _layout: Any, _token: Any = None, **_: Any) -> TensorHandle:
        return self.create_local_load(view)

    def create_tmem_store(self, view: View, values: Any) -> None:
        self.create_local_store(view, values)

    def create_remote_store(self, view: View, values: Any, rank: Any) -> None:
        self.create_local_store(view.on(self.peer(view, scalar(rank))), values, "remote")

    def create_local_gather(self, view: View, indices: Any, axis: int) -> TensorHandle:
        data = self.create_local_load(view).data
        index = self.create_local_load(indices).data if isinstance(indices, View) else indices.data
        return TensorHandle(np.take_along_axis(data, index, axis), view.dtype)

    # Barriers

    def create_barrier_expect(self, view: View, size: int, pred: Any) -> None:
        if scalar(pred):
            sim = machine()
            self.barrier(view).expect(size, sim.scheduler.current.clock)
            sim.scheduler.current.tick()
            sim.scheduler.changed()
            sim.scheduler.give_way()

    def create_barrier_wait(self, view: View, phase: Any, pred: Any) -> None:
        if not scalar(pred):
            return
        sim = machine()
        barrier = self.barrier(view)
        task, where = sim.scheduler.current, here()

        def complain(message: str) -> None:
            sim.find("phase", f"{message}: {task.name} misses it", [where])

        wait = PhaseWait(barrier, scalar(phase) & 1, complain)
        barrier.waits += 1
        barrier.blocked += not barrier.passes(wait.parity)
        sim.scheduler.wait(wait, wait, where)
        task.clock.join(barrier.released)

    def create_barrier_arrive(self, view: View, count: int, pred: Any = None) -> None:
        if pred is None or scalar(pred):
            sim = machine()
            self.barrier(view).arrive(count, sim.scheduler.current.clock)
            sim.scheduler.current.tick()
            sim.scheduler.give_way()

    def create_warp_barrier_arrive(self, view: View, count: int, pred: Any = None) -> None:
        """Every thread arrives for itself."""
        self.create_barrier_arrive(view, count * machine().scheduler.current.threads, pred)

    def create_named_barrier_wait(self, number: Any, threads: Any) -> None:
        sim = machine()
        task = sim.scheduler.current
        meeting = task.cta.named.arrive(scalar(number), task.threads, scalar(threads), task.clock)
        task.tick()
        sim.scheduler.changed()
        sim.scheduler.wait(meeting, meeting, here())
        task.clock.join(meeting.clock)

    def create_named_barrier_arrive(self, number: Any, threads: Any) -> None:
        sim = machine()
        task = sim.scheduler.current
        task.cta.named.arrive(scalar(number), task.threads, scalar(threads), task.clock)
        task.tick()
        sim.scheduler.changed()
        sim.scheduler.give_way()

    # Clusters

    def create_cluster_cta_rank(self) -> TensorHandle:
        return self.get_int32(machine().scheduler.current.cta.rank)

    def create_cluster_size_1d(self) -> TensorHandle:
        return self.get_int32(len(machine().scheduler.current.cta.cluster.ctas))

    def create_cluster_barrier(self) -> None:
        machine().meet_cluster()

    def create_fence_mbarrier_init_cluster(self) -> None:
        """Remote operations on a barrier wait until it is initialised anyway: the compiler lets the cluster meet."""

    # Cluster launch control: which cluster of the grid, that has not started, this one takes over

    def create_alloc_clc_responses(self, count: Any, _layout: Any) -> View:
        cta = machine().scheduler.current.cta
        allocation = cta.allocate(Allocation("smem", 16, constant(count), here()))
        return View(allocation, cta, tl.uint8, (16,), (1,))

    def clc_issue(self, response: View, bar: View) -> None:
        """Asked for by the first CTA, answered to all of the cluster."""
        sim = machine()
        if response.cta.rank:
            return
        answered = [(response.on(cta), self.barrier(bar.on(cta))) for cta in response.cta.cluster.ctas]

        def answer(operation: Operation) -> None:
            taken = sim.pending.popleft() if sim.pending else (-1, -1, -1)
            words = np.array([*taken, 0], np.int32).view(np.uint8)
            for view, barrier in answered:
                sim.write(view, words, sim.operation_actor(operation))
                barrier.bytes_came(16, operation.clock)

        operation = sim.new_operation("clc request", [answer])
        sim.scheduler.issue(operation)

    def clc_query(self, response: View) -> list[TensorHandle]:
        values = self.create_local_load(response).data.view(np.int32)[:3].tolist()
        if values[0] >= 0:
            values[0] += response.cta.rank
        return [self.get_int32(value) for value in values]

    # Fences and the rest

    def create_fence_async_shared(self, _cluster: bool) -> None:
        task = machine().scheduler.current
        task.clock.fence()
        task.tick()

    def create_threadfence(self, _scope: str) -> None:
        """Order of global memory is given by atomics; a fence alone tells nobody anything."""

    def create_thread_id(self, axis: int) -> TensorHandle:
        return self.get_int32(0)

    def create_clock64(self) -> TensorHandle:
        return self.get_int64(machine().scheduler.steps)

    def create_prefetch(self, *_: Any) -> None: ...
    def create_prefetch_tensormap(self, *_: Any) -> None: ...
    def create_async_TMA_prefetch(self, *_: Any) -> None: ...  # noqa: N802

    def vote_ballot_sync(self, mask: Any, pred: Any) -> TensorHandle:
        """A bit for each lane; here every element of a warp's share sees whether any has it set.

        Which elements share a warp depends on the layout. All that kernels ask is whether the result is zero, so that
        the rows of a block are taken as lanes, 32 to a warp.
        """
        data = pred.data.reshape(pred.data.shape[0], -1).any(axis=1)
        lanes = np.zeros(-(-len(data) // 32) * 32, dtype=np.uint64)
        lanes[: len(data)] = data
        words = (lanes.reshape(-1, 32) << np.arange(32, dtype=np.uint64)).sum(axis=1)
        rows = np.repeat(words, 32)[: len(data)].astype(np.uint32).view(np.int32) & np.int32(scalar(mask))
        shape = (len(data),) + (1,) * (pred.data.ndim - 1)
        return TensorHandle(np.broadcast_to(rows.reshape(shape), pred.data.shape).copy(), tl.int32)


semantic.builder = Builder()
