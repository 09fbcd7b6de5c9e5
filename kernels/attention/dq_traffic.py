"""A model of what it costs to add up dQ in the backward on Blackwell, and of which way to do it is cheapest.

The kernel that computes dK and dV holds a tile of keys and meets every block of queries, so that a block's dQ is a sum
over tiles, in float32, of which each adds its share to global memory. Ways to do that (:data:`SCHEMES`):

- ``single``: one CTA's tile of 128 keys adds ``128 x D x 4`` bytes a block of queries;
- ``pair``: a pair of CTAs sums over 256 keys on the tensor cores, and adds half as much;
- ``replicas``: like ``single``, into several copies of dQ, so that fewer CTAs meet at an address;
- ``separate``: a kernel of its own holds dQ in registers and adds nothing, for two matmuls more (of seven).

This is a model: nothing of it was measured on Blackwell. The rates are in :class:`Device`, with what they rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 128  # queries of a block, and keys of a CTA's tile
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Device:
    """``flops`` a second of dense 16-bit matmuls; bytes a second that TMA may add to float32 in L2; seconds between two
    adds at one address; bytes a second for clearing and summing copies."""

    name: str
    flops: float
    added_bytes: float
    turn: float
    memory_bytes: float


B200 = Device(
    "B200",
    flops=2.25e15,  # data sheet
    added_bytes=3.2e12,  # assumed: twice the 1.6 TB/s that the Hopper kernel was seen to add on an H200 (NOTES.md)
    turn=4e-9,  # assumed: some clocks of L2
    memory_bytes=8e12,  # data sheet
)


@dataclass(frozen=True)
class Scheme:
    """``keys`` whose share is added at once (0: dQ is not added up), copies of dQ, matmuls for all gradients."""

    name: str
    keys: int
    replicas: int = 1
    matmuls: int = 5


SCHEMES = (
    Scheme("pair", keys=2 * BLOCK),
    Scheme("single", keys=BLOCK),
    Scheme("replicas", keys=BLOCK, replicas=8),
    Scheme("separate", keys=0, matmuls=7),
)


@dataclass(frozen=True)
class Shape:
    """Lengths of each sequence, and what they have in common. ``broadcast``: all share one block of queries."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    head_dim: int
    broadcast: bool

    @property
    def flops(self) -> float:
        """Of the backward without a mask, as the field counts them: five matmuls over pairs that exist."""
        pairs = sum(q * k for q, k in zip(self.queries, self.keys, strict=True))
        return 10.0 * self.head_dim * self.heads * pairs


@dataclass(frozen=True)
class Cost:
    """Of a shape under a scheme. ``meetings``: how often something is added at the address where most is."""

    scheme: Scheme
    added_bytes: float
    bytes_per_flop: float
    meetings: float
    seconds: float


def cost(shape: Shape, scheme: Scheme, device: Device = B200) -> Cost:
    """Matmuls, adds, and the adds at one address overlap: the longest counts. Copies are cleared and summed besides.

    Matmuls are those of whole blocks, whether all their rows exist or not; what does not exist is not added.
    """
    tile = scheme.keys or BLOCK
    added, blocks, at_an_address = 0.0, 0, []
    for queries, keys in zip(shape.queries, shape.keys, strict=True):
        tiles = -(-keys // tile)
        blocks += -(-queries // BLOCK) * tiles * (tile // BLOCK)
        if scheme.keys and queries:
            added += FLOAT * queries * tiles * shape.head_dim * shape.heads
            at_an_address.append(tiles)
    most = sum(at_an_address) if shape.broadcast else max(at_an_address, default=0)
    meetings = most / scheme.replicas
    matmul = 2.0 * scheme.matmuls * BLOCK * BLOCK * shape.head_dim * shape.heads * blocks
    rows = max(shape.queries, default=0) if shape.broadcast else sum(shape.queries)
    copies = 2 * FLOAT * rows * shape.head_dim * shape.heads * (scheme.replicas - 1)
    seconds = max(matmul / device.flops, added / device.added_bytes, meetings * device.turn)
    seconds += copies / device.memory_bytes
    return Cost(scheme, added, added / shape.flops if shape.flops else 0.0, meetings, seconds)


def cheapest(shape: Shape, schemes: Sequence[Scheme] = SCHEMES, device: Device = B200) -> Cost:
    """The least time; among equals the first, of which less is added."""
    return min((cost(shape, scheme, device) for scheme in schemes), key=lambda found: found.seconds)
