"""Which tiles of the list a persistent program handles."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from .tiles import tile_count


@aggregate
class Walk:
    """A program's share of the pairs (tile, head), heads innermost: the pairs of one sequence run at the same time.

    The list is sorted, heaviest first, and dealt out in rounds. With ``zigzag`` every other round goes backwards, so
    that a program that got the heaviest tile of a round gets the lightest of the next.
    """

    tiles: tl.tensor
    count: tl.tensor
    mirrored: tl.tensor  # the program's place in a round that goes backwards
    heads: tl.constexpr
    zigzag: tl.constexpr

    @triton.jit
    def index(self, i):
        """Index of the ``i``-th step's pair in the list of pairs; beyond the last, any."""
        lane = tl.program_id(0)
        if self.zigzag:
            lane = tl.where(i % 2 == 0, lane, self.mirrored)
        return tl.where(i < self.count, i * tl.num_programs(0) + lane, 0)

    @triton.jit
    def at(self, i):
        """``tile, head`` of the ``i``-th step; beyond the last, any."""
        index = self.index(i)
        return index // self.heads, index % self.heads


@triton.jit
def start_walk(tiles, HEADS: tl.constexpr, ZIGZAG: tl.constexpr, ONE_HEAD: tl.constexpr = False):
    """``ONE_HEAD``: all pairs of a program are of the same head, for which the programs must be a multiple of them."""
    programs = tl.num_programs(0)
    lane = tl.program_id(0)
    mirrored = programs - 1 - lane
    if ONE_HEAD:
        mirrored += 1 - HEADS + 2 * (lane % HEADS)  # tile by tile backwards, with the heads in their order
    pairs = tile_count(tiles) * HEADS
    rounds = pairs // programs
    if ZIGZAG:
        lane = tl.where(rounds % 2 == 0, lane, mirrored)
    return Walk(tiles, rounds + tl.where(lane < pairs % programs, 1, 0), mirrored, HEADS, ZIGZAG)
