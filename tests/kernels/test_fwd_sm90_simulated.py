"""The forward kernel for Hopper on the simulator: right answers whatever is beyond the end of a sequence.

That no schedule finds a race or a deadlock is in `tests/sim/test_attention.py`, for every configuration.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from backward_problems import drawn, make
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import launch_sm90
from jfabench.kernels.attention.config_sm90 import FORWARD, ForwardConfig
from jfabench.kernels.attention.problem import Problem as Call
from jfabench.kernels.attention.problem import make_problem
from jfabench.sim.attention import attention_on
from jfabench.sim.host import simulated_gpu

sys.path.insert(0, str(Path(__file__).parent / "numerics"))
from attention_check import answer
from attention_oracle import Problem

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")

WIDE, SHORT, LOW = FORWARD
CONFIGS = {"wide": WIDE, "short": SHORT, "low": LOW, "late, all masked": replace(WIDE, late=True, peel=False)}
POLICIES = ("random", "early", "late")


def poisoned(call: Call) -> tuple[Tensor, Tensor]:
    """Outputs in which what is not written shows."""
    rows = call.sequences.rows
    return call.q.new_full((rows, call.heads, call.head_dim), torch.nan), torch.full((call.heads, rows), torch.nan)


def forward(problem: Problem, config: ForwardConfig, seed: int, policy: str, processors: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` from the simulator, which must have found nothing."""
    with (
        simulated_gpu("sm_90", seed, policy) as simulation,
        attention_on("sm_90", multiprocessors=processors, choose=lambda _kind, _usable: config),
        mock.patch.object(Call, "new_outputs", poisoned),
    ):
        found = jagged_flash_attention(
            problem.q, problem.k, problem.v, problem.k_offsets, return_lse=True, **problem.options
        )
    assert simulation.ok, "\n".join(str(run) for run in simulation.runs if not run.ok)
    return found


def check(problem: Problem, out: Tensor, lse: Tensor) -> None:
    answer(problem, torch.zeros_like(out)).check({"out": out}, lse)


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
