"""What to draw of a table of results: which parameter is which axis, which rows go into which figure, and its words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from jfabench.reports import derive, palette
from jfabench.reports.load import Results

MAX_FIGURES = 3
"""Figures per metric and grid at most: a report with more is not read. What was left out is said."""

CPU_NOTE = "CPU - not a performance result"
_MAX_PANELS = 6


@dataclass(frozen=True)
class Layout:
    """Which parameter is the x axis, which one makes panels, and which ones make figures."""

    x: str | None
    panel: str | None
    figures: tuple[str, ...]


def layout(rows: pd.DataFrame, axes: Sequence[str]) -> Layout:
    """Chooses from the grid's axes, then from whatever else varies; what follows from other parameters is left out."""
    columns = list(dict.fromkeys([*axes, *derive.param_columns(rows), "seed"]))
    varying = [name for name in columns if name in rows and rows[name].nunique(dropna=False) > 1]
    numeric = [name for name in varying if is_numeric(rows[name])]
    wanted = [name for name in numeric if name in axes] or [name for name in numeric if name != "seed"] or numeric
    # The last of equals varies fastest.
    x = max(reversed(wanted), key=lambda name: rows[name].nunique()) if wanted else (varying[-1] if varying else None)
    shapes = rows.drop_duplicates("shape")
    kept: list[str] = []
    for name in varying:
        known = [column for column in (x, *kept) if column is not None]
        if name != x and int(shapes.groupby(known, dropna=False)[name].nunique(dropna=False).max()) > 1:
            kept.append(name)
    panels = [name for name in kept if rows[name].nunique(dropna=False) <= _MAX_PANELS]
    panel = panels[-1] if panels else None
    return Layout(x, panel, tuple(name for name in kept if name != panel))


def filled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `none` where a parameter has no value, so that it can be an axis like any other."""
    blank = [name for name in derive.param_columns(rows) if rows[name].isna().any()]
    return rows.assign(**{name: rows[name].astype(object).where(rows[name].notna(), "none") for name in blank})


def value_text(value: Any) -> str:
    """A parameter's value for people: integers in full, other numbers without trailing zeros."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_numeric(values: pd.Series[Any]) -> bool:
    """Whether all values are numbers; truth values are not."""
    return all(isinstance(v, int | float | np.number) and not isinstance(v, bool | np.bool_) for v in values)


