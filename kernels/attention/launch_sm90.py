"""The TLX kernels for Hopper: from a problem to launches. Nothing waits for the device, but for :mod:`.tune`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config_sm90 as configs
from . import launch_triton, record
from .bwd_post import round_kernel
from .bwd_sm90 import backward_sm90_kernel
from .config_sm90 import BackwardConfig, Config, ForwardConfig
from .fwd_sm90 import forward_sm90_kernel
from .hardware import gpu_name, multiprocessors, on_device, shared_memory_limit
from .interpret import run_kernel
from .problem import Problem, aligned, row_blocks
from .ragged import RAGGED_ROWS, ragged_blocks
from .tiles import build_tiles
from .tune import choose


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
        programs = min(multiprocessors(q.device) * config.residents, tiles.most * problem.heads)
        run_kernel(
            forward_sm90_kernel,
            (programs,),
            row_blocks(q, configs.ROWS),
            ragged_blocks(k, config.block_n),
            ragged_blocks(v, config.block_n),
            ragged_blocks(out, configs.ROWS),
            lse,
            tiles.entries,
            sequences.rows,
            problem.sm_scale * math.log2(math.e),
            *problem.mask,
            record.buffer("forward", programs, tiles, problem.heads),
            RESIDENT=queries_stay(problem, config, programs, tiles.most * problem.heads),
            **_compile_options(problem, config),
        )

    with on_device(q):
        launch(_choose("forward", problem, launch))
    return out, lse


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
        # Without dQ there is nothing to choose between.
        return launch(_choose("backward", problem, launch) if need_dq else BackwardConfig(add_dq=False))


def _key_pass(
    problem: Problem, dout: Tensor, lse2: Tensor, delta: Tensor, config: BackwardConfig
) -> tuple[Tensor | None, Tensor, Tensor]:
    """``dk``, ``dv``, and if the configuration says so ``dq``."""
    q, k, v, sequences = problem.q, problem.k, problem.v, problem.sequences
    kv_heads = k.shape[1]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if config.add_dq else None
    # In whole blocks the row statistics come by TMA, which needs addresses that are multiples of 16 bytes.
    whole = sequences.broadcast and sequences.M % configs.step_queries(problem.head_dim) == 0 and lse2.numel() < 2**31
    rows = configs.ROWS
    tiles = build_tiles(sequences, configs.TILE_KEYS, over_keys=True)
    programs = min(multiprocessors(q.device), tiles.most * kv_heads)
    run_kernel(
        backward_sm90_kernel,
        (programs,),
        ragged_blocks(q, rows),
        ragged_blocks(k, rows),
        ragged_blocks(v, rows),
        ragged_blocks(dout, rows),
        None if sums is None else ragged_blocks(sums, rows, rows),
        ragged_blocks(dk, rows),
        ragged_blocks(dv, rows),
        _values(lse2) if whole else lse2,
        _values(delta) if whole else delta,
        tiles.entries,
        sequences.rows,
        problem.sm_scale,
        *problem.mask,
        record.buffer("backward", programs, tiles, kv_heads),
        KV_HEADS=kv_heads,
        GROUP=problem.group,
        D=problem.head_dim,
        STAGES=config.stages,
        ADD_DQ=config.add_dq,
        LATE_DQ=config.add_dq and config.late_dq,
        WHOLE_QUERIES=whole,
        num_warps=4,
        num_stages=1,
    )
    return None if sums is None else _rounded(sums, problem), dk, dv


def queries_stay(problem: Problem, config: ForwardConfig, programs: int, pairs: int) -> bool:
    """Whether each of ``programs`` that share ``pairs`` of tile and head can load all its queries once."""
    room = config.block_m * config.q_stages
    one_head = programs % problem.heads == 0 and programs < pairs  # with a single pair there is nothing to keep
    return problem.sequences.broadcast and problem.q.shape[0] <= room and one_head


def _values(statistics: Tensor) -> TensorDescriptor:
    """Descriptor of the ``[H, rows]`` values as one line."""
    return TensorDescriptor(statistics, [statistics.numel()], [1], [configs.ROWS])


def _rounded(sums: Tensor, problem: Problem) -> Tensor:
    dq = torch.empty_like(problem.q)
    block = 4096
    grid = (triton.cdiv(dq.numel(), block),)
    run_kernel(round_kernel, grid, sums, dq, dq.numel(), problem.sm_scale, BLOCK=block, num_warps=8)
    return dq


def _compile_options(problem: Problem, config: ForwardConfig) -> dict[str, Any]:
    fields = {name.upper(): value for name, value in vars(config).items()}
    options: dict[str, Any] = {
        "HEADS": problem.heads,
        "GROUP": problem.group,
        "D": problem.head_dim,
        **{name: fields[name] for name in forward_sm90_kernel.arg_names if name in fields},
        "num_warps": 4,
        "num_stages": 1,
    }
    if config.launch_registers is not None:
        options["maxnreg"] = config.launch_registers
    return options


def _choose(kernel: str, problem: Problem, launch: Callable[[Config], object]) -> Config:
    kind, device = problem.kind("sm90", kernel), problem.q.device
    usable = configs.candidates(kind, shared_memory_limit(device))
    if problem.deterministic:
        fixed: Config = configs.deterministic(usable[0])
        return fixed
    chosen: Config = choose(kind, gpu_name(device), usable, launch, problem.began)
    return chosen
