"""The end of a sweep in the terminal: one table that fits its width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jfabench.reports import derive
from jfabench.reports.figures import CPU_NOTE, provider_styles, speed_unit
from jfabench.reports.load import Results

# Short enough for a column; the report spells them out.
_STATUS = {"unsupported": "unsup.", "unavailable": "unavail."}


MAX_CASES = 60
"""Shapes shown at most; the report has all."""


def show(results: Results, console: Console | None = None) -> None:
    """Prints the table, the mean speedups and what must be known before a number is believed."""
    console = console or Console()
    if results.rows.empty:
        console.print("There is no record yet.")
    else:
        console.print(render(results.rows, console.width, list(provider_styles(results))))
    if results.baseline is not None:
        for line in _means(results.rows, results.baseline):
            console.print(line, markup=False, highlight=False)
    for warning in results.warnings:
        console.print(Text.assemble(("! ", "yellow"), warning))


def render(rows: pd.DataFrame, width: int = 80, order: Sequence[str] = ()) -> Table:
    """Speed in TFLOP/s (GFLOP/s on slow machines), the best of each shape and direction in bold.

    A case without a number shows its status. Columns are provider and direction; where that does not fit `width`,
    directions go below each other, and then providers, too: forward first, providers in `order`. `rows` holds at least
    one.
    """
    factor, unit = speed_unit(rows)
    common, heads, cases = _cases(rows)
    left_out = len(cases) - MAX_CASES
    cases = dict(list(cases.items())[:MAX_CASES])
    best = _best(rows)
    cells = {}
    for shape, direction, provider, status, speed in zip(
        rows["shape"], rows["direction"], rows["provider"], rows["status"], rows["tflops"], strict=True
    ):
        place = (shape, direction, provider)
        cells[place] = _cell(str(status), speed * factor, bold=place in best)
    on_cpu = any(str(name).startswith(derive.CPU) for name in rows["gpu"].unique())
    title = ", ".join([unit, *([common] if common else []), *([CPU_NOTE] if on_cpu else [])])

    found, directions = list(rows["provider"].unique()), derive.directions(rows)
    providers = [*(name for name in order if name in found), *(name for name in found if name not in order)]
    layouts = (
        ([[(d, p) for d in directions for p in providers]], True),
        ([[(d, p) for p in providers] for d in directions], len(directions) == 1),
        ([[(d, p)] for d in directions for p in providers], False),
    )
    for (number, (groups, beside)), padding in itertools.product(enumerate(layouts), (2, 1)):
        table = Table(
            title=title, box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False, title_justify="left"
        )
        for head in heads:
            table.add_column(escape(head), justify="left" if head == "case" else "right", no_wrap=True)
        if number > 0:
            table.add_column("", no_wrap=True)
        for direction, provider in groups[0]:
            words = f"{provider} {direction}" if number == 0 and len(directions) > 1 else provider
            table.add_column("" if number == 2 else escape(_folded(words)), justify="right", no_wrap=True)
        for group in groups:
            direction, provider = group[0]
            for shape, case in cases.items():
                line: list[Any] = [Text(word) for word in case]
                if number > 0:
                    line.append(Text(direction if number == 1 else f"{direction} {provider}"))
                table.add_row(*line, *(cells.get((shape, *place), Text("-", "dim")) for place in group))
            if not beside:
                table.add_section()
        if left_out > 0:
            table.caption = f"and {left_out:,} more shapes; the report has all"
        if Console(width=10_000).measure(table).maximum <= width:
            break
    return table


def _cases(rows: pd.DataFrame) -> tuple[str, list[str], dict[Any, list[str]]]:
    """What all labels have in common, the headings of the columns that name a shape, and each shape's words there.

    Labels of the form `N=512 fill=0.1` get a column for each quantity, others a column of their own.
    """
    shapes = rows.drop_duplicates("shape")
    seeds = shapes["seed"].nunique() > 1
    words = [
        [*str(label).split(), *([f"seed={seed}"] if seeds else [])]
        for label, seed in zip(shapes["label"], shapes["seed"], strict=True)
    ]
    common = [word for word in words[0] if all(word in other for other in words)] if len(words) > 1 else []
    rest = [[word for word in label if word not in common] for label in words]
    pairs = [dict(word.split("=", 1) for word in label if "=" in word) for label in rest]
    heads = list(dict.fromkeys(name for pair in pairs for name in pair))
    if not heads or any(len(pair) != len(label) for pair, label in zip(pairs, rest, strict=True)):
        heads, cells = ["case"], [[" ".join(label)] for label in rest]
    else:
        cells = [[pair.get(head, "") for head in heads] for pair in pairs]
    return " ".join(common), heads, dict(zip(shapes["shape"], cells, strict=True))


def _folded(name: str) -> str:
    """`sdpa_padded fwd` on three lines."""
    return name.replace("_", "_\n").replace(" ", "\n")


def _cell(status: str, speed: float, bold: bool) -> Text:
    if status == "ok":
        return Text(f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}", "bold" if bold else "")
    return Text(_STATUS.get(status, status), "dim" if status in _STATUS else "red")


def _best(rows: pd.DataFrame) -> set[tuple[Any, ...]]:
    """(shape, direction, provider) of the fastest right result of each shape and direction."""
    ok = rows[rows["tflops"].notna()]
    fastest = ok.loc[ok.groupby(["shape", "direction"], sort=False)["tflops"].idxmax()]
    return set(fastest[["shape", "direction", "provider"]].itertuples(index=False, name=None))


def _means(rows: pd.DataFrame, baseline: str) -> list[str]:
    lines = []
    summary = derive.summary(rows)
    for direction, group in summary[summary["provider"] != baseline].groupby("direction", sort=False):
        known = group[group["speedup_cases"] > 0]
        if known.empty:
            continue
        words = [
            f"{row['provider']} {row['speedup']:.3g}x"
            + ("" if row["complete"] else f" ({row['speedup_cases']} of {row['cases']} cases)")
            for _, row in known.iterrows()
        ]
        lines.append(f"{direction}, mean speedup over {baseline}: {', '.join(words)}")
    return lines
