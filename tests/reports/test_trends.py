"""The page of a history."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nights
import numpy as np
import pytest
from screens import show_page

from jfabench.changes import Point, Run, Series
from jfabench.reports import trends

LINKS = trends.github("https://github.com/owner/name.git")


def history(cases: int, runs: int, rng: np.random.Generator, planted: int, machine: str = "H200") -> list[Series]:
    """`planted` of the series get a change of 5%."""
    all_runs = [
        Run(i, machine, nights.night(i).isoformat(), "nightly", f"{i:040x}", False, "good") for i in range(runs)
    ]
    made = []
    for number in range(cases):
        logs = nights.planted(rng, runs, 0.05)[0] if number < planted else nights.noise(rng, runs)
        points = tuple(Point(run, 1e-3 * math.exp(value)) for run, value in zip(all_runs, logs, strict=True))
        provider = ("tlx_jfa", "triton_jfa")[number % 2]
        made.append(Series(machine, nights.case(2 ** (number // 2), provider), f"N=2^{number // 2}", points))
    return made


def test_200_nights_of_100_cases_take_less_than_10_seconds(tmp_path: Path) -> None:
    series = history(100, 200, np.random.default_rng(11), planted=10)
    begin = time.perf_counter()
    found = trends.write(series, tmp_path / "trends.html", LINKS)
    assert time.perf_counter() - begin < 10
    changed = [one for one in series[:10] if any(change.series is one for change in found)]
    assert len(changed) >= 9
    assert sum(change.series not in series[:10] for change in found) <= 1
    page = (tmp_path / "trends.html").read_text()
    assert page.count("<figure>") == 50
    assert page.count("<circle") == 100 * 200


def test_a_change_links_to_its_commits_and_each_point_to_its_own(tmp_path: Path) -> None:
    series = history(1, 40, np.random.default_rng(1), planted=1)
    (change,) = trends.write(series, tmp_path / "trends.html", LINKS)
    page = (tmp_path / "trends.html").read_text()
    before, after = change.before.commit, change.after.commit
    link = f"https://github.com/owner/name/compare/{before}...{after}"
    assert page.count(f'href="{link}"') == 2  # in the table and in the chart
    assert page.count("https://github.com/owner/name/commit/") == 40
    assert page.count('class="mark"') == 1


def test_without_a_repository_nothing_is_linked(tmp_path: Path) -> None:
    trends.write(history(1, 40, np.random.default_rng(1), planted=1), tmp_path / "trends.html")
    assert "<a href" not in (tmp_path / "trends.html").read_text()


def test_machines_do_not_share_a_chart(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    series = [*history(2, 10, rng, 0), *history(2, 5, rng, 0, machine="B200")]
    trends.write(series, tmp_path / "trends.html")
    page = (tmp_path / "trends.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["H200", "B200"]
    assert page.count("<figure>") == 2


def test_points_lie_inside_the_picture_and_in_order() -> None:
    series = history(2, 30, np.random.default_rng(3), 0)
    (machine,) = trends.machines(series, trends.Links())
    (chart,) = machine.charts
    assert [line.provider for line in chart.lines] == ["tlx_jfa", "triton_jfa"]
    for line in chart.lines:
        xs, ys = zip(*(point[:2] for point in line.points), strict=True)
        assert list(xs) == sorted(xs)
        assert min(xs) >= trends.LEFT
        assert max(xs) <= trends.WIDTH - trends.RIGHT
        assert min(ys) >= trends.TOP
        assert max(ys) <= trends.HEIGHT - trends.BOTTOM
    slowest = max(range(30), key=lambda i: series[0].points[i].seconds)
    highest = min(range(30), key=lambda i: chart.lines[0].points[i][1])
    assert slowest == highest


@pytest.mark.parametrize("runs", [1, 2])
def test_short_histories(tmp_path: Path, runs: int) -> None:
    trends.write(history(1, runs, np.random.default_rng(4), 0), tmp_path / "trends.html")
    page = (tmp_path / "trends.html").read_text()
    for svg in re.findall(r'<svg role="img".*?</svg>', page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_an_empty_history_says_what_to_do(tmp_path: Path) -> None:
    trends.write([], tmp_path / "trends.html")
    assert "history import" in (tmp_path / "trends.html").read_text()


def test_links_to_any_address_are_whole() -> None:
    run = Run(1, "H200", nights.night(1).isoformat(), "nightly", "abc", False, "good")
    links = trends.github("https://git.example/{group}/name.git/")
    assert links.of(run) == "https://git.example/{group}/name/commit/abc"


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400])
def test_charts_are_whole_and_legible_on_a_phone_and_on_a_wide_screen(
    tmp_path: Path, browser: Any, width: int, dark: bool
) -> None:
    trends.write(history(4, 40, np.random.default_rng(1), planted=1), tmp_path / "trends.html", LINKS)
    show_page(browser, tmp_path / "trends.html", width, dark=dark)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    inside = """return [...document.querySelectorAll('svg[role=img]')].flatMap((svg) => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].map((text) => text.getBoundingClientRect())
          .map((box) => [box.left - frame.left, frame.right - box.right, box.height]); })"""
    boxes = browser.execute_script(inside)
    assert len(boxes) == 2 * (5 + 2)
    assert all(left >= 0 and right >= 0 for left, right, _ in boxes)
    assert all(height > 9 for *_, height in boxes)
