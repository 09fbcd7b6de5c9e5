import gc
import math
import statistics
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jfabench import measure
from jfabench.measure import (
    decide,
    interleave,
    iterations_for_round,
    make_sampler,
    measure_interleaved,
    median_interval,
    warm_up,
)
from jfabench.policy import MeasurePolicy
from jfabench.records import Measurement

durations = st.floats(1e-7, 10.0)


# Interval of the median -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_interval_is_made_of_the_order_statistics_that_the_binomial_distribution_gives(samples):
    middle, low, high = median_interval(samples)
    assert middle == statistics.median(samples)
    # the smallest k with P(X <= k) >= 2.5% is the largest with P(X < k) <= 2.5%: no dyadic fraction equals 2.5%
    rank = int(stats.binom.ppf(0.025, len(samples), 0.5))
    if rank == 0:
        assert (low, high) == (-math.inf, math.inf)
    else:
        ordered = sorted(samples)
        assert (low, high) == (ordered[rank - 1], ordered[len(samples) - rank])


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (12, 3, 10), (100, 40, 61)])
def test_ranks_agree_with_the_printed_tables(count, low, high):
    """Conover, Practical Nonparametric Statistics: ranks of 95% intervals of the median."""
    assert median_interval(list(range(1, count + 1)))[1:] == (low, high)


def test_five_samples_are_too_few_for_an_interval():
    assert median_interval([1.0] * 5) == (1.0, -math.inf, math.inf)
    assert median_interval([1.0] * 6) == (1.0, 1.0, 1.0)


def test_the_interval_covers_the_true_median_of_skewed_samples_as_often_as_it_says():
    draws = stats.lognorm.rvs(1.0, size=(2000, 25), random_state=1)  # true median: 1
    hits = sum(low <= 1.0 <= high for _, low, high in map(median_interval, draws.tolist()))
    assert 0.95 <= hits / len(draws) <= 0.975  # exact coverage of ranks 8..18 of 25: 95.7%


# Stopping rule --------------------------------------------------------------------------------------------------------

POLICY = MeasurePolicy(target=0.01, rounds=4, min_iterations=12, max_iterations=100, max_seconds=1.0)


def noisy(count, middle=1e-3, spread=0.5):
    return [middle * (1 + spread * (i / (count - 1) - 0.5)) for i in range(count)]


@pytest.mark.parametrize(
    ("rounds", "reason"),
    [
        ([[1e-3] * 3] * 4, "precision"),
        ([[1e-3] * 50] * 3, None),  # precise, but too few rounds
        ([[1e-3] * 2] * 5, None),  # precise, but too few samples
        ([noisy(10)] * 4, None),
        ([noisy(25)] * 4, "iterations"),
        ([noisy(5, middle=0.1)] * 4, "time"),
        ([noisy(3, middle=9.0)] * 3, None),  # far beyond the time, but the minimum comes first
        ([noisy(3, middle=9.0)] * 4, "time"),
        ([[1.0] * 3] * 4, "precision"),
    ],
)
def test_decide(rounds, reason):
    assert decide(rounds, POLICY) == reason


def test_precision_means_the_whole_width_of_the_interval():
    samples = [1.0] * 3 + [1.009] * 9  # ranks 3 and 10 of 12: width 0.9% of the median
    assert decide([samples[i::4] for i in range(4)], POLICY) == "precision"
    samples = [1.0] * 3 + [1.012] * 9
    assert decide([samples[i::4] for i in range(4)], POLICY) == "time"


policies = st.builds(
    MeasurePolicy,
    rounds=st.integers(1, 8),
    min_iterations=st.integers(1, 50),
    max_iterations=st.integers(1, 2000),
    max_seconds=st.floats(0.01, 20),
)


