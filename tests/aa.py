"""Simulated comparisons: logarithms of block medians of two builds, with the noise that machines have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jfabench import regression
from jfabench.regression import Blocks, Estimate, Verdict

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """Relative sizes: `process` what processes differ by (once for all their cases, and once for each case), `drift` of
    the machine over a stage, `steps` how many stages have a step of the clock of 4 to 12%, for a part of their time.

    Every sample has noise of its own (0.2 to 2%, by case) and a tail: 3% are slower by 30% on average. Three of 1,000
    blocks are hit by something else.
    """

    process: float = 0.003
    drift: float = 0.03
    steps: float = 1 / 3


def stages(
    rng: np.random.Generator, grids: int, cases: int, pairs: int, noise: Noise, samples: int = 20
) -> NDArray[np.float64]:
    """`grids` stages of a build against itself: logarithms of block medians, `[grids, cases, pairs, 2]`."""
    blocks = (grids, pairs, cases, 2)  # in the order of time, but for turns
    length = pairs * cases * 2
    clock = np.linspace(-1, 1, length)
    wave = np.sin(clock * rng.uniform(2, 9, (grids, 1)) + rng.uniform(0, 6, (grids, 1)))
    level = rng.normal(0, noise.drift / 2, (grids, 1)) * clock + rng.normal(0, noise.drift / 4, (grids, 1)) * wave
    level += np.cumsum(rng.normal(0, 0.0005, (grids, length)), axis=1)
    begin, duration = rng.integers(0, length, (grids, 1)), rng.integers(1, max(2, length // 2), (grids, 1))
    inside = (np.arange(length) >= begin) & (np.arange(length) < begin + duration)
    level += inside * (rng.random((grids, 1)) < noise.steps) * rng.uniform(0.04, 0.12, (grids, 1))
    level = level.reshape(blocks).copy()
    turned = (np.arange(pairs)[:, None] + np.arange(cases)[None]) % 2 == 1  # B first there
    level[:, turned] = level[:, turned][..., ::-1]
    level += rng.normal(0, noise.process, (grids, pairs, 1, 2)) + rng.normal(0, noise.process, blocks)
    each = rng.normal(0, 1, (*blocks, samples)) * rng.uniform(0.002, 0.02, (cases, 1, 1))
    each += np.where(rng.random(each.shape) < 0.03, rng.exponential(0.3, each.shape), 0)
    hit = np.where(rng.random(blocks) < 0.003, rng.exponential(0.05, blocks), 0)
    return (level + np.median(each, axis=-1) + hit).transpose(0, 2, 1, 3)


def blocks(values: Values) -> Blocks:
    """Of one case, from `[pairs, 2]`."""
    return Blocks(tuple(values[:, 0]), tuple(values[:, 1]), paired=True)


def decided(first: Values, again: Values, floor: float | None = None) -> dict[int, Verdict]:
    """What a comparison in two stages (`[cases, pairs, 2]` each) says of its suspicious cases, by their number."""
    limit = regression.threshold(floor)
    tested = len(first)
    found: dict[int, Estimate] = {c: regression.estimate(blocks(first[c]), tested) for c in range(tested)}
    suspicious = [c for c, one in found.items() if regression.is_suspicious(one.shown.middle, limit)]
    return {c: regression.verdict(regression.estimate(blocks(again[c]), len(suspicious)), limit) for c in suspicious}


def slower(values: Values, cases: int, effect: float) -> Values:
    """The same with build B slower by `effect` in the first `cases` cases."""
    changed = values.copy()
    changed[..., :cases, :, 1] += math.log1p(effect)
    return changed
