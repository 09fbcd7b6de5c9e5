"""Medians and intervals, against scipy, against simulations with a known truth, and by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jfabench.reports.statistics import geometric_mean, medians, order_rank, speedups, t95

SECONDS = st.floats(1e-7, 1e2)
ROUNDS = st.lists(st.lists(SECONDS, min_size=1, max_size=6), min_size=2, max_size=6)


def test_quantiles_of_students_t() -> None:
    freedom = np.arange(1, 400)
    np.testing.assert_allclose(t95(freedom), scipy.stats.t.ppf(0.975, freedom), rtol=0, atol=1e-4)
    assert math.isnan(t95(np.array([0]))[0])


def test_by_hand() -> None:
    # Rounds' medians 1, 2, 4: logarithms 0, ln 2, 2 ln 2, so their standard error is ln 2 / sqrt(3).
    found = medians([[[1.0], [2.0, 1.0, 3.0], [4.0, 4.0]]])
    assert found.median[0] == 2.5  # of 1, 1, 2, 3, 4, 4
    half = scipy.stats.t.ppf(0.975, 2) * math.log(2) / math.sqrt(3)
    assert found.low[0] == pytest.approx(2.5 * math.exp(-half), rel=1e-4)
    assert found.high[0] == pytest.approx(2.5 * math.exp(half), rel=1e-4)
    assert (found.samples[0], found.rounds[0]) == (6, 3)


@given(st.lists(st.one_of(ROUNDS, st.just([])), max_size=5))
def test_many_cases_at_once_equal_each_case_alone(cases: list[list[list[float]]]) -> None:
    together = medians(cases)
    for row, rounds in enumerate(cases):
        samples = [sample for block in rounds for sample in block]
        assert together.samples[row] == len(samples)
        if not samples:
            assert math.isnan(together.median[row])
            continue
        assert together.median[row] == statistics.median(samples)
        logs = [math.log(statistics.median(block)) for block in rounds]
        half = scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs) if len(set(logs)) > 1 else 0.0
        assert math.log(together.high[row] / together.median[row]) == pytest.approx(half, rel=1e-3, abs=1e-9)


@given(ROUNDS, st.floats(0.01, 100))
def test_intervals_hold_the_median_and_scale_with_the_unit(rounds: list[list[float]], factor: float) -> None:
    found, scaled = medians([rounds]), medians([[[factor * s for s in block] for block in rounds]])
    assert found.low[0] <= found.median[0] <= found.high[0]
    for name in ("median", "low", "high"):
        assert getattr(scaled, name)[0] == pytest.approx(factor * getattr(found, name)[0], rel=1e-6)


@given(st.lists(SECONDS, min_size=2, max_size=6), st.integers(2, 5))
def test_more_rounds_of_the_same_kind_narrow_the_interval(values: list[float], times: int) -> None:
    few, many = medians([[[v] for v in values]]), medians([[[v] for v in values * times]])
    assert many.high[0] / many.low[0] <= few.high[0] / few.low[0] * (1 + 1e-12)


@pytest.mark.parametrize("between", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("rounds", [3, 4, 8])
def test_coverage(between: float, rounds: int) -> None:
    """The interval holds the true median in about 95% of 2,000 simulated cases, wherever the noise comes from."""
    rng = np.random.default_rng(0)
    logs = rng.normal(0, 0.01 * between, (2000, rounds, 1)) + rng.normal(0, 0.01, (2000, rounds, 6))
    found = medians(np.exp(logs).tolist())
    assert 0.925 <= np.mean((found.low <= 1) & (found.high >= 1)) <= 0.975


def test_one_round_uses_order_statistics_and_few_samples_give_no_interval() -> None:
    found = medians([[[3.0, 1.0, 2.0, 6.0, 5.0, 4.0]], [[1.0, 2.0, 3.0]], [[7.0]]])
    assert found.median.tolist() == [3.5, 2.0, 7.0]
    assert (found.low[0], found.high[0]) == (1.0, 6.0)  # P(all six on one side) = 2 / 64
    assert np.isnan(found.low[1:]).all()
    assert np.isnan(found.high[1:]).all()


def test_order_ranks_are_the_largest_that_hold_the_median_with_95_percent() -> None:
    for samples in range(1, 300):
        rank = order_rank(samples)
        assert rank == 0 or 1 - 2 * scipy.stats.binom.cdf(rank - 1, samples, 0.5) >= 0.95
        assert 1 - 2 * scipy.stats.binom.cdf(rank, samples, 0.5) < 0.95
    assert [order_rank(samples) for samples in (0, 5, 6, 9)] == [0, 0, 1, 2]


def test_samples_that_cannot_be_times_give_no_number() -> None:
    found = medians([[[0.0, 0.0], [0.0]], []])
    assert np.isnan(found.median).all()
    assert np.isnan(found.low).all()


def test_a_drift_that_hits_both_alike_cancels_in_their_ratio() -> None:
    drift = [1.0, 1.1, 1.2, 1.3]
    both = medians([[[2.0 * d] for d in drift], [[1.0 * d] for d in drift]])
    ratios = speedups(both, np.array([0, 0]))
    assert ratios.ratio.tolist() == pytest.approx([1.0, 2.0])
    assert ratios.high[1] / ratios.low[1] == pytest.approx(1.0)
    assert both.high[1] / both.low[1] > 1.3


def test_without_common_rounds_the_ratio_takes_the_widest_interval() -> None:
    samples = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    both = medians([[[2 * s for s in samples]], [samples]])
    ratios = speedups(both, np.array([-1, 0]))
    assert math.isnan(ratios.ratio[0])
    assert ratios.ratio[1] == pytest.approx(2.0)
    assert (ratios.low[1], ratios.high[1]) == pytest.approx((2 / 1.5, 3 / 1.0))


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))
