"""The forward kernel for Blackwell on the simulator: right answers, no race, no deadlock, under adversarial schedules.

The same problems on a GPU are those of `numerics/`; here nothing runs on one.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import forward_problems
import pytest
import torch
from forward_problems import POLICIES, check

from jfabench.kernels.attention.config_sm100 import LOW, ON_DEMAND, PAIR, SHORT, WIDE

sys.path.insert(0, str(Path(__file__).parent / "numerics"))
from attention_oracle import Problem

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")

CONFIGS = {
    "wide": WIDE,
    "on demand": ON_DEMAND,
    "short": SHORT,
    "low": LOW,
    "pair": PAIR,
    "pair on demand": replace(PAIR, order="clc"),
    "plain": replace(WIDE, order="rounds", growth=0.0, polynomial=0, peel=False, p_parts=1, kv_stages=3),
}

forward = partial(forward_problems.forward, "sm_100")


def drawn(seed: int, head_dims: tuple[int, ...]) -> Problem:
    """A small problem: uneven lengths, some 0 or 1; packed or broadcast queries; any mask, group, dtype."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, head_dim = draw.randint(1, 5), draw.choice(head_dims)
    dtype = draw.choice([torch.bfloat16, torch.float16])
    k_lengths = [draw.choice([0, 1, draw.randint(2, 140), draw.randint(100, 300)]) for _ in range(batch)]
    k_lengths[draw.randrange(batch)] = draw.randint(1, 300)
    q_lengths = None
    if draw.random() < 0.5:
        q_lengths = [draw.choice([0, 1, draw.randint(2, 300)]) for _ in range(batch)]
        q_lengths[draw.randrange(batch)] = draw.randint(1, 300)
    rows = sum(q_lengths) if q_lengths else draw.choice([1, 64, 128, 256, 300])
    kv_heads, group = draw.choice([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)])
    k, v = (torch.randn(sum(k_lengths), kv_heads, head_dim).to(dtype) for _ in range(2))
    q = torch.randn(rows, kv_heads * group, head_dim).to(dtype)
    window = draw.choice([(-1, -1), (-1, -1), (30, -1), (40, 3), (0, 0), (-1, 5)])
    return Problem(q, k, v, k_lengths, q_lengths, causal=draw.random() < 0.4, window=window)


def check_drawn(name: str, seed: int) -> None:
    config = CONFIGS[name]
    problem = drawn(seed, (128,) if config.ctas == 2 else (64, 128))
    draw = random.Random(-seed)
    check(problem, *forward(problem, config, seed, draw.choice(POLICIES), draw.choice([1, 2, 4]) * config.ctas))


@pytest.mark.parametrize("seed", range(2))
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
    """One block of keys, or two, a tile: everything that is handed over at the end of a tile is handed over often."""
    torch.manual_seed(0)
    lengths = [130, 0, 7, 128, 1, 129, 64]
    q = torch.randn(100, 2, 128).to(torch.bfloat16)
    k, v = (torch.randn(sum(lengths), 2, 128).to(torch.bfloat16) for _ in range(2))
    problem = Problem(q, k, v, lengths, None)
    check(problem, *forward(problem, CONFIGS[name], 1, "late", CONFIGS[name].ctas))


@pytest.mark.parametrize(("packed", "value"), [(True, float("nan")), (False, float("inf"))])
@pytest.mark.parametrize(("name", "head_dim"), [("wide", 128), ("pair", 128), ("wide", 64), ("low", 64)])
def test_neighbours_do_not_show(name: str, head_dim: int, packed: bool, value: float) -> None:
    torch.manual_seed(0)
    lengths = [70, 40, 133]
    q = torch.randn(243 if packed else 90, 1, head_dim).to(torch.bfloat16)
    k, v = (torch.randn(243, 1, head_dim).to(torch.bfloat16) for _ in range(2))
    problem = Problem(q, k, v, lengths, lengths if packed else None)
    clean = forward(problem, CONFIGS[name], 0, "random", 2)
    k[70:110] = v[70:110] = value
    found = forward(problem, CONFIGS[name], 0, "random", 2)
    rows = lengths if packed else [90] * 3
    for one, other in zip(found, clean, strict=True):
        along = 0 if one.dim() == 3 else 1
        for b in (0, 2):
            assert torch.equal(one.split(rows, along)[b], other.split(rows, along)[b])


def test_large_scores_are_rescaled() -> None:
    """The maximum of a row grows by far more than P may exceed 1, in every step."""
    torch.manual_seed(0)
    q = torch.ones(128, 1, 64, dtype=torch.bfloat16)
    k = torch.randn(400, 1, 64) + torch.linspace(4, 0, 400)[:, None, None]  # the last block is visited first
    v = torch.randn(400, 1, 64).to(torch.bfloat16)
    problem = Problem(q, k.to(torch.bfloat16), v, [400], None)
    check(problem, *forward(problem, WIDE, 0, "random", 1))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["wide", "pair on demand"])
def test_faults_in_the_synchronisation_are_noticed(name: str) -> None:
    """Every wait, arrival, commit and expectation left out, or every phase flipped, one at a time."""
    from jfabench.sim.attention import Case
    from jfabench.sim.mutate_attention import mutate_attention

    config = CONFIGS[name]
    case = Case((200, 37, 300, 0, 129), queries=300, heads=2, kv_heads=1, head_dim=64 * config.ctas)
    report = mutate_attention(
        case, "fwd", "sm_100", choose=lambda _kind, _usable: config, multiprocessors=config.ctas, seeds=2
    )
    survived = [outcome.mutation for outcome in report.survivors if outcome.verdict == "survived"]
    # The simulator does not follow a fence from the warp that stores to another's TMA operation.
    assert {(mutation.kind, mutation.function) for mutation in survived} <= {("fence", "_finish")}, str(report)
    assert len(report.caught) > 70
