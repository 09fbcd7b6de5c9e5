"""The report: one HTML file that needs nothing else, neither network nor fonts nor the folder that it stands in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from jfabench.collector import without_collector
from jfabench.folder import ResultFolder, write_json, write_whole
from jfabench.records import STATUSES, cost
from jfabench.reports import charts, derive, figures, palette
from jfabench.reports import sections as extras
from jfabench.reports.load import Results, load, not_ok, write_table

# How each operator counts its work, for readers; the counting itself is the operator's.
WORK = {
    "jagged_attention": (
        "Forward: 4 · D · H · (number of visible query-key pairs, summed over the sequences), from the true lengths, "
        "never from the padded ones; a pair is counted only where the mask lets it through. Backward: 2.5 times as "
        "much. Bytes: each input read once, each output written once (a query block shared by all sequences once)."
    )
}

MODES = {
    "profiler": (
        "the summed GPU time of the kernels, copies and fills that one call launches, from the CUPTI profiler; gaps "
        "between them do not count. The L2 cache is flushed before each call, outside the sample."
    ),
    "events": (
        "the time between two CUDA events around one call. The L2 cache is flushed before each call, outside the "
        "sample."
    ),
    "cudagraph": (
        "the replay time of a CUDA graph of several calls, each after a flush of the L2 cache, less that of a graph of "
        "the flushes alone, divided by the number of calls."
    ),
    "wall": "the host time of one call until the device is idle again; launch overhead is part of it.",
}


def build(folders: ResultFolder | Sequence[ResultFolder], target: ResultFolder | None = None) -> Results:
    """Writes `results.csv`, `environment.json`, `charts/` and `report.html` into `target` (default: the first folder).

    Each file replaces an old one at once, so that a reader, or a build that is killed, never leaves half of one; the
    page comes last and needs none of the others. Several folders are merged; the last record of a case counts. Raises
    what `load` raises, and `OSError`.
    """
    with without_collector():  # walking through all records over and over costs a tenth of the time
        return _build([folders] if isinstance(folders, ResultFolder) else folders, target)


def _build(folders: Sequence[ResultFolder], target: ResultFolder | None) -> Results:
    results = load(folders, target)
    write_table(results)
    environments = [{**environment, "records": count} for environment, count in results.environments]
    write_json(results.target.environment, environments)
    drawn = charts.draw(results)
    page = render(results, drawn)
    write_whole(results.target.report, page.encode())
    return results


def render(results: Results, drawn: charts.Charts) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, percent=_percent, short=figures.short_name)
    rows = results.rows
    grids = figures.grids(results)
    failed, neutral = not_ok(results)
    return environment.get_template("report.html").render(
        results=results,
        manifest=results.manifest,
        ceilings=results.ceilings,
        title=results.manifest.config if results.manifest else results.folders[0].root.name,
        counts=_counts(rows),
        providers=_legend(results),
        means=[_means(grid) for grid in grids],
        metrics=_by_metric(drawn),
        omitted=drawn.omitted,
        failures=_groups(failed),
        unsupported=_groups(neutral),
        table=table_data(results, [grid.layout for grid in grids]),
        tuning=extras.sections(folder.root for folder in (results.target, *results.folders)),
        environment=_environment_tables(results.environments),
        modes={
            mode: MODES.get(mode, "a mode that this version does not know.") for mode in rows["mode"].unique() if mode
        },
        work_text={name: WORK.get(name, "As the operator defines it.") for name in rows["operator"].unique()},
        cpu_note=figures.CPU_NOTE,
        when=_period(rows),
        cost=cost(results.records),
        theme=theme(),
        place=_shown(results.target.root),
        sources=[_shown(folder.stored) for folder in results.folders],
        script=Markup((Path(__file__).parent / "templates" / "report.js").read_text(encoding="utf-8")),
    )


# Small words ---------------------------------------------------------------------------------------------------------


def _number(value: float, digits: int = 3) -> str:
    """`digits` significant digits, without an exponent; a dash for NaN."""
    if math.isnan(value):
        return "–"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}%"


def _shown(path: Path) -> str:
    """A path to name in a command: relative to where the report was made, or a placeholder; never absolute."""
    if not path.is_absolute():
        return str(path)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else "DIR"


def _period(rows: pd.DataFrame) -> str:
    times = sorted(str(when) for when in rows["when"] if when)
    if not times:
        return ""
    first, last = times[0].replace("T", " "), times[-1].replace("T", " ")
    if first == last:
        return first
    return f"{first} to {last[11:] if first[:10] == last[:10] else last}"


def theme() -> Markup:
    """The two palettes as CSS custom properties."""
    light = {"bg": palette.BACKGROUND, "text": palette.TEXT, "muted": palette.MUTED, "line": palette.LINE}
    dark = {
        "bg": palette.DARK_BACKGROUND,
        "text": palette.DARK_TEXT,
        "muted": palette.DARK_MUTED,
        "line": palette.DARK_LINE,
    }
    light |= {f"s{style.slot}": style.color for style in palette.STYLES}
    dark |= {f"s{style.slot}": style.dark for style in palette.STYLES}

    def properties(values: Mapping[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in values.items())

    return Markup(
        f":root{{color-scheme:light dark;{properties(light)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{properties(dark)}}}}}"
        f"@media print{{:root{{color-scheme:light;{properties(light)}}}}}"
    )


def _counts(rows: pd.DataFrame) -> list[tuple[str, int]]:
    """How many rows have each status, in the statuses' own order; one that is not known comes last."""
    found = rows["status"].value_counts()
    order = [*(status for status in STATUSES if status in found), *(s for s in found.index if s not in STATUSES)]
    return [(str(status), int(found[status])) for status in order]


