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
    heads: tl.tensor
    count: tl.tensor
    zigzag: tl.constexpr

    @triton.jit
    def index(self, i):
        """Index of the ``i``-th step's pair in the list of pairs; beyond the last, any."""
        programs = tl.num_programs(0)
        lane = tl.program_id(0)
        if self.zigzag:
            lane = tl.where(i % 2 == 0, lane, programs - 1 - lane)
        return tl.where(i < self.count, i * programs + lane, 0)

    @triton.jit
    def at(self, i):
        """``tile, head`` of the ``i``-th step; beyond the last, any."""
        index = self.index(i)
        return index // self.heads, index % self.heads


@triton.jit
def start_walk(tiles, heads, ZIGZAG: tl.constexpr):
    programs = tl.num_programs(0)
    pairs = tile_count(tiles) * heads
    rounds = pairs // programs
    lane = tl.program_id(0)
    if ZIGZAG:
        lane = tl.where(rounds % 2 == 0, lane, programs - 1 - lane)
    return Walk(tiles, heads, rounds + tl.where(lane < pairs % programs, 1, 0), ZIGZAG)
