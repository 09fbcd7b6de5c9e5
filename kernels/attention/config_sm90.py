"""TLX on Hopper: the configurations of each kernel, which of them a device can hold, and which is the default."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .kinds import Kind

ROWS = 64  # queries or keys of a consumer
TILE_KEYS = 128  # of the backward kernel: ROWS for each consumer
REGISTERS = 512  # of a multiprocessor, for each of the 128 threads of a warp group
LOADER_REGISTERS = 24  # the fewest that a warp group can be left with


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward kernel is compiled and launched. It takes the fields that it has arguments of the same name for.

    A program's tile is ``consumers`` x 64 queries, and a step handles ``block_n`` keys. ``q_stages`` tiles of queries
    and ``kv_stages`` blocks of keys and of values are in shared memory at once. Each thread of a consumer has
    ``registers``; ``residents`` programs share a multiprocessor.

    ``pingpong``: the consumers take turns to issue matmuls. ``zigzag``: every other round of tiles is dealt backwards.
    ``late``: probabilities are rounded after the next scores were started, at the price of registers. ``lazy``: maxima
    are raised, and the output rescaled, only where they have grown 256-fold. Under a window it does neither. ``peel``:
    blocks of keys that every query sees whole are not masked.
    """

    consumers: int = 2
    block_n: int = 128
    q_stages: int = 2
    kv_stages: int = 2
    residents: int = 1
    registers: int = 240
    pingpong: bool = True
    zigzag: bool = True
    late: bool = True
    lazy: bool = True
    peel: bool = True

    @property
    def block_m(self) -> int:
        """Queries of a tile."""
        return ROWS * self.consumers

    @property
    def launch_registers(self) -> int | None:
        """Registers of a thread at launch, where that must be said so that ``residents`` programs have room."""
        return None if self.residents == 1 else REGISTERS // (self.residents * (1 + self.consumers))

    def shared_bytes(self, head_dim: int) -> int:
        """Of one program: rings of Q, K and V, and staging of ``out``, all 16-bit, and 1 KiB for barriers."""
        q_and_out = (self.q_stages + 1) * ROWS * self.consumers
        keys_and_values = 2 * self.kv_stages * self.block_n
        return 2 * head_dim * (q_and_out + keys_and_values) + 1024

    def fits(self, head_dim: int, shared_limit: int) -> bool:
        """Whether ``residents`` programs have room where one may have ``shared_limit`` bytes of shared memory."""
        # The next tile's first blocks arrive before the present one's last are released, and turns are taken by two.
        if self.kv_stages < 2 or self.consumers > 2 or (self.pingpong and self.consumers != 2):
            return False
        registers = self.residents * (LOADER_REGISTERS + self.consumers * self.registers)
        return registers <= REGISTERS and self.residents * self.shared_bytes(head_dim) <= shared_limit


@dataclass(frozen=True)
class BackwardConfig:
    """How the gradients are computed.

    dQ is added up by the kernel that computes dK and dV (``add_dq``), or computed by a pass of its own, with two more
    matmuls. ``late_dq``: it adds that of a step a step later, which keeps the keys of a tile longer. ``stages`` steps
    of queries are in shared memory at once.
    """

    add_dq: bool = True
    late_dq: bool = True
    stages: int = 2

    def shared_bytes(self, head_dim: int) -> int:
        """Of one program, with 1 KiB for barriers.

        Two slots of K, one of V, ``stages`` of Q and dO with their row statistics, buffers for dS if dQ is added, and
        those for dQ, through which dK and dV leave, too.
        """
        keys_and_values = 3 * TILE_KEYS * head_dim
        queries = 2 * self.stages * step_queries(head_dim) * head_dim
        ds = 4 * ROWS * step_queries(head_dim) if self.add_dq else 0
        statistics = 2 * self.stages * step_queries(head_dim)
        return 2 * (keys_and_values + queries + ds) + 4 * (2 * ROWS * ROWS + statistics) + 1024

    def fits(self, head_dim: int, shared_limit: int) -> bool:
        # The next step's queries arrive before the present one's are released.
        return self.stages >= 2 and self.shared_bytes(head_dim) <= shared_limit


Config = TypeVar("Config", ForwardConfig, BackwardConfig)

FORWARD = (
    ForwardConfig(),
    ForwardConfig(block_n=64, kv_stages=4, late=False, lazy=False),
    ForwardConfig(consumers=1, block_n=64, residents=2, registers=216, pingpong=False, late=False, lazy=False),
)
BACKWARD = (BackwardConfig(), BackwardConfig(late_dq=False), BackwardConfig(add_dq=False))
CANDIDATES: dict[str, tuple[ForwardConfig, ...] | tuple[BackwardConfig, ...]] = {
    "forward": FORWARD,
    "backward": BACKWARD,
}


def step_queries(head_dim: int) -> int:
    """Queries of a step of the backward kernel: 64 x 128 elements of each operand."""
    return ROWS * 128 // head_dim


def shared_bytes(kernel: str, config: ForwardConfig | BackwardConfig, head_dim: int) -> int:
    """Shared memory of one program of ``kernel``."""
    del kernel  # the config knows
    return config.shared_bytes(head_dim)


def fits(kernel: str, config: ForwardConfig | BackwardConfig, head_dim: int, shared_limit: int) -> bool:
    """Whether a device has room for ``config`` that lets a program have ``shared_limit`` bytes of shared memory."""
    del kernel
    return config.fits(head_dim, shared_limit)


def default(kind: Kind) -> ForwardConfig | BackwardConfig:
    """The configuration that serves where none may be timed."""
    if kind.kernel == "backward":
        late, prompt, separate = BACKWARD
        if not kind.broadcast and kind.mean_k <= 512:
            return separate
        # Late, the next keys would come too late in tiles of one step; the mean is rounded down to a power of two.
        return late if kind.group * kind.mean_q > step_queries(kind.head_dim) else prompt
    wide, short, low = FORWARD
    if kind.mean_q <= ROWS:
        return low
    # Means are rounded down to powers of two.
    if kind.mean_k < (256 if kind.broadcast else 512):
        return short
    return wide


def deterministic(config: Any) -> Any:
    """The same, without sums whose order depends on scheduling."""
    return replace(config, add_dq=False) if isinstance(config, BackwardConfig) else config


def candidates(kind: Kind, shared_limit: int) -> tuple[Any, ...]:
    """All configurations that serve the kind and fit the device, the default first."""
    ordered: list[Any] = sorted(CANDIDATES[kind.kernel], key=lambda config: config != default(kind))
    return tuple(config for config in ordered if config.fits(kind.head_dim, shared_limit))