@given(durations, policies)
def test_rounds_reach_the_minimum_and_keep_to_the_caps(estimate, policy):
    count = iterations_for_round(estimate, policy)
    minimum = min(policy.min_iterations, policy.max_iterations)
    assert count >= 1
    assert count * policy.rounds >= minimum
    if count > math.ceil(minimum / policy.rounds):  # more than it must
        assert count * estimate * policy.rounds <= policy.max_seconds
        assert (count - 1) * policy.rounds * 4 < policy.max_iterations


@given(durations, policies)
def test_every_case_ends(estimate, policy):
    """With samples as unsteady as can be, a cap is reached, and no more than one round late."""
    rounds, reason, count = [], None, iterations_for_round(estimate, policy)
    while reason is None:
        rounds.append([estimate * (1 + (i % 2)) for i in range(count)])
        reason = decide(rounds, policy)
        assert len(rounds) <= policy.max_iterations + policy.rounds
    assert len(rounds) == policy.rounds or decide(rounds[:-1], policy) is None


def test_iterations_of_typical_calls():
    assert iterations_for_round(1e-5, MeasurePolicy()) == 63  # 16 rounds make 1000
    assert iterations_for_round(2e-3, MeasurePolicy()) == 31  # 16 rounds of 62 ms make a second
    assert iterations_for_round(0.5, MeasurePolicy()) == 3  # 4 rounds make 12


