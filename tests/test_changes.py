"""Change points: planted ones are found, noise has none."""

from __future__ import annotations

import math

import nights
import numpy as np
import pytest

from jfabench.changes import SHORTEST, Change, Point, Run, Series, change_points, changes_of


def series(logs: np.ndarray) -> Series:
    runs = [
        Run(i, "machine", nights.night(i).isoformat(), "nightly", f"{i:040x}", False, "unknown")
        for i in range(len(logs))
    ]
    points = tuple(Point(run, 1e-3 * math.exp(value)) for run, value in zip(runs, logs, strict=True))
    return Series("machine", nights.case(1024), "N=1024", points)


def test_nine_of_ten_planted_changes_of_5_percent_are_found_and_noise_has_none() -> None:
    rng = np.random.default_rng(7)
    found = extra = 0
    for _ in range(200):
        logs, at = nights.planted(rng, 200, 0.05)
        places = [place for place, _ in change_points(logs)]
        near = [place for place in places if abs(place - at) <= 3]
        found += bool(near)
        extra += len(places) - bool(near)
    false = sum(len(change_points(nights.noise(rng, 200))) for _ in range(200))
    assert found >= 0.9 * 200
    assert extra <= 2  # at most 1 in 100 series
    assert false <= 2


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_size_and_the_place_of_a_change(sign: int) -> None:
    rng = np.random.default_rng(1)
    logs = rng.normal(0, 0.004, 60)
    logs[40:] += sign * math.log(1.05)
    (change,) = changes_of(series(logs))
    assert change.at == 40
    assert change.ratio == pytest.approx(1.05**sign, abs=0.005)
    assert (change.before.id, change.after.id) == (39, 40)


def test_two_changes_are_two() -> None:
    rng = np.random.default_rng(2)
    logs = rng.normal(0, 0.004, 90)
    logs[30:60] += math.log(1.1)
    assert [at for at, _ in change_points(logs)] == [30, 60]


def test_single_bad_nights_are_no_change() -> None:
    rng = np.random.default_rng(3)
    logs = rng.normal(0, 0.004, 60)
    logs[[10, 11, 30, 50]] += 0.5
    assert change_points(logs) == []


def test_a_small_change_is_not_marked() -> None:
    logs = np.zeros(60)
    logs[30:] += math.log(1.01)
    assert change_points(logs + np.random.default_rng(4).normal(0, 1e-4, 60)) == []


def test_times_without_any_noise() -> None:
    assert change_points(np.zeros(50)) == []
    assert [at for at, _ in change_points(np.repeat([0.0, 0.1], 25))] == [25]


@pytest.mark.parametrize("runs", range(2 * SHORTEST))
def test_too_few_runs_have_no_change(runs: int) -> None:
    logs = np.where(np.arange(runs) < SHORTEST, 0.0, 0.5)
    assert change_points(logs) == []


def test_a_slow_drift_of_the_machine_is_not_torn_into_many() -> None:
    rng = np.random.default_rng(5)
    assert len(change_points(rng.normal(0, 0.004, 200) + np.linspace(0, 0.03, 200))) <= 1


def test_a_change_knows_its_runs() -> None:
    one = series(np.repeat([0.0, 0.1], 10))
    assert changes_of(one) == [Change(one, 10, pytest.approx(math.exp(0.1)))]
