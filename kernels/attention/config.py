"""Plain Triton: the configurations of each kernel, which of them a device can hold, and which is the default."""

from __future__ import annotations

from dataclasses import dataclass

from .kinds import Kind


@dataclass(frozen=True)
class Config:
    """How one kernel is compiled and launched.

    A step handles ``block_m`` queries and ``block_n`` keys; ``num_stages`` steps' data are in flight in the inner loop.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


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


def default(kind: Kind) -> Config:
    """The configuration that serves where none may be timed: the fastest of the measured case that is most alike."""
    first, *others = CANDIDATES[kind.kernel]
    if kind.kernel == "dq":
        small, narrow = others
        if kind.broadcast and kind.mean_k < 64:
            return small
        if not kind.broadcast and kind.mean_k <= 1024:
            return narrow
    return first


def candidates(kind: Kind, shared_limit: int) -> tuple[Config, ...]:
    """All configurations that fit the device, the default first."""
    ordered = sorted(CANDIDATES[kind.kernel], key=lambda config: config != default(kind))
    return tuple(config for config in ordered if fits(kind.kernel, config, kind.head_dim, shared_limit))
