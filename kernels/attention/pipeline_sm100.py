"""Signals and rings between the warps of one Blackwell kernel, which may span a pair of CTAs (TLX).

A pair shares its matmuls: the first CTA, the leader, issues them for both, each CTA holding half of the operand that
both need. So what matmuls wait for is told to the leader, and what they finish is told to both CTAs.

Both sides of a barrier count its uses. Use ``n`` has the phase ``n & 1``, and waiting for use ``n - 1`` before there
was any returns at once, which is how a producer finds its buffer free at first.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

LEADER = tl.constexpr(0)  # rank in the cluster


@aggregate
class Signal:
    """``size`` barriers on which warps tell each other that something is done, once a use."""

    barriers: tlx.mbarrier
    ctas: tl.constexpr  # 2: the leader alone waits, and every arrival goes to it
    by_thread: tl.constexpr  # part of the type, since functions are compiled once per type

    @triton.jit
    def wait(self, which, count):
        tlx.barrier_wait(self.barriers[which], count & 1)

    @triton.jit
    def arrive(self, which):
        if self.ctas == 2:
            tlx.barrier_arrive(self.barriers[which], 1, remote_cta_rank=LEADER)
        else:
            tlx.barrier_arrive(self.barriers[which], 1)

    @triton.jit
    def arrive_if(self, condition, which):
        """Within one CTA."""
        tlx.barrier_arrive(self.barriers[which], 1, pred=condition)


@triton.jit
def make_signal(SIZE: tl.constexpr):
    """Told by a matmul, by TMA, or by one warp, in each CTA for itself."""
    return Signal(tlx.alloc_barriers(num_barriers=SIZE, arrive_count=1), 1, False)


@triton.jit
def make_group_signal(SIZE: tl.constexpr, GROUPS: tl.constexpr, CTAS: tl.constexpr):
    """Told by ``GROUPS`` warp groups, with ``CTAS == 2`` of each CTA, to the leader.

    Within a CTA every thread arrives for itself, which spares the warp group from meeting first.
    """
    if CTAS == 2:
        barriers = tlx.alloc_barriers(num_barriers=SIZE, arrive_count=2 * GROUPS)
    else:
        barriers = tlx.alloc_warp_barrier(num_barriers=SIZE, num_warps=4, num_arrivals=GROUPS)
    return Signal(barriers, CTAS, CTAS == 1)


@aggregate
class Slots:
    """The barriers of ``depth`` slots of shared memory, which TMA fills and matmuls release, in each CTA of a pair.

    The leader is told when a slot is full in both CTAs. Both are told when the matmuls that read it are complete.
    """

    full: tlx.mbarrier
    empty: tlx.mbarrier
    depth: tl.constexpr
    ctas: tl.constexpr

    @triton.jit
    def slot(self, count):
        """Slot and phase of the ``count``-th use."""
        return count % self.depth, (count // self.depth) & 1

    @triton.jit
    def acquire(self, count):
        """Producer: wait until the slot is free."""
        slot, phase = self.slot(count)
        tlx.barrier_wait(self.empty[slot], phase ^ 1)

    @triton.jit
    def wait(self, count):
        """Consumer: wait until the slot is full."""
        slot, phase = self.slot(count)
        tlx.barrier_wait(self.full[slot], phase)

    @triton.jit
    def expect(self, count, BYTES: tl.constexpr):
        """Producer: announce ``BYTES`` in each CTA."""
        full = self.full[count % self.depth]
        if self.ctas == 2:
            tlx.barrier_expect_bytes(full, 2 * BYTES, pred=tlx.cluster_cta_rank() == LEADER)
        else:
            tlx.barrier_expect_bytes(full, BYTES)

    @triton.jit
    def fetch(self, count, descriptor, tile, place):
        """Producer: load the block at the coordinates ``place``, of the announced bytes, into ``tile``."""
        full = self.full[count % self.depth]
        tlx.async_descriptor_load(descriptor, tile, place, full, two_ctas=self.ctas == 2)


@triton.jit
def make_slots(DEPTH: tl.constexpr, CTAS: tl.constexpr):
    full = tlx.alloc_barriers(num_barriers=DEPTH, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=DEPTH, arrive_count=1)
    return Slots(full, empty, DEPTH, CTAS)


@aggregate
class Operand:
    """A matmul's operand: ``depth`` slots of shared memory that TMA fills, in each CTA of a pair its own block.

    The leader is told when a slot is full in both CTAs. Both are told when the matmuls that read it are complete. Both
    sides count the uses, and the count gives the slot and the phase of its barriers.
    """

    tiles: tlx.buffered_tensor
    barriers: tlx.mbarrier  # of every slot that it is full, then of every slot that it is empty
    depth: tl.constexpr
    ctas: tl.constexpr

    @triton.jit
    def tile(self, count):
        return self.tiles[count % self.depth]

    @triton.jit
    def wait(self, count):
        """Until the ``count``-th use is there."""
        tlx.barrier_wait(self.barriers[count % self.depth], (count // self.depth) & 1)

    @triton.jit
    def released(self, count):
        """The barrier that the last matmul of the ``count``-th use completes."""
        return self.barriers[self.depth + count % self.depth]

    @triton.jit
    def load(self, count, descriptor, rows, row, column):
        """When the slot is free, start to load the block of ``rows`` from ``row`` on."""
        BYTES: tl.constexpr = self.tiles.shape[0] * self.tiles.shape[1] * tlx.size_of(self.tiles.dtype)
        full = self.barriers[count % self.depth]
        tlx.barrier_wait(self.released(count), ((count // self.depth) & 1) ^ 1)
        if self.ctas == 2:
            tlx.barrier_expect_bytes(full, 2 * BYTES, pred=tlx.cluster_cta_rank() == LEADER)
        else:
            tlx.barrier_expect_bytes(full, BYTES)
        place = rows.at(row, column)
        tlx.async_descriptor_load(descriptor, self.tile(count), place, full, two_ctas=self.ctas == 2)


@triton.jit
def make_operand(
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CTAS: tl.constexpr
):
    """``DEPTH`` slots of blocks ``[ROWS, COLUMNS]``."""
    tiles = tlx.local_alloc((ROWS, COLUMNS), DTYPE, DEPTH)
    return Operand(tiles, tlx.alloc_barriers(num_barriers=2 * DEPTH, arrive_count=1), DEPTH, CTAS)
