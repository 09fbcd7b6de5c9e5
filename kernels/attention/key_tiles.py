"""Tiles of keys for the backward on Blackwell: what a tile is, which steps of queries it takes, who handles it (TLX).

A program is one CTA or a pair of them. A tile has 128 keys for each CTA, of one key/value head, and a step of it is a
block of queries of one query head. The list (:mod:`.tiles`) has an entry for every tile that exists, the tiles of a
sequence in a row; a pair's count 256 keys, so that each head's blocks are padded to whole pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .blocks import visible_span
from .ragged import Rows
from .tiles import load_tile, tile_count

KEYS = tl.constexpr(128)  # of a CTA's tile: the lanes of tensor memory
AHEAD = tl.constexpr(2)  # tiles that the scheduler may make known beyond the one that a role is at


@aggregate
class Steps:
    """The steps of a tile for one head: blocks of queries that see some of its keys, those without a mask first."""

    begin: tl.tensor  # first query of the masked ones before the others
    inner: tl.tensor  # first query of the others
    bulk: tl.tensor  # how many need no mask
    count: tl.tensor  # how many there are, at least one

    @triton.jit
    def first(self, i, STEP: tl.constexpr):
        """First query of the ``i``-th step."""
        leading = (self.inner - self.begin) // STEP
        edge = i - self.bulk
        masked = tl.where(edge < leading, self.begin + edge * STEP, self.inner + (i - leading) * STEP)
        return tl.where(edge < 0, self.inner + i * STEP, masked)

    @triton.jit
    def at(self, i, GROUP: tl.constexpr, STEP: tl.constexpr):
        """Query head within the group, and first query, of the ``i``-th step of all ``GROUP`` heads."""
        member = i // self.count if GROUP > 1 else 0
        return member, self.first(i - member * self.count, STEP)


@aggregate
class Tile:
    """128 keys of one key/value head, from ``key`` on in their sequence, and the queries of that sequence."""

    head: tl.tensor
    key: tl.tensor
    program_key: tl.tensor  # first key of the program's tile
    q: Rows
    k: Rows
    out: Rows  # where the queries' rows of dout, and their statistics, are

    @triton.jit
    def facer(self, key):
        """The query that faces a key."""
        return key - (self.k.length - self.q.length)

    @triton.jit
    def steps(self, window, STEP: tl.constexpr, CTAS: tl.constexpr):
        """The same for both CTAs of a pair. A step is unmasked if all its queries see all keys, which exist.

        Queries that do not exist need no mask (their dO and Q are zeros), so that a last block counts as whole.
        """
        SPAN: tl.constexpr = KEYS * CTAS
        # Seen from the keys the window is mirrored: `right` reaches back to earlier queries, `left` to later ones.
        left, right = window
        length = tl.cdiv(self.q.length, STEP) * STEP
        begin, inner, tail, end = visible_span(self.facer(self.program_key), length, right, left, SPAN, STEP)
        begin = tl.minimum(begin, tl.maximum(length - STEP, 0))
        bulk = tl.where(self.program_key + SPAN <= self.k.length, tl.maximum(tail - inner, 0) // STEP, 0)
        return Steps(
            begin=begin,
            inner=tl.where(bulk > 0, inner, begin),
            bulk=bulk,
            count=tl.maximum(tl.cdiv(end - begin, STEP), 1),
        )

    @triton.jit
    def seen(self, first, window, QUERIES: tl.constexpr):
        """Which of the ``QUERIES`` from ``first`` on see which keys, ``[128, QUERIES]``: a range for each key."""
        left, right = window
        key = tl.arange(0, KEYS)
        facing = key - (first - self.facer(self.key))  # the query that faces the key, counted from `first`
        low = tl.where(self.key + key < self.k.length, 0, QUERIES)
        high = tl.full([KEYS], QUERIES, tl.int32)
        if right is not None:
            low = tl.maximum(low, facing - right)
        if left is not None:
            high = facing + left + 1
        query = tl.arange(0, QUERIES)[None, :]
        return (query >= low[:, None]) & (query < high[:, None])


@aggregate
class Queue:
    """A program's tiles. Its scheduler makes their numbers known, a few ahead of the roles that handle them.

    Tiles are numbered by (sequence, head, block of keys), so that a head's blocks are next to each other.
    """

    tiles: tl.tensor
    heads: tl.tensor
    count: tl.tensor
    numbers: tlx.buffered_tensor  # [1] int32
    known: tlx.mbarrier
    forgotten: tlx.mbarrier
    ctas: tl.constexpr

    @triton.jit
    def tile(self, number):
        """The list has the blocks of a sequence in a row, once for all heads."""
        entry = number // self.heads
        block, q_start, q_len, k_start, k_len, out_start = load_tile(self.tiles, entry)
        blocks = tl.cdiv(k_len, KEYS * self.ctas)
        place = number - (entry - block) * self.heads
        program_key = place % blocks * (KEYS * self.ctas)
        key = program_key
        if self.ctas == 2:
            key += tlx.cluster_cta_rank() * KEYS
        return Tile(
            head=place // blocks,
            key=key,
            program_key=program_key,
            q=Rows(q_start, q_len),
            k=Rows(k_start, k_len),
            out=Rows(out_start, q_len),
        )

    @triton.jit
    def first(self):
        return tl.program_id(0) // self.ctas

    @triton.jit
    def has(self, number):
        """Whether there is such a tile: not for -1, nor for a program beyond the end of the list."""
        return (number >= 0) & (number < self.count)

    @triton.jit
    def publish(self, r, number):
        """Scheduler: the program's tile ``r``, from 1 on, has this number. One that does not exist is its last."""
        slot = (r - 1) % AHEAD
        tlx.barrier_wait(self.forgotten[slot], (((r - 1) // AHEAD) & 1) ^ 1)
        tlx.local_store(self.numbers[slot], tl.full([1], 0, tl.int32) + number)
        tlx.barrier_arrive(self.known[slot], 1)

    @triton.jit
    def next(self, r):
        """Number of the program's tile ``r``, from 1 on."""
        slot = (r - 1) % AHEAD
        tlx.barrier_wait(self.known[slot], ((r - 1) // AHEAD) & 1)
        number = tl.sum(tlx.local_load(self.numbers[slot]), 0)
        tlx.barrier_arrive(self.forgotten[slot], 1)
        return number


@triton.jit
def make_queue(tiles, heads, LISTENERS: tl.constexpr, CTAS: tl.constexpr):
    """``LISTENERS`` warps of a CTA ask for the next tile."""
    return Queue(
        tiles,
        heads,
        tile_count(tiles) * heads,
        numbers=tlx.local_alloc((1,), tl.int32, AHEAD),
        known=tlx.alloc_warp_barrier(num_barriers=AHEAD, num_warps=1),
        forgotten=tlx.alloc_warp_barrier(num_barriers=AHEAD, num_warps=LISTENERS),
        ctas=CTAS,
    )
