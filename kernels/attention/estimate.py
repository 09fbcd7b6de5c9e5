"""Estimates: the least cycles that one step of a kernel's inner loop keeps each unit of a multiprocessor busy.

A unit is taken to work at the rate of :data:`MACHINES`; the one that is busy longest bounds the step from below.
Nothing else is counted (other arithmetic, latencies, waits). A masked block costs these units the same. Programs that
share a multiprocessor share its units.

Traffic of shared memory is counted by hand from the kernels' sources: of each matmul the operands that are there,
not in registers or tensor memory, read once and not kept for the next matmul; and what a step copies by TMA, stores and
loads. Row statistics, and what is done once a tile, are left out. Weighing this against matmuls and exponentials is
FlashAttention-4's analysis (Zadouri et al., 2026, https://arxiv.org/abs/2603.05451). Matmuls of 64 rows are taken to
run at the full rate, too.

What a step moves between the multiprocessor and the memory beyond it is counted, too. How much of that is in L2 depends
on what the other multiprocessors do, so that it does not bound a step: ``memory`` is what it would take if all of it
came from, or went to, DRAM, of which each multiprocessor had its share.

A kernel is described by a function in :data:`STEPS`, an architecture by a row in :data:`MACHINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import config_bwd_sm100, config_sm100
from .config_sm90 import ROWS, TILE_KEYS, BackwardConfig, step_queries

# Matmuls of a step of the plain Triton kernels: S and P V; S, dP, dV and dK; S, dP and dQ.
PLAIN_MATMULS = {"forward_kernel": 2, "dkdv_kernel": 4, "dq_kernel": 3, "broadcast_dq_kernel": 3}


@dataclass(frozen=True)
class Machine:
    """What a multiprocessor does in a cycle: multiply-adds of 16-bit matmuls, exponentials, bytes of shared memory.

    ``dram_bytes`` is its share of the device's DRAM: the data sheet's rate over the multiprocessors and the highest
    clock.
    """

    multiply_adds: int
    exponentials: int
    shared_bytes: int
    dram_bytes: float


MACHINES = {
    90: Machine(2048, 16, 128, 4.8e12 / (132 * 1.98e9)),  # H200
    100: Machine(4096, 16, 128, 8e12 / (148 * 1.965e9)),  # B200
}


@dataclass(frozen=True)
class Step:
    """A step: pairs of a query and a key, matmuls over them, bytes through shared memory (None: it is not known how
    many) and bytes to or from the memory beyond the multiprocessor. Of the pairs' exponentials the share ``on_unit`` is
    computed by the unit for them."""

    pairs: int
    matmuls: int
    shared_bytes: int | None
    global_bytes: int
    on_unit: float = 1.0


@dataclass(frozen=True)
class StepCycles:
    """Cycles of one step of one CTA; ``shared`` is None where it is not known what goes through it."""

    tensor: float
    exponential: float
    shared: float | None
    global_bytes: int
    memory: float

    @property
    def bound(self) -> str:
        """The unit that is busy longest, or all that are, such as "tensor and shared"; not the memory, see above."""
        units = {"tensor": self.tensor, "exponential": self.exponential, "shared": self.shared or 0.0}
        return " and ".join(unit for unit, cycles in units.items() if cycles == max(units.values()))


def step_cycles(kernel: str, config: Mapping[str, Any], head_dim: int, arch: int) -> StepCycles | None:
    """Of the kernel of that name on ``arch`` (such as 90); None where nothing is known.

    Each pair of a query and a key costs an exponential, and ``head_dim`` multiply-adds in each matmul.
    """
    machine, describe = MACHINES.get(arch), STEPS.get(kernel)
    if machine is None or describe is None:
        return None
    step = describe(config, head_dim)
    return StepCycles(
        step.pairs * head_dim * step.matmuls / machine.multiply_adds,
        step.pairs * step.on_unit / machine.exponentials,
        None if step.shared_bytes is None else step.shared_bytes / machine.shared_bytes,
        step.global_bytes,
        step.global_bytes / machine.dram_bytes,
    )


def _forward(config: Mapping[str, Any], head_dim: int) -> Step:
    """``S = Q K^T`` and ``O += P V`` of 64 queries a consumer with ``block_n`` keys.

    Shared memory, 16-bit: every consumer reads Q, K and V for itself (P is in registers), and TMA writes K and V once.
    """
    consumers, block_n = config["consumers"], config["block_n"]
    queries, keys = ROWS * head_dim, block_n * head_dim
    elements = consumers * (queries + 2 * keys) + 2 * keys
    return Step(consumers * ROWS * block_n, 2, 2 * elements, 2 * 2 * keys)


def _backward(config: Mapping[str, Any], head_dim: int) -> Step:
    """``S^T``, ``dP^T``, ``dV``, ``dK`` and perhaps ``dQ`` of a step of queries with 64 keys for each of two consumers.

    Shared memory: every consumer reads K and Q for S^T, V and dO for dP^T, dO for dV and Q for dK (the other operands
    are in registers), all 16-bit; TMA writes Q and dO once. For dQ a consumer writes its dS^T, reads 64 x 128 of dS and
    128 x 64 of K, all 16-bit, and its 64 x 64 of dQ are written and read in float32. Row statistics are left out.

    Beyond it: Q and dO come, with two float32 statistics a row, and dQ goes in float32.
    """
    chosen = BackwardConfig(**config)
    step = step_queries(head_dim)
    keys, queries = ROWS * head_dim, step * head_dim
    each = 2 * (2 * keys + 4 * queries)
    moved = 2 * 2 * queries + 2 * 4 * step
    if chosen.add_dq:
        each += 2 * (ROWS * step + 2 * ROWS * TILE_KEYS) + 4 * 2 * ROWS * ROWS
        moved += 4 * queries
    return Step(TILE_KEYS * step, 5 if chosen.add_dq else 4, 2 * each + 2 * 2 * queries, moved)


def _plain(matmuls: int, over_queries: bool) -> Callable[[Mapping[str, Any], int], Step]:
    """Two operands of 16 bits come in each step: K and V, or Q and dO with their statistics."""

    def describe(config: Mapping[str, Any], head_dim: int) -> Step:
        rows = config["block_m"] if over_queries else config["block_n"]
        moved = 2 * 2 * rows * head_dim + (2 * 4 * rows if over_queries else 0)
        return Step(config["block_m"] * config["block_n"], matmuls, None, moved)

    return describe


def _forward_sm100(config: Mapping[str, Any], head_dim: int) -> Step:
    """``S`` and ``P V`` of 128 queries a softmax group with ``block_n`` keys, which the CTAs of a program share.

    Shared memory, 16-bit: of every group the matmuls read Q, K and V (P is in tensor memory), and TMA writes K and V
    once; of a pair each CTA has, and reads, half of K and half of V.

    Of each part of P, ``polynomial`` columns are computed on the multiply-add units.
    """
    block_n, groups = config["block_n"], config["groups"]
    queries, keys = config_sm100.ROWS * head_dim, block_n * head_dim // config["ctas"]
    elements = groups * (queries + 2 * keys) + 2 * keys
    share = 1 - config["polynomial"] * config["p_parts"] / block_n
    return Step(config_sm100.ROWS * groups * block_n, 2, 2 * elements, 2 * 2 * keys, share)


def _backward_sm100(config: Mapping[str, Any], head_dim: int) -> Step:
    """``S^T``, ``dP^T``, ``dV``, ``dK`` and perhaps ``dQ`` of a step of queries with the 128 keys of a CTA.

    Shared memory: K and Q are read for S^T, V and dO for dP^T, dO for dV and Q for dK (P^T and dS^T are in tensor
    memory), all 16-bit; TMA writes Q and dO once. For dQ, dS^T is written, and dS and K are read, all 16-bit; and dQ is
    written and read in float32.

    Of a pair each CTA has, and reads, half of Q and dO: of the rows for S^T and dP^T, of the columns for dV and dK, so
    that TMA still writes as much. It computes half of the rows of dQ, over the keys of both: as many elements of dS,
    half of which the peer wrote, and of K, half of its columns.

    Beyond it: Q and dO come, with two float32 statistics a row, and dQ goes in float32.
    """
    chosen = config_bwd_sm100.BackwardConfig(**config)
    keys, queries = config_bwd_sm100.KEYS * head_dim, chosen.block_m * head_dim
    pairs, part = config_bwd_sm100.KEYS * chosen.block_m, queries // chosen.ctas
    shared = 2 * (2 * keys + 4 * part + 2 * queries)
    moved = 2 * 2 * queries + 2 * 4 * chosen.block_m
    if chosen.add_dq:
        shared += 2 * (2 * pairs + keys) + 2 * 4 * part
        moved += 4 * part
    return Step(pairs, 5 if chosen.add_dq else 4, shared, moved)


STEPS: dict[str, Callable[[Mapping[str, Any], int], Step]] = {
    "forward_sm90_kernel": _forward,
    "backward_sm90_kernel": _backward,
    "forward_sm100_kernel": _forward_sm100,
    "backward_sm100_kernel": _backward_sm100,
    **{name: _plain(matmuls, name == "dkdv_kernel") for name, matmuls in PLAIN_MATMULS.items()},
}
