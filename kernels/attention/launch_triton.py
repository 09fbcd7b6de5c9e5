"""The plain Triton kernels: from a problem to launches. Nothing waits for the device, but for :mod:`.tune`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config as configs
from .bwd_triton import broadcast_dq_kernel, delta_kernel, dkdv_kernel, dq_kernel
from .config import Config
from .fwd_triton import forward_kernel
from .hardware import gpu_name, multiprocessors, on_device, shared_memory_limit
from .interpret import is_interpreted, run_kernel
from .problem import Problem, aligned, row_blocks
from .tiles import build_tiles
from .tune import choose


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """``out`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``."""
    q, sequences = problem.q, problem.sequences
    out, lse = problem.new_outputs()
    if problem.is_empty:
        return out.zero_(), lse.fill_(-math.inf)

    def launch(config: Config) -> None:
        tiles = build_tiles(sequences, config.block_m)
        run_kernel(
            forward_kernel,
            (tiles.most, problem.heads),
            *_operands(problem, config),
            out,
            lse,
            tiles.entries,
            sequences.rows,
            problem.sm_scale * math.log2(math.e),
            *problem.mask,
            **_compile_options(problem, config),
        )

    with on_device(q):
        launch(_choose("forward", problem, launch))
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, *, need_dq: bool, need_dkdv: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dq, dk, dv``, shaped like ``q``, ``k``, ``v``; None where not needed."""
    if problem.is_empty:
        return no_gradients(problem, need_dq=need_dq, need_dkdv=need_dkdv)
    dout = aligned(dout)
    dq = dk = dv = None
    with on_device(dout):
        delta, lse2 = row_statistics(out, lse, dout)
        if need_dkdv:
            dk, dv = _dkdv(problem, dout, lse2, delta)
        if need_dq:
            dq = query_pass(problem, dout, lse2, delta)
    return dq, dk, dv


def no_gradients(
    problem: Problem, *, need_dq: bool, need_dkdv: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Zeros, as far as they are needed."""
    dk, dv = (torch.zeros_like(problem.k), torch.zeros_like(problem.v)) if need_dkdv else (None, None)
    return torch.zeros_like(problem.q) if need_dq else None, dk, dv


def query_pass(problem: Problem, dout: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
    """``dq`` alone, without atomics."""
    return (_broadcast_dq if problem.sequences.broadcast else _dq)(problem, dout, lse2, delta)


def row_statistics(out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """``delta`` and ``lse2``, ``[H, rows]`` float32 each: row sums of ``dout * out``, log-sum-exp in base 2."""
    rows, heads, head_dim = out.shape
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    block = 64
    grid = (triton.cdiv(rows, block), heads)
    run_kernel(delta_kernel, grid, out, dout, lse, delta, lse2, rows, D=head_dim, BLOCK=block, num_warps=4)
    return delta, lse2


def _dkdv(problem: Problem, dout: Tensor, lse2: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    sequences = problem.sequences
    dk, dv = torch.empty_like(problem.k), torch.empty_like(problem.v)

    def launch(config: Config) -> None:
        tiles = build_tiles(sequences, config.block_n, over_keys=True)
        run_kernel(
            dkdv_kernel,
            (tiles.most, problem.k.shape[1]),
            *_operands(problem, config),
            row_blocks(dout, config.block_m),
            lse2,
            delta,
            dk,
            dv,
            tiles.entries,
            sequences.rows,
            problem.sm_scale,
            *problem.mask,
            **_compile_options(problem, config),
        )

    launch(_choose("dkdv", problem, launch))
    return dk, dv


def _dq(problem: Problem, dout: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
    sequences = problem.sequences
    dq = torch.empty_like(problem.q)

    def launch(config: Config) -> None:
        tiles = build_tiles(sequences, config.block_m)
        run_kernel(
            dq_kernel,
            (tiles.most, problem.heads),
            *_operands(problem, config),
            row_blocks(dout, config.block_m),
            lse2,
            delta,
            dq,
            tiles.entries,
            sequences.rows,
            problem.sm_scale,
            *problem.mask,
            **_compile_options(problem, config),
        )

    launch(_choose("dq", problem, launch))
    return dq


def _broadcast_dq(problem: Problem, dout: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
    q, sequences = problem.q, problem.sequences
    by_length = build_tiles(sequences, sequences.M)  # one tile a sequence

    def launch(config: Config) -> Tensor:
        blocks = triton.cdiv(sequences.M, config.block_m)
        shares = min(sequences.batch, max(1, _resident_programs(q.device, config) // (blocks * problem.heads)))
        partial = q.new_empty((shares, *q.shape), dtype=torch.float32)
        run_kernel(
            broadcast_dq_kernel,
            (blocks, problem.heads, shares),
            *_operands(problem, config),
            row_blocks(dout, config.block_m),
            lse2,
            delta,
            partial,
            by_length.entries,
            sequences.rows,
            sequences.M,
            problem.sm_scale,
            *problem.mask,
            **_compile_options(problem, config),
        )
        return partial

    return launch(_choose("dq", problem, launch)).sum(0).to(q.dtype)


def _operands(problem: Problem, config: Config) -> tuple[TensorDescriptor, ...]:
    q, k, v = problem.q, problem.k, problem.v
    return row_blocks(q, config.block_m), row_blocks(k, config.block_n), row_blocks(v, config.block_n)


def _compile_options(problem: Problem, config: Config) -> dict[str, int]:
    return {
        "GROUP": problem.group,
        "D": problem.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _choose(kernel: str, problem: Problem, launch: Callable[[Config], object]) -> Config:
    if is_interpreted(forward_kernel):
        return configs.INTERPRETED
    kind, device = problem.kind("triton", kernel), problem.q.device
    usable = configs.candidates(kind, shared_memory_limit(device))
    if not usable:
        raise RuntimeError(
            f"jagged_flash_attention: no configuration of the {kernel} kernel fits {shared_memory_limit(device)} bytes "
            "of shared memory."
        )
    if problem.deterministic:
        return usable[0]
    return choose(kind, gpu_name(device), usable, launch, problem.began)


def _resident_programs(device: torch.device, config: Config) -> int:
    """Programs that run at once: registers allow two of four warps on a multiprocessor, one of eight."""
    return multiprocessors(device) * max(1, 8 // config.num_warps)
