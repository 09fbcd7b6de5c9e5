"""Intervals, verdicts and the error rates of whole comparisons."""

from __future__ import annotations

import math

import aa
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from jfabench import regression
from jfabench.intervals import NOTHING, Interval
from jfabench.regression import GRID_ERROR, Blocks, Estimate, Noise

CASES, PAIRS, AGAIN = 30, 4, 8  # a grid, and the pairs of both stages by default

logs = st.floats(-12, 1)


def close(interval: Interval, expected: tuple[float, float, float]) -> None:
    assert tuple(interval) == pytest.approx(expected, rel=1e-9)


# One case ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(logs, logs), min_size=2, max_size=12), st.integers(1, 200))
def test_pairs_are_judged_by_students_t_over_their_differences(pairs: list[tuple[float, float]], tested: int) -> None:
    a, b = zip(*pairs, strict=True)
    differences = np.array(b) - np.array(a)
    found = regression.estimate(Blocks(a, b, paired=True), tested)
    error = differences.std(ddof=1) / math.sqrt(len(pairs))
    for interval, confidence in ((found.shown, 0.95), (found.deciding, 1 - 2 * GRID_ERROR / tested)):
        half = min(scipy.stats.t.ppf((1 + confidence) / 2, len(pairs) - 1) * error, 600.0)
        middle = differences.mean()
        expected = (math.exp(middle), math.exp(middle - half), math.exp(middle + half))
        assert tuple(interval) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Precision loss")  # scipy's, of blocks that hardly differ
@given(st.lists(logs, min_size=2, max_size=8), st.lists(logs, min_size=2, max_size=8))
def test_other_blocks_get_welchs_interval(a: list[float], b: list[float]) -> None:
    found = regression.estimate(Blocks(tuple(a), tuple(b), paired=False), 1).shown
    if np.ptp(a) < 1e-6 and np.ptp(b) < 1e-6:  # no scatter: scipy's answer is not a number
        assert found.low == pytest.approx(found.high, rel=1e-4)
        return
    expected = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert math.log(found.low) == pytest.approx(max(expected.low, np.mean(b) - np.mean(a) - 600), abs=1e-4)
    assert math.log(found.high) == pytest.approx(min(expected.high, np.mean(b) - np.mean(a) + 600), abs=1e-4)


def test_a_single_block_needs_the_noise_of_the_machine() -> None:
    one = Blocks((0.0,), (math.log(1.1),), paired=False)
    unknown = regression.estimate(one, 1).shown
    assert unknown.middle == pytest.approx(1.1)
    assert math.isnan(unknown.low)
    known = regression.estimate(one, 1, Noise(0.01, 0.005, 7, 30, 4)).shown
    half = scipy.stats.t.ppf(0.975, 7) * 0.005 * math.sqrt(2)
    close(known, (1.1, 1.1 * math.exp(-half), 1.1 * math.exp(half)))


def test_nothing_is_known_without_blocks_of_both() -> None:
    assert regression.estimate(Blocks((), (0.0, 0.0), paired=False), 1) == Estimate(NOTHING, NOTHING)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30))
def test_the_value_of_a_block_is_the_median_of_all_samples(samples: list[float]) -> None:
    rounds = [samples[::2], samples[1::2]]
    assert math.exp(regression.block_value(rounds)) == pytest.approx(float(np.median(samples)))


def test_a_block_without_a_time_has_no_value() -> None:
    assert math.isnan(regression.block_value([]))
    assert math.isnan(regression.block_value([[0.0, 0.0]]))


# Verdicts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "deciding", "decisive", "expected"),
    [
        ((1.03, 1.02, 1.04), (1.03, 1.01, 1.05), True, "slower"),
        ((1.03, 1.02, 1.04), (1.03, 0.99, 1.07), True, "cannot tell"),  # chance is not excluded
        ((1.015, 1.01, 1.0199), (1.015, 1.005, 1.025), True, "same"),  # real, and too small to matter
        ((1.019, 1.01, 1.03), (1.019, 1.005, 1.033), True, "cannot tell"),
        ((0.97, 0.96, 0.98), (0.97, 0.95, 0.99), True, "faster"),
        ((1.0, 0.99, 1.01), (1.0, 0.95, 1.05), True, "same"),
        ((1.03, 1.029, 1.031), (1.03, 1.02, 1.04), False, "cannot tell"),  # the first stage accuses nobody
        ((1.0, 0.99, 1.01), (1.0, 0.95, 1.05), False, "same"),
        ((1.03, math.nan, math.nan), (1.03, math.nan, math.nan), True, "cannot tell"),
        (tuple(NOTHING), tuple(NOTHING), True, "cannot tell"),
    ],
)
def test_verdicts(
    shown: tuple[float, float, float], deciding: tuple[float, float, float], decisive: bool, expected: str
) -> None:
    assert regression.verdict(Estimate(Interval(*shown), Interval(*deciding)), 0.02, decisive) == expected


def test_the_noise_floor_raises_what_counts() -> None:
    assert regression.threshold(None) == regression.threshold(0.01) == 0.02
    assert regression.threshold(0.05) == 0.05


