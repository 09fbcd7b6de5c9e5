"""Which multiprocessor computes which tile when: predicted for any lengths, number of multiprocessors and policy.

A tile of the forward is a block of queries of one head, and its steps are blocks of keys; a tile of the backward is a
block of keys, and its steps are blocks of queries. A tile of `n` steps is taken to cost `a + b * n`, wherever it runs
and whatever runs beside it (`jfabench.tile_costs`). So this is about balance: caches, clocks and memory are not in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Policy = Literal["none", "sorted", "zigzag", "lpt", "dynamic"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MEANINGS: dict[Policy, str] = {
    "none": "dealt out in turn, in the order of the batch",
    "sorted": "dealt out in turn, heaviest first",
    "zigzag": "heaviest first, every other round dealt backwards",
    "lpt": "heaviest first, the next one to whoever is free",
    "dynamic": "in the order of the batch, the next one to whoever is free (a queue, or cluster launch control)",
}


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts the work: `tile` rows a tile, `step` rows of the other side a step.

    `over_keys`: tiles are of keys, else of queries. `residents` programs share a multiprocessor.
    """

    over_keys: bool
    tile: int
    step: int
    residents: int = 1


@dataclass(frozen=True)
class Tiles:
    """All tiles in the order of the batch, heads innermost; `sequence`, `head`, `block` and `steps` are `[tiles]`.

    With `over_keys` they are blocks of keys, else of queries.
    """

    sequence: Ints
    head: Ints
    block: Ints
    steps: Ints
    over_keys: bool = False

    def __len__(self) -> int:
        return len(self.steps)

    def weights_first(self, weight: Ints) -> Ints:
        """The order of the list that the kernels build: sequences by `weight` `[B]`, the heaviest first.

        Of a sequence the blocks of queries come from the last on, those of keys from the first on: under a causal mask
        these have the most steps.
        """
        block = self.block if self.over_keys else -self.block
        return np.lexsort((self.head, block, self.sequence, -weight[self.sequence]))


