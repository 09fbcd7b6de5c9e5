"""A comparison of two builds as a table in the terminal, `comparison.csv`, Markdown, and one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jfabench.folder import write_whole
from jfabench.intervals import Interval
from jfabench.regression import CONFIDENCE, GRID_ERROR, VERDICTS, CaseResult, Comparison
from jfabench.reports import derive, pages

_COLOURS = {"slower": "red", "faster": "green", "same": "", "cannot tell": "dim"}
MOST_LINES = 60
"""Cases in the terminal's table at most; the files have all."""


def table(found: Comparison) -> pd.DataFrame:
    """One row per case, in the order of measurement. Times in seconds, `ratio` is time of B over time of A."""
    rows: list[dict[str, Any]] = []
    for case in found.cases:
        shown, deciding = case.estimate.shown, case.estimate.deciding
        rows.append(
            {
                "operator": case.case.operator,
                "provider": case.case.provider,
                "direction": case.case.direction,
                "label": case.label,
                **derive.flatten(case.case.params),
                "seed": case.case.seed,
                "status_a": case.status[0],
                "status_b": case.status[1],
                "a_s": case.seconds[0],
                "b_s": case.seconds[1],
                "ratio": shown.middle,
                "low": shown.low,
                "high": shown.high,
                "deciding_low": deciding.low,
                "deciding_high": deciding.high,
                "blocks_a": len(case.blocks.a),
                "blocks_b": len(case.blocks.b),
                "stage": case.stage,
                "verdict": case.verdict,
                "changes": "; ".join(case.changes),
            }
        )
    return pd.DataFrame(rows)


def write_table(found: Comparison, root: Path) -> Path:
    """Writes `comparison.csv` into `root`, whole or not at all."""
    path = root / "comparison.csv"
    write_whole(path, table(found).to_csv(index=False, float_format="%.10g").encode())
    return path


def write_page(found: Comparison, root: Path) -> Path:
    """Writes `comparison.html` into `root`: one page without any network access."""
    path = root / "comparison.html"
    page = pages.page(
        "comparison.html",
        found=found,
        counts=[(verdict, len(found.of(verdict))) for verdict in VERDICTS],
        means=[(*place, mean, count) for place, (mean, count) in found.means.items()],
        cases=ordered(found),
        confidence=CONFIDENCE,
        grid_error=GRID_ERROR,
        interval=interval_text,
        percent=change_text,
        time=time_text,
    )
    write_whole(path, page.encode())
    return path


def ordered(found: Comparison) -> list[CaseResult]:
    """What matters first: broken and slower cases, the largest effect first, then faster ones, then the rest."""
    rank = {"slower": 1, "faster": 2, "cannot tell": 4, "same": 5}

    def place(case: CaseResult) -> tuple[float, float]:
        ratio = case.estimate.shown.middle
        effect = 0.0 if math.isnan(ratio) else abs(math.log(ratio))
        first = (
            0 if case.broken else 3 if case.changes and case.verdict in ("same", "cannot tell") else rank[case.verdict]
        )
        return first, -effect if case.verdict in ("slower", "faster") else 0.0

    return sorted(found.cases, key=place)


def show(found: Comparison, console: Console | None = None) -> None:
    """Prints the table, geometric means, what must be known, and one sentence with the outcome."""
    console = console or Console()
    if not console.is_terminal:  # a file has room for whole lines
        console.width = max(console.width, 140)
    cases = ordered(found)
    lines = Table(
        title=f"time of B over time of A; A: {escape(found.labels[0])}, B: {escape(found.labels[1])}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for heading in ("case", "A", "B", "B / A", "95%", "verdict"):
        lines.add_column(heading, justify="left" if heading in ("case", "verdict") else "right")
    for case in cases[:MOST_LINES]:
        name = f"{case.case.provider} {case.case.direction} {case.label}"
        words = "; ".join([case.verdict if "ok" in case.status else "no time", *case.changes])
        lines.add_row(
            escape(name),
            *(time_text(seconds) for seconds in case.seconds),
            change_text(case.estimate.shown.middle),
            interval_text(case.estimate.shown),
            escape(words),
            style=_COLOURS["slower" if case.broken else case.verdict],
        )
    if len(cases) > MOST_LINES:
        lines.caption = f"and {len(cases) - MOST_LINES:,} more; comparison.csv has all"
    console.print(lines)
    for (provider, direction), (mean, count) in found.means.items():
        console.print(
            f"geometric mean over {count} case{'' if count == 1 else 's'}, {provider} {direction}: "
            f"{change_text(mean.middle)} "
            f"({interval_text(mean)})",
            markup=False,
            highlight=False,
        )
    for note in found.notes:
        console.print(f"! {note}", markup=False, highlight=False)
    console.print(outcome(found), markup=False, highlight=False, soft_wrap=True)


def outcome(found: Comparison) -> str:
    """One sentence: how many cases got which verdict, and what counts as a change; or why none has a time."""
    if found.unmeasured:
        return f"{len(found.cases)} cases: {found.unmeasured}"
    counts = ", ".join(f"{len(cases)} {verdict}" for verdict in VERDICTS if (cases := found.of(verdict)))
    broken = f"{len(found.broken)} no longer right; " if found.broken else ""
    return f"{len(found.cases)} cases: {broken}{counts} (a change counts from {100 * found.limit:.1f}%)"


def markdown(found: Comparison, most: int = 20) -> str:
    """The outcome, and the cases that changed, for a comment on GitHub."""
    lines = [outcome(found), ""]
    changed = [case for case in ordered(found) if case.broken or case.changes or case.verdict in ("slower", "faster")]
    if changed:
        lines += ["| case | A | B | B / A | 95% | verdict |", "|---|---:|---:|---:|---|---|"]
    for case in changed[:most]:
        words = "; ".join([f"**{case.verdict}**" if case.verdict == "slower" else case.verdict, *case.changes])
        cells = [
            f"`{case.case.provider}` {case.case.direction} {case.label}",
            *(time_text(seconds) for seconds in case.seconds),
            change_text(case.estimate.shown.middle),
            interval_text(case.estimate.shown),
            words.replace("|", "\\|").replace("\n", " "),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if len(changed) > most:
        lines.append(f"\n... and {len(changed) - most} more.")
    if found.means:
        lines += ["", "| geometric mean | cases | B / A | 95% |", "|---|---:|---:|---|"]
    for (provider, direction), (mean, count) in found.means.items():
        lines.append(f"| `{provider}` {direction} | {count} | {change_text(mean.middle)} | {interval_text(mean)} |")
    return "\n".join(lines) + "\n"


# Small words ---------------------------------------------------------------------------------------------------------


def change_text(ratio: float) -> str:
    """`+3.1%` where B takes 3.1% longer."""
    return "–" if math.isnan(ratio) else f"{100 * (ratio - 1):+.1f}%"


def interval_text(interval: Interval) -> str:
    if math.isnan(interval.low):
        return "–"
    high = f"{100 * (interval.high - 1):+.1f}%" if interval.high < 10 else "more than +900%"
    return f"{100 * (interval.low - 1):+.1f} to {high}"


def time_text(seconds: float, like: float | None = None) -> str:
    """Four digits, and the unit that fits this time, or the time `like`."""
    if math.isnan(seconds):
        return "–"
    fits = like or seconds
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if fits * f >= 1), (1e9, "ns"))
    return f"{_digits(seconds * factor)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.{max(0, 3 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def names(cases: Sequence[CaseResult]) -> str:
    return ", ".join(f"{case.case.provider} {case.case.direction} {case.label}" for case in cases)
