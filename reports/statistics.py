"""The statistics of `jfabench.intervals` for a whole table, as columns of numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jfabench.intervals import NOTHING, Interval, Rounds, paired_ratio, unpaired_ratio

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Intervals:
    """One entry per case; NaN where there is nothing to say."""

    middle: Floats
    low: Floats
    high: Floats


def columns(intervals: Iterable[Interval]) -> Intervals:
    table = np.array([tuple(interval) for interval in intervals], dtype=np.float64).reshape(-1, 3)
    return Intervals(table[:, 0], table[:, 1], table[:, 2])


def speedups(cases: Sequence[Rounds], base: Sequence[int], paired: Sequence[bool]) -> Intervals:
    """How many times faster each case is than case `base[case]` (-1: none), with 95% intervals.

    `paired` tells whether round `r` of the two was measured in turns.
    """

    def ratio(case: int) -> Interval:
        if base[case] < 0:
            return NOTHING
        if base[case] == case:
            return Interval(1.0, 1.0, 1.0)
        return (paired_ratio if paired[case] else unpaired_ratio)(cases[base[case]], cases[case])

    return columns(ratio(case) for case in range(len(cases)))


def geometric_mean(ratios: Any) -> float:
    """NaN for no ratio at all."""
    values = np.asarray(ratios, dtype=np.float64)
    return float(np.exp(np.log(values).mean())) if values.size else float("nan")
