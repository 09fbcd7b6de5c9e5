"""The TLX kernels for Blackwell: from a problem to launches. Nothing waits for the device, but for :mod:`.tune`.

Here is the forward; the backward has a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import config_sm100 as configs
from . import launch_triton
from .config_sm100 import ForwardConfig
from .fwd_sm100 import forward_sm100_kernel
from .hardware import gpu_name, multiprocessors, on_device, shared_memory_limit
from .interpret import run_kernel
from .launch_bwd_sm100 import backward
from .problem import Problem
from .ragged import RAGGED_ROWS, ragged_blocks
from .tiles import TileList, build_tiles
from .tune import choose

__all__ = ["backward", "forward"]


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """``out`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``."""
    q, k, v, sequences = problem.q, problem.k, problem.v, problem.sequences
    if max(sequences.rows, sequences.total_k) > RAGGED_ROWS:
        return launch_triton.forward(problem)
    out, lse = problem.new_outputs()
    if problem.is_empty:
        return out.zero_(), lse.fill_(-math.inf)

    def launch(config: ForwardConfig) -> None:
        tiles = build_tiles(sequences, config.block_m)
        run_kernel(
            forward_sm100_kernel,
            (_programs(problem, config, tiles),),
            ragged_blocks(q, configs.ROWS),
            ragged_blocks(k, config.block_n // config.ctas),
            ragged_blocks(v, config.block_n, problem.head_dim // config.ctas),
            ragged_blocks(out, configs.ROWS, configs.STAGED),
            lse,
            tiles.entries,
            sequences.rows,
            problem.heads,
            problem.sm_scale * math.log2(math.e),
            *problem.mask,
            **_compile_options(problem, config),
        )

    with on_device(q):
        launch(_choose("forward", problem, launch))
    return out, lse


def _programs(problem: Problem, config: ForwardConfig, tiles: TileList) -> int:
    """CTAs to launch: one for every pair of tile and head that may exist, or as many as are resident at once."""
    pairs = tiles.most * problem.heads
    if config.order == "clc":
        return pairs * config.ctas
    resident = multiprocessors(problem.q.device) * config.residents // config.ctas
    return max(1, min(resident, pairs)) * config.ctas


def _compile_options(problem: Problem, config: ForwardConfig) -> dict[str, Any]:
    fields = {name.upper(): value for name, value in vars(config).items()}
    options: dict[str, Any] = {
        "GROUP": problem.group,
        "D": problem.head_dim,
        "EXACT": problem.q.dtype == torch.float16,
        "KEEP_Q": problem.sequences.broadcast,
        **{name: fields[name] for name in forward_sm100_kernel.arg_names if name in fields},
        "num_warps": 4,
        "num_stages": 1,
    }
    if config.ctas > 1:
        options["ctas_per_cga"] = (config.ctas, 1, 1)
    if config.residents > 1:
        options["maxnreg"] = config.launch_registers
    return options


def _choose(kernel: str, problem: Problem, launch: Callable[[ForwardConfig], object]) -> ForwardConfig:
    kind, device = problem.kind("sm100", kernel), problem.q.device
    usable = configs.candidates(kind, shared_memory_limit(device))
    if problem.deterministic:
        fixed: ForwardConfig = usable[0]
        return fixed
    chosen: ForwardConfig = choose(kind, gpu_name(device), usable, launch, problem.began)
    return chosen
