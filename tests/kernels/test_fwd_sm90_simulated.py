"""The forward kernel for Hopper on the simulator: right answers whatever is beyond the end of a sequence.

That no schedule finds a race or a deadlock is in `tests/sim/test_attention.py`, for every configuration.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import forward_problems
import pytest
import torch
from backward_problems import drawn, make
from forward_problems import POLICIES, check
from torch import Tensor

from jfabench.kernels.attention import launch_sm90
from jfabench.kernels.attention.config_sm90 import FORWARD
from jfabench.kernels.attention.problem import make_problem

sys.path.insert(0, str(Path(__file__).parent / "numerics"))

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")

WIDE, SHORT, LOW = FORWARD
CONFIGS = {
    "wide": WIDE,
    "short": SHORT,
    "low": LOW,
    "wide, all masked": replace(WIDE, peel=False),
    "wide, neither late nor lazy": replace(WIDE, late=False, lazy=False),
}

forward = partial(forward_problems.forward, "sm_90")


def check_drawn(name: str, seed: int) -> None:
    draw = random.Random(-seed)
    problem = drawn(seed, (64, 128))
    check(problem, *forward(problem, CONFIGS[name], seed, draw.choice(POLICIES), draw.choice([1, 2, 4])))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_random_problems(name: str, seed: int) -> None:
    check_drawn(name, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CONFIGS)
def test_many_random_problems(name: str) -> None:
    for seed in range(100, 160):
        check_drawn(name, seed)


@pytest.mark.parametrize("name", CONFIGS)
def test_many_short_tiles_of_one_program(name: str) -> None:
    """One block of keys, or two, a tile, and no tile with all its queries."""
    torch.manual_seed(0)
    problem = make([130, 0, 7, 128, 1, 129, 64], 100, heads=2, kv_heads=2)
    check(problem, *forward(problem, CONFIGS[name], 1, "late", 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_maxima_that_grow(name: str) -> None:
    """In some rows by more than a lazy maximum's slack, in others by less, and in the rest never.

    A tile visits the last block of a sequence first, and then the others from the first on.
    """
    torch.manual_seed(0)
    problem = make([700, 129], 130, heads=2)
    growing = torch.cat([torch.linspace(1.0, 9.0, 640), torch.full([60], 0.1), torch.full([128], 9.0), torch.ones(1)])
    problem.k.mul_(growing[:, None, None])
    problem.q.mul_(torch.linspace(0.0, 2.0, 130)[:, None, None])
    check(problem, *forward(problem, CONFIGS[name], 0, "random", 2))


@pytest.mark.parametrize(
    ("name", "m", "heads", "kv_heads", "options"),
    [
        ("wide", 1, 2, 1, {}),
        ("wide", 65, 3, 3, {}),  # an odd number of rounds, and the last one incomplete
        ("wide", 129, 2, 2, {}),
        ("wide", 256, 2, 1, {"causal": True}),
        ("wide", 257, 2, 1, {}),
        ("in rounds", 65, 3, 3, {}),
        ("one slot", 65, 3, 3, {}),
        ("one slot", 129, 2, 1, {}),
        ("short", 256, 2, 1, {"window": (40, 3)}),
        ("low", 65, 3, 3, {}),
        ("low", 129, 2, 1, {"causal": True}),
    ],
)
def test_queries_that_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, m: int, heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    configs = CONFIGS | {"in rounds": replace(WIDE, zigzag=False), "one slot": replace(WIDE, q_stages=1)}
    config = configs[name]
    stayed = []

    def queries_stay(*arguments: Any) -> bool:
        stayed.append(rule(*arguments))
        return stayed[-1]

    rule = launch_sm90.queries_stay
    monkeypatch.setattr(launch_sm90, "queries_stay", queries_stay)
    torch.manual_seed(0)
    problem = make([70, 0, 130, 1, 300], m, heads=heads, kv_heads=kv_heads, head_dim=64, **options)
    check(problem, *forward(problem, config, 1, "late", heads))
    assert stayed == [m <= config.block_m * config.q_stages]


def test_when_queries_stay() -> None:
    """If there is room for all, and a program has several tiles, all of one head."""
    ends = torch.tensor([0, 4, 9])

    def stay(m: int, programs: int, pairs: int, heads: int = 2, offsets: Tensor | None = None) -> bool:
        q, k = torch.zeros(m, heads, 64), torch.zeros(9, heads, 64)
        problem = make_problem(q, k, k, ends, offsets, 0.1, (-1, -1), False)
        return launch_sm90.queries_stay(problem, WIDE, programs, pairs)

    assert stay(256, 4, 8)
    assert not stay(257, 4, 8)
    assert not stay(256, 4, 4)
    assert not stay(256, 4, 9, heads=3)
    assert stay(256, 6, 9, heads=3)
    assert not stay(9, 4, 8, offsets=ends)


@pytest.mark.parametrize(("queries", "value"), [([70, 40, 133], float("nan")), (90, float("inf"))])
@pytest.mark.parametrize("name", ["wide", "short", "low"])
def test_neighbours_do_not_show(name: str, queries: list[int] | int, value: float) -> None:
    """Nor does a block of results that reaches beyond its sequence overwrite theirs."""
    torch.manual_seed(0)
    lengths = [70, 40, 133]
    problem = make(lengths, queries)
    clean = forward(problem, CONFIGS[name], 0, "random", 2)
    problem.k[70:110] = problem.v[70:110] = value
    if isinstance(queries, list):
        problem.q[70:110] = value
    found = forward(problem, CONFIGS[name], 0, "random", 2)
    rows = queries if isinstance(queries, list) else [queries] * 3
    for one, other in zip(found, clean, strict=True):
        along = 0 if one.dim() == 3 else 1
        for b in (0, 2):
            assert torch.equal(one.split(rows, along)[b], other.split(rows, along)[b])


@pytest.mark.parametrize("queries", [None, torch.tensor([0, 4, 18])], ids=["broadcast", "packed"])
def test_more_rows_than_a_ragged_descriptor_has_are_left_to_plain_triton(
    monkeypatch: pytest.MonkeyPatch, queries: Tensor | None
) -> None:
    keys = torch.tensor([0, 4, 9])
    q, k = torch.zeros(9 if queries is None else 18, 2, 64).to(torch.bfloat16), torch.zeros(9, 2, 64).to(torch.bfloat16)
    problem = make_problem(q, k, k, keys, queries, 0.1, (-1, -1), False)  # 18 rows of out
    monkeypatch.setattr(launch_sm90.launch_triton, "forward", lambda given: ("plain", given))
    monkeypatch.setattr(launch_sm90, "RAGGED_ROWS", 17)
    assert launch_sm90.forward(problem) == ("plain", problem)
