"""TLX on Blackwell, backward: the configurations, which of them a device can hold, and which is the default."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .dq_traffic import SCHEMES, Shape, cheapest
from .kinds import Kind

KEYS = 128  # of a CTA's tile: the lanes of tensor memory
TMEM_COLUMNS = 512
STATISTICS = 2  # steps whose row statistics are in shared memory
CHUNK = 32  # columns of tensor memory that a thread has in registers at a time
# What a multiprocessor has for each of the 128 threads of a warp group, where five groups of warps are launched alike.
REGISTERS = 480
LEAST_REGISTERS = 48  # that the epilogue needs


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward kernel is compiled and launched.

    A step handles ``block_m`` queries; a tile has 128 keys for each of ``ctas`` CTAs, which share matmuls. There are
    slots in shared memory for ``k_stages`` tiles of K, and so on. dQ leaves in slices of ``dq_columns`` through
    ``dq_stages`` buffers, the last ``early`` slices of a step by way of registers; dK and dV in slices of
    ``dkv_columns``. dQ is added to one of ``replicas`` copies, which are summed afterwards; without ``add_dq`` it is
    computed by a pass of its own, with two more matmuls. ``clc``: tiles are handed out on demand, else dealt out in
    rounds. Registers are those of a thread that computes dS, of one of the reducer, and of one of the single warps; the
    epilogue's threads have the rest.
    """

    block_m: int = 128
    ctas: int = 1
    k_stages: int = 1
    v_stages: int = 1
    q_stages: int = 2
    dout_stages: int = 1
    dq_columns: int = 16
    dq_stages: int = 2
    early: int = 1
    dkv_columns: int = 32
    replicas: int = 1
    add_dq: bool = True
    clc: bool = False
    compute_registers: int = 128
    reduce_registers: int = 88
    single_registers: int = 72

    @property
    def store_registers(self) -> int:
        """Of a thread of the epilogue."""
        return REGISTERS - 2 * self.compute_registers - self.reduce_registers - self.single_registers

    def tmem_columns(self, head_dim: int) -> int:
        """Of S^T, dP^T, dK and dV, and of dQ where it has a place of its own."""
        scores, sums = 2 * self.block_m, 2 * head_dim
        own = self.add_dq and self.ctas == 1 and scores + sums + head_dim <= TMEM_COLUMNS
        return scores + sums + (head_dim if own else 0)

    def shared_bytes(self, head_dim: int) -> int:
        """Of one CTA: operands and dS, 16-bit, staging and row statistics, and 1 KiB or more for barriers."""
        keys = KEYS * (self.k_stages + self.v_stages)
        queries = self.block_m // self.ctas * (self.q_stages + self.dout_stages)
        operands = head_dim * (keys + queries)
        if self.ctas == 2:  # other parts of K, Q and dO: all rows, half of the columns
            operands += head_dim // 2 * (2 * KEYS + 2 * self.block_m)
        ds = KEYS * self.block_m
        dq_staging = self.block_m * self.dq_columns * self.dq_stages
        statistics = 2 * STATISTICS * self.block_m
        return 2 * (operands + ds + KEYS * self.dkv_columns) + 4 * (dq_staging + statistics) + 768 + 256 * self.ctas

    def fits(self, head_dim: int, shared_limit: int) -> bool:
        """Whether the kernel can, and a device has room that lets a CTA have so many bytes of shared memory."""
        width = head_dim // self.ctas  # of dQ in tensor memory
        slices = width // self.dq_columns
        return (
            self.block_m in (64, 128)
            and (self.ctas == 1 or (self.block_m == 128 and head_dim == 128))
            # The next step's scores need its queries before this step's dK has released its own; a pair has both twice.
            and self.q_stages >= 3 - self.ctas
            and width % self.dq_columns == 0
            and self.early <= slices
            and head_dim % self.dkv_columns == 0
            and self.dkv_columns % CHUNK == 0
            and self.store_registers >= LEAST_REGISTERS
            and self.tmem_columns(head_dim) <= TMEM_COLUMNS
            and self.shared_bytes(head_dim) <= shared_limit
        )


LONG = BackwardConfig(dq_stages=3, early=2, compute_registers=136, reduce_registers=72, single_registers=80)
# Two tiles of K: the next tile's first scores beside the end of a tile, and little is wasted on few queries.
SHORT = BackwardConfig(block_m=64, k_stages=2, dout_stages=2, dq_columns=32, dkv_columns=64)
PAIR = BackwardConfig(ctas=2, q_stages=1, early=2, compute_registers=144, reduce_registers=56, single_registers=88)
SMALL_HEADS = BackwardConfig(k_stages=2, v_stages=2, dout_stages=2, dq_columns=32, dkv_columns=64)

CANDIDATES = {
    128: (
        PAIR,
        LONG,
        SHORT,
        replace(PAIR, clc=True),
        replace(PAIR, early=1),
        replace(LONG, clc=True),
        replace(LONG, add_dq=False),
    ),
    64: (SMALL_HEADS, SHORT, replace(SMALL_HEADS, clc=True), replace(SMALL_HEADS, add_dq=False)),
}


def shared_bytes(kernel: str, config: BackwardConfig, head_dim: int) -> int:
    """Shared memory of one CTA."""
    del kernel  # there is one
    return config.shared_bytes(head_dim)


def fits(kernel: str, config: BackwardConfig, head_dim: int, shared_limit: int) -> bool:
    """Whether a device has room for ``config`` that lets a CTA have ``shared_limit`` bytes of shared memory."""
    del kernel
    return config.fits(head_dim, shared_limit)


def default(kind: Kind) -> BackwardConfig:
    """The configuration that serves where none may be timed: what the model of dQ's traffic says for mean lengths."""
    pair_or_none, *others = SCHEMES
    schemes = (pair_or_none, *others) if kind.head_dim == 128 else others
    shape = Shape((max(kind.mean_q, 1),), (max(kind.mean_k, 1),), kind.group, kind.head_dim, kind.broadcast)
    scheme = cheapest(shape, schemes).scheme
    if scheme.name == "pair":
        return PAIR
    alone = SHORT if kind.mean_q <= SHORT.block_m else LONG if kind.head_dim == 128 else SMALL_HEADS
    return replace(alone, add_dq=scheme.keys > 0)


def deterministic(config: BackwardConfig) -> BackwardConfig:
    """The same, without sums whose order depends on scheduling."""
    return replace(config, add_dq=False, replicas=1)


def candidates(kind: Kind, shared_limit: int) -> tuple[BackwardConfig, ...]:
    """All configurations that serve the kind and fit the device, the default first."""
    first = default(kind)
    ordered = (first, *(config for config in CANDIDATES[kind.head_dim] if config != first))
    return tuple(config for config in ordered if config.fits(kind.head_dim, shared_limit))
