"""Times of one case over many runs, and where they changed.

Change points are searched with `ruptures` (Truong, Oudre, Vayatis 2020): kernel change-point detection with a linear
kernel (a change of the mean) and a penalty for each segment, on the logarithms of the medians. Single bad nights would
look like two changes, so what lies further than `_CLIP` noise widths from its neighbours is drawn in first; that width
comes from the differences of consecutive nights, which a change hardly touches. Then each change must hold by itself:
its two segments differ by at least `SMALLEST_CHANGE`, and Welch's t-test between them is beyond `_LEVEL`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jfabench.records import Case

SMALLEST_CHANGE = 0.02
"""A relative change of time that is smaller is not marked."""

SHORTEST = 4
"""Runs between two changes, and before the first and after the last one, at least."""

_CLIP = 3.5
_PENALTY = 4.0  # for each change, in units of the noise's variance times the logarithm of the number of runs
_LEVEL = 1e-4
_WINDOW = 7
_LEAST_NOISE = 1e-3


@dataclass(frozen=True)
class Run:
    """One imported result folder. `verdict` is `good`, `regression`, `wrong` or `unknown` (nobody judged it)."""

    id: int
    machine: str
    started: str
    config: str
    commit: str
    dirty: bool
    verdict: str


@dataclass(frozen=True)
class Point:
    run: Run
    seconds: float


@dataclass(frozen=True)
class Series:
    """The median times of one case on one machine, in the order of the runs."""

    machine: str
    case: Case
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Change:
    """The time of a case changed between runs `at - 1` and `at` of its series: by `ratio` (above 1: slower)."""

    series: Series
    at: int
    ratio: float

    @property
    def before(self) -> Run:
        return self.series.points[self.at - 1].run

    @property
    def after(self) -> Run:
        return self.series.points[self.at].run


def changes_of(series: Series) -> list[Change]:
    """The change points of a series, the earliest first."""
    logs = np.log([point.seconds for point in series.points])
    return [Change(series, at, ratio) for at, ratio in change_points(logs)]


def change_points(logs: NDArray[np.float64]) -> list[tuple[int, float]]:
    """Where the level of `logs` changes: the first index after each change, and the ratio of the times."""
    if len(logs) < 2 * SHORTEST:
        return []
    import ruptures

    noise = max(_noise(logs), _LEAST_NOISE)
    calm = _clipped(logs, _CLIP * noise)
    search = ruptures.KernelCPD(kernel="linear", min_size=SHORTEST).fit(calm.reshape(-1, 1))
    ends = search.predict(pen=_PENALTY * noise**2 * math.log(len(logs)))
    return _kept(calm, [0, *ends])


def _kept(logs: NDArray[np.float64], ends: list[int]) -> list[tuple[int, float]]:
    """Drops the least certain boundary until all hold: what it parted is one segment then."""
    while len(ends) > 2:
        found = [_step(logs[a:b], logs[b:c]) for a, b, c in zip(ends, ends[1:], ends[2:], strict=False)]
        worst = max(range(len(found)), key=lambda i: (abs(found[i][0]) < math.log1p(SMALLEST_CHANGE), found[i][1]))
        if abs(found[worst][0]) >= math.log1p(SMALLEST_CHANGE) and found[worst][1] <= _LEVEL:
            return [(at, math.exp(step)) for at, (step, _) in zip(ends[1:-1], found, strict=True)]
        del ends[worst + 1]
    return []


def _step(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[float, float]:
    """The difference of the two levels, and the probability of one so large by chance (Welch)."""
    from scipy.stats import ttest_ind

    step = float(np.median(after) - np.median(before))
    if np.ptp(before) == np.ptp(after) == 0:
        return step, 0.0 if step else 1.0
    return step, float(ttest_ind(before, after, equal_var=False).pvalue)


def _noise(logs: NDArray[np.float64]) -> float:
    """The standard deviation between nights, from the median absolute difference of consecutive ones."""
    return float(np.median(np.abs(np.diff(logs)))) / 0.6745 / math.sqrt(2)


def _clipped(logs: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Each value drawn in to within `width` of the median of its neighbours on either side, whichever is nearer."""
    half = _WINDOW // 2 + 1
    result = logs.copy()
    for place in range(len(logs)):
        sides = [logs[max(0, place - half) : place], logs[place + 1 : place + 1 + half]]
        middles = [float(np.median(side)) for side in sides if len(side) >= 2]
        nearest = min(middles, key=lambda middle: abs(logs[place] - middle))
        result[place] = min(max(logs[place], nearest - width), nearest + width)
    return result
