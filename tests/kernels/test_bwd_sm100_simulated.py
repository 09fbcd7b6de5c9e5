"""The backward kernel for Blackwell on the simulator: right gradients, no race, no deadlock, whatever the schedule.

Nothing here runs on a GPU.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from backward_problems import check, drawn, forward, make, run, run_and_check
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import launch_bwd_sm100
from jfabench.kernels.attention.config_bwd_sm100 import LONG, PAIR, SHORT, SMALL_HEADS, BackwardConfig
from jfabench.kernels.attention.problem import make_problem
from jfabench.sim.attention import attention_on
from jfabench.sim.host import simulated_gpu

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")

POLICIES = ("random", "early", "late")
LIMIT = 227 * 1024
CONFIGS = {
    "long": LONG,
    "long on demand": replace(LONG, clc=True, early=4),
    "long plain": replace(LONG, early=0, dq_stages=2, dkv_columns=32),
    "short": SHORT,
    "short on demand": replace(SHORT, clc=True, early=2),
    "short one tile of keys": replace(SHORT, k_stages=1, dout_stages=1, early=0),
    "pair": PAIR,
    "pair on demand": replace(PAIR, clc=True, early=4),
    "pair plain": replace(PAIR, early=0),
    "pair without dq": replace(PAIR, add_dq=False),
    "small heads": SMALL_HEADS,
    "small heads plain": replace(SMALL_HEADS, early=0, k_stages=1, v_stages=1, dout_stages=1, clc=True),
    "replicas": replace(LONG, replicas=3),
    "without dq": replace(LONG, add_dq=False),
}


def head_dims(config: BackwardConfig) -> tuple[int, ...]:
    return tuple(d for d in (64, 128) if config.fits(d, LIMIT))


def check_drawn(name: str, seed: int) -> None:
    config = CONFIGS[name]
    draw = random.Random(-seed)
    problem = drawn(seed, head_dims(config))
    run_and_check(
        problem, config, seed=seed, policy=draw.choice(POLICIES), processors=draw.choice([1, 2, 3]) * config.ctas
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_fit_some_head_dim(name: str) -> None:
    assert head_dims(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_random_problem(name: str) -> None:
    check_drawn(name, 10 * list(CONFIGS).index(name))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", CONFIGS)
def test_many_random_problems(name: str) -> None:
    for seed in range(1000, 1012):
        check_drawn(name, seed + 100 * list(CONFIGS).index(name))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["long", "short", "pair", "replicas", "pair on demand"])
def test_broadcast_dq_is_the_sum_over_the_batch(name: str, policy: str) -> None:
    """Several CTAs add to the same blocks of dQ, each of them more than once."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    problem = make([130, 0, 128, 1, 129], 130)
    found, right = run_and_check(problem, config, seed=1, policy=policy, processors=2 * config.ctas)
    assert found["dq"].shape == problem.q.shape
    assert right.values["dq"].abs().max() > 0.1


@pytest.mark.parametrize("name", ["long", "pair"])
def test_without_dq_the_bits_do_not_depend_on_the_schedule(name: str) -> None:
    torch.manual_seed(0)
    config = replace(CONFIGS[name], add_dq=False)
    problem = make([130, 70], 100, heads=2)
    dout, right, out, lse = forward(problem)
    runs = [
        run(problem, dout, out, lse, config, seed=seed, policy=policy, processors=processors * config.ctas)
        for seed, policy, processors in ((0, "random", 1), (1, "early", 2), (2, "late", 3))
    ]
    check(runs[0], right)
    assert set(runs[0]) == {"dq", "dk", "dv"}
    for other in runs[1:]:
        assert all(torch.equal(runs[0][key], other[key]) for key in runs[0])


def test_determinism_is_asked_of_the_default_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_bwd_sm100, "choose", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(launch_bwd_sm100, "gpu_name", lambda _device: "a GPU")
    monkeypatch.setattr(launch_bwd_sm100, "shared_memory_limit", lambda _device: LIMIT)
    x = torch.zeros(300, 1, 128, dtype=torch.bfloat16)
    call = make_problem(x, x, x, torch.tensor([0, 300]), None, 1.0, (-1, -1), True)
    chosen = launch_bwd_sm100._choose("backward", call, lambda _config: pytest.fail("launched"))
    assert chosen == replace(PAIR, add_dq=False)