@given(st.floats(0.5, 2.0), st.floats(0.005, 0.2))
def test_suspicion_does_not_depend_on_which_build_is_which(ratio: float, limit: float) -> None:
    assert regression.is_suspicious(ratio, limit) == regression.is_suspicious(1 / ratio, limit) or math.isclose(
        abs(math.log(ratio)), math.log1p(limit) / 2, rel_tol=1e-9
    )


def test_no_ratio_is_not_suspicious() -> None:
    assert not regression.is_suspicious(math.nan, 0.02)


# Grids ---------------------------------------------------------------------------------------------------------------


def test_the_mean_of_a_grid_takes_processes_as_the_unit() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(0, 0.001, (20, 5, 2)) + rng.normal(0, 0.01, (1, 5, 2))  # processes shift all their cases
    mean = regression.geometric_mean([aa.blocks(case) for case in values])
    differences = (values[..., 1] - values[..., 0]).mean(axis=0)
    half = scipy.stats.t.ppf(0.975, 4) * differences.std(ddof=1) / math.sqrt(5)
    middle = differences.mean()
    close(mean, (math.exp(middle), math.exp(middle - half), math.exp(middle + half)))


def test_the_mean_of_cases_with_different_blocks_is_as_wide_as_they_are() -> None:
    cases = [Blocks((0.0, 0.0), (0.1, 0.12), True), Blocks((0.0, 0.01, 0.0), (0.1, 0.1, 0.1), True)]
    each = [regression.estimate(case, 1).shown for case in cases]
    close(
        regression.geometric_mean(cases),
        tuple(math.sqrt(getattr(each[0], end) * getattr(each[1], end)) for end in Interval._fields),
    )


def test_the_mean_of_no_case() -> None:
    assert regression.geometric_mean([]) == NOTHING


def test_noise_is_found_again() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(0, 0.004, (200, 6, 2))
    noise = regression.noise_of([aa.blocks(case) for case in values])
    means = (values[..., 1] - values[..., 0]).mean(axis=1)
    assert noise.process_sd == pytest.approx(0.004, rel=0.05)
    assert noise.floor == pytest.approx(np.abs(np.expm1(means)).max())
    assert (noise.cases, noise.pairs, noise.freedom) == (200, 6, 11)
    assert Noise(**noise.to_json()) == noise


def test_noise_takes_two_pairs() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        regression.noise_of([Blocks((0.0,), (0.0,), True)])


# Error rates of whole comparisons ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise",
    [aa.Noise(), aa.Noise(process=0.01, drift=0.1, steps=1.0), aa.Noise(process=0.0005, drift=0.0, steps=0.0)],
    ids=["usual", "bad", "quiet"],
)
def test_of_1000_comparisons_of_a_build_with_itself_at_most_1_percent_alarm(noise: aa.Noise) -> None:
    rng = np.random.default_rng(3)
    alarms = praise = suspicious = 0
    for _ in range(10):
        first, again = (aa.stages(rng, 100, CASES, pairs, noise) for pairs in (PAIRS, AGAIN))
        for grid in range(100):
            found = aa.decided(first[grid], again[grid]).values()
            suspicious += len(found)
            alarms += "slower" in found
            praise += "faster" in found
    assert alarms <= 10
    assert praise <= 10
    if noise.process > 0.001:
        assert suspicious > 100  # the second stage had something to do


def test_one_stage_alone_keeps_the_error_rate_of_the_grid() -> None:
    """`--repeat 0`: the first pairs decide. Without a threshold, so that the intervals themselves are tested."""
    rng = np.random.default_rng(4)
    alarms = 0
    for _ in range(10):
        values = rng.normal(0, 0.01, (100, CASES, 6, 2))
        for grid in values:
            found = (regression.estimate(aa.blocks(case), CASES).deciding for case in grid)
            alarms += any(interval.low > 1 for interval in found)
    assert 1 <= alarms <= 18  # 10 expected: one in a hundred, neither hidden nor more


@pytest.mark.parametrize(("effect", "least"), [(0.03, 0.9), (0.05, 0.97)])
def test_power(effect: float, least: float) -> None:
    """A slow-down in a third of the grid is found in so many cases, and nothing else is blamed for it.

    Measured with these settings: 3% is found in 96% of the cases, 5% in 98%; what is missing are runs in which clocks
    step. The test asks for a little less.
    """
    rng = np.random.default_rng(5)
    slow, grids = CASES // 3, 100
    first, again = (aa.slower(aa.stages(rng, grids, CASES, n, aa.Noise()), slow, effect) for n in (PAIRS, AGAIN))
    hits = wrong = 0
    for grid in range(grids):
        named = {case for case, verdict in aa.decided(first[grid], again[grid]).items() if verdict == "slower"}
        hits += len(named & set(range(slow)))
        wrong += bool(named - set(range(slow)))
    print(f"a slow-down of {effect:.0%} is found in {hits / (slow * grids):.1%} of the cases, {wrong} wrong grids")
    assert hits >= least * slow * grids
    assert wrong <= 2


def test_a_change_below_the_floor_is_not_named() -> None:
    rng = np.random.default_rng(6)
    first, again = (aa.slower(aa.stages(rng, 50, CASES, n, aa.Noise()), 5, 0.03) for n in (PAIRS, AGAIN))
    named = sum("slower" in aa.decided(first[grid], again[grid], floor=0.06).values() for grid in range(50))
    assert named == 0
