"""Block shapes and launch parameters: the candidates per kernel, and which of them a device can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled and launched.

    ``block_m`` query rows and ``block_n`` key rows per step; ``num_stages`` blocks in flight in the unmasked loop.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The first candidate that fits is the default; the others are tried when a length bucket is first met on a GPU.
FORWARD = (
    Config(block_m=128, block_n=128, num_warps=8, num_stages=2),
    Config(block_m=128, block_n=64, num_warps=4, num_stages=3),
    Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
)
DKDV = (
    Config(block_m=64, block_n=128, num_warps=8, num_stages=2),
    Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
)
DQ = (
    Config(block_m=128, block_n=64, num_warps=8, num_stages=2),
    Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
)

# Interpreted, an operation costs the same for any block size, up to the size where the matmuls start to show.
INTERPRETED = Config(block_m=128, block_n=128, num_warps=4, num_stages=1)


def shared_bytes(config: Config, head_dim: int, kernel: str) -> int:
    """Estimate of the shared memory of one program: resident 16-bit operands plus the pipelined pair of blocks."""
    resident, streamed = {
        "forward": (config.block_m, config.block_n),  # Q; K and V
        "dkdv": (2 * config.block_n, config.block_m),  # K and V; Q and dO
        "dq": (2 * config.block_m, config.block_n),  # Q and dO; K and V
    }[kernel]
    return 2 * head_dim * (resident + 2 * streamed * config.num_stages)


def fits(config: Config, head_dim: int, kernel: str, shared_limit: int) -> bool:
    """Whether a device with ``shared_limit`` bytes of shared memory per program can run ``config``."""
    return shared_bytes(config, head_dim, kernel) <= shared_limit
