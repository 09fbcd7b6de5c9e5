"""The statistics of comparing two builds: intervals of a ratio of times from blocks, verdicts, and their error rates.

A *block* is what one worker process measured of one case in one visit; its value is the logarithm of the median of its
samples. Blocks are the unit, not iterations: those share their process, its memory layout and the clock of the moment.
Two builds are measured in turns by pairs of processes. A *pair* of blocks has the drift of the machine in common, and
the difference of the two is what an interval is made of: Student's t over the differences of the pairs. It is
deterministic and holds for five of them, where a percentile bootstrap covers too little (see `jfabench.intervals`).
Blocks that were not measured in turns get Welch's interval (1947) of two means.

**Two stages.** A grid has many cases, and each could alarm by chance. First, all cases are measured by a few pairs. A
case is *suspicious* if the estimate differs by more than half of what counts; the others can be called the same, or not
known, but never slower. Suspicious cases are measured again, by more pairs of *fresh* processes, and the new blocks
alone decide, in intervals that hold together (Bonferroni over the repeated cases). How cases were chosen cannot bias
what was measured afterwards, so at most `GRID_ERROR` of comparisons of a build with itself name a slower case, however
many cases the grid has and however they depend on each other.

A case is *slower* if the deciding interval excludes 1 and the ratio is beyond the threshold: 2%, or the noise floor of
the machine if that is higher. The second condition is no statistics: smaller effects are often real, and nobody's
concern. It also holds off single outliers among the pairs.

In simulations (`tests/test_regression.py`: 30 cases, 4 and 8 pairs, processes that differ by 0.3%, drift, outliers,
steps of the clock in a third of the runs) none of 1,000 comparisons of a build with itself alarms; a build that is 3%
slower in ten cases is found in 96% of them, one that is 5% slower in 98%.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from jfabench.intervals import NOTHING, Interval
from jfabench.records import Case

Verdict = Literal["faster", "slower", "same", "cannot tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

BROKEN = frozenset({"wrong", "failed", "timeout", "oom"})
"""Outcomes of a case that was expected to give a right result."""

GRID_ERROR = 0.01
"""Of the comparisons of a build with itself, at most this part may call any case slower (and as many, faster)."""

SMALLEST_EFFECT = 0.02
"""A relative change of time that is smaller is not called a regression, whatever is known about it."""

CONFIDENCE = 0.95
"""Of the intervals that are shown, each for itself."""


@dataclass(frozen=True)
class Noise:
    """What a comparison of a build with itself found on one machine.

    `floor` is the largest relative difference of any case; `process_sd` the standard deviation of the logarithm of a
    block's median between processes, from `freedom` degrees of freedom. `cases` and `pairs` say how much was measured.
    """

    floor: float
    process_sd: float
    freedom: int
    cases: int
    pairs: int
    when: str = ""
    env: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Blocks:
    """The logarithms of the block medians of one case, in seconds: of the two builds, in the order of measurement.

    `paired`: block `i` of both was measured in turns.
    """

    a: tuple[float, ...]
    b: tuple[float, ...]
    paired: bool

    @property
    def pairs(self) -> int:
        return len(self.a) if self.paired else min(len(self.a), len(self.b))


@dataclass(frozen=True)
class Estimate:
    """Time of build B over time of build A (above 1: B takes longer).

    `shown` is the ratio with its 95% interval, `deciding` with the interval that holds together with those of all
    other cases that were tested beside it.
    """

    shown: Interval
    deciding: Interval


@dataclass(frozen=True)
class CaseResult:
    """What a comparison says of one case.

    `status` and `seconds` are those of the two builds: the outcome (`missing` without a record) and the geometric mean
    of the block medians (NaN without any). `stage` is `first` or `repeated` where suspicious cases were measured again,
    else `only`. `changes` are sentences on what differs beyond time: outcome, errors, counters.
    """

    case: Case
    label: str
    status: tuple[str, str]
    seconds: tuple[float, float]
    blocks: Blocks
    stage: Literal["only", "first", "repeated"]
    estimate: Estimate
    verdict: Verdict
    changes: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether build A had a right result and build B tried and has none."""
        return self.status[0] == "ok" and self.status[1] in BROKEN


@dataclass(frozen=True)
class Comparison:
    """Two builds over a grid. `means` are geometric means of the ratios by (provider, direction).

    `limit` is the relative change that counts, `notes` what a reader must know before believing a number. `unmeasured`
    is a sentence that says why, where no case at all was measured on both sides, nor was wrong before, else empty.
    """

    labels: tuple[str, str]
    machine: str
    cases: tuple[CaseResult, ...]
    means: Mapping[tuple[str, str], tuple[Interval, int]]
    limit: float
    noise: Noise | None
    notes: tuple[str, ...] = ()
    unmeasured: str = ""

    def of(self, verdict: Verdict) -> list[CaseResult]:
        return [case for case in self.cases if case.verdict == verdict]

    @property
    def broken(self) -> list[CaseResult]:
        return [case for case in self.cases if case.broken]

    @property
    def regressed(self) -> bool:
        return bool(self.of("slower") or self.broken)


