"""Which pairs of tile and head a program of a Blackwell kernel gets when they are dealt out in advance."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from jfabench.kernels.attention.schedule_sm100 import make_schedule

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")


@triton.jit(do_not_specialize=["heads"])
def visit(tiles, visits, heads, ORDER: tl.constexpr, CTAS: tl.constexpr, TURNS: tl.constexpr):
    """Write `tile, head` of every turn of a CTA to `visits` [CTAs, TURNS, 2]."""
    schedule = make_schedule(tiles, heads, ORDER, False, 1, CTAS)
    turn = 0
    pair = schedule.first()
    while pair >= 0:
        tile, head = schedule.split(pair)
        place = visits + (tl.program_id(0) * TURNS + turn) * 2
        tl.store(place, tile)
        tl.store(place + 1, head)
        pair = schedule.next(turn)
        turn += 1


def visited(tiles: int, heads: int, programs: int, order: str = "zigzag", ctas: int = 1) -> list[list[tuple[int, int]]]:
    """The pairs of each CTA, in order."""
    from jfabench.sim import launch

    turns = -(-tiles * heads // programs) + 1
    count = torch.tensor([tiles], dtype=torch.int32)
    found = torch.full((programs * ctas, turns, 2), -1)
    options = {"ctas_per_cga": (ctas, 1, 1)} if ctas > 1 else {}
    run = launch(
        visit, (programs * ctas,), count, found, heads, ORDER=order, CTAS=ctas, TURNS=turns, arch="sm_100", **options
    )
    assert run.ok, run
    return [[(tile, head) for tile, head in cta.tolist() if tile >= 0] for cta in found]


@pytest.mark.parametrize("order", ["zigzag", "rounds"])
@pytest.mark.parametrize(
    ("tiles", "heads", "programs"), [(7, 4, 8), (5, 3, 4), (1, 2, 6), (0, 4, 4), (9, 1, 3), (6, 4, 4)]
)
def test_every_pair_is_visited_once(tiles: int, heads: int, programs: int, order: str) -> None:
    found = [pair for program in visited(tiles, heads, programs, order) for pair in program]
    assert sorted(found) == [(tile, head) for tile in range(tiles) for head in range(heads)]


def test_a_program_keeps_its_head_if_the_heads_divide_the_programs() -> None:
    for program in visited(9, 4, 8):
        assert len({head for _, head in program}) == 1


def test_a_zigzag_deals_evenly() -> None:
    """Tile ``i`` of ten weighs ``10 - i``: in rounds the first program would get 5 more than the last."""
    loads = [sum(10 - tile for tile, _ in program) for program in visited(10, 1, 5)]
    assert loads == [11] * 5


def test_both_ctas_of_a_pair_visit_the_same() -> None:
    found = visited(5, 2, 3, ctas=2)
    assert found[::2] == found[1::2]
    assert sorted(pair for program in found[::2] for pair in program) == [(t, h) for t in range(5) for h in range(2)]
