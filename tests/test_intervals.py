"""Intervals against scipy, against simulations with a known truth, and by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jfabench.intervals import (
    MIN_ROUNDS,
    is_precise,
    median_interval,
    order_rank,
    paired_ratio,
    t95,
    unpaired_ratio,
)

SECONDS = st.floats(1e-7, 1e2)
ROUNDS = st.lists(st.lists(SECONDS, min_size=1, max_size=6), min_size=2, max_size=6)


def test_quantiles_of_students_t() -> None:
    freedom = range(1, 400)
    found = [t95(n) for n in freedom]
    np.testing.assert_allclose(found, scipy.stats.t.ppf(0.975, freedom), rtol=0, atol=1e-4)
    assert math.isnan(t95(0))


def test_order_ranks_are_the_largest_that_hold_the_median_with_95_percent() -> None:
    for samples in range(1, 300):
        rank = order_rank(samples)
        assert rank == 0 or 1 - 2 * scipy.stats.binom.cdf(rank - 1, samples, 0.5) >= 0.95
        assert 1 - 2 * scipy.stats.binom.cdf(rank, samples, 0.5) < 0.95
    assert [order_rank(samples) for samples in (0, 5, 6, 9)] == [0, 0, 1, 2]


# Medians --------------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    # Rounds' medians 1, 2, 4: logarithms 0, ln 2, 2 ln 2, so their standard error is ln 2 / sqrt(3).
    found = median_interval([[1.0], [2.0, 1.0, 3.0], [4.0, 4.0]])
    assert found.middle == pytest.approx(2.0)
    half = scipy.stats.t.ppf(0.975, 2) * math.log(2) / math.sqrt(3)
    assert found.low == pytest.approx(2.0 * math.exp(-half), rel=1e-4)
    assert found.high == pytest.approx(2.0 * math.exp(half), rel=1e-4)
    assert found.width == pytest.approx(2 * math.sinh(half), rel=1e-4)


@given(ROUNDS)
def test_the_interval_is_students_t_on_the_logarithms_of_the_rounds_medians(rounds: list[list[float]]) -> None:
    found = median_interval(rounds)
    assert found.middle == pytest.approx(scipy.stats.gmean([statistics.median(block) for block in rounds]))
    logs = [math.log(statistics.median(block)) for block in rounds]
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * scipy.stats.sem(logs) if len(set(logs)) > 1 else 0.0
    assert math.log(found.high / found.middle) == pytest.approx(half, rel=1e-3, abs=1e-9)
    assert math.log(found.middle / found.low) == pytest.approx(half, rel=1e-3, abs=1e-9)


@given(ROUNDS, st.floats(0.01, 100))
def test_intervals_hold_the_median_and_scale_with_the_unit(rounds: list[list[float]], factor: float) -> None:
    found, scaled = median_interval(rounds), median_interval([[factor * s for s in block] for block in rounds])
    assert found.low <= found.middle <= found.high
    assert scaled == pytest.approx([factor * value for value in found], rel=1e-6)


@given(st.lists(SECONDS, min_size=2, max_size=6), st.integers(2, 5))
def test_more_rounds_of_the_same_kind_narrow_the_interval(values: list[float], times: int) -> None:
    few, many = median_interval([[v] for v in values]), median_interval([[v] for v in values * times])
    assert many.high / many.low <= few.high / few.low * (1 + 1e-12)


@pytest.mark.parametrize("between", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("rounds", [3, 4, 8])
def test_coverage_with_rounds_chosen_beforehand(between: float, rounds: int) -> None:
    """The interval holds the true median in about 95% of 2,000 simulated cases, wherever the noise comes from."""
    rng = np.random.default_rng(0)
    logs = rng.normal(0, 0.01 * between, (2000, rounds, 1)) + rng.normal(0, 0.01, (2000, rounds, 6))
    found = np.array([median_interval(case) for case in np.exp(logs).tolist()])
    assert 0.925 <= np.mean((found[:, 1] <= 1) & (found[:, 2] >= 1)) <= 0.975


def test_one_round_uses_order_statistics_and_few_samples_give_no_interval() -> None:
    # P(all six on one side) = 2 / 64
    assert median_interval([[3.0, 1.0, 2.0, 6.0, 5.0, 4.0]]) == (3.5, 1.0, 6.0)
    for samples, middle in (([1.0, 2.0, 3.0], 2.0), ([7.0], 7.0)):
        found = median_interval([samples])
        assert found.middle == middle
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert found.width == math.inf


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (12, 3, 10), (100, 40, 61)])
def test_ranks_agree_with_the_printed_tables(count: int, low: int, high: int) -> None:
    """Conover, Practical Nonparametric Statistics: ranks of 95% intervals of the median."""
    assert median_interval([[float(i) for i in range(1, count + 1)]])[1:] == (low, high)


def test_one_round_covers_the_true_median_of_skewed_samples_as_often_as_it_says() -> None:
    draws = scipy.stats.lognorm.rvs(1.0, size=(2000, 25), random_state=1)  # true median: 1
    hits = sum(low <= 1.0 <= high for _, low, high in (median_interval([row]) for row in draws.tolist()))
    assert 0.95 <= hits / len(draws) <= 0.975  # exact coverage of ranks 8..18 of 25: 95.7%


@pytest.mark.parametrize("rounds", [[], [[]], [[0.0, 0.0], [0.0]]])
def test_samples_that_cannot_be_times_give_no_number(rounds: list[list[float]]) -> None:
    assert all(map(math.isnan, median_interval(rounds)))
    assert not is_precise(rounds, 0.5)


def test_few_rounds_that_agree_by_chance_are_not_called_precise() -> None:
    rounds = [[1.0] * 10] * MIN_ROUNDS
    assert is_precise(rounds, 0.01)
    assert not is_precise(rounds[:-1], 0.01)
    assert not is_precise(rounds[:2], 0.01)
    assert is_precise(rounds[:1], 0.01)  # a single round was asked for: its iterations are the unit


def test_precise_means_the_full_width() -> None:
    values = [0.999, 1.001, 0.999, 1.001]
    width = 2 * math.sinh(scipy.stats.t.ppf(0.975, 3) * scipy.stats.sem(np.log(values)))
    assert is_precise([[value] for value in values], 1.001 * width)
    assert not is_precise([[value] for value in values], 0.999 * width)


# Ratios ---------------------------------------------------------------------------------------------------------------


def test_a_drift_that_hits_both_alike_cancels_in_their_ratio() -> None:
    drift = [1.0, 1.1, 1.2, 1.3]
    found = paired_ratio([[2.0 * d] for d in drift], [[1.0 * d] for d in drift])
    assert found == pytest.approx((2.0, 2.0, 2.0))
    apart = unpaired_ratio([[2.0 * d] for d in drift], [[1.0 * d] for d in drift])
    assert apart.middle == pytest.approx(2.0)
    assert apart.high / apart.low > 1.3


def test_identical_kernels_are_equally_fast_though_the_baseline_stopped_earlier() -> None:
    """Clocks fall by 4% over twelve rounds; the baseline was precise after four."""
    rng = np.random.default_rng(0)
    drift = np.linspace(1.0, 1.04, 12)
    for _ in range(20):
        noise = np.exp(rng.normal(0, 1e-4, (2, 12)))
        base, own = ([[seconds] * 3 for seconds in drift * one] for one in noise)
        ratio, low, high = paired_ratio(base[:4], own)
        assert ratio == pytest.approx(1.0, abs=5e-4)
        assert high - low < 2e-3
        # What the ratio of the two medians would say.
        assert median_interval(base[:4]).middle / median_interval(own).middle < 0.99


def test_identical_kernels_differ_in_five_percent_of_cases() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        drift = np.cumsum(rng.normal(0, 0.01, 12))
        base, own = (np.exp(drift + rng.normal(0, 0.002, 12))[:, None].tolist() for _ in range(2))
        _, low, high = paired_ratio(base[:4], own)
        hits += low <= 1 <= high
    assert 0.935 <= hits / 2000 <= 0.965


def test_a_single_common_round_gives_the_widest_interval() -> None:
    samples = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    for ratio in (paired_ratio, unpaired_ratio):
        assert ratio([[2 * s for s in samples]], [samples]) == pytest.approx((2.0, 2 / 1.5, 3 / 1.0))


@pytest.mark.parametrize("ratio", [paired_ratio, unpaired_ratio])
def test_nothing_compares_with_nothing(ratio: object) -> None:
    assert callable(ratio)
    assert all(map(math.isnan, ratio([], [[1.0]])))
    assert all(map(math.isnan, ratio([[1.0]], [])))
    assert all(map(math.isnan, ratio([[0.0]], [[1.0]])))


def test_rounds_are_paired_by_number_also_where_one_has_no_samples() -> None:
    base, own = [[1.0], [], [4.0], [8.0]], [[1.0], [5.0], [2.0], [4.0]]
    assert paired_ratio(base, own).middle == pytest.approx(4 ** (1 / 3))


@pytest.mark.filterwarnings("ignore:Precision loss")
@given(ROUNDS, ROUNDS)
def test_unpaired_ratios_are_welchs(base: list[list[float]], own: list[list[float]]) -> None:
    logs = [[math.log(statistics.median(block)) for block in rounds] for rounds in (base, own)]
    found = unpaired_ratio(base, own)
    assert math.log(found.middle) == pytest.approx(np.mean(logs[0]) - np.mean(logs[1]), abs=1e-9)
    parts = [np.var(values, ddof=1) / len(values) for values in logs]
    if sum(parts) < 1e-12:
        assert found.high == pytest.approx(found.low, rel=1e-5)
        return
    expected = scipy.stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    half = math.log(found.high / found.middle)
    # Degrees of freedom are rounded down, so the interval is at least as wide.
    assert half >= (expected.high - expected.low) / 2 * (1 - 1e-4)
    assert half <= scipy.stats.t.ppf(0.975, min(map(len, logs)) - 1) * math.sqrt(sum(parts)) * (1 + 1e-4)


def test_importing_needs_no_library() -> None:
    import subprocess
    import sys

    code = "import sys, jfabench.intervals; sys.exit(bool({'numpy', 'scipy', 'pandas', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
