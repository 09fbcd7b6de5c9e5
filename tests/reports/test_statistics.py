"""Statistics of a table: the same numbers as case by case, in the right places."""

from __future__ import annotations

import math

import pytest

from jfabench.intervals import median_interval, paired_ratio, unpaired_ratio
from jfabench.reports.statistics import columns, geometric_mean, speedups

CASES = [[[2.0], [2.2], [2.1]], [[1.0], [1.2], [1.1], [1.4]], [], [[3.0]]]


def test_columns_have_an_entry_for_each_case() -> None:
    found = columns(map(median_interval, CASES))
    assert found.middle.tolist() == pytest.approx([9.24 ** (1 / 3), 1.848**0.25, math.nan, 3.0], nan_ok=True)
    assert found.high[0] == median_interval(CASES[0]).high
    assert len(columns([]).low) == 0


def test_speedups_are_paired_or_not_as_told() -> None:
    found = speedups(CASES, [0, 0, 0, -1], [True, True, False, False])
    assert (found.middle[0], found.low[0], found.high[0]) == (1.0, 1.0, 1.0)
    assert (found.middle[1], found.low[1], found.high[1]) == paired_ratio(CASES[0], CASES[1])
    assert all(math.isnan(value) for value in found.middle[2:])
    apart = speedups(CASES, [0, 0, 0, -1], [False] * 4)
    assert apart.low[1] == unpaired_ratio(CASES[0], CASES[1]).low != found.low[1]


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))
