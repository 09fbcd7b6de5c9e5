"""Which pairs of tile and head a persistent program of a Hopper kernel handles."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from jfabench.kernels.attention.walk import start_walk

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")


@triton.jit
def visit(tiles, visits, TURNS: tl.constexpr, HEADS: tl.constexpr, ZIGZAG: tl.constexpr, ONE_HEAD: tl.constexpr):
    """Write `tile, head` of every step of a program to `visits` [programs, TURNS, 2]."""
    walk = start_walk(tiles, HEADS, ZIGZAG, ONE_HEAD)
    for i in range(walk.count):
        tile, head = walk.at(i)
        place = visits + (tl.program_id(0) * TURNS + i) * 2
        tl.store(place, tile)
        tl.store(place + 1, head)


def visited(tiles: int, heads: int, programs: int, zigzag: bool, one_head: bool) -> list[list[tuple[int, int]]]:
    """The pairs of each program, in order."""
    from jfabench.sim import launch

    turns = -(-tiles * heads // programs) + 1
    found = torch.full((programs, turns, 2), -1)
    count = torch.tensor([tiles], dtype=torch.int32)
    run = launch(visit, (programs,), count, found, turns, heads, zigzag, one_head, arch="sm_90")
    assert run.ok, run
    return [[(tile, head) for tile, head in program.tolist() if tile >= 0] for program in found]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize(
    ("tiles", "heads", "programs"), [(7, 4, 8), (5, 3, 4), (1, 2, 6), (0, 4, 4), (9, 1, 3), (6, 4, 4), (11, 6, 4)]
)
def test_every_pair_is_visited_once(tiles: int, heads: int, programs: int, zigzag: bool) -> None:
    for one_head in {False, programs % heads == 0}:
        found = [pair for program in visited(tiles, heads, programs, zigzag, one_head) for pair in program]
        assert sorted(found) == [(tile, head) for tile in range(tiles) for head in range(heads)]


@pytest.mark.parametrize("zigzag", [True, False])
def test_all_pairs_of_a_program_can_be_of_one_head(zigzag: bool) -> None:
    found = visited(9, 4, 8, zigzag, True)
    assert [{head for _, head in program} for program in found] == [{lane % 4} for lane in range(8)]


@pytest.mark.parametrize("one_head", [True, False])
def test_a_zigzag_deals_evenly(one_head: bool) -> None:
    """Tile ``i`` of eight weighs ``8 - i``: two programs a head, and four tiles each."""
    found = visited(8, 2, 4, True, one_head)
    assert [sum(8 - tile for tile, _ in program) for program in found] == [18] * 4