# Summary -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LegendEntry:
    name: str
    style: palette.Style
    text: str
    baseline: bool


def _legend(results: Results) -> list[LegendEntry]:
    texts = results.manifest.providers if results.manifest else {}
    present = set(results.rows["provider"])
    styles = figures.provider_styles(results)
    return [
        LegendEntry(name, style, texts.get(name, ""), name == results.baseline)
        for name, style in styles.items()
        if name in present
    ]


@dataclass(frozen=True)
class Means:
    """The geometric means of one grid: over all of it, and for each value of the parameter that makes panels.

    `cells[provider][direction]` and `slices[provider][direction, value]` are rows of `derive.summary`, or missing.
    `columns` are the slices' (direction, value), forward first; none if there is no such parameter or no speedup.
    """

    name: str
    directions: list[str]
    cells: dict[str, dict[str, dict[str, Any]]]
    panel: str | None
    columns: list[tuple[str, Any]]
    slices: dict[str, dict[tuple[str, Any], dict[str, Any]]]


def _means(grid: figures.Grid) -> Means:
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _summary_rows(grid.rows, []):
        cells.setdefault(str(row["provider"]), {})[str(row["direction"])] = row
    panel = None if grid.rows["speedup"].isna().all() else grid.layout.panel
    slices: dict[str, dict[tuple[str, Any], dict[str, Any]]] = {}
    columns: dict[tuple[str, Any], None] = {}
    for row in _summary_rows(grid.rows, [panel]) if panel else []:
        place = str(row["direction"]), row[str(panel)]
        columns[place] = None
        slices.setdefault(str(row["provider"]), {})[place] = row
    return Means(grid.name, derive.directions(grid.rows), cells, panel, list(columns), slices)


def _summary_rows(rows: pd.DataFrame, by: Sequence[str]) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in derive.summary(rows, by).to_dict("records")]


def _by_metric(drawn: charts.Charts) -> dict[str, list[charts.Chart]]:
    metrics: dict[str, list[charts.Chart]] = {}
    for chart in drawn.charts:
        metrics.setdefault(chart.metric.title, []).append(chart)
    return metrics


# Failures and environments -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Records of one provider that have status and reason in common; `cases` are their directions and labels."""

    provider: str
    status: str
    reason: str
    cases: list[str]


def _groups(rows: pd.DataFrame) -> list[Group]:
    return [
        Group(str(provider), str(status), str(reason), (group["direction"] + " " + group["label"]).to_list())
        for (provider, status, reason), group in rows.groupby(["provider", "status", "reason"], sort=False)
    ]


