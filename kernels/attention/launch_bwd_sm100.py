"""The TLX backward for Blackwell: from a problem to launches. Nothing waits for the device, but for :mod:`.tune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from . import config_bwd_sm100 as configs
from . import launch_triton
from .bwd_post import round_kernel
from .bwd_sm100 import backward_sm100_kernel
from .config_bwd_sm100 import KEYS, BackwardConfig
from .hardware import gpu_name, multiprocessors, on_device, shared_memory_limit
from .interpret import run_kernel
from .problem import Problem, aligned
from .ragged import RAGGED_ROWS, ragged_blocks
from .tiles import TileList, build_tiles
from .tune import choose


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, *, need_dq: bool, need_dkdv: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dq, dk, dv``, shaped like ``q``, ``k``, ``v``; None where not needed.

    dQ is either added up in float32 by the kernel that computes dK and dV, in whatever order its programs come to it,
    or computed by a kernel of its own, the plain Triton one, which is what determinism asks for.
    """
    if max(problem.sequences.rows, problem.sequences.total_k) > RAGGED_ROWS:
        return launch_triton.backward(problem, out, lse, dout, need_dq=need_dq, need_dkdv=need_dkdv)
    if problem.is_empty:
        return launch_triton.no_gradients(problem, need_dq=need_dq, need_dkdv=need_dkdv)
    dout = aligned(dout)

    def launch(config: BackwardConfig) -> tuple[Tensor | None, Tensor, Tensor]:
        dq, dk, dv = _key_pass(problem, dout, lse2, delta, config)
        if need_dq and not config.add_dq:
            dq = launch_triton.query_pass(problem, dout, lse2, delta)
        return dq, dk, dv

    with on_device(dout):
        delta, lse2 = launch_triton.row_statistics(out, lse, dout)
        if not need_dkdv:
            return launch_triton.query_pass(problem, dout, lse2, delta) if need_dq else None, None, None
        # Timed without dQ, a choice would be wrong for the calls of the kind that need it.
        return launch(_choose("backward", problem, launch if need_dq else None))


def _key_pass(
    problem: Problem, dout: Tensor, lse2: Tensor, delta: Tensor, config: BackwardConfig
) -> tuple[Tensor | None, Tensor, Tensor]:
    """``dk``, ``dv``, and if the configuration says so ``dq``."""
    q, k, v, sequences = problem.q, problem.k, problem.v, problem.sequences
    kv_heads, half = k.shape[1], problem.head_dim // 2
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    sums = q.new_zeros((config.replicas, *q.shape), dtype=torch.float32) if config.add_dq else None
    rows = config.block_m // config.ctas
    pair = config.ctas == 2
    tiles = build_tiles(sequences, KEYS * config.ctas, over_keys=True)
    run_kernel(
        backward_sm100_kernel,
        (_programs(tiles, kv_heads, config, q.device),),
        ragged_blocks(q, rows),
        ragged_blocks(k, KEYS),
        ragged_blocks(v, KEYS),
        ragged_blocks(dout, rows),
        ragged_blocks(q, config.block_m, half) if pair else None,
        ragged_blocks(k, 2 * KEYS, half) if pair else None,
        ragged_blocks(dout, config.block_m, half) if pair else None,
        None if sums is None else ragged_blocks(sums.flatten(0, 1), rows, config.dq_columns),
        ragged_blocks(dk, KEYS, config.dkv_columns),
        ragged_blocks(dv, KEYS, config.dkv_columns),
        lse2,
        delta,
        tiles.entries,
        sequences.rows,
        q.shape[0],
        kv_heads,
        problem.sm_scale,
        *problem.mask,
        **_compile_options(problem, config),
    )
    return None if sums is None else _rounded(sums, problem), dk, dv


def _programs(tiles: TileList, kv_heads: int, config: BackwardConfig, device: torch.device) -> int:
    """CTAs to launch: for every tile that may exist, or as many as are resident at once."""
    most = tiles.most * kv_heads
    if not config.clc:
        most = min(multiprocessors(device) // config.ctas, most)
    return max(1, most) * config.ctas


def _compile_options(problem: Problem, config: BackwardConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "GROUP": problem.group,
        "D": problem.head_dim,
        "BLOCK_M": config.block_m,
        "STAGES": (config.k_stages, config.v_stages, config.q_stages, config.dout_stages),
        "DQ_STAGING": (config.dq_columns, config.dq_stages),
        "DKV_COLUMNS": config.dkv_columns,
        "EARLY": config.early,
        "REPLICAS": config.replicas,
        "CLC": config.clc,
        "ADD_DQ": config.add_dq,
        "REGISTERS": (config.compute_registers, config.reduce_registers, config.single_registers),
        "CTAS": config.ctas,
        "num_warps": 4,
        "num_stages": 1,
    }
    if config.ctas > 1:
        options["ctas_per_cga"] = (config.ctas, 1, 1)
    return options


def _rounded(sums: Tensor, problem: Problem) -> Tensor:
    """dQ of the replicas ``[replicas, rows, H, D]``."""
    dq = torch.empty_like(problem.q)
    total = sums.sum(0) if sums.shape[0] > 1 else sums
    block = 4096
    grid = (triton.cdiv(dq.numel(), block),)
    run_kernel(round_kernel, grid, total, dq, dq.numel(), problem.sm_scale, BLOCK=block, num_warps=8)
    return dq


def _choose(kernel: str, problem: Problem, launch: Callable[[BackwardConfig], object] | None) -> BackwardConfig:
    """The fastest, timed with ``launch``; if that is None, the default without dQ."""
    kind, device = problem.kind("sm100", kernel), problem.q.device
    usable = configs.candidates(kind, shared_memory_limit(device))
    if problem.deterministic or launch is None:
        return configs.deterministic(usable[0])
    chosen: BackwardConfig = choose(kind, gpu_name(device), usable, launch, problem.began)
    return chosen
