"""Rings of shared-memory tiles between the warp groups of one kernel (TLX).

A :class:`Ring` hides the producer/consumer protocol: a producer waits until a slot is free, a consumer until it is
full. Both count the tiles that they have moved, and the count gives the slot and the phase of its barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .record import WAIT_STORES


@aggregate
class Ring:
    """``depth`` slots of ``parts`` tiles each, which are loaded together and released together."""

    tiles: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier
    depth: tl.constexpr
    parts: tl.constexpr
    by_thread: tl.constexpr  # how consumers release; part of the type, since functions are compiled once per type
    name: tl.constexpr  # one of the waits of :mod:`.record`

    @triton.jit
    def slot(self, count):
        """Slot and phase of the ``count``-th use of the ring."""
        return count % self.depth, (count // self.depth) & 1

    @triton.jit
    def tile(self, count, part: tl.constexpr):
        return self.tiles[(count % self.depth) * self.parts + part]

    @triton.jit
    def acquire(self, count, watch):
        """Producer: wait until the slot is free."""
        slot, phase = self.slot(count)
        since = watch.now()
        tlx.barrier_wait(self.empty[slot], phase ^ 1)
        watch.waited(self.name, since)

    @triton.jit
    def wait(self, count, watch):
        """Consumer: wait until the slot is full."""
        slot, phase = self.slot(count)
        since = watch.now()
        tlx.barrier_wait(self.full[slot], phase)
        watch.waited(self.name, since)

    @triton.jit
    def wait_if(self, condition, count, watch):
        """Consumer: wait, or do nothing unless ``condition``; without a branch, which a matmul in flight forbids."""
        slot, phase = self.slot(count)
        since = watch.now()
        tlx.barrier_wait(self.full[slot], phase, condition)
        watch.waited(self.name, since)

    @triton.jit
    def release(self, count):
        """Consumer: give the slot back. One arrival for the whole warp group."""
        tlx.barrier_arrive(self.empty[count % self.depth], 1)

    @triton.jit
    def load(self, count, descriptor, row, column, rows=None, EXTRA: tl.constexpr = 0):
        """Producer: fill the free slot with consecutive blocks of the rows from ``row`` on, by TMA.

        ``rows`` (:class:`.ragged.Rows`) goes with a ragged descriptor; then ``row`` counts in their sequence. The slot
        is full when ``EXTRA`` bytes more have come, which the caller loads.
        """
        slot = count % self.depth
        ROWS: tl.constexpr = self.tiles.shape[0]
        COLUMNS: tl.constexpr = self.tiles.shape[1]
        SIZE: tl.constexpr = tlx.size_of(descriptor.dtype)
        tlx.barrier_expect_bytes(self.full[slot], self.parts * ROWS * COLUMNS * SIZE + EXTRA)
        for part in tl.static_range(self.parts):
            place = (row + part * ROWS, column) if rows is None else rows.at(row + part * ROWS, column)
            tlx.async_descriptor_load(descriptor, self.tiles[slot * self.parts + part], place, self.full[slot])


@triton.jit
def make_ring(
    descriptor,
    NAME: tl.constexpr,
    DEPTH: tl.constexpr,
    CONSUMERS: tl.constexpr,
    PARTS: tl.constexpr,
    BY_THREAD: tl.constexpr = False,
):
    """A ring of tiles of the descriptor's rows and columns, each released by ``CONSUMERS`` warp groups.

    With ``BY_THREAD`` every thread of a consumer arrives for itself, which spares the warp group from meeting first.
    """
    tiles = tlx.local_alloc((descriptor.block_shape[-2], descriptor.block_shape[-1]), descriptor.dtype, DEPTH * PARTS)
    full = tlx.alloc_barriers(num_barriers=DEPTH, arrive_count=1)
    if BY_THREAD:
        empty = tlx.alloc_warp_barrier(num_barriers=DEPTH, num_warps=4, num_arrivals=CONSUMERS)
    else:
        empty = tlx.alloc_barriers(num_barriers=DEPTH, arrive_count=CONSUMERS)
    return Ring(tiles, full, empty, DEPTH, PARTS, BY_THREAD, NAME)


@triton.jit
def wait_stores(watch):
    """Wait until the warp group's own TMA stores have been read. The compiler lets the warp group meet after it."""
    since = watch.now()
    tlx.async_descriptor_store_wait(0)
    watch.waited(WAIT_STORES, since)
