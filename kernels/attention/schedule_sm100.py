"""Which tiles of the list a persistent program of a Blackwell kernel handles, and in which order.

The list holds the tiles that exist, heaviest first. Its pairs (tile, head) are numbered, and a *schedule* tells every
role of a program the numbers of its pairs, and then a negative one:

- :class:`Rounds` deals them out in advance, in rounds, in a zigzag every other one backwards: a program that got the
  heaviest tile of a round gets the lightest of the next;
- :class:`OnDemand` asks the hardware for the next one (Cluster Launch Control): a program cancels the launch of another
  and does its work. They go from the heaviest down, so this is list scheduling, longest processing time first. The
  grid is as large as the list may be, and what the list lacks is cancelled by whoever finishes first.

A pair of CTAs counts as one program.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .tiles import tile_count

BOARD = tl.constexpr(2)  # numbers told ahead of the roles that are slowest to read them


@aggregate
class Rounds:
    """Dealt out in advance: every role knows."""

    tiles: tl.tensor
    heads: tl.tensor
    pairs: tl.tensor
    zigzag: tl.constexpr
    ctas: tl.constexpr

    @triton.jit
    def _at(self, turn):
        """Number of this program's pair in a round."""
        programs = tl.num_programs(0) // self.ctas
        lane = tl.program_id(0) // self.ctas
        # The heads of a tile move together, so that a program keeps its head, and with broadcast queries its Q.
        width = tl.where(programs % self.heads == 0, self.heads, 1)
        place = lane // width
        if self.zigzag:
            place = tl.where(turn % 2 == 0, place, programs // width - 1 - place)
        pair = turn * programs + place * width + lane % width
        return tl.where(pair < self.pairs, pair, -1)

    @triton.jit
    def first(self):
        return self._at(0)

    @triton.jit
    def next(self, turn):
        """The pair after that of ``turn``."""
        return self._at(turn + 1)

    @triton.jit
    def split(self, pair):
        """``tile, head``, heads innermost: the pairs of one sequence run at the same time. Any if ``pair`` < 0."""
        pair = tl.maximum(pair, 0)
        return pair // self.heads, pair % self.heads


@aggregate
class OnDemand:
    """Handed out by the hardware: one warp asks, and tells the roles of its CTA through ``board``."""

    tiles: tl.tensor
    heads: tl.tensor
    pairs: tl.tensor
    board: tlx.buffered_tensor  # [1] int32
    told: tlx.mbarrier
    read: tlx.mbarrier
    by_head: tl.constexpr
    ctas: tl.constexpr

    @triton.jit
    def pair_of(self, program):
        """The pair of a program number as the hardware gives it; negative if there is none."""
        pair = program // self.ctas
        return tl.where((program >= 0) & (pair < self.pairs), pair, -1)

    @triton.jit
    def first(self):
        return self.pair_of(tl.program_id(0))

    @triton.jit
    def next(self, turn):
        """The pair after that of ``turn``."""
        slot = turn % BOARD
        tlx.barrier_wait(self.told[slot], (turn // BOARD) & 1)
        pair = tl.max(tlx.local_load(self.board[slot]), 0)
        tlx.barrier_arrive(self.read[slot], 1)
        return pair

    @triton.jit
    def split(self, pair):
        """``tile, head``: with ``by_head`` one head after the other, so that consecutive pairs share broadcast Q."""
        pair = tl.maximum(pair, 0)
        if self.by_head:
            tiles = tl.maximum(self.pairs // self.heads, 1)
            tile, head = pair % tiles, pair // tiles
        else:
            tile, head = pair // self.heads, pair % self.heads
        return tile, head

    @triton.jit
    def await_readers(self, turn):
        """The warp that asks: wait until all roles have read what was on the board before."""
        tlx.barrier_wait(self.read[turn % BOARD], ((turn // BOARD) & 1) ^ 1)

    @triton.jit
    def tell(self, turn, pair):
        """The warp that asks: tell the pair after that of ``turn``."""
        slot = turn % BOARD
        tlx.local_store(self.board[slot], tl.full([1], pair, tl.int32))
        tlx.barrier_arrive(self.told[slot], 1)


@triton.jit
def make_schedule(tiles, heads, ORDER: tl.constexpr, BY_HEAD: tl.constexpr, ROLES: tl.constexpr, CTAS: tl.constexpr):
    """``ORDER`` is "zigzag", "rounds" or "clc"; ``ROLES`` is how many async tasks of a CTA call ``next``."""
    pairs = tile_count(tiles) * heads
    if ORDER == "clc":
        board = tlx.local_alloc((1,), tl.int32, BOARD)
        told = tlx.alloc_barriers(num_barriers=BOARD, arrive_count=1)
        read = tlx.alloc_barriers(num_barriers=BOARD, arrive_count=ROLES)
        schedule = OnDemand(tiles, heads, pairs, board, told, read, BY_HEAD, CTAS)
    else:
        schedule = Rounds(tiles, heads, pairs, ORDER == "zigzag", CTAS)  # type: ignore[assignment]
    return schedule
