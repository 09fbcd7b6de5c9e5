"""Every second of a sweep belongs to one case, and what is overhead follows from what is recorded."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfabench.phases import Account, overhead_sentence
from jfabench.records import Case, Measurement, Record, overhead

CASES = [Case("op", name, "fwd", {}) for name in "abc"]


def record(measured: tuple[float, ...] = (), **phases: float) -> Record:
    rounds = Measurement("profiler", (measured,), "precision") if measured else None
    return Record(CASES[0], "ok", "", measurement=rounds, phases={k.replace("_", " "): v for k, v in phases.items()})


# Overhead ------------------------------------------------------------------------------------------------------------


def test_overhead_is_all_but_first_call_warm_up_and_measured_calls() -> None:
    spent = record((0.25, 0.5), start=0.5, setup=0.25, check=0.125, first_call=9.0, warmup=3.0, measure=1.0)
    # Of the second of measuring, calls ran for three quarters; the rest went into flushes and the profiler.
    assert overhead(spent) == 0.5 + 0.25 + 0.125 + 0.25


def test_overhead_of_a_case_that_was_not_measured() -> None:
    assert overhead(record(start=0.5, first_call=2.0, check=0.25)) == 0.75


def test_kernels_side_by_side_do_not_make_it_negative() -> None:
    """Samples sum up what ran at the same time."""
    assert overhead(record((3.0,), measure=2.0, start=0.5)) == 0.5


def test_what_older_versions_recorded_still_counts() -> None:
    assert overhead(Record(CASES[0], "ok", "", overhead_seconds=2.5)) == 2.5
    assert overhead(Record(CASES[0], "ok", "")) is None


def test_phases_survive_their_json() -> None:
    before = Record(CASES[0], "ok", "", phases={"first call": 1.5}, worker=1234)
    assert Record.from_json(before.to_json()) == before
    with pytest.raises(TypeError, match="phases"):
        Record.from_json({**before.to_json(), "phases": [1]})


def test_the_sentence_leaves_the_first_case_out_of_the_mean() -> None:
    known = [record(start=4.0, first_call=7.0), record(start=1.0, first_call=0.5), record(start=2.0, warmup=1.0)]
    assert overhead_sentence([known[0], Record(CASES[1], "ok", ""), *known[1:]], 9.0) == (
        "overhead of a case (all but first call, warm-up and measured calls): 1.50 s on average, 2.00 s at most, "
        "4.00 s in the first; first calls took 7.5 s in all, start-up 9.0 s"
    )
    assert overhead_sentence([known[0], Record(CASES[1], "ok", "", overhead_seconds=99.0)], 9.0) == ""
    assert overhead_sentence([], 0.0) == ""


# The account ---------------------------------------------------------------------------------------------------------


def test_common_phases_are_shared_by_the_cases_that_are_open() -> None:
    a, b, c = CASES
    account = Account(until=0.0)
    account.open([a, b, c])
    account.enter("inputs", None, 3.0)
    assert account.finish(a, 6.0) == {"start": 1.0, "inputs": 1.0}
    account.enter("check", b, 8.0)  # 2 s more of inputs
    account.enter("finish", None, 9.0)
    assert account.finish(b, 10.0) == {"start": 1.0, "inputs": 2.0, "check": 1.0, "finish": 0.5}
    assert account.finish(c, 11.0) == {"start": 1.0, "inputs": 2.0, "finish": 1.5}


def test_the_time_between_two_visits_is_the_start_of_the_second() -> None:
    account = Account(until=0.0)
    account.open(CASES[:1])
    account.finish(CASES[0], 1.0)
    account.enter("finish", None, 5.0)  # said after the last record
    account.open(CASES[1:2])
    account.enter("inputs", None, 7.0)
    assert account.finish(CASES[1], 7.0) == {"start": 6.0}


def test_what_passes_before_a_restart_is_nobodys() -> None:
    account = Account(until=time.monotonic() - 100.0)
    assert account.restart() == pytest.approx(100.0, abs=1.0)
    account.open(CASES[:1])
    assert account.finish(CASES[0], account.until + 2.0) == {"start": 2.0}


announcements = st.lists(
    st.tuples(st.floats(0, 10), st.sampled_from(["enter", "finish", "open"]), st.integers(0, 3), st.integers(0, 2)),
    max_size=40,
)


@given(announcements)
def test_nothing_is_lost_and_nothing_counted_twice(announcements: list[tuple[float, str, int, int]]) -> None:
    """Whatever is announced in whatever order, by clocks that now and then stand still."""
    account, now = Account(until=0.0), 0.0
    account.open(CASES)
    last: dict[Case, dict[str, Any]] = {}
    for seconds, what, who, phase in announcements:
        now += seconds
        case = CASES[who] if who < 3 else None
        if what == "open":
            account.open(CASES)
        elif what == "enter":
            account.enter(f"phase {phase}", case, now)
        elif case is not None:
            last[case] = account.finish(case, now)
    account.open(CASES)
    account.enter("end", None, now)
    told = sum(sum(phases.values()) for phases in account.spent.values())
    assert told == pytest.approx(now, abs=1e-6)
    for case, phases in last.items():
        assert all(seconds <= account.spent[case][name] + 1e-6 for name, seconds in phases.items())