def threshold(floor: float | None, smallest: float = SMALLEST_EFFECT) -> float:
    """The relative change that counts: the larger of `smallest` and the noise floor."""
    return max(smallest, floor or 0.0)


def block_value(rounds: Iterable[Iterable[float]]) -> float:
    """The logarithm of the median of all samples (seconds) of a block; NaN without any, or where it is zero."""
    samples = [sample for block in rounds for sample in block]
    median = statistics.median(samples) if samples else 0.0
    return math.log(median) if median > 0 else math.nan


def estimate(blocks: Blocks, tested: int, noise: Noise | None = None) -> Estimate:
    """The ratio of one case among `tested` ones that are judged together.

    With a single block of one build, what processes differ by has to be known from elsewhere (`noise`); where it is
    not, there is a ratio without an interval.
    """
    if not blocks.a or not blocks.b:
        return Estimate(NOTHING, NOTHING)
    middle, error, freedom = _difference(blocks, noise)
    shown, deciding = (
        _around(middle, error * quantile(freedom, outside) if freedom else math.nan)
        for outside in ((1 - CONFIDENCE) / 2, GRID_ERROR / max(tested, 1))
    )
    return Estimate(shown, deciding)


def _difference(blocks: Blocks, noise: Noise | None) -> tuple[float, float, float]:
    """The difference of the logarithms, its standard error, and the degrees of freedom of that (0: not known)."""
    a, b = blocks.a, blocks.b
    if blocks.paired and len(a) > 1:
        differences = [y - x for x, y in zip(a, b, strict=True)]
        return statistics.fmean(differences), math.sqrt(_variance(differences) / len(a)), len(a) - 1
    middle = statistics.fmean(b) - statistics.fmean(a)
    if min(len(a), len(b)) > 1:
        parts = [_variance(values) / len(values) for values in (a, b)]
        total = sum(parts)
        squares = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
        return middle, math.sqrt(total), total**2 / squares if squares else min(len(a), len(b)) - 1.0
    if noise is not None and noise.freedom > 0:
        return middle, noise.process_sd * math.sqrt(1 / len(a) + 1 / len(b)), noise.freedom
    return middle, math.nan, 0


def is_suspicious(ratio: float, limit: float) -> bool:
    """Whether a ratio of the first stage is worth measuring again: more than half way to `limit` (relative)."""
    return not math.isnan(ratio) and abs(math.log(ratio)) > math.log1p(limit) / 2


def verdict(found: Estimate, limit: float, decisive: bool = True) -> Verdict:
    """What can be said of a case where a relative change of `limit` counts.

    Where not `decisive` (the first of two stages), no case is called slower or faster.
    """
    ratio, low, high = found.deciding
    band = 1 + limit
    if decisive and low > 1 and ratio > band:
        return "slower"
    if decisive and high < 1 and ratio < 1 / band:
        return "faster"
    if found.shown.low > 1 / band and found.shown.high < band:
        return "same"
    return "cannot tell"


def geometric_mean(cases: Sequence[Blocks], noise: Noise | None = None) -> Interval:
    """The geometric mean of the ratios of all cases, with its 95% interval.

    Cases share their processes and are not independent of each other: where all were measured by the same pairs, the
    means over the cases of each pair are the unit, as one case's differences are. Otherwise the intervals of the cases
    are combined as if they moved together, which is the widest that they allow.
    """
    known = [case for case in cases if case.a and case.b]
    if not known:
        return NOTHING
    if all(case.paired and len(case.a) == len(known[0].a) > 1 for case in known):
        mean = Blocks(_means(case.a for case in known), _means(case.b for case in known), paired=True)
        return estimate(mean, 1, noise).shown
    each = zip(*(estimate(case, 1, noise).shown for case in known), strict=True)
    middle, low, high = (math.exp(statistics.fmean(map(math.log, values))) for values in each)
    return Interval(middle, low, high)


def noise_of(cases: Sequence[Blocks], when: str = "", env: Mapping[str, Any] | None = None) -> Noise:
    """The noise that a comparison of a build with itself shows. Raises `ValueError` with fewer than two pairs."""
    known = [case for case in cases if min(len(case.a), len(case.b)) > 1]
    if not known:
        raise ValueError("the noise of a machine takes at least two pairs of blocks of a case")
    floor = max(abs(math.expm1(statistics.fmean(case.b) - statistics.fmean(case.a))) for case in known)
    variance = statistics.fmean(_variance([*case.a, *case.b]) for case in known)
    pairs = min(case.pairs for case in known)
    # Cases of one process have their process in common, so they add no degrees of freedom.
    return Noise(floor, math.sqrt(variance), 2 * pairs - 1, len(known), pairs, when, dict(env or {}))


@cache
def quantile(freedom: float, outside: float) -> float:
    """The value that Student's t exceeds with probability `outside`."""
    from scipy.stats import t

    return float(t.isf(outside, freedom))


def _means(values: Iterable[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.fmean(column) for column in zip(*values, strict=True))


def _variance(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _around(middle: float, half: float) -> Interval:
    if math.isnan(half):
        return Interval(math.exp(middle), math.nan, math.nan)
    half = min(half, 600.0)  # a float overflows soon after
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
