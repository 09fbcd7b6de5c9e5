"""Small kernels that are right, and that ``FAULT`` makes wrong in one place each."""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.ragged_tma import load_ragged

ROWS = tl.constexpr(64)
BYTES = tl.constexpr(64 * 64 * 2)


@triton.jit
def copy_kernel(src, dst, count, FAULT: tl.constexpr):
    """Blocks ``[64, 64]`` of float16 through a ring of two buffers, by a loader and a storer."""
    tiles = tlx.local_alloc((ROWS, 64), tl.float16, 2)
    staging = tlx.local_alloc((ROWS, 64), tl.float16, 1)
    full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    if FAULT == "too much shared memory":
        tlx.local_alloc((256, 256), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(count):
                if FAULT != "no wait for a free buffer":
                    tlx.barrier_wait(empty[i % 2], ((i // 2) & 1) ^ 1)
                if FAULT == "too many bytes expected":
                    tlx.barrier_expect_bytes(full[i % 2], BYTES + 128)
                elif FAULT != "bytes not expected":
                    tlx.barrier_expect_bytes(full[i % 2], BYTES)
                else:
                    tlx.barrier_arrive(full[i % 2], 1)
                tlx.async_descriptor_load(src, tiles[i % 2], [i * ROWS, 0], full[i % 2])
        with tlx.async_task(num_warps=4):
            for i in range(count):
                if FAULT == "phase flipped":
                    tlx.barrier_wait(full[i % 2], ((i // 2) & 1) ^ 1)
                elif FAULT != "no wait for data":
                    tlx.barrier_wait(full[i % 2], (i // 2) & 1)
                buffer = i % 2
                if FAULT == "no such buffer":
                    buffer = i % 2 + 1
                x = tlx.local_load(tiles[buffer])
                if FAULT == "released by two arrivals":
                    tlx.barrier_arrive(empty[i % 2], 2)
                elif FAULT != "buffer not released":
                    tlx.barrier_arrive(empty[i % 2], 1)
                if FAULT == "released twice":
                    tlx.barrier_arrive(empty[i % 2], 1)
                if FAULT != "no wait before the staging buffer is used again":
                    tlx.async_descriptor_store_wait(0)
                if FAULT != "staging buffer not written":
                    tlx.local_store(staging[0], x)
                tlx.async_descriptor_store(dst, staging[0], [i * ROWS, 0])
            if FAULT != "no wait before the end":
                tlx.async_descriptor_store_wait(0)


@triton.jit
def ragged_kernel(src, out, start, length):
    """The rows from ``start`` on, of which there are ``length``; zeros beyond."""
    rows = load_ragged(src, start, length, [0, 0])
    i = tl.arange(0, 64)
    tl.store(out + i[:, None] * 64 + i[None, :], rows)


@triton.jit
def window_kernel(dst, FENCE: tl.constexpr):
    """A store through the cluster's window, which the compiler puts no fence after."""
    staging = tlx.local_alloc((ROWS, 64), tl.float16, 1)
    tlx.remote_shmem_store(staging[0], tl.full([64, 64], 1.0, tl.float16), tlx.cluster_cta_rank())
    if FENCE:
        tlx.fence("async_shared")
    tlx.async_descriptor_store(dst, staging[0], [0, 0])
    tlx.async_descriptor_store_wait(0)


@triton.jit
def matmul_kernel(a, b, out, FAULT: tl.constexpr):
    """``[64, 64]`` by wgmma."""
    left = tlx.local_alloc((64, 64), tl.float16, 1)
    right = tlx.local_alloc((64, 64), tl.float16, 1)
    bar = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    tlx.barrier_expect_bytes(bar[0], 2 * BYTES)
    tlx.async_descriptor_load(a, left[0], [0, 0], bar[0])
    tlx.async_descriptor_load(b, right[0], [0, 0], bar[0])
    tlx.barrier_wait(bar[0], 0)
    product = tlx.async_dot(left[0], right[0])
    if FAULT == "operand overwritten":
        tlx.local_store(right[0], tl.zeros([64, 64], tl.float16))
    if FAULT != "result not waited for":
        product = tlx.async_dot_wait(0, product)
    rows = tl.arange(0, 64)
    if FAULT != "result not used":
        tl.store(out + rows[:, None] * 64 + rows[None, :], product)


@triton.jit
def missed_kernel(out):
    """Phase 0 and phase 1 of a barrier complete, whether or not the task that waits for phase 0 has looked."""
    bar = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(bar[0], 1)
            tlx.barrier_arrive(bar[0], 1)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(bar[0], 0)
            tl.store(out, 1.0)


@triton.jit
def global_kernel(out, counter, HOW: tl.constexpr):
    """Every program writes to the same place."""
    me = tl.program_id(0)
    if HOW == "stores":
        tl.store(out, me.to(tl.float32))
    elif HOW == "equal stores":
        tl.store(out, 1.0)
    elif HOW == "atomics":
        tl.atomic_add(out, 1.0)
    elif HOW == "a flag":
        if me == 0:
            tl.store(out, 1.0)
            tl.atomic_xchg(counter, 1, sem="release")
        else:
            while tl.atomic_add(counter, 0, sem="acquire") == 0:
                pass
            tl.store(out, tl.load(out) + 1.0)
    elif HOW == "out of bounds":
        tl.store(out + 1000000 + me, 1.0)
    elif HOW == "spinning":
        while tl.atomic_add(counter, 0) == 0:
            pass
    elif HOW == "spinning on a number":
        while me == 0:
            me = me * 2


@triton.jit
def reduction_kernel(out, READ: tl.constexpr, sink):
    """Every program adds to the same block, and may read it."""
    staging = tlx.local_alloc((ROWS, 64), tl.float32, 1)
    tlx.local_store(staging[0], tl.full([64, 64], 1.0, tl.float32))
    tlx.async_descriptor_store(out, staging[0], [0, 0], store_reduce="add")
    tlx.async_descriptor_store_wait(0)
    if READ:
        rows = tl.arange(0, 64)
        tl.store(sink + tl.program_id(0) * 4096 + rows[:, None] * 64 + rows[None, :], out.load([0, 0]))


@triton.jit
def tensor_memory_kernel(out, FAULT: tl.constexpr):
    """A block through tensor memory, from one warp group to another."""
    buffer = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    if FAULT == "too much tensor memory":
        tlx.local_alloc((128, 256), tl.float32, 2, tlx.storage_kind.tmem)
    ready = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(buffer[0], tl.full([128, 64], 2.0, tl.float32))
            tlx.barrier_arrive(ready[0], 1)
        with tlx.async_task(num_warps=4):
            if FAULT != "no wait":
                tlx.barrier_wait(ready[0], 0)
            rows, columns = tl.arange(0, 128), tl.arange(0, 64)
            tl.store(out + rows[:, None] * 64 + columns[None, :], tlx.local_load(buffer[0]))


@triton.jit
def alias_kernel(out):
    """Three allocations, of which the last begins with the first and is larger."""
    first = tlx.local_alloc((64,), tl.float32, 1)
    second = tlx.local_alloc((64,), tl.float32, 1)
    larger = tlx.local_alloc((64,), tl.float32, 4, reuse=first)
    tlx.local_store(second[0], tl.full([64], 2.0, tl.float32))
    for i in tl.static_range(4):
        tlx.local_store(larger[i], tl.full([64], i, tl.float32))
    tl.store(out + tl.arange(0, 64), tlx.local_load(larger[3]))
    tl.store(out + 64 + tl.arange(0, 64), tlx.local_load(second[0]))
