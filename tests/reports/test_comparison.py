"""What is shown of a comparison."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import nights
import pytest
from rich.console import Console
from screens import show_page

from jfabench import compare, regression
from jfabench.intervals import Interval
from jfabench.records import Measurement, Record, Status
from jfabench.regression import Blocks, CaseResult, Comparison, Noise
from jfabench.reports import comparison


def result(n: int, change: float, *, status: str = "ok", changes: tuple[str, ...] = (), label: str = "") -> CaseResult:
    """Build B takes `change` (relative) longer, known to 0.1%."""
    b = tuple(math.log1p(change) + noise for noise in (-1e-3, 0.0, 1e-3, 0.0))
    blocks = Blocks((0.0,) * 4, b, True) if status == "ok" else Blocks((), (), True)
    estimate = regression.estimate(blocks, 5)
    seconds = (1.0, 1.0 + change) if status == "ok" else (math.nan, math.nan)
    verdict = regression.verdict(estimate, 0.02)
    name = label or f"N={n}"
    return CaseResult(nights.case(n), name, ("ok", status), seconds, blocks, "only", estimate, verdict, changes)


FOUND = Comparison(
    labels=("main", "the work tree"),
    machine="NVIDIA H200",
    cases=(
        result(1, 0.0),
        result(2, 0.03),
        result(3, -0.05),
        result(4, 0.10, changes=("registers 168 -> 255",)),
        result(5, 0.0, status="wrong", changes=("ok -> wrong: out | lse",)),
        result(6, 0.001, changes=("error of out 0.001 -> 0.01",)),
    ),
    means={("tlx_jfa", "fwd"): (Interval(1.016, 1.01, 1.02), 5)},
    limit=0.02,
    noise=Noise(0.004, 0.003, 7, 30, 4),
    notes=("Something to know.",),
)


def test_what_matters_comes_first() -> None:
    labels = [case.label for case in comparison.ordered(FOUND)]
    assert labels == ["N=5", "N=4", "N=2", "N=3", "N=6", "N=1"]


def test_the_sentence_counts_everything() -> None:
    expected = "6 cases: 1 no longer right; 1 faster, 2 slower, 2 same, 1 cannot tell (a change counts from 2.0%)"
    assert comparison.outcome(FOUND) == expected


def blocks(*records: Record) -> compare.Block:
    return {record.case: record for record in records}


def without_time(n: int, status: Status, reason: str) -> Record:
    record = nights.record(nights.case(n), 1.0, nights.night(0))
    return replace(record, status=status, reason=reason, measurement=None)


NO_GPU = "needs a GPU: run it on\n  a machine that has one"


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (
            [without_time(n, "unavailable", NO_GPU) for n in range(12)],
            [without_time(n, "unavailable", NO_GPU) for n in range(12)],
            "12 unavailable: needs a GPU: run it on a machine that has one",
        ),
        (
            [nights.record(nights.case(n), 1.0, nights.night(0)) for n in range(4)],
            [without_time(n, "failed" if n else "oom", "") for n in range(3)],
            "2 failed; 1 oom; 1 in one of the two only",
        ),
        (
            [nights.record(nights.case(1), 1.0, nights.night(0))],
            [nights.record(nights.case(1), 1.0, nights.night(0), measurement=Measurement("wall", ((1.0,),), "time"))],
            "1 without times of the same mode",
        ),
        (
            [without_time(n, "failed", f"reason {n}") for n in range(6)],
            [without_time(n, "failed", f"reason {n}") for n in range(6)],
            "1 failed: reason 0; 1 failed: reason 1; 1 failed: reason 2; 1 failed: reason 3; and others",
        ),
    ],
)
@pytest.mark.parametrize("paired", [True, False])
def test_a_comparison_without_any_time_says_why(
    a: list[Record], b: list[Record], told: str, paired: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = compare.from_blocks(("A", "B"), ([blocks(*a)], [blocks(*b)]), paired=paired)
    assert found.unmeasured == f"nothing was measured on both sides, so that nothing is known: {told}"
    assert comparison.outcome(found) == f"{len(a)} cases: {found.unmeasured}"
    assert comparison.markdown(found).startswith(f"{len(a)} cases: nothing was measured")
    assert told in comparison.write_page(found, tmp_path).read_text()


def test_one_case_with_times_makes_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    side = [blocks(nights.record(nights.case(1), 1.0, nights.night(0)), without_time(2, "unavailable", NO_GPU))]
    found = compare.from_blocks(("A", "B"), (side, side), paired=False)
    assert found.unmeasured == ""
    assert comparison.outcome(found) == "2 cases: 2 cannot tell (a change counts from 2.0%)"


def test_the_table_has_every_number(tmp_path: Path) -> None:
    path = comparison.write_table(FOUND, tmp_path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["verdict"] for row in rows] == [case.verdict for case in FOUND.cases]
    slow = rows[1]
    assert float(slow["ratio"]) == pytest.approx(1.03, rel=1e-3)
    assert float(slow["deciding_low"]) < float(slow["low"]) < 1.03 < float(slow["high"]) < float(slow["deciding_high"])
    assert (slow["lengths.max_len"], slow["blocks_a"], slow["status_b"]) == ("2", "4", "ok")
    assert (rows[4]["status_b"], rows[4]["a_s"], rows[4]["changes"]) == ("wrong", "", "ok -> wrong: out | lse")


def test_the_terminal_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=160, file=io.StringIO())
    comparison.show(FOUND, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in (
        "N=4",
        "+10.0%",
        "+3.0%",
        "-5.0%",
        "registers 168 -> 255",
        "geometric mean over 5 cases",
        "! Something",
    ):
        assert words in text
    assert text.rstrip().endswith(comparison.outcome(FOUND))


def test_a_large_grid_is_cut_in_the_terminal() -> None:
    many = Comparison(("a", "b"), "x", tuple(result(n, 0.0) for n in range(1, 101)), {}, 0.02, None)
    console = Console(width=160, file=io.StringIO())
    comparison.show(many, console)
    assert isinstance(console.file, io.StringIO)
    assert "and 40 more" in console.file.getvalue()


def test_markdown_lists_what_changed_and_keeps_its_columns() -> None:
    text = comparison.markdown(FOUND)
    rows = [line for line in text.splitlines() if line.startswith("| `tlx_jfa` fwd N=")]
    assert [row.split("N=")[1][0] for row in rows] == ["5", "4", "2", "3", "6"]  # not what is the same
    assert all(row.replace("\\|", "").count("|") == 7 for row in rows)
    assert "**slower**" in rows[1]
    assert "and 3 more" in comparison.markdown(FOUND, most=2)


def test_the_page_stands_alone_and_escapes_names(tmp_path: Path) -> None:
    odd = Comparison(("<a>", "b&c"), "x", (result(1, 0.1, label="<script>"),), {}, 0.02, None)
    page = comparison.write_page(odd, tmp_path).read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;a&gt;" in page
    assert "http:" not in page
    assert "https:" not in page
    assert "has not been measured" in page  # the noise floor
    page = comparison.write_page(FOUND, tmp_path).read_text()
    assert page.count('<td class="slower">') == 2
    assert "0.40%" in page


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_verdict_is_in_sight_on_a_phone_and_on_a_wide_screen(
    tmp_path: Path, browser: Any, width: int, dark: bool
) -> None:
    label = "N=8192 fill=0.5 M=256 B=768 H=4 D=128"  # as long as they are
    long = Comparison(("main", "."), "x", (result(1, 0.1, label=label),), FOUND.means, 0.02, None, ("A note.",))
    show_page(browser, comparison.write_page(long, tmp_path), width, dark=dark)
    verdict = "return document.querySelector('td.slower')"
    assert browser.execute_script(f"{verdict}.getBoundingClientRect().right") < width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light != dark
    color = f"{verdict.replace('return ', 'return getComputedStyle(')}).color"
    assert browser.execute_script(color) != browser.execute_script("return getComputedStyle(document.body).color")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.23456, "1.235 s"), (0.0123456, "12.35 ms"), (123.456e-6, "123.5 µs"), (5e-9, "5.000 ns"), (math.nan, "–")],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert comparison.time_text(seconds) == text


def test_times_can_share_a_unit() -> None:
    assert comparison.time_text(0.98e-3, like=1.1e-3) == "0.9800 ms"


def test_changes_are_readable() -> None:
    assert comparison.change_text(1.0312) == "+3.1%"
    assert comparison.change_text(math.nan) == "–"
    assert comparison.interval_text(Interval(1.0, 0.99, 1.02)) == "-1.0 to +2.0%"
    assert comparison.interval_text(Interval(1.0, math.nan, math.nan)) == "–"
    assert comparison.interval_text(Interval(1.0, 0.0, 2.2e7)) == "-100.0 to more than +900%"  # of two noisy pairs
