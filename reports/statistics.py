"""Medians and their intervals from rounds of samples, for many cases at once. Plain numpy.

Why a t interval over rounds. Iterations of one round follow each other within milliseconds and share the clock, the
temperature and the state of the memory system, so they are not independent: the *rounds* are, and they are the unit
here. There are few of them (four by default). A percentile bootstrap over four rounds has only 35 distinct resamples
and covers the true median in about 80% of cases where it claims 95%; a hierarchical one covers 83-98%, depending on
how much of the noise lies between rounds. Student's t on the logarithms of the rounds' medians covers 93-96% for 3 to
10 rounds in all these situations (`tests/reports/test_statistics.py` repeats the simulation), is deterministic and is
wide when rounds are few, which is honest.

Limits: it says how well *this* process on this machine knows its median. It does not hold what differs between two
processes (memory layout) or between two days; comparing commits needs repeated processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Student's t, two-sided 95%, for 1 to 30 degrees of freedom.
_T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_Z95 = 1.959964


def t95(freedom: NDArray[np.int64]) -> Floats:
    """The two-sided 95% quantile of Student's t; NaN below one degree of freedom."""
    table = np.array((np.nan, *_T95))
    n = np.maximum(freedom, 1)
    # Cornish and Fisher's expansion, within 1e-4 from 31 degrees of freedom on.
    beyond = _Z95 + (_Z95**3 + _Z95) / (4 * n) + (5 * _Z95**5 + 16 * _Z95**3 + 3 * _Z95) / (96 * n**2)
    return np.where(freedom > len(_T95), beyond, table[np.clip(freedom, 0, len(_T95))])


@dataclass(frozen=True)
class Medians:
    """One entry per case, in seconds; NaN where there is nothing to say.

    `median` is the median of all samples, `[low, high]` its 95% interval, `log_rounds` `[cases, rounds]` the natural
    logarithm of each round's median (NaN where a case has no such round).
    """

    median: Floats
    low: Floats
    high: Floats
    samples: NDArray[np.int64]
    rounds: NDArray[np.int64]
    log_rounds: Floats


def medians(cases: Sequence[Sequence[Sequence[float]]]) -> Medians:
    """Medians with intervals for `cases[case][round][iteration]` in seconds.

    With one round, iterations have to be the unit: the interval is then the one of order statistics (at least 95% for
    independent samples, none below six), and drift stays invisible.
    """
    count = len(cases)
    width = max((len(rounds) for rounds in cases), default=0)
    sizes = np.zeros((count, width), dtype=np.int64)
    for row, rounds in enumerate(cases):
        sizes[row, : len(rounds)] = [len(samples) for samples in rounds]
    values = np.fromiter(
        (sample for rounds in cases for samples in rounds for sample in samples), np.float64, int(sizes.sum())
    )
    samples, rounds_used = sizes.sum(axis=1), (sizes > 0).sum(axis=1)

    with np.errstate(divide="ignore", invalid="ignore"):
        median = _segment_medians(values, samples)
        median[~(median > 0)] = np.nan
        log_rounds = np.log(_segment_medians(values, sizes.ravel())).reshape(count, width)
    log_rounds[~np.isfinite(log_rounds)] = np.nan

    half = _half_width(log_rounds)
    low, high = median * np.exp(-half), median * np.exp(half)
    single = np.flatnonzero(rounds_used == 1)
    low[single], high[single] = _order_interval(values, samples, single)
    return Medians(median, low, high, samples, rounds_used, log_rounds)


@dataclass(frozen=True)
class Ratios:
    ratio: Floats
    low: Floats
    high: Floats


def speedups(of: Medians, base: NDArray[np.int64]) -> Ratios:
    """How many times faster each case is than case `base[case]` (-1: none): ratio of medians, 95% interval.

    Rounds of the two are paired by number, since they were interleaved: a drift of the clocks that hits both cancels.
    (Pairing rounds that are independent costs only width.) With fewer than two common rounds the interval is the widest
    one that the two single intervals allow.
    """
    known = base >= 0
    at = np.where(known, base, 0)

    def of_base(values: Floats) -> Floats:
        return np.where(known.reshape(-1, *[1] * (values.ndim - 1)), values[at], np.nan)

    ratio = of_base(of.median) / of.median
    half = _half_width(of_base(of.log_rounds) - of.log_rounds)
    low = np.where(np.isnan(half), of_base(of.low) / of.high, ratio * np.exp(-half))
    high = np.where(np.isnan(half), of_base(of.high) / of.low, ratio * np.exp(half))
    return Ratios(ratio, low, high)


def geometric_mean(ratios: Any) -> float:
    """NaN for no ratio at all."""
    values = np.asarray(ratios, dtype=np.float64)
    return float(np.exp(np.log(values).mean())) if values.size else float("nan")


def _half_width(logs: Floats) -> Floats:
    """Half of the 95% t interval of each row's mean, ignoring NaN; NaN with fewer than two values."""
    number = (~np.isnan(logs)).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nansum(logs, axis=1) / number
        variance = np.nansum((logs - mean[:, None]) ** 2, axis=1) / (number - 1)
        half: Floats = t95(number - 1) * np.sqrt(variance / number)
    half[number < 2] = np.nan
    return half


def _segment_medians(values: Floats, sizes: NDArray[np.int64]) -> Floats:
    """The median of each of the consecutive segments of `values`; NaN for an empty one."""
    result = np.full(len(sizes), np.nan)
    used = sizes > 0
    if not used.any():
        return result
    segment = np.repeat(np.arange(len(sizes)), sizes)
    ordered = values[np.lexsort((values, segment))]
    first = (np.cumsum(sizes) - sizes)[used]
    lower, upper = first + (sizes[used] - 1) // 2, first + sizes[used] // 2
    result[used] = (ordered[lower] + ordered[upper]) / 2
    return result


def _order_interval(values: Floats, sizes: NDArray[np.int64], cases: NDArray[np.int64]) -> tuple[Floats, Floats]:
    low, high = np.full(len(cases), np.nan), np.full(len(cases), np.nan)
    first = np.cumsum(sizes) - sizes
    for position, case in enumerate(cases):
        number = int(sizes[case])
        rank = order_rank(number)
        if rank:
            ordered = np.sort(values[first[case] : first[case] + number])
            low[position], high[position] = ordered[rank - 1], ordered[number - rank]
    return low, high


@cache
def order_rank(samples: int) -> int:
    """The largest r such that the r-th smallest and r-th largest of independent samples enclose the median with >= 95%.

    0 where there is none: below six samples. Exact, from the binomial distribution.
    """
    outside, rank = 1, 0  # sequences of coin tosses with at most `rank` heads
    while 40 * outside <= 2**samples:
        rank += 1
        outside += math.comb(samples, rank)
    return rank
