"""TLX on Blackwell, forward: the configurations, which of them a device can hold, and which is the default.

Chosen by estimates: no configuration has been timed on a Blackwell GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .kinds import Kind

ROWS = 128  # queries of a softmax group: the lanes of tensor memory
STAGED = 64  # columns of O that leave at a time
REGISTERS = 512  # of a multiprocessor, for each of the 128 threads of a warp group
LANE_COLUMNS = 512  # of a multiprocessor's tensor memory
ORDERS = ("zigzag", "rounds", "clc")


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel is compiled and launched. It takes the fields that it has arguments of the same name for.

    A program is ``ctas`` CTAs that share K and V; each has ``groups`` softmax groups of 128 queries, and a step handles
    ``block_n`` keys. ``q_stages`` tiles of queries, ``kv_stages`` blocks of keys or values, and ``out_stages`` blocks
    of 128 x 64 of O are in shared memory at once. P is handed to the matmuls in ``p_parts``. A thread of a softmax
    group has ``softmax_registers``, one of the single warps ``single_registers``, and the corrector's the rest;
    ``residents`` programs share a multiprocessor.

    ``order`` of the tiles: dealt out in "rounds", in a "zigzag" of rounds, or on demand ("clc", Cluster Launch
    Control). ``growth``: O is rescaled where the maximum has grown by more, in base 2; 0: always. ``polynomial``: of so
    many columns of each part of P the exponentials are computed on the multiply-add units. ``peel``: blocks of keys
    that every query sees whole are not masked.
    """

    groups: int = 2
    block_n: int = 128
    q_stages: int = 1
    kv_stages: int = 4
    out_stages: int = 2
    p_parts: int = 2
    ctas: int = 1
    residents: int = 1
    softmax_registers: int = 192
    single_registers: int = 40
    order: str = "zigzag"
    growth: float = 8.0
    polynomial: int = 16
    peel: bool = True

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return ROWS * self.groups * self.ctas

    @property
    def launch_registers(self) -> int:
        """Registers of a thread at launch: those of a multiprocessor over all threads, of which the roles take theirs.

        The corrector is a warp group, and so are the single warps together.
        """
        return REGISTERS // self.residents // (2 + self.groups) // 8 * 8

    @property
    def corrector_registers(self) -> int:
        roles = self.groups * self.softmax_registers + self.single_registers
        return (2 + self.groups) * self.launch_registers - roles

    def shared_bytes(self, head_dim: int) -> int:
        """Of one CTA: Q, half or all of K and V, staging of O, all 16-bit, and 1 KiB for barriers."""
        queries = self.q_stages * self.groups * ROWS * head_dim
        keys_and_values = self.kv_stages * self.block_n * head_dim // self.ctas
        return 2 * (queries + keys_and_values + self.out_stages * ROWS * STAGED) + 1024

    def tmem_columns(self, head_dim: int) -> int:
        """Of one CTA: S, in whose place are the parts of P, of at least 32 columns, and three of statistics; and O."""
        p = self.p_parts * max(self.block_n // self.p_parts // 2, 32)
        used = self.groups * (max(self.block_n, p + 12) + head_dim)
        return max(32, 1 << (used - 1).bit_length())  # allocated in powers of two

    def fits(self, head_dim: int, shared_limit: int) -> bool:
        """Whether ``residents`` programs have room where one may have ``shared_limit`` bytes of shared memory."""
        # V of this step and K of the next are read at the same time as the block after them arrives.
        if (
            self.kv_stages < 3
            or self.out_stages < 1
            or self.order not in ORDERS
            or self.groups not in (1, 2)
            or self.ctas not in (1, 2)
        ):
            return False
        # A half of V is 32 columns if D = 64: another layout than K's, whose place it takes.
        if self.ctas == 2 and head_dim != 128:
            return False
        if not 0 <= self.polynomial <= self.block_n // self.p_parts or self.corrector_registers < 64:
            return False
        return (
            self.residents * self.shared_bytes(head_dim) <= shared_limit
            and self.residents * self.tmem_columns(head_dim) <= LANE_COLUMNS
        )


WIDE = ForwardConfig()
ON_DEMAND = ForwardConfig(order="clc")
SHORT = ForwardConfig(block_n=64, kv_stages=8, p_parts=1)
LOW = ForwardConfig(
    groups=1, block_n=64, out_stages=1, p_parts=1, residents=2, softmax_registers=120, single_registers=32
)
PAIR = ForwardConfig(ctas=2, kv_stages=8)
FORWARD = (WIDE, ON_DEMAND, SHORT, LOW, PAIR)
CANDIDATES = {"forward": FORWARD}


def shared_bytes(kernel: str, config: ForwardConfig, head_dim: int) -> int:
    """Shared memory of one CTA of ``kernel``."""
    del kernel  # there is one
    return config.shared_bytes(head_dim)


def fits(kernel: str, config: ForwardConfig, head_dim: int, shared_limit: int) -> bool:
    """Whether a device has room for ``config`` that lets a program have ``shared_limit`` bytes of shared memory."""
    del kernel
    return config.fits(head_dim, shared_limit)


def default(kind: Kind) -> ForwardConfig:
    """The configuration that serves where none may be timed."""
    if kind.mean_q <= ROWS:
        return LOW
    return SHORT if kind.mean_k < 64 else WIDE


def candidates(kind: Kind, shared_limit: int) -> tuple[Any, ...]:
    """All configurations that serve the kind and fit the device, the default first."""
    ordered = sorted(CANDIDATES[kind.kernel], key=lambda config: config != default(kind))
    return tuple(config for config in ordered if config.fits(kind.head_dim, shared_limit))