def _environment_tables(environments: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """What all environments share, and one row per environment for the rest."""
    known = [(env, count) for env, count in environments if env]
    keys = list(dict.fromkeys(key for env, _ in known for key in env))
    common = {key: known[0][0].get(key) for key in keys if len({repr(env.get(key)) for env, _ in known}) == 1}
    differing = [key for key in keys if key not in common]
    return {
        "common": common,
        "differing": differing,
        "rows": [([env.get(key) for key in differing], count) for env, count in known],
        "unknown": sum(count for env, count in environments if not env),
    }


# The table's data ----------------------------------------------------------------------------------------------------


def table_data(results: Results, layouts: Sequence[figures.Layout]) -> dict[str, Any]:
    """The results table as compact JSON: one array per column, words stored once, numbers with five digits."""
    rows = results.rows
    axes = dict.fromkeys(name for plan in layouts for name in (*plan.figures, plan.panel, plan.x) if name)
    columns = [_words("case", "case", rows["label"])] if not axes else []
    for names in _columns_of_axes(rows, list(axes)):
        values = rows[names[0]]
        for name in names[1:]:
            values = values.where(values.notna(), rows[name])
        numeric = figures.is_numeric(values.dropna()) and values.notna().any()
        column = (
            _numbers(names[0], figures.short_name(names[0]), values)
            if numeric
            else _words(names[0], figures.short_name(names[0]), values.astype(object).where(values.notna(), "none"))
        )
        columns.append(column | {"title": ", ".join(names)})
    columns += [
        _words("provider", "provider", rows["provider"], list(figures.provider_styles(results))),
        _words("direction", "direction", rows["direction"], derive.directions(rows)),
        _words("status", "status", rows["status"]),
        _numbers("median", "median", rows["median_s"], "time"),
        _numbers("spread", "± 95%", (rows["high_s"] - rows["low_s"]) / 2 / rows["median_s"], "percent"),
    ]
    if rows["span_s"].notna().any():
        columns.append(_numbers("span", "span", rows["span_s"], "time"))
    if rows["kernels_per_call"].notna().any():
        columns.append(_numbers("kernels", "kernels per call", rows["kernels_per_call"], "decimal"))
    giga = not rows["tflops"].max() >= 1
    columns.append(
        _numbers("speed", "GFLOP/s" if giga else "TFLOP/s", rows["tflops"] * (1e3 if giga else 1), "decimal")
    )
    columns.append(_numbers("rate", "GB/s", rows["bytes_per_s"] / 1e9, "decimal"))
    if rows["roofline_fraction"].notna().any():
        columns.append(_numbers("roofline", "of roofline", rows["roofline_fraction"], "percent"))
    if results.baseline is not None:
        columns.append(_numbers("speedup", "speedup", rows["speedup"], "ratio"))
        columns.append(
            _numbers("speedup_low", "speedup, 95%", rows["speedup_low"], "range")
            | {"high": _plain(rows["speedup_high"]), **_coded(rows["speedup_note"])}
        )
    errors = rows[[name for name in rows.columns if name.endswith("_rel")]]
    if len(errors.columns) and errors.notna().any(axis=None):
        columns.append(_numbers("error", "worst error", errors.max(axis=1), "exponent"))
    counters = [name for name in rows.columns if name.startswith("counters.")]
    columns += [
        _numbers(name, name.removeprefix("counters."), rows[name], "decimal")
        for name in counters
        if pd.api.types.is_numeric_dtype(rows[name])
    ]
    columns.append(_words("flags", "flags", rows["flags"]))
    columns.append(_words("reason", "reason", rows["reason"]))
    return {
        "rows": len(rows),
        "columns": columns,
        "styles": {entry.name: entry.style.slot for entry in _legend(results)},
    }


def _columns_of_axes(rows: pd.DataFrame, axes: Sequence[str]) -> list[list[str]]:
    """The axes of each column: two grids may have the same quantity, such as N, under different names."""
    columns: list[list[str]] = []
    for name in axes:
        for column in columns:
            alike = figures.short_name(column[0]) == figures.short_name(name)
            if alike and not any((rows[other].notna() & rows[name].notna()).any() for other in column):
                column.append(name)
                break
        else:
            columns.append([name])
    return columns


def _words(key: str, label: str, values: pd.Series[Any], order: Sequence[str] = ()) -> dict[str, Any]:
    return {"key": key, "label": label, "kind": "text", **_coded(values, order)}


def _coded(values: pd.Series[Any], order: Sequence[str] = ()) -> dict[str, Any]:
    """Each word once, and for each row the place of its word. `order` is that of the words known beforehand."""
    texts = values.astype(str)
    present = dict.fromkeys(texts)
    words = [*(word for word in order if word in present), *(word for word in present if word not in order)]
    return {"words": words, "codes": texts.map({word: code for code, word in enumerate(words)}).tolist()}


def _numbers(key: str, label: str, values: pd.Series[Any], kind: str = "number") -> dict[str, Any]:
    return {"key": key, "label": label, "kind": kind, "data": _plain(values)}


def _plain(values: pd.Series[Any]) -> list[float | None]:
    return [None if pd.isna(v) else v if isinstance(v, int) else float(f"{v:.5g}") for v in values.tolist()]
