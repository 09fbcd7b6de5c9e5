"""Problems for the kernels for Hopper and Blackwell on the simulator, and how to judge gradients.

``run`` and ``run_and_check`` are of the backward kernel for Blackwell.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "numerics"))
from attention_check import Answer, answer, largest
from attention_oracle import Problem

from jfabench.kernels.attention import config, launch_bwd_sm100, launch_triton
from jfabench.kernels.attention.config_bwd_sm100 import BackwardConfig
from jfabench.kernels.attention.problem import make_problem
from jfabench.sim.host import simulated_gpu

Gradients = dict[str, Tensor]


def make(
    k_lengths: list[int],
    queries: list[int] | int,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> Problem:
    """Normal inputs. ``queries`` are the lengths of packed ones, or the number of broadcast ones."""
    packed = isinstance(queries, list)
    rows = sum(queries) if isinstance(queries, list) else queries
    q = torch.randn(rows, heads, head_dim).to(dtype)
    k, v = (torch.randn(sum(k_lengths), kv_heads, head_dim).to(dtype) for _ in range(2))
    return Problem(q, k, v, k_lengths, queries if packed else None, causal=causal, window=window)  # type: ignore[arg-type]


def drawn(seed: int, head_dims: tuple[int, ...]) -> Problem:
    """A small problem: uneven lengths, some 0 or 1; packed or broadcast queries; any mask, group, dtype."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch = draw.randint(1, 4)
    k_lengths = [draw.choice([0, 1, draw.randint(2, 140), draw.randint(100, 400)]) for _ in range(batch)]
    k_lengths[draw.randrange(batch)] = draw.randint(1, 400)
    if draw.random() < 0.5:
        queries: list[int] | int = draw.choice([1, 64, 128, 200, 256])
    else:
        queries = [draw.choice([0, 1, draw.randint(2, 300)]) for _ in range(batch)]
        queries[draw.randrange(batch)] = draw.randint(1, 300)
    kv_heads, group = draw.choice([(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)])
    return make(
        k_lengths,
        queries,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw.choice(head_dims),
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        causal=draw.random() < 0.3,
        window=draw.choice([(-1, -1), (-1, -1), (30, -1), (40, 3), (0, 0), (-1, 5), (200, 150)]),
    )


def run(
    problem: Problem,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    config_: BackwardConfig,
    *,
    seed: int = 0,
    policy: str = "random",
    processors: int = 2,
    need: tuple[bool, bool] = (True, True),
) -> Gradients:
    """The gradients from the simulator, which must have found nothing. Memory for them starts as NaN."""
    window = (problem.window[0], 0 if problem.causal else problem.window[1])
    scale = problem.q.shape[2] ** -0.5
    q_offsets = problem.q_offsets
    call = make_problem(problem.q, problem.k, problem.v, problem.k_offsets, q_offsets, scale, window, False)
    poisoned = mock.Mock(side_effect=lambda x: torch.full_like(x, torch.nan))
    with (
        simulated_gpu("sm_100", seed, policy, kernels=lambda name: name.startswith("backward")) as simulation,
        mock.patch.object(launch_bwd_sm100, "choose", return_value=config_),
        mock.patch.object(launch_bwd_sm100.configs, "candidates", return_value=(config_,)),
        mock.patch.object(launch_bwd_sm100, "gpu_name", return_value="simulated"),
        mock.patch.object(launch_bwd_sm100, "shared_memory_limit", return_value=227 * 1024),
        mock.patch.object(launch_bwd_sm100, "multiprocessors", return_value=processors),
        mock.patch.object(launch_triton, "_choose", lambda kernel, *_: config.CANDIDATES[kernel][0]),
        mock.patch.object(torch, "empty_like", poisoned),
    ):
        grads = launch_bwd_sm100.backward(call, out, lse, dout, need_dq=need[0], need_dkdv=need[1])
    assert simulation.ok, "\n".join(str(run) for run in simulation.runs if not run.ok)
    return {name: grad for name, grad in zip(("dq", "dk", "dv"), grads, strict=True) if grad is not None}


def run_and_check(problem: Problem, config_: BackwardConfig, **options: object) -> tuple[Gradients, Answer]:
    """Run from the right output, rounded, and compare with the oracle's gradients."""
    dout, right, out, lse = forward(problem)
    found = run(problem, dout, out, lse, config_, **options)  # type: ignore[arg-type]
    check(found, right)
    return found, right


def forward(problem: Problem) -> tuple[Tensor, Answer, Tensor, Tensor]:
    """``dout``, the right answer, and what a forward pass hands to the backward: ``out`` and ``lse``."""
    rows = sum(problem.q_lengths) if problem.q_lengths is not None else len(problem.k_lengths) * problem.q.shape[0]
    dout = torch.randn(rows, *problem.q.shape[1:]).to(problem.q.dtype)
    right = answer(problem, dout)
    return dout, right, right.values["out"].to(problem.q.dtype), right.lse.float()


def check(found: Gradients, right: Answer) -> None:
    """The yardstick, with one ulp of the largest value more.

    A gradient is rounded to its dtype at last, which alone may move a value from one side of the right one to the
    other. In small problems the yardstick's own few values may all have been rounded luckily, and twice its error be
    less than that.
    """
    for name, value in found.items():
        assert value.shape == right.values[name].shape, name
        assert value.isfinite().all(), name
        limit = right.limits[name] + ulp(largest(right.values[name]), value.dtype)
        replace(right, limits={name: limit}).check_error(name, value, right.values[name])


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance of the numbers of this dtype around one of this magnitude; 0 at 0."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude)) if magnitude else 0.0
