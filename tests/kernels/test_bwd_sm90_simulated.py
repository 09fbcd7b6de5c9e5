"""The backward kernel for Hopper on the simulator: right gradients, no race, no deadlock, whatever the schedule.

Nothing here runs on a GPU.
"""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import pytest
import torch
from backward_problems import Gradients, Problem, check, drawn, forward, make
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import launch_sm90
from jfabench.kernels.attention.config_sm90 import BACKWARD, BackwardConfig
from jfabench.kernels.attention.problem import make_problem
from jfabench.kernels.attention.tiles import TileList, build_tiles
from jfabench.sim.attention import attention_on
from jfabench.sim.host import simulated_gpu

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")

CONFIGS = dict(zip(("late dq", "prompt dq", "without dq"), BACKWARD, strict=True))
WITH_DQ = ("late dq", "prompt dq")
POLICIES = ("random", "early", "late")
ONE_STEP_AND_TWO = {64: [33, 200, 1, 128, 129, 100, 256], 128: [33, 100, 1, 64, 65, 64, 128]}
"""Numbers of queries of sequences, by D: a step of the kernel is 8192 / D queries."""


def backward(
    problem: Problem,
    dout: Tensor,
    config: BackwardConfig,
    *,
    seed: int = 0,
    policy: str = "random",
    processors: int = 2,
    wanted: tuple[str, ...] = ("q", "k", "v"),
) -> Gradients:
    """The gradients from the simulator, which must have found nothing. Memory for them starts as NaN."""
    leaves = {name: getattr(problem, name).clone().requires_grad_(name in wanted) for name in ("q", "k", "v")}

    def choose(_kind: Any, usable: tuple[Any, ...]) -> Any:
        return config if config in usable else usable[0]

    with (
        simulated_gpu("sm_90", seed, policy, kernels=lambda name: name == "backward_sm90_kernel") as simulation,
        attention_on("sm_90", multiprocessors=processors, choose=choose),
        mock.patch.object(torch, "empty_like", side_effect=lambda x: torch.full_like(x, torch.nan)),
    ):
        out = jagged_flash_attention(leaves["q"], leaves["k"], leaves["v"], problem.k_offsets, **problem.options)
        grads = torch.autograd.grad(out, [leaves[name] for name in wanted], dout)
    assert simulation.ok, "\n".join(str(run) for run in simulation.runs if not run.ok)
    return {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def run_and_check(problem: Problem, config: BackwardConfig, **options: Any) -> Gradients:
    dout, right, _, _ = forward(problem)
    found = backward(problem, dout, config, **options)
    check(found, right)
    return found


def check_drawn(name: str, seed: int) -> None:
    draw = random.Random(-seed)
    problem = drawn(seed, (64, 128))
    options = {"policy": draw.choice(POLICIES), "processors": draw.choice([1, 2, 4])}
    run_and_check(problem, CONFIGS[name], seed=seed, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CONFIGS)
def test_random_problems(name: str, seed: int) -> None:
    check_drawn(name, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CONFIGS)
def test_many_random_problems(name: str) -> None:
    for seed in range(100, 200):
        check_drawn(name, seed)


@pytest.mark.parametrize(("policy", "processors"), [("random", 2), ("early", 1), ("late", 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", WITH_DQ)
def test_tiles_of_one_step_among_those_of_two(
    name: str, head_dim: int, policy: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late, keys of a tile are released in the next tile's first step, perhaps its only one; two tiles have room.

    The list of tiles has those with most steps first. Here it is shuffled: any tile may follow any other.
    """

    def shuffled(*arguments: Any, **options: Any) -> TileList:
        tiles = build_tiles(*arguments, **options)
        count = int(tiles.entries[0, 0])
        tiles.entries[1 : count + 1] = tiles.entries[1 + torch.randperm(count)]
        return tiles

    torch.manual_seed(head_dim)
    problem = make([130, 60, 7, 128, 1, 129, 64], ONE_STEP_AND_TWO[head_dim], head_dim=head_dim, heads=2, kv_heads=2)
    monkeypatch.setattr(launch_sm90, "build_tiles", shuffled)
    run_and_check(problem, CONFIGS[name], policy=policy, processors=processors)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("queries", [33, 64, [64, 0, 33, 1, 40, 64, 5]], ids=["33", "64", "packed"])
def test_many_tiles_of_one_step(queries: list[int] | int, name: str) -> None:
    """Everything that is handed over at the end of a tile is handed over often, and most tiles lack some keys."""
    torch.manual_seed(0)
    problem = make([130, 0, 7, 128, 1, 129, 64], queries)
    run_and_check(problem, CONFIGS[name], policy="late", processors=1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", WITH_DQ)
def test_broadcast_dq_is_the_sum_over_the_batch(name: str, policy: str) -> None:
    """Several programs add to the same blocks of dQ, each of them more than once."""
    torch.manual_seed(0)
    problem = make([130, 0, 128, 1, 129], 130)
    found = run_and_check(problem, CONFIGS[name], policy=policy, seed=1)
    assert found["dq"].shape == problem.q.shape


def test_without_dq_the_bits_do_not_depend_on_the_schedule() -> None:
    torch.manual_seed(0)
    problem = make([130, 70], 100, heads=2)
    dout = forward(problem)[0]
    schedules = ((0, "random", 1), (1, "early", 2), (2, "late", 4))
    runs = [
        backward(problem, dout, CONFIGS["without dq"], seed=seed, policy=policy, processors=processors)
        for seed, policy, processors in schedules
    ]
    for other in runs[1:]:
        assert all(torch.equal(runs[0][key], other[key]) for key in ("dq", "dk", "dv"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("queries", [[50, 60, 90], 90, 128], ids=["packed", "broadcast", "whole"])
@pytest.mark.parametrize("name", CONFIGS)
def test_neighbours_do_not_show(name: str, queries: list[int] | int, value: float) -> None:
    """What is wrong with one sequence changes nothing of the others' gradients, nor is a block stored over theirs."""
    torch.manual_seed(0)
    lengths = [70, 40, 133]
    problem = make(lengths, queries, head_dim=64)
    dout = forward(problem)[0]
    clean = backward(problem, dout, CONFIGS[name])
    problem.k[70:110] = problem.v[70:110] = value
    if isinstance(queries, list):
        problem.q[50:110] = dout[50:110] = value
    dirty = backward(problem, dout, CONFIGS[name])
    assert dirty["dk"][70:110].isnan().all()
    for b in (0, 2):
        for gradient in ("dk", "dv"):
            assert torch.equal(dirty[gradient].split(lengths)[b], clean[gradient].split(lengths)[b])
        if isinstance(queries, list):
            assert torch.equal(dirty["dq"].split(queries)[b], clean["dq"].split(queries)[b])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("k_lengths", "queries"),
    [([0, 5, 0], [3, 0, 4]), ([1], 1), ([0, 0, 3, 0], 2), ([129, 1], [0, 0])],
    ids=["nobody meets", "one pair", "mostly empty", "no queries"],
)
def test_empty_sequences(name: str, k_lengths: list[int], queries: list[int] | int) -> None:
    torch.manual_seed(0)
    found = run_and_check(make(k_lengths, queries), CONFIGS[name])
    if isinstance(queries, list):
        assert all((grad == 0).all() for grad in found.values())


@pytest.mark.parametrize("wanted", [("q",), ("k", "v")], ids=["dq alone", "dk and dv alone"])
def test_only_what_is_needed(wanted: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    run_and_check(make([60, 140], 70), CONFIGS["late dq"], wanted=wanted)


@pytest.mark.parametrize(("q_rows", "k_rows"), [(1, 10), (10, 1)])
def test_more_rows_than_a_ragged_descriptor_has_are_left_to_plain_triton(
    monkeypatch: pytest.MonkeyPatch, q_rows: int, k_rows: int
) -> None:
    monkeypatch.setattr(launch_sm90, "RAGGED_ROWS", 9)
    monkeypatch.setattr(launch_sm90.launch_triton, "backward", lambda *_, **needs: needs)
    q, k = (torch.zeros(rows, 1, 128, dtype=torch.bfloat16) for rows in (q_rows, k_rows))
    call = make_problem(q, k, k, torch.tensor([0, k_rows]), None, 1.0, (-1, -1), False)
    needs = {"need_dq": True, "need_dkdv": False}
    assert launch_sm90.backward(call, q, torch.zeros(1, q_rows), q, **needs) == needs
