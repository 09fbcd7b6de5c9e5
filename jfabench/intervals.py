"""The one statistic of the project: medians and ratios of them, with 95% intervals. Standard library only.

The loop that measures stops on the very interval that the report shows, so that a case which stopped because it was
precise is precise in the report, too.

Why Student's t over rounds. Iterations of one round follow each other within milliseconds and share the clock, the
temperature and the state of the memory system, so they are not independent of each other: the *rounds* are the unit.
There are few of them (four at first). A percentile bootstrap over four rounds has only 35 distinct resamples and covers
the true median in about 80% of cases where it claims 95%. Student's t on the logarithms of the rounds' medians covers
it in 93 to 96% for any number of rounds chosen beforehand, is deterministic, and is wide where rounds are few.

What stopping early costs. A rule that looks after every round stops a little too readily where rounds happen to agree.
In simulations with a target of 1% the interval then covers the true median in 94 to 95% of cases where rounds differ by
0.5% (standard deviation) or less, and in no less than 91% where they differ by more (`tests/test_measure.py` repeats
them). With two or three rounds the loss would be larger, hence `MIN_ROUNDS`.

Limits: an interval says how well *this* process on this machine knows its median. It does not hold what differs between
two processes (memory layout) or between two days; comparing commits needs repeated processes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

Rounds = Sequence[Sequence[float]]
"""The samples of a case, in seconds: one sequence for each round."""

MIN_ROUNDS = 4
"""Fewer rounds than these are never called precise, except for a single one that was asked for."""


class Interval(NamedTuple):
    """A value and the ends of its 95% interval; NaN where samples are too few to tell."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The full width relative to the value; infinite where there is no interval."""
        width = (self.high - self.low) / self.middle if self.middle > 0 else math.nan
        return math.inf if math.isnan(width) else width


NOTHING = Interval(math.nan, math.nan, math.nan)


def median_interval(rounds: Rounds) -> Interval:
    """The median time of a case with its 95% interval.

    That is the geometric mean of the rounds' medians, with Student's t on their logarithms. (The median of all samples
    would waste a third of what the rounds know, and such an interval around it would be too narrow.) With one round,
    iterations have to be the unit: the interval then lies between two order statistics (at least 95% for independent
    samples, none below six), and drift stays invisible. A round that cannot be a time (a median of zero) does not
    count.
    """
    logs = log_medians(rounds)
    known = [log for log in logs if not math.isnan(log)]
    if not known:
        return NOTHING
    if len(known) > 1:
        return _around(math.exp(statistics.fmean(known)), _half_width(known))
    samples = sorted(next(block for block, log in zip(rounds, logs, strict=True) if not math.isnan(log)))
    middle, rank = statistics.median(samples), order_rank(len(samples))
    return Interval(middle, samples[rank - 1], samples[-rank]) if rank else Interval(middle, math.nan, math.nan)


def is_precise(rounds: Rounds, target: float) -> bool:
    """Whether the full relative width of the median's interval is at most `target`, from enough rounds to say so."""
    return (len(rounds) == 1 or len(rounds) >= MIN_ROUNDS) and median_interval(rounds).width <= target


def paired_ratio(base: Rounds, own: Rounds) -> Interval:
    """How many times faster `own` is than `base`, of rounds measured in turns.

    The geometric mean of the ratios of the medians of those rounds that both have, and Student's t on their logarithms:
    a drift that hits both alike cancels, also where one of them stopped earlier. With a single common round the
    interval is the widest that the two single intervals allow.
    """
    logs = [b - o for b, o in zip(log_medians(base), log_medians(own), strict=False)]
    known = [log for log in logs if not math.isnan(log)]
    if not known:
        return NOTHING
    ratio = math.exp(statistics.fmean(known))
    return _around(ratio, _half_width(known)) if len(known) > 1 else _widest(ratio, base, own)


def unpaired_ratio(base: Rounds, own: Rounds) -> Interval:
    """How many times faster `own` is than `base`, of rounds that have nothing to do with each other.

    The ratio of the geometric means of the rounds' medians, with Welch's interval on the logarithms (Welch 1947, with
    Satterthwaite's degrees of freedom, rounded down). Where one of the two has a single round, the interval is the
    widest that the two single intervals allow.
    """
    logs = [[log for log in log_medians(rounds) if not math.isnan(log)] for rounds in (base, own)]
    if not all(logs):
        return NOTHING
    ratio = math.exp(statistics.fmean(logs[0]) - statistics.fmean(logs[1]))
    if min(map(len, logs)) < 2:
        return _widest(ratio, base, own)
    parts = [_variance(values) / len(values) for values in logs]
    total = sum(parts)
    if total == 0:
        return Interval(ratio, ratio, ratio)
    freedom = total**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, logs, strict=True))
    return _around(ratio, t95(max(1, math.floor(freedom + 1e-9))) * math.sqrt(total))


def log_medians(rounds: Rounds) -> list[float]:
    """The natural logarithm of each round's median; NaN for a round without samples, or with a median of zero."""
    medians = [statistics.median(block) if block else 0.0 for block in rounds]
    return [math.log(median) if median > 0 else math.nan for median in medians]


def _half_width(logs: Sequence[float]) -> float:
    """Half of the 95% t interval of the mean of `logs`; NaN with fewer than two."""
    if len(logs) < 2:
        return math.nan
    return t95(len(logs) - 1) * math.sqrt(_variance(logs) / len(logs))


def _variance(values: Sequence[float]) -> float:
    """Of at least two values. `statistics.variance` is exact, and ten times as slow."""
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _around(middle: float, half: float) -> Interval:
    factor = math.exp(min(half, 700.0))  # beyond that a float overflows
    return Interval(middle, middle / factor, middle * factor)


def _widest(ratio: float, base: Rounds, own: Rounds) -> Interval:
    of_base, of_own = median_interval(base), median_interval(own)
    return Interval(ratio, of_base.low / of_own.high, of_base.high / (of_own.low or math.nan))


# Quantiles ------------------------------------------------------------------------------------------------------------

# Student's t, two-sided 95%, for 1 to 30 degrees of freedom.
_T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_Z95 = 1.959964


def t95(freedom: int) -> float:
    """The two-sided 95% quantile of Student's t; NaN below one degree of freedom."""
    if freedom < 1:
        return math.nan
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    # Cornish and Fisher's expansion, within 1e-4 from 31 degrees of freedom on.
    z, n = _Z95, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


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
