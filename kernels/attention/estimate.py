"""Estimates: the least cycles that one step of a kernel's inner loop keeps each unit of a Hopper multiprocessor busy.

Assumed of sm_90, per multiprocessor and cycle: 2048 multiply-adds of 16-bit matmuls, 16 exponentials, 128 bytes of
shared memory. Nothing else is counted (other arithmetic, latencies, waits, memory beyond the multiprocessor). A unit is
taken to work at that rate; the one that is busy longest bounds the step from below. A masked block costs these units
the same. Programs that share a multiprocessor share its units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_sm90 import ROWS, TILE_KEYS, BackwardConfig, step_queries

MULTIPLY_ADDS = 2048
EXPONENTIALS = 16
SHARED_BYTES = 128

# Matmuls of a step of the plain Triton kernels: S and P V; S, dP, dV and dK; S, dP and dQ.
PLAIN_MATMULS = {"forward_kernel": 2, "dkdv_kernel": 4, "dq_kernel": 3, "broadcast_dq_kernel": 3}


@dataclass(frozen=True)
class StepCycles:
    """Cycles of one step of one program; ``shared`` is None where only the compiler knows what goes through it."""

    tensor: float
    exponential: float
    shared: float | None

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        units = {"tensor": self.tensor, "exponential": self.exponential, "shared": self.shared or 0.0}
        return max(units, key=lambda unit: units[unit])


def step_cycles(kernel: str, config: Mapping[str, Any], head_dim: int, arch: int) -> StepCycles | None:
    """Of the kernel of that name on ``arch`` (such as 90); None where nothing is known."""
    if arch != 90:
        return None
    if kernel == "forward_sm90_kernel":
        return _forward(config["consumers"], config["block_n"], head_dim)
    if kernel == "backward_sm90_kernel":
        return _backward(BackwardConfig(**config), head_dim)
    if kernel in PLAIN_MATMULS:
        return _cycles(config["block_m"] * config["block_n"], head_dim, PLAIN_MATMULS[kernel], None)
    return None


def _cycles(pairs: int, head_dim: int, matmuls: int, shared_bytes: int | None) -> StepCycles:
    """Each pair of a query and a key costs an exponential, and ``head_dim`` multiply-adds in each matmul."""
    shared = None if shared_bytes is None else shared_bytes / SHARED_BYTES
    return StepCycles(pairs * head_dim * matmuls / MULTIPLY_ADDS, pairs / EXPONENTIALS, shared)


def _forward(consumers: int, block_n: int, head_dim: int) -> StepCycles:
    """``S = Q K^T`` and ``O += P V`` of 64 queries a consumer with ``block_n`` keys.

    Shared memory, 16-bit: every consumer reads Q, K and V for itself (P is in registers), and TMA writes K and V once.
    """
    queries, keys = ROWS * head_dim, block_n * head_dim
    elements = consumers * (queries + 2 * keys) + 2 * keys
    return _cycles(consumers * ROWS * block_n, head_dim, 2, 2 * elements)


def _backward(config: BackwardConfig, head_dim: int) -> StepCycles:
    """``S^T``, ``dP^T``, ``dV``, ``dK`` and perhaps ``dQ`` of a step of queries with 64 keys for each of two consumers.

    Shared memory: every consumer reads K and Q for S^T, V and dO for dP^T, dO for dV and Q for dK (the other operands
    are in registers), all 16-bit; TMA writes Q and dO once. For dQ a consumer writes its dS^T, reads 64 x 128 of dS and
    128 x 64 of K, all 16-bit, and its 64 x 64 of dQ are written and read in float32. Row statistics are left out.
    """
    step = step_queries(head_dim)
    keys, queries = ROWS * head_dim, step * head_dim
    each = 2 * (2 * keys + 4 * queries)
    if config.add_dq:
        each += 2 * (ROWS * step + 2 * ROWS * TILE_KEYS) + 4 * 2 * ROWS * ROWS
    return _cycles(TILE_KEYS * step, head_dim, 5 if config.add_dq else 4, 2 * each + 2 * 2 * queries)
