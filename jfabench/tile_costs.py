"""What a tile of a kernel costs, `a + b * steps`, and how that follows from measured times of whole calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jfabench.schedule import Floats, Ints, Schedule, Shape, Tiles


@dataclass(frozen=True)
class TileCost:
    """Seconds of a tile (`a`), of each of its steps (`b`), and of a call beside its attention kernel (`c`).

    `residual` is the largest relative error of the fit among the `cases` it was made from, `source` where they are.
    `queries`: it holds for sequences of as many queries only, since all tiles of the fit had as many steps.
    """

    gpu: str
    direction: str
    head_dim: int
    shape: Shape
    a: float
    b: float
    c: float
    cases: int
    residual: float
    source: str
    queries: int | None = None

    def seconds(self, work: Tiles) -> Floats:
        cost: Floats = self.a + self.b * work.steps.astype(np.float64)
        return cost


_FROM = "reports/results/h200/jagged (tlx_jfa at commit 7700cd5cb461, M={} B=768 H=4, profiler mode)"
_M64, _M256, _M512 = (_FROM.format(queries) for queries in (64, 256, 512))
_LIST = "; c is given, since every case has as many tiles: what the list of tiles takes"
_STEPS = "; all tiles have M / 64 steps, so that only the sum is known: a is taken to be 0"

KNOWN = (
    TileCost("NVIDIA H200", "fwd", 128, Shape(False, 128, 128), 0.644e-6, 1.554e-6, 10e-6, 12, 0.020, _M256 + _LIST),
    TileCost("NVIDIA H200", "fwd", 128, Shape(False, 128, 64), 0.636e-6, 0.914e-6, 10e-6, 3, 0.010, _M256 + _LIST),
    TileCost("NVIDIA H200", "fwd", 128, Shape(False, 64, 64, 2), 0.0752e-6, 1.909e-6, 10e-6, 15, 0.044, _M64 + _LIST),
    TileCost("NVIDIA H200", "bwd", 128, Shape(True, 128, 64), 0.0, 5.227e-6, 13.66e-6, 15, 0.033, _M64 + _STEPS, 64),
    TileCost("NVIDIA H200", "bwd", 128, Shape(True, 128, 64), 0.0, 2.476e-6, 115.1e-6, 15, 0.021, _M256 + _STEPS, 256),
    TileCost("NVIDIA H200", "bwd", 128, Shape(True, 128, 64), 0.0, 2.276e-6, 193.8e-6, 15, 0.083, _M512 + _STEPS, 512),
)
"""Fitted by `calibrate`; a test fits them again."""

MULTIPROCESSORS = {"NVIDIA H200": 132}


def default_shape(
    direction: str, head_dim: int, queries: Ints, keys: Ints, bounds: tuple[int, int], *, broadcast: bool
) -> Shape:
    """How the TLX kernels for Hopper cut a batch untuned.

    `queries` and `keys` are the rows of each sequence, `[B]`; with `broadcast` all share the same queries.
    """
    from jfabench.kernels.attention import config_sm90
    from jfabench.kernels.attention.kinds import Kind, power_of_two_below

    if direction == "bwd":
        return Shape(True, config_sm90.TILE_KEYS, config_sm90.step_queries(head_dim))
    means = (power_of_two_below(int(rows.mean()) if len(rows) else 0) for rows in (queries, keys))
    masked = (bound >= 0 for bound in bounds)
    config = config_sm90.default(Kind("sm90", "forward", "bf16", head_dim, 1, broadcast, *masked, *means))
    assert isinstance(config, config_sm90.ForwardConfig)
    return Shape(False, config.block_m, config.block_n, config.residents)


def known_cost(
    direction: str, head_dim: int, shape: Shape, gpu: str | None = None, queries: int | None = None
) -> TileCost | None:
    """What was measured of such tiles, on a GPU whose name holds `gpu` or on any; None if nothing.

    `queries` is the number that each sequence has, None if they differ.
    """
    alike = (c for c in KNOWN if (c.direction, c.head_dim, c.shape) == (direction, head_dim, shape))
    there = (cost for cost in alike if gpu is None or gpu.lower() in cost.gpu.lower())
    return next((cost for cost in there if cost.queries in (None, queries)), None)


def model(direction: str, head_dim: int, shape: Shape) -> TileCost:
    """In units of one step, for a device or a kernel of which nothing is measured.

    What is taken over is `a / b` of the tiles that are most like it: of the same direction, and if possible with steps
    of as many rows.
    """
    alike = [cost for cost in KNOWN if cost.direction == direction]
    known = min(alike, key=lambda cost: abs(cost.shape.step - shape.step))
    source = f"a / b of D={known.head_dim} on {known.gpu}: {known.source}"
    return TileCost("", direction, head_dim, shape, known.a / known.b, 1.0, 0.0, 0, 0.0, source)


@dataclass(frozen=True)
class Sample:
    """A measured call: how many tiles and steps each program had (`[programs]`), and the seconds that it took."""

    tiles: Floats
    steps: Floats
    seconds: float

    @classmethod
    def of(cls, work: Tiles, placed: Schedule, seconds: float) -> Sample:
        """Of a policy that does not depend on costs: the tiles of each program are known beforehand."""
        if placed.policy in ("lpt", "dynamic"):
            raise ValueError(f"under the policy {placed.policy} the costs decide which program gets a tile")
        counts: Floats = np.bincount(placed.program, minlength=placed.programs).astype(np.float64)
        steps: Floats = np.bincount(placed.program, work.steps, placed.programs).astype(np.float64)
        return cls(counts, steps, seconds)


@dataclass(frozen=True)
class Fit:
    """`a`, `b`, `c` as in `TileCost`, and the relative error of each sample: predicted over measured, less 1."""

    a: float
    b: float
    c: float
    errors: tuple[float, ...]

    @property
    def residual(self) -> float:
        return max(map(abs, self.errors))


def predicted(sample: Sample, a: float, b: float, c: float) -> float:
    """Seconds of a call: the makespan, which is the largest sum of a program, and what comes on top."""
    return float((a * sample.tiles + b * sample.steps).max()) + c


def calibrate(samples: Sequence[Sample], c: float | None = None, rounds: int = 50) -> Fit:
    """Fits `a`, `b` and `c` (unless it is given) to measured calls, by least squares of the relative errors.

    A call ends with its last program, so that of each sample one program's tiles and steps count. Which one that is
    follows from the costs: it is chosen with those of the round before, until it stays. No cost is negative.

    Raises:
        ValueError: there are fewer samples than costs, or none of them tells tiles from steps.
    """
    free = 2 if c is not None else 3
    if len(samples) < free:
        raise ValueError(f"{len(samples)} measured cases cannot tell {free} costs apart: measure more lengths")
    target = np.array([sample.seconds for sample in samples])
    # First guess: work is shared evenly.
    chosen = np.array([(sample.tiles.mean(), sample.steps.mean()) for sample in samples])
    best: tuple[float, tuple[float, ...]] | None = None
    for _ in range(rounds):
        costs = _least_squares(chosen, target, c)
        values = np.array([predicted(sample, *costs) for sample in samples])
        errors = values / target - 1
        total = float((errors**2).sum())
        if best is None or total < best[0]:
            best = total, (*costs, *errors)
        last = [int((costs[0] * sample.tiles + costs[1] * sample.steps).argmax()) for sample in samples]
        following = np.array([(s.tiles[p], s.steps[p]) for s, p in zip(samples, last, strict=True)])
        if np.array_equal(following, chosen):
            break
        chosen = following
    assert best is not None
    a, b, on_top, *rest = best[1]
    return Fit(a, b, on_top, tuple(rest))


def _least_squares(chosen: Floats, target: Floats, c: float | None) -> tuple[float, float, float]:
    """Of the relative errors, over the costs that are at least 0: of all sets of costs that are not 0 the best.

    Where two sets do as well, as with tiles that have the same number of steps everywhere, the costs of steps come
    first, then those of tiles.
    """
    columns = [chosen[:, 1], chosen[:, 0], *([np.ones(len(target))] if c is None else [])]
    right = np.ones(len(target)) if c is None else 1 - c / target
    matrix = np.stack(columns, axis=1) / target[:, None]
    best: tuple[float, Floats] | None = None
    for count in range(1, len(columns) + 1):
        for used in itertools.combinations(range(len(columns)), count):
            part = matrix[:, used]
            found, _, rank, _ = np.linalg.lstsq(part, right, rcond=None)
            if rank < count:
                continue
            costs = np.zeros(len(columns))
            costs[list(used)] = found
            error = float(((matrix @ costs - right) ** 2).sum())
            if (costs >= 0).all() and (best is None or error < best[0] - 1e-9):
                best = error, costs
    if best is None:
        raise ValueError("the measured cases do not tell tiles from steps: measure more lengths")
    b, a, *rest = map(float, best[1])
    return a, b, rest[0] if c is None else c