def test_order_is_abba():
    assert [interleave(i, "ab") for i in range(4)] == [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")]
    position = {name: sum(interleave(i, "abc").index(name) for i in range(4)) for name in "abc"}
    assert len(set(position.values())) == 1  # linear drift hits all alike


# Warm-up --------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only inside calls: call `i` takes `times[i]` seconds, the last one for ever."""

    def __init__(self, *times):
        self.times, self.now, self.calls = times, 0.0, 0

    def __call__(self):
        return self.now

    def call(self):
        self.now += self.times[min(self.calls, len(self.times) - 1)]
        self.calls += 1


def test_warm_up_goes_on_until_three_blocks_agree():
    clock = Clock(30.0, *[0.01] * 5, *[0.004] * 5, 0.001)
    done = warm_up(clock.call, MeasurePolicy(warmup_seconds=0.5), "cpu", clock=clock)
    assert done.estimate == pytest.approx(0.001)
    assert done.iterations == clock.calls
    assert done.seconds == pytest.approx(clock.now - 30.0)  # the first call, which may compile, does not use it up
    assert 0.15 < done.seconds < 0.35


def test_warm_up_of_an_unsteady_call_ends_in_time():
    clock = Clock(*[0.01 * (1 + i % 3) for i in range(1000)])
    done = warm_up(clock.call, MeasurePolicy(warmup_seconds=0.5), "cpu", clock=clock)
    assert 0.5 <= done.seconds < 0.6


def test_warm_up_of_a_slow_call_is_two_calls():
    clock = Clock(2.0)
    done = warm_up(clock.call, MeasurePolicy(warmup_seconds=0.5), "cpu", clock=clock)
    assert (done.iterations, done.estimate) == (2, 2.0)


def test_no_warm_up_still_gives_an_estimate():
    clock = Clock(5.0, 0.25)
    assert warm_up(clock.call, MeasurePolicy(warmup_seconds=0), "cpu", clock=clock).estimate == 0.25


# The loop -------------------------------------------------------------------------------------------------------------


class FakeSampler:
    """Says that each call took what the call returns."""

    mode, device = "events", "cpu"

    def __init__(self):
        self.kernels_per_call = None

    def sample(self, call, iterations):
        self.kernels_per_call = 3.0
        return [call() for _ in range(iterations)]


QUICK = MeasurePolicy(rounds=4, min_iterations=12, max_iterations=64, max_seconds=100.0, warmup_seconds=0)


def unsteady():
    value = iter(range(10**6))
    return lambda: 1e-3 * (1 + next(value) % 7)


def test_calls_are_interleaved_and_leave_when_they_are_done():
    phases = []
    calls = {"steady": lambda: 1e-3, "unsteady": unsteady(), "also steady": lambda: 2e-3}
    outcomes = measure_interleaved(calls, FakeSampler(), QUICK, on_phase=lambda *phase: phases.append(phase))
    assert list(outcomes) == ["also steady", "steady", "unsteady"]  # the fourth round runs backward
    assert phases[:3] == [(name, "warmup") for name in calls]
    rounds = [name for name, phase in phases if phase == "measure"]
    assert rounds[:6] == ["steady", "unsteady", "also steady", "also steady", "unsteady", "steady"]
    assert rounds[12:] == ["unsteady"] * (len(rounds) - 12)
    assert len(rounds) > 12

    steady, noise = outcomes["steady"], outcomes["unsteady"]
    assert steady.stopped_by == "precision"
    assert steady.mode == "events"
    assert steady.kernels_per_call == 3.0
    assert [len(block) for block in steady.rounds] == [4] * 4
    assert set(sum(steady.rounds, ())) == {1e-3}
    assert steady.warmup_iterations == 2
    assert noise.stopped_by == "iterations"
    assert sum(map(len, noise.rounds)) == 64


def failing_after(calls, error):
    state = {"left": calls}

    def call():
        state["left"] -= 1
        if state["left"] < 0:
            raise error
        return 1e-3

    return call


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failing_call_loses_nothing_of_the_others(after):
    error = RuntimeError("boom")
    calls = {"a": lambda: 1e-3, "broken": failing_after(after, error), "b": lambda: 1e-3}
    outcomes = measure_interleaved(calls, FakeSampler(), QUICK)
    assert outcomes["broken"] is error
    assert isinstance(outcomes["a"], Measurement)
    assert outcomes["a"] == outcomes["b"].__class__(
        **{**vars(outcomes["b"]), "warmup_seconds": outcomes["a"].warmup_seconds}
    )


def test_a_stored_failure_keeps_no_tensor_alive_but_says_where_it_happened():
    class Tensor:
        pass

    tensors = []

    def call():
        big = Tensor()
        tensors.append(weakref.ref(big))
        try:
            raise KeyError("inner")
        except KeyError:
            raise RuntimeError("out of memory")  # noqa: B904

    error = measure_interleaved({"a": call}, FakeSampler(), QUICK)["a"]
    gc.collect()
    assert [tensor() for tensor in tensors] == [None]
    assert error.__traceback__ is not None


def test_after_a_lost_device_the_unfinished_calls_are_missing(monkeypatch):
    lost = []
    calls = {
        "done": lambda: 1e-3,
        "broken": failing_after(2 + 4 * 4, RuntimeError("illegal memory access")),
        "unfinished": unsteady(),
    }

    def noisy_then_broken(call=calls["broken"], noise=unsteady()):  # noqa: B008
        call()
        return noise()

    calls["broken"] = noisy_then_broken
    monkeypatch.setattr(measure, "_device_lost", lambda device: lost.append(device) or True)
    outcomes = measure_interleaved(calls, FakeSampler(), QUICK)
    assert set(outcomes) == {"done", "broken"}
    assert isinstance(outcomes["done"], Measurement)
    assert lost == ["cpu"]


def test_an_interrupt_is_not_an_outcome():
    with pytest.raises(KeyboardInterrupt):
        measure_interleaved({"a": failing_after(3, KeyboardInterrupt())}, FakeSampler(), QUICK)


def test_measuring_on_the_cpu_for_real():
    policy = MeasurePolicy(max_seconds=0.05, max_iterations=20, warmup_seconds=0.02)
    work = list(range(20000))
    outcomes = measure_interleaved(
        {"short": lambda: sum(work[:2000]), "long": lambda: sum(work)}, make_sampler("wall", "cpu"), policy
    )
    middles = {name: statistics.median(sum(outcome.rounds, ())) for name, outcome in outcomes.items()}
    assert 3 < middles["long"] / middles["short"] < 30
    assert all(outcome.kernels_per_call is None and outcome.mode == "wall" for outcome in outcomes.values())