@dataclass(frozen=True)
class Metric:
    name: str
    title: str

    def values(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Columns `y`, `low`, `high` (95%), in the unit that the axis shows; NaN where there is no number."""
        if self.name == "speed":
            y, low, high = rows["tflops"], rows["flops"] / rows["high_s"] / 1e12, rows["flops"] / rows["low_s"] / 1e12
        elif self.name == "speedup":
            y, low, high = rows["speedup"], rows["speedup_low"], rows["speedup_high"]
        else:
            y = rows["roofline_fraction"] * 100
            low, high = rows["roofline_s"] / rows["high_s"] * 100, rows["roofline_s"] / rows["low_s"] * 100
        return pd.DataFrame({"y": y, "low": low, "high": high}).astype(float)


SPEED = Metric("speed", "Speed")
SPEEDUP = Metric("speedup", "Speedup")
ROOFLINE = Metric("roofline", "Fraction of the roofline")
METRICS = (SPEED, SPEEDUP, ROOFLINE)


@dataclass(frozen=True)
class FigureSpec:
    """The rows of one figure and how to draw them."""

    metric: Metric
    stem: str
    title: str
    subtitle: str
    rows: pd.DataFrame
    layout: Layout
    styles: Mapping[str, palette.Style]
    baseline: str | None
    roofline: str | None
    on_cpu: bool


@dataclass(frozen=True)
class Grid:
    """One grid of a report: what tells it from the others (nothing, if it is the only one), and how it is drawn."""

    point: Mapping[str, Any]
    rows: pd.DataFrame
    layout: Layout

    @property
    def name(self) -> str:
        return point_name(self.point)


def grids(results: Results) -> list[Grid]:
    """The grids of a report, each with axes of its own: lengths of equal and of varying sequences do not share one."""
    frames = [filled(frame) for frame in results.grids]
    points = _tell_apart(frames)
    return [Grid(point, rows, layout(rows, results.axes)) for point, rows in zip(points, frames, strict=True)]


def _tell_apart(frames: Sequence[pd.DataFrame]) -> list[dict[str, Any]]:
    """A parameter that is constant in each grid and another one in each, preferably a word; else a number."""
    if len(frames) < 2:
        return [{} for _ in frames]
    shared = [name for name in derive.param_columns(frames[0]) if all(name in frame for frame in frames)]
    found = [
        name
        for name in ("operator", *shared)
        if all(frame[name].nunique(dropna=False) == 1 for frame in frames)
        and len({frame[name].iloc[0] for frame in frames}) == len(frames)
    ]
    found.sort(key=lambda name: not isinstance(frames[0][name].iloc[0], str))
    if not found:
        return [{"grid": number} for number in range(1, len(frames) + 1)]
    return [{found[0]: frame[found[0]].iloc[0]} for frame in frames]


def figures(results: Results, omitted: list[str]) -> Iterable[FigureSpec]:
    """What to draw, in order; appends to `omitted` what cannot be."""
    metrics = [metric for metric in METRICS if metric.values(results.rows)["y"].notna().any()]
    if not metrics:
        omitted.append("No case has a number, so there is nothing to draw.")
        return
    found = grids(results)
    groups = {number: _groups(grid, omitted) for number, grid in enumerate(found)}
    for metric in metrics:
        for number, grid in enumerate(found):
            for point, rows in groups[number]:
                title = ", ".join([metric.title, *([point_name(point)] if point else [])])
                if metric.values(rows)["y"].isna().all():
                    omitted.append(f"{title}: no case has a number.")
                else:
                    yield _spec(results, metric, grid, point, rows, title)


def _groups(grid: Grid, omitted: list[str]) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """What is common to each figure of a grid, and its rows."""
    names = list(grid.layout.figures)
    if not names:
        return [(dict(grid.point), grid.rows)]
    shapes = grid.rows.drop_duplicates("shape")
    groups = list(shapes.groupby(names, sort=False, dropna=False))
    if len(groups) > MAX_FIGURES:
        omitted.append(
            f"Drawn are the first {MAX_FIGURES} of {len(groups)} combinations of "
            f"{', '.join(map(short_name, names))}{' for ' * bool(grid.name)}{grid.name}; the table below has all."
        )
    return [
        ({**grid.point, **dict(zip(names, values, strict=True))}, grid.rows[grid.rows["shape"].isin(group["shape"])])
        for values, group in groups[:MAX_FIGURES]
    ]


def _spec(
    results: Results, metric: Metric, grid: Grid, point: Mapping[str, Any], rows: pd.DataFrame, title: str
) -> FigureSpec:
    styles = provider_styles(results)
    present = set(grid.rows["provider"])
    return FigureSpec(
        metric,
        _stem(metric, point),
        title,
        _subtitle(results, rows, grid.layout),
        rows,
        grid.layout,
        {name: style for name, style in styles.items() if name in present},
        results.baseline,
        results.ceilings.source if results.ceilings and grid.rows["roofline_s"].notna().any() else None,
        results.on_cpu,
    )


def point_name(point: Mapping[str, Any]) -> str:
    """`M = 256, fill = 0.5`."""
    return ", ".join(f"{short_name(name)} = {value_text(value)}" for name, value in point.items())


def _stem(metric: Metric, point: Mapping[str, Any]) -> str:
    """`speed-M_256`: a file's name that every system accepts."""
    words = [metric.name, *(f"{short_name(name)}_{value_text(value)}" for name, value in point.items())]
    return "-".join(re.sub(r"[^\w.-]+", "_", word) for word in words)


def provider_styles(results: Results) -> dict[str, palette.Style]:
    """Styles in the order of the manifest, then of appearance."""
    declared = results.manifest.providers if results.manifest else ()
    return palette.assign([*declared, *results.rows["provider"].unique()])


_SHORT = {
    "batch": "B",
    "heads": "H",
    "kv_heads": "H_kv",
    "head_dim": "D",
    "q_len": "M",
    "lengths.max_len": "N",
    "lengths.length": "N",
    "lengths.fill": "fill",
    "lengths.kind": "lengths",
}
_LONG = {
    "lengths.max_len": "longest sequence N (keys)",
    "lengths.length": "sequence length N",
    "q_len": "queries M",
    "batch": "sequences B",
}


def short_name(param: str) -> str:
    """The field's letter for a parameter, else the last part of its dotted name."""
    return _SHORT.get(param, param.rpartition(".")[2])


def param_title(param: str) -> str:
    """A parameter's name for an axis."""
    return _LONG.get(param, short_name(param))


def _subtitle(results: Results, rows: pd.DataFrame, plan: Layout) -> str:
    parts = [CPU_NOTE] if results.on_cpu else []
    parts.append(", ".join(results.devices))
    if "dtype" in rows:
        parts.append("/".join(map(str, rows["dtype"].unique())))
    for name in ("batch", "heads", "kv_heads", "head_dim"):
        if name in rows and name not in (plan.x, plan.panel):
            low, high = rows[name].min(), rows[name].max()
            parts.append(f"{short_name(name)}={low}" if low == high else f"{short_name(name)}={low} to {high}")
    parts += [name for name in ("causal", "deterministic") if name in rows and rows[name].eq(True).all()]
    known = results.ceilings is not None and rows["roofline_s"].notna().any()
    parts.append(f"{results.ceilings.source} ceilings" if known and results.ceilings else "no ceilings")
    return " · ".join(part for part in parts if part)


def speed_unit(rows: pd.DataFrame) -> tuple[float, str]:
    """The factor from TFLOP/s to the unit in which these rows read well, and its name. A CPU does GFLOP/s."""
    return (1.0, "TFLOP/s") if rows["tflops"].max() >= 1 else (1e3, "GFLOP/s")
