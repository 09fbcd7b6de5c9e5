"""From tensors to launches: configurations, tile lists, grids. Nothing waits for the device, but for :mod:`.tune`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config as configs
from .bwd_triton import broadcast_dq_kernel, delta_kernel, dkdv_kernel, dq_kernel
from .config import Config
from .fwd_triton import forward_kernel
from .interpret import is_interpreted, run_kernel
from .tiles import Sequences, build_tiles
from .tune import fastest


class Mask(NamedTuple):
    """Window bounds as kernels take them: None where unbounded."""

    left: int | None
    right: int | None

    @classmethod
    def from_window(cls, left: int, right: int, rows_q: int, rows_k: int) -> Mask:
        """Drop a bound that no pair can reach, so that it costs nothing."""
        return cls(
            left=None if left < 0 or left >= rows_k else left,
            right=None if right < 0 or right >= rows_q else right,
        )


@dataclass(frozen=True)
class Problem:
    """What all kernels of one call have in common."""

    q: Tensor  # [total_q or M, H, D]
    k: Tensor  # [total_k, H_kv, D]
    v: Tensor  # [total_k, H_kv, D]
    sequences: Sequences
    sm_scale: float
    mask: Mask
    deterministic: bool

    @property
    def is_empty(self) -> bool:
        """No query meets any key: known from the shapes, and nothing to describe to TMA."""
        return self.q.shape[0] == 0 or self.k.shape[0] == 0

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    q_offsets: Tensor | None,
    sm_scale: float,
    window: tuple[int, int],
    deterministic: bool,
) -> Problem:
    """Bundle checked arguments; ``q_offsets`` None means broadcast queries."""
    if not (q.is_cuda or is_interpreted(forward_kernel)):
        raise RuntimeError(
            f"jagged_flash_attention runs on CUDA tensors, got {q.device}: to run on the CPU, set TRITON_INTERPRET=1 "
            "in the environment before Python starts."
        )
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    sequences = Sequences(q_offsets, k_offsets, q.shape[0], k.shape[0])
    mask = Mask.from_window(*window, q.shape[0], k.shape[0])
    return Problem(q, k, v, sequences, sm_scale, mask, deterministic)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """``out`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``."""
    q, sequences = problem.q, problem.sequences
    rows = sequences.rows
    out = q.new_empty((rows, problem.heads, problem.head_dim))
    lse = q.new_empty((problem.heads, rows), dtype=torch.float32)
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
            rows,
            problem.sm_scale * math.log2(math.e),
            *problem.mask,
            **_compile_options(problem, config),
        )

    with _on_device(q):
        launch(_choose("forward", problem, launch))
    return out, lse


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, *, need_dq: bool, need_dkdv: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dq, dk, dv``, shaped like ``q``, ``k``, ``v``; None where not needed."""
    if problem.is_empty:
        return torch.zeros_like(problem.q), torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    dout = _aligned(dout)
    dq = dk = dv = None
    with _on_device(dout):
        delta, lse2 = _row_statistics(out, lse, dout)
        if need_dkdv:
            dk, dv = _dkdv(problem, dout, lse2, delta)
        if need_dq:
            dq = (_broadcast_dq if problem.sequences.broadcast else _dq)(problem, dout, lse2, delta)
    return dq, dk, dv


def _row_statistics(out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
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
            _row_blocks(dout, config.block_m),
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
            _row_blocks(dout, config.block_m),
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
            _row_blocks(dout, config.block_m),
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


def _aligned(tensor: Tensor) -> Tensor:
    """A copy if the data of a view starts where TMA cannot (16 bytes); the allocator never places it so."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _row_blocks(packed: Tensor, block: int) -> TensorDescriptor:
    """Descriptor of ``packed`` ``[rows, heads, D]`` that reads ``block`` rows of one head at a time."""
    rows, heads, head_dim = packed.shape
    return TensorDescriptor(packed, [rows, heads * head_dim], [heads * head_dim, 1], [block, head_dim])


def _operands(problem: Problem, config: Config) -> tuple[TensorDescriptor, ...]:
    q, k, v = problem.q, problem.k, problem.v
    return _row_blocks(q, config.block_m), _row_blocks(k, config.block_n), _row_blocks(v, config.block_n)


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
    device = problem.q.device
    limit = _properties(device).shared_memory_per_block_optin
    usable = [c for c in configs.CANDIDATES[kernel] if configs.fits(kernel, c, problem.head_dim, limit)]
    if not usable:
        raise RuntimeError(
            f"jagged_flash_attention: no configuration of the {kernel} kernel fits {limit} bytes of shared memory."
        )
    if problem.deterministic:
        return usable[0]
    sequences, mask = problem.sequences, problem.mask
    mean_q = sequences.rows // sequences.batch
    mean_k = sequences.total_k // sequences.batch
    key = (
        kernel,
        device.index,
        problem.q.dtype,
        problem.head_dim,
        problem.group,
        sequences.broadcast,
        (mask.left is None, mask.right is None),
        mean_q.bit_length(),
        mean_k.bit_length(),
    )
    return fastest(key, usable, launch)


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _multiprocessors(device: torch.device) -> int:
    return _properties(device).multi_processor_count if device.type == "cuda" else 1


def _resident_programs(device: torch.device, config: Config) -> int:
    """Programs that run at once: registers allow two of four warps on a multiprocessor, one of eight."""
    return _multiprocessors(device) * max(1, 8 // config.num_warps)


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
