"""The forward kernels on the simulator: what is asked of them, whatever they are for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention.problem import Problem as Call
from jfabench.sim.attention import attention_on
from jfabench.sim.host import simulated_gpu

sys.path.insert(0, str(Path(__file__).parent / "numerics"))
from attention_check import answer
from attention_oracle import Problem

POLICIES = ("random", "early", "late")


def poisoned(call: Call) -> tuple[Tensor, Tensor]:
    """Outputs in which what is not written shows."""
    rows = call.sequences.rows
    return call.q.new_full((rows, call.heads, call.head_dim), torch.nan), torch.full((call.heads, rows), torch.nan)


def forward(arch: str, problem: Problem, config: Any, seed: int, policy: str, processors: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` from the simulator, which must have found nothing."""
    with (
        simulated_gpu(arch, seed, policy) as simulation,
        attention_on(arch, multiprocessors=processors, choose=lambda _kind, _usable: config),
        mock.patch.object(Call, "new_outputs", poisoned),
    ):
        found = jagged_flash_attention(
            problem.q, problem.k, problem.v, problem.k_offsets, return_lse=True, **problem.options
        )
    assert simulation.ok, "\n".join(str(run) for run in simulation.runs if not run.ok)
    return found


def check(problem: Problem, out: Tensor, lse: Tensor) -> None:
    answer(problem, torch.zeros_like(out)).check({"out": out}, lse)