def count_tiles(queries: Ints, keys: Ints, shape: Shape, heads: int) -> int:
    """How many `tiles` would be, without making them; the arguments are those of `tiles`."""
    return int((-(-(keys if shape.over_keys else queries) // shape.tile)).sum()) * heads


def tiles(
    queries: Ints, keys: Ints, shape: Shape, heads: int, group: int = 1, bounds: tuple[int, int] = (-1, -1)
) -> Tiles:
    """The tiles of a batch.

    Args:
        queries: `[B]` rows of queries of each sequence.
        keys: `[B]` rows of keys.
        shape: how the kernel cuts them.
        heads: query heads in the forward, key heads in the backward, whose steps cover a `group` of query heads each.
        bounds: `(left, right)` of the window as in the operator, -1 for none; `right` 0 is a causal mask.
    """
    tiled, other = (keys, queries) if shape.over_keys else (queries, keys)
    counts = -(-tiled // shape.tile)
    sequence = np.repeat(np.arange(len(tiled)), counts)
    block = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Seen from the keys, the window is mirrored.
    before, after = bounds[::-1] if shape.over_keys else bounds
    offset = (queries - keys) if shape.over_keys else (keys - queries)
    first = block * shape.tile + offset[sequence]
    length = other[sequence]
    end = np.minimum(length, np.maximum(first + shape.tile + after, 0)) if after >= 0 else length
    begin = np.maximum(first - before, 0) // shape.step * shape.step if before >= 0 else np.zeros_like(length)
    steps = np.maximum(-(-(end - begin) // shape.step), 1)  # at least one, be it masked whole
    each = np.tile(np.arange(heads), len(sequence))
    return Tiles(
        np.repeat(sequence, heads),
        each,
        np.repeat(block, heads),
        np.repeat(steps, heads) * (group if shape.over_keys else 1),
        shape.over_keys,
    )


@dataclass(frozen=True)
class Schedule:
    """What a policy makes of tiles: for each, in the tiles' own order, its program, start and end `[tiles]`."""

    policy: Policy
    programs: int
    sms: int
    residents: int
    program: Ints
    start: Floats
    end: Floats

    @property
    def busy(self) -> Floats:
        """`[sms]` how long programs of each multiprocessor work, in sum."""
        busy: Floats = np.bincount(self.program % self.sms, self.end - self.start, self.sms).astype(np.float64)
        return busy

    @property
    def makespan(self) -> float:
        return float(self.end.max()) if len(self.end) else 0.0

    @property
    def lower_bound(self) -> float:
        """No schedule ends before: all work shared evenly, or the longest tile."""
        cost = self.end - self.start
        return max(float(cost.sum()) / (self.sms * self.residents), float(cost.max())) if len(cost) else 0.0

    @property
    def imbalance(self) -> float:
        """The busiest multiprocessor's work over the average of all; those without any count."""
        return float(self.busy.max() / self.busy.mean()) if len(self.end) else 1.0

    @property
    def over_bound(self) -> float:
        return self.makespan / self.lower_bound if len(self.end) else 1.0

    @property
    def busy_share(self) -> float:
        """The share of all time until the end in which programs work."""
        return float(self.busy.sum()) / (self.sms * self.residents * self.makespan) if len(self.end) else 1.0


def schedule(work: Tiles, cost: Floats, order: Ints, policy: Policy, sms: int, residents: int = 1) -> Schedule:
    """Places the tiles, of which each costs `cost` `[tiles]`; `order` is that of the list, heaviest first.

    There are as many programs as are resident at once, and they are never more than tiles.
    """
    if sms < 1 or residents < 1:
        raise ValueError(f"{sms} multiprocessors with {residents} programs each: both must be at least 1")
    programs = max(1, min(sms * residents, len(work)))
    listed = order if policy in ("sorted", "zigzag", "lpt") else np.arange(len(work))
    if policy in ("lpt", "dynamic"):
        lanes, starts = _to_whoever_is_free(cost[listed], programs)
    else:
        lanes, starts = _dealt(cost[listed], programs, zigzag=policy == "zigzag")
    program, start = np.empty(len(work), np.int64), np.empty(len(work))
    program[listed], start[listed] = lanes, starts
    return Schedule(policy, programs, sms, residents, program, start, start + cost)


def _dealt(cost: Floats, programs: int, *, zigzag: bool) -> tuple[Ints, Floats]:
    turn, lane = np.divmod(np.arange(len(cost)), programs)
    if zigzag:
        lane = np.where(turn % 2 == 0, lane, programs - 1 - lane)
    rounds = np.zeros((int(turn[-1]) + 1 if len(turn) else 0, programs))
    rounds[turn, lane] = cost
    starts = np.cumsum(rounds, axis=0) - rounds
    return lane, starts[turn, lane]


def _to_whoever_is_free(cost: Floats, programs: int) -> tuple[Ints, Floats]:
    free = [(0.0, program) for program in range(programs)]
    lanes, starts = np.empty(len(cost), np.int64), np.empty(len(cost))
    for i, value in enumerate(cost.tolist()):
        at, program = free[0]
        heapq.heapreplace(free, (at + value, program))
        lanes[i], starts[i] = program, at
    return lanes, starts


def intervals(work: Tiles, placed: Schedule) -> Any:
    """The table that `jfabench.reports.heatmap` draws, a row a tile; `label` is its number of steps."""
    import pandas as pd

    return pd.DataFrame(
        {
            "sm": placed.program % placed.sms,
            "start": placed.start,
            "end": placed.end,
            "label": work.steps,
            "sequence": work.sequence,
            "head": work.head,
            "block": work.block,
        }
    )


def compared(
    work: Tiles, cost: Floats, weight: Ints, policies: Sequence[Policy], sms: int, residents: int = 1
) -> list[Schedule]:
    """A schedule for each policy. `weight` `[B]` is what the kernels sort sequences by: rows of the other side."""
    order = work.weights_first(weight)
    return [schedule(work, cost, order, policy, sms, residents) for policy in policies]