def test_without_dq_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice would be kept for the kind, and serve calls that need dQ."""
    monkeypatch.setattr(launch_bwd_sm100, "choose", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(launch_bwd_sm100, "gpu_name", lambda _device: "a GPU")
    monkeypatch.setattr(launch_bwd_sm100, "shared_memory_limit", lambda _device: LIMIT)
    monkeypatch.setattr(launch_bwd_sm100.launch_triton, "row_statistics", lambda *_: (None, None))
    monkeypatch.setattr(launch_bwd_sm100, "_key_pass", lambda *arguments: (None, arguments[-1], None))
    x = torch.zeros(300, 1, 128, dtype=torch.bfloat16)
    call = make_problem(x, x, x, torch.tensor([0, 300]), None, 1.0, (-1, -1), False)
    chosen = launch_bwd_sm100.backward(call, x, torch.zeros(1, 300), x, need_dq=False, need_dkdv=True)[1]
    assert chosen == replace(PAIR, add_dq=False)


@pytest.mark.parametrize(("q_rows", "k_rows"), [(1, 10), (10, 1)])
def test_more_rows_than_ragged_descriptors_have(monkeypatch: pytest.MonkeyPatch, q_rows: int, k_rows: int) -> None:
    monkeypatch.setattr(launch_bwd_sm100, "RAGGED_ROWS", 9)
    monkeypatch.setattr(launch_bwd_sm100.launch_triton, "backward", lambda *_, **needs: needs)
    q, k = (torch.zeros(rows, 1, 128, dtype=torch.bfloat16) for rows in (q_rows, k_rows))
    call = make_problem(q, k, k, torch.tensor([0, k_rows]), None, 1.0, (-1, -1), False)
    needs = {"need_dq": True, "need_dkdv": False}
    assert launch_bwd_sm100.backward(call, q, torch.zeros(1, q_rows), q, **needs) == needs


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["long", "short", "pair"])
def test_neighbours_do_not_show(name: str, packed: bool, value: float) -> None:
    """What is wrong with one sequence's keys, and so with its output, changes nothing of the others' gradients."""
    torch.manual_seed(0)
    lengths = [70, 40, 133]
    queries: list[int] | int = [50, 60, 90] if packed else 90
    problem = make(lengths, queries)
    config = CONFIGS[name]
    dout, _, out, lse = forward(problem)
    clean = run(problem, dout, out, lse, config)
    problem.k[70:110] = problem.v[70:110] = value
    rows = slice(50, 110) if packed else slice(90, 180)
    out[rows], lse[:, rows] = torch.nan, torch.nan
    dirty = run(problem, dout, out, lse, config)
    for b in (0, 2):
        for name in ("dk", "dv"):
            assert torch.equal(dirty[name].split(lengths)[b], clean[name].split(lengths)[b])
        if isinstance(queries, list):  # with other sums in another order
            torch.testing.assert_close(dirty["dq"].split(queries)[b], clean["dq"].split(queries)[b], atol=0, rtol=1e-2)


@pytest.mark.parametrize("name", ["long", "pair"])
@pytest.mark.parametrize(
    ("k_lengths", "queries"),
    [([0, 5, 0], [3, 0, 4]), ([1], 1), ([0, 0, 3, 0], 2), ([129, 1], [0, 0])],
    ids=["nobody meets", "one pair", "mostly empty", "no queries"],
)
def test_empty_sequences(name: str, k_lengths: list[int], queries: list[int] | int) -> None:
    torch.manual_seed(0)
    found, _ = run_and_check(make(k_lengths, queries), CONFIGS[name])
    if isinstance(queries, list):
        assert all((grad == 0).all() for grad in found.values())


@pytest.mark.parametrize("need", [(True, False), (False, True)], ids=["dq alone", "dk and dv alone"])
def test_only_what_is_needed(need: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    found, _ = run_and_check(make([60, 140], 70), LONG, need=need)
    assert set(found) == ({"dq"} if need[0] else {"dk", "dv"})


def test_many_short_tiles_of_one_program() -> None:
    """One step a tile: everything that is handed over at the end of a tile is handed over often."""
    torch.manual_seed(0)
    problem = make([130, 0, 7, 128, 1, 129, 64], 64)
    for config, policy in zip((LONG, SHORT, PAIR), POLICIES, strict=True):
        run_and_check(problem, config, policy=policy, processors=config.ctas)


def test_a_problem_of_many_steps() -> None:
    torch.manual_seed(0)
    run_and_check(make([300], [700], causal=True), PAIR, processors=4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "torch.compile"])
def test_through_the_public_function(compiled: bool) -> None:
    """Forward and backward by autograd, with the configurations that would be the defaults on a GPU."""
    torch.manual_seed(0)
    problem = make([200, 0, 300], 256, heads=2, kv_heads=1)
    dout, right, _, _ = forward(problem)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_flash_attention(q, k, v, problem.k_offsets, **problem.options)  # type: ignore[arg-type, return-value]

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with simulated_gpu("sm_100", kernels=lambda name: "sm100" in name) as simulation, attention_on("sm_100"):
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
    assert simulation.ok, "\n".join(str(run) for run in simulation.runs if not run.ok)
    names = [run.kernel for run in simulation.runs]
    assert "forward_sm100_kernel" in names
    assert "backward_sm100_kernel" in names
    check({"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}, right)
