"""The history of a machine as one HTML page: a chart per shape and direction, a line per provider, changes marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jfabench.changes import Change, Run, Series, changes_of
from jfabench.folder import write_whole
from jfabench.reports import pages, palette
from jfabench.reports.comparison import change_text, time_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 190, 72, 10, 12, 26  # a phone shows it at 85%
_TICKS = 4


@dataclass(frozen=True)
class Links:
    """Where commits can be looked at: `{commit}`, and `{before}` and `{after}`, stand for hashes. None: nowhere."""

    commit: str | None = None
    difference: str | None = None

    def of(self, run: Run) -> str | None:
        return self.commit.format(commit=run.commit) if self.commit and run.commit else None

    def between(self, change: Change) -> str | None:
        before, after = change.before.commit, change.after.commit
        if not (self.difference and before and after and before != after):
            return None
        return self.difference.format(before=before, after=after)


def github(repository: str) -> Links:
    """The links of a repository by its address, such as `https://github.com/owner/name`."""
    base = repository.rstrip("/").removesuffix(".git").replace("{", "{{").replace("}", "}}")
    return Links(f"{base}/commit/{{commit}}", f"{base}/compare/{{before}}...{{after}}")


@dataclass(frozen=True)
class Line:
    """One provider in a chart, in the coordinates of the picture. `bad` are runs that were judged a regression."""

    provider: str
    slot: int
    path: str
    points: tuple[tuple[float, float, str, str | None], ...]


@dataclass(frozen=True)
class Mark:
    x: float
    slot: int
    text: str
    link: str | None


@dataclass(frozen=True)
class Chart:
    title: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...]
    ticks: tuple[tuple[float, str], ...]
    dates: tuple[tuple[float, str, str], ...]


@dataclass(frozen=True)
class Machine:
    name: str
    runs: int
    charts: tuple[Chart, ...]
    changes: tuple[Change, ...]


def write(series: Sequence[Series], target: Path, links: Links | None = None) -> list[Change]:
    """Writes the page to `target`, whole or not at all; returns the changes that it marks."""
    found = machines(series, links or Links())
    page = pages.page(
        "trends.html",
        machines=found,
        links=links or Links(),
        styles={name: style.slot for name, style in _styles(series).items()},
        change=change_text,
        time=time_text,
        size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM},
    )
    write_whole(target, page.encode())
    return [change for machine in found for change in machine.changes]


def machines(series: Sequence[Series], links: Links) -> list[Machine]:
    """Everything that the page shows, by machine, in the order of their latest runs."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.machine, []).append(one)
    styles = _styles(series)
    result = []
    for name, members in sorted(groups.items(), key=lambda item: -max(s.points[-1].run.id for s in item[1])):
        runs = sorted({p.run for s in members for p in s.points}, key=lambda run: (run.started, run.id))
        place = {run.id: number for number, run in enumerate(runs)}
        marked = {id(s): changes_of(s) for s in members}
        charts: dict[tuple[str, str], list[Series]] = {}
        for one in members:
            charts.setdefault((one.case.shape_key, one.case.direction), []).append(one)
        drawn = tuple(_chart(group, runs, place, marked, styles, links) for group in charts.values())
        latest = sorted((c for s in members for c in marked[id(s)]), key=lambda c: c.after.started, reverse=True)
        result.append(Machine(name, len(runs), drawn, tuple(latest)))
    return result


def _styles(series: Sequence[Series]) -> dict[str, palette.Style]:
    return palette.assign(one.case.provider for one in series)


def _chart(
    group: Sequence[Series],
    runs: Sequence[Run],
    place: Mapping[int, int],
    marked: Mapping[int, Sequence[Change]],
    styles: Mapping[str, palette.Style],
    links: Links,
) -> Chart:
    seconds = [point.seconds for one in group for point in one.points]
    low, high = min(seconds) * 0.97, max(seconds) * 1.03
    across = (WIDTH - LEFT - RIGHT) / max(1, len(runs) - 1)

    def x(run: Run) -> float:
        return round(LEFT + across * place[run.id], 1)

    def y(value: float) -> float:
        part = math.log(value / low) / math.log(high / low)
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * part, 1)

    lines, marks = [], []
    for one in group:
        slot = styles[one.case.provider].slot
        at = [(x(p.run), y(p.seconds), _point_text(one, p.run, p.seconds), links.of(p.run)) for p in one.points]
        path = "M" + "L".join(f"{px:g} {py:g}" for px, py, *_ in at)
        lines.append(Line(one.case.provider, slot, path, tuple(at)))
        marks += [Mark(x(c.after), slot, _change_text(c), links.between(c)) for c in marked[id(one)]]
    first = group[0]
    title = f"{first.label or first.case.shape_key} · {first.case.direction}"
    return Chart(title, tuple(lines), tuple(marks), _ticks(low, high, y), _dates(runs, x))


def _ticks(low: float, high: float, y: Any) -> tuple[tuple[float, str], ...]:
    values = [low * (high / low) ** (step / _TICKS) for step in range(_TICKS + 1)]
    return tuple((y(value), time_text(value, like=high)) for value in values)


def _dates(runs: Sequence[Run], x: Any) -> tuple[tuple[float, str, str], ...]:
    ends = [(runs[0], "start"), (runs[-1], "end")] if len(runs) > 1 else [(runs[0], "start")]
    return tuple((x(run), run.started[:10], anchor) for run, anchor in ends)


def _point_text(series: Series, run: Run, seconds: float) -> str:
    commit = f", commit {run.commit[:12]}{'+' if run.dirty else ''}" if run.commit else ""
    judged = f", {run.verdict}" if run.verdict not in ("unknown", "good") else ""
    return f"{series.case.provider}: {time_text(seconds)}, {run.started[:16].replace('T', ' ')}{commit}{judged}"


def _change_text(change: Change) -> str:
    return f"{change.series.case.provider} {change_text(change.ratio)}, from {change.after.started[:10]} on"
