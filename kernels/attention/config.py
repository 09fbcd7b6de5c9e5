"""Block shapes and launch parameters: the candidates per kernel, and which of them a device can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled and launched.

    A step handles ``block_m`` queries and ``block_n`` keys; ``num_stages`` steps' data are in flight in the inner loop.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The first candidate that fits is the default; the others are tried when a kind of problem is first met on a GPU.
# Chosen on an H200 from those listed in NOTES.md.
CANDIDATES = {
    "forward": (
        Config(block_m=64, block_n=64, num_warps=4, num_stages=3),
        Config(block_m=128, block_n=64, num_warps=8, num_stages=3),
        Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
    ),
    "dkdv": (
        Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
        Config(block_m=64, block_n=128, num_warps=8, num_stages=2),
    ),
    "dq": (
        Config(block_m=128, block_n=64, num_warps=8, num_stages=3),
        Config(block_m=64, block_n=64, num_warps=4, num_stages=2),
        Config(block_m=128, block_n=32, num_warps=8, num_stages=3),
    ),
}

# Interpreted, an operation costs about the same for any block size until the matmuls start to show.
INTERPRETED = Config(block_m=128, block_n=128, num_warps=4, num_stages=1)


def shared_bytes(kernel: str, config: Config, head_dim: int) -> int:
    """Shared memory of one program, estimated: resident 16-bit operands, the pipelined pair of blocks, and 1 KiB."""
    resident, streamed = {
        "forward": (config.block_m, config.block_n),  # Q; K and V
        "dkdv": (2 * config.block_n, config.block_m),  # K and V; Q and dO
        "dq": (2 * config.block_m, config.block_n),  # Q and dO; K and V
    }[kernel]
    return 2 * head_dim * (resident + 2 * streamed * config.num_stages) + 1024


def fits(kernel: str, config: Config, head_dim: int, shared_limit: int) -> bool:
    """Whether a device with ``shared_limit`` bytes of shared memory per program can run ``config``."""
    return shared_bytes(kernel, config, head_dim) <= shared_limit
