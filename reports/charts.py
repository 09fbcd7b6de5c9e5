"""Charts of a table of results: SVG and PNG files, and the same panels one by one for the report.

A figure shows one metric of one grid over the numeric parameter with the most values. Its panels are the values of one
more parameter, by direction; further parameters make further figures. A line is one provider, in a colour and marker of
its own, labelled at its end, with the 95% interval. A case without a number is marked by a cross and named below the
panel.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from jfabench.folder import write_whole
from jfabench.reports import derive, palette, svg
from jfabench.reports.figures import (
    CPU_NOTE,
    METRICS,
    ROOFLINE,
    SPEED,
    SPEEDUP,
    FigureSpec,
    Metric,
    figures,
    is_numeric,
    param_title,
    short_name,
    speed_unit,
    value_text,
)
from jfabench.reports.load import Results
from jfabench.reports.pictures import RC, png, svg_text

_MAX_BARS = 20  # points of a line that get a bar and a marker each; a longer one gets a band

# Inches of the plot in a panel, and of what surrounds it; the room for names at its right depends on them.
_WIDTH, _PLOT = 2.05, 1.9
_LEFT, _TOP, _BOTTOM, _NOTE_LINE = 0.5, 0.42, 0.45, 0.16
_TITLE, _SUBTITLE, _GAP, _LEGEND_LINE = 0.26, 0.19, 0.2, 0.21
_LETTER = 0.078  # of a text in the base size, on average and rounded up


@dataclass(frozen=True)
class Panel:
    """One drawn panel: its title in words, its SVG coloured by CSS variables, and what has no number in it."""

    title: str
    svg: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Chart:
    """One figure: the files' stem, its headline and subtitle, and its panels."""

    metric: Metric
    stem: str
    title: str
    subtitle: str
    panels: tuple[Panel, ...]
    columns: int


@dataclass(frozen=True)
class Charts:
    """All figures, and sentences on what could not be drawn or was left out."""

    charts: tuple[Chart, ...]
    omitted: tuple[str, ...]


def draw(results: Results) -> Charts:
    """Writes `charts/*.svg` and `charts/*.png` of the results' target folder and returns the panels.

    Each file is replaced as a whole. Those of an earlier report that are no longer drawn are removed at the end.
    """
    folder = results.target.charts
    written = set()
    charts: list[Chart] = []
    omitted: list[str] = []
    for figure in figures(results, omitted):
        fig, axes = render(figure)
        with rc_context(RC):
            text, picture = svg_text(fig), png(fig)
        for name, content in ((f"{figure.stem}.svg", text.encode()), (f"{figure.stem}.png", picture)):
            write_whole(folder / name, content)
            written.add(name)
        charts.append(_chart(figure, text, fig, axes))
    for old in folder.glob("*"):
        if _OURS.fullmatch(old.name) and old.name not in written:
            old.unlink()
    return Charts(tuple(charts), tuple(omitted))


_OURS = re.compile(rf"({'|'.join(metric.name for metric in METRICS)})(-.*)?\.(svg|png)")


# Drawing -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnPanel:
    axes: Axes
    title: str
    notes: tuple[str, ...]


def render(spec: FigureSpec) -> tuple[Figure, list[DrawnPanel]]:
    """The whole figure, without touching pyplot or any global state of matplotlib."""
    places = _places(spec)
    series = {place: panel_series(spec, rows) for place, (_, rows) in places.items()}
    notes = {place: _notes(spec, panel) for place, panel in series.items()}
    cell = _cell_width(spec)
    columns, lines = max(c for _, c in places) + 1, max(r for r, _ in places) + 1
    width = cell * columns
    titles = textwrap.wrap(spec.title, int((width - _LEFT) / (1.5 * _LETTER)))
    subtitles = textwrap.wrap(spec.subtitle, int((width - _LEFT) / _LETTER))
    legend_columns = max(2, min(len(spec.styles) + 1, int(width / 1.3)))
    legend = _LEGEND_LINE * math.ceil((len(spec.styles) + 1) / legend_columns) + 0.12
    noted = _NOTE_LINE * max(len(_wrapped(texts, cell)) for texts in notes.values())
    height = _TOP + _PLOT + _BOTTOM + noted
    with rc_context(RC):
        header = _TITLE * len(titles) + _SUBTITLE * len(subtitles) + _GAP
        total = (width, header + height * lines + legend)
        fig = Figure(figsize=total)
        y = total[1] - 0.08
        for words, step, looks in (
            (titles, _TITLE, {"size": 12, "weight": "bold"}),
            (subtitles, _SUBTITLE, {"color": palette.MUTED}),
        ):
            for line in words:
                fig.text(_LEFT / total[0], (y - step / 2) / total[1], line, va="center", **looks)
                y -= step
        drawn: list[DrawnPanel] = []
        for (r, c), (title, rows) in places.items():
            bottom = legend + height * (lines - 1 - r) + _BOTTOM + noted
            rectangle = (
                (c * cell + _LEFT) / total[0],
                bottom / total[1],
                _WIDTH / total[0],
                _PLOT / total[1],
            )
            ax = fig.add_axes(rectangle)
            ax.set_gid(f"panel-{len(drawn)}")
            _draw_panel(ax, spec, rows, series[r, c], title)
            for number, line in enumerate(_wrapped(notes[r, c], cell)):
                y = (bottom - _BOTTOM - _NOTE_LINE * (number + 0.5)) / total[1]
                x = (c * cell + _LEFT - 0.2) / total[0]
                fig.text(x, y, line, size=8, color=palette.MUTED, va="center")
            drawn.append(DrawnPanel(ax, title, notes[r, c]))
        _legend(fig, spec, total, legend_columns)
    return fig, drawn


def _places(spec: FigureSpec) -> dict[tuple[int, int], tuple[str, pd.DataFrame]]:
    """The title and rows of the panel in each line and column: a line for each direction, forward first.

    Where there is one panel for each direction, they stand side by side.
    """
    values: list[Any] = list(dict.fromkeys(spec.rows[spec.layout.panel])) if spec.layout.panel else [None]
    if all(isinstance(value, int | float) for value in values):
        values.sort()
    places = {}
    for r, direction in enumerate(derive.directions(spec.rows)):
        for c, value in enumerate(values):
            rows = _cell_rows(spec, direction, value)
            point = f"{short_name(str(spec.layout.panel))} = {value_text(value)}, " if spec.layout.panel else ""
            if len(rows):
                place = (r, c) if len(values) > 1 else (0, r)
                places[place] = f"{point}{_DIRECTION.get(direction, direction)}", rows
    return places


_DIRECTION = {"fwd": "forward", "bwd": "backward", "fwd_bwd": "forward + backward"}


@dataclass(frozen=True)
class Series:
    """One provider in one panel: `y` with `[low, high]` at each place `x`, NaN where `missing` says why."""

    x: tuple[float, ...]
    y: np.ndarray[Any, np.dtype[np.float64]]
    low: np.ndarray[Any, np.dtype[np.float64]]
    high: np.ndarray[Any, np.dtype[np.float64]]
    missing: Mapping[float, str]


def panel_series(spec: FigureSpec, rows: pd.DataFrame) -> dict[str, Series]:
    """The series of each provider, over the x values that any provider has a record of in this panel."""
    positions, column = _positions(spec), spec.layout.x
    places = [positions[value] for value in rows[column]] if column else [0.0] * len(rows)
    numbers = spec.metric.values(rows)
    found = {
        (provider, place): (status, *values)
        for provider, place, status, *values in zip(
            rows["provider"], places, rows["status"], numbers["y"], numbers["low"], numbers["high"], strict=True
        )
    }
    x = tuple(sorted(set(places)))
    result = {}
    for provider in spec.styles:
        points = [found.get((provider, place), ("not run", math.nan, math.nan, math.nan)) for place in x]
        table = np.array([point[1:] for point in points], dtype=np.float64).reshape(len(x), 3)
        no_number = "not comparable" if spec.metric is SPEEDUP else "no number"
        missing = {
            place: no_number if point[0] == "ok" else str(point[0])
            for place, point in zip(x, points, strict=True)
            if math.isnan(point[1])
        }
        result[provider] = Series(x, table[:, 0], table[:, 1], table[:, 2], missing)
    return result


_MAX_NAME = 24


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"


def _cell_width(spec: FigureSpec) -> float:
    """Inches of a panel with the names of its lines."""
    longest = max(len(_shortened(name)) for name in spec.styles)
    return _LEFT + _WIDTH + max(1.0, 0.2 + 0.072 * longest)


def _cell_rows(spec: FigureSpec, direction: str, value: Any) -> pd.DataFrame:
    rows = spec.rows[spec.rows["direction"] == direction]
    return rows if spec.layout.panel is None else rows[rows[spec.layout.panel] == value]


def _positions(spec: FigureSpec) -> dict[Any, float]:
    """Where each value of x stands: numbers where they are, anything else evenly."""
    if spec.layout.x is None:
        return {None: 0.0}
    values = list(dict.fromkeys(spec.rows[spec.layout.x]))
    if is_numeric(spec.rows[spec.layout.x]):
        return {value: float(value) for value in sorted(values)}
    return {value: float(place) for place, value in enumerate(values)}


def _notes(spec: FigureSpec, panel: Mapping[str, Series]) -> tuple[str, ...]:
    """`fa3: unsupported` for a provider without any number here, else `fa4: timeout at 2048`."""
    words = {place: value_text(value) for value, place in _positions(spec).items()}
    notes = []
    for provider, series in panel.items():
        for status in dict.fromkeys(series.missing.values()):
            places = [place for place, why in series.missing.items() if why == status]
            where = "" if len(places) == len(series.x) else " at " + ", ".join(words[place] for place in places)
            notes.append(f"{provider}: {status}{where}")
    return tuple(notes)


def _wrapped(notes: Sequence[str], width: float) -> list[str]:
    """The lines of the notes below a panel of `width` inches."""
    text = "× " + "; ".join(notes)
    return textwrap.wrap(text, int((width - 0.3) / 0.062), max_lines=4, placeholder=" …") if notes else []


def _draw_panel(ax: Axes, spec: FigureSpec, rows: pd.DataFrame, panel: Mapping[str, Series], title: str) -> None:
    positions = _positions(spec)
    scale, unit = _unit(spec)
    ax.set_title(title, loc="left", size=10, weight="bold", pad=18)
    ax.text(-0.1, 1.035, unit, transform=ax.transAxes, size=8, color=palette.MUTED, va="bottom")
    ax.grid(axis="y", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ends: dict[str, tuple[float, float]] = {}
    crosses: dict[float, int] = {}
    top, bottom = 0.0, math.inf
    for provider, style in spec.styles.items():
        series = panel[provider]
        last = max((place for place in range(len(series.x)) if not math.isnan(series.y[place])), default=None)
        if last is None:
            continue  # named below the panel; a row of crosses would say no more
        y, low, high = series.y * scale, series.low * scale, series.high * scale
        looks: dict[str, Any] = {"color": style.color, "linewidth": 1.5, "linestyle": style.line, "label": provider}
        looks |= {"marker": style.marker, "markersize": 4.5}
        if len(series.x) <= _MAX_BARS:
            error = np.nan_to_num(np.stack([y - low, high - y])).clip(min=0)
            ax.errorbar(series.x, y, yerr=error, elinewidth=1.2, **looks)
        else:
            ax.plot(series.x, y, markevery=_markers(y), **looks)
            ax.fill_between(series.x, low, high, color=style.color, alpha=0.25, linewidth=0)
        ends[provider] = (series.x[last], float(y[last]))
        # A bar that is far longer than anything else runs out of the panel instead of flattening it.
        largest, smallest = float(np.nanmax(y)), float(np.nanmin(y))
        top = max(top, largest, min(1.3 * largest, float(np.nanmax(np.append(high, 0.0)))))
        bottom = min(bottom, smallest, max(smallest / 1.3, float(np.nanmin(np.append(low, smallest)))))
        levels = []
        for x in series.missing:
            crosses[x] = crosses.get(x, -1) + 1
            levels.append(0.035 + 0.055 * crosses[x])
        if levels:
            ax.plot(
                list(series.missing),
                levels,
                transform=ax.get_xaxis_transform(),
                marker="x",
                color=style.color,
                markersize=5,
                markeredgewidth=1.4,
                linestyle="none",
                clip_on=False,
                label=f"_no number: {provider}",
            )
    _x_axis(ax, spec, positions)
    if spec.metric is SPEEDUP:
        _speedup_axis(ax, bottom, top)
    elif spec.metric is ROOFLINE:
        ends["roofline"] = _reference(ax, 100.0)
        ax.set_ylim(0, max(top, 100.0) * 1.05)
        ax.yaxis.set_major_locator(MaxNLocator(5))
    else:
        if spec.roofline:
            top = _draw_roofline(ax, spec, rows, scale, top, ends)
        ax.set_ylim(0, (top or 1.0) * 1.08)
        ax.yaxis.set_major_locator(MaxNLocator(5))
    _label_ends(ax, spec, ends)
    if spec.on_cpu:
        ax.text(
            0.5,
            0.5,
            CPU_NOTE.replace("not a ", "not a\n"),
            transform=ax.transAxes,
            ha="center",
            va="center",
            size=12,
            weight="bold",
            color=palette.MUTED,
            alpha=0.6,
            zorder=0,
        )


def _markers(y: np.ndarray[Any, np.dtype[np.float64]]) -> list[int]:
    """Which points of a long line get a marker: every so many, and those without a neighbour to draw a line to."""
    known = np.isfinite(y)
    lonely = known & ~np.append(False, known[:-1]) & ~np.append(known[1:], False)
    regular = np.arange(len(y)) % math.ceil(len(y) / _MAX_BARS) == 0
    return [int(place) for place in np.flatnonzero(known & (regular | lonely))]


def _unit(spec: FigureSpec) -> tuple[float, str]:
    """The factor from a metric's values to what the axis shows, and the axis's name."""
    if spec.metric is SPEED:
        return speed_unit(spec.rows)
    return (1.0, f"times as fast as {spec.baseline}") if spec.metric is SPEEDUP else (1.0, "% of the roofline")


def _x_axis(ax: Axes, spec: FigureSpec, positions: Mapping[Any, float]) -> None:
    values = list(positions.values())
    numeric = spec.layout.x is not None and is_numeric(spec.rows[spec.layout.x])
    logarithmic = numeric and min(values) > 0 and max(values) >= 4 * min(values)
    if logarithmic:
        ax.set_xscale("log", base=2)
        margin = (max(values) / min(values)) ** 0.05
        ax.set_xlim(min(values) / margin, max(values) * margin)
    else:
        margin = 0.05 * (max(values) - min(values)) or 0.5
        ax.set_xlim(min(values) - margin, max(values) + margin)
    step = math.ceil(len(values) / 8)
    ax.xaxis.set_major_locator(FixedLocator(values[::step]))
    ax.xaxis.set_minor_locator(NullLocator())
    texts = ["" if value is None else value_text(value) for value in positions][::step]
    if not numeric:
        texts = [textwrap.shorten(text, 14, placeholder="…") for text in texts]
    ax.xaxis.set_ticklabels(texts)
    ax.set_xlabel("" if spec.layout.x is None else param_title(spec.layout.x), labelpad=3)


def _draw_roofline(
    ax: Axes, spec: FigureSpec, rows: pd.DataFrame, scale: float, top: float, ends: dict[str, tuple[float, float]]
) -> float:
    """Draws what the ceilings allow where it fits, else says where it is. Returns the top of the axis."""
    frame = rows.drop_duplicates("shape")
    positions, column = _positions(spec), spec.layout.x
    speed = frame["flops"] / frame["roofline_s"] / 1e12 * scale
    allowed = {
        positions[value]: float(y)
        for value, y in zip(frame[column] if column else [None] * len(frame), speed, strict=True)
        if not math.isnan(y)
    }
    if not allowed:
        return top
    x = sorted(allowed)
    ax.plot(x, [allowed[place] for place in x], label=f"roofline ({spec.roofline})", **_DASHED)
    lowest, highest = min(allowed.values()), max(allowed.values())
    if highest <= 1.8 * top:
        ends["roofline"] = (x[-1], allowed[x[-1]])
        return max(top, highest)
    span = f"{lowest:,.0f}" if round(lowest) == round(highest) else f"{lowest:,.0f} to {highest:,.0f}"
    ax.text(
        0.98,
        0.995,
        f"roofline {'above' if lowest > top * 1.2 else 'leaves the scale'}: {span}",
        transform=ax.transAxes,
        size=7.5,
        color=palette.MUTED,
        va="top",
        ha="right",
        style="italic",
        bbox={"facecolor": palette.BACKGROUND, "edgecolor": "none", "pad": 1.5},
    )
    return top * 1.12


_DASHED: dict[str, Any] = {"color": palette.MUTED, "linestyle": (0, (4, 2)), "linewidth": 1.2}


def _reference(ax: Axes, y: float) -> tuple[float, float]:
    ax.axhline(y, zorder=1.5, **_DASHED)
    return float(ax.get_xlim()[1]), y


def _speedup_axis(ax: Axes, bottom: float, top: float) -> None:
    """Logarithmic, so that twice as fast and half as fast stand equally far from 1."""
    ax.set_yscale("log", base=2)
    low, high = min(bottom, 0.85), max(top, 1.2)
    room = (high / low) ** 0.06
    low, high = low / room**2, high * room  # below there may be crosses
    ax.set_ylim(low, high)
    scales: tuple[tuple[float, ...], ...] = (
        (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3),
        (0.5, 0.75, 1, 1.25, 1.5, 2),
        (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4),
        (0.1, 0.25, 0.5, 1, 2, 4, 8, 16),
        (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        *(tuple(base**exponent for exponent in range(-20, 21)) for base in (10.0, 100.0, 10_000.0)),
    )
    spanning = [scale for scale in scales if scale[0] <= 1.2 * low and high <= 1.2 * scale[-1]]
    fitting = [[tick for tick in scale if low <= tick <= high] for scale in spanning]
    ticks = next((ticks for ticks in fitting if len(ticks) <= 7), fitting[-1])
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}×"))
    _reference(ax, 1.0)


def _label_ends(ax: Axes, spec: FigureSpec, ends: Mapping[str, tuple[float, float]]) -> None:
    """Names each line at the right, moved apart where lines end close together."""
    to_axes = ax.transData + ax.transAxes.inverted()
    starts = {name: to_axes.transform(end) for name, end in ends.items()}
    for name, y in spread({name: float(start[1]) for name, start in starts.items()}, gap=0.075).items():
        color = spec.styles[name].color if name in spec.styles else palette.MUTED
        x0, y0 = starts[name]
        ax.plot([min(x0 + 0.02, 1.0), 1.03], [y0, y], color=color, linewidth=0.6, transform=ax.transAxes, clip_on=False)
        ax.text(1.04, y, _shortened(name), size=8.5, color=color, va="center", transform=ax.transAxes)


def spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """The heights in the same order, at least `gap` apart, and within [0, 1] as long as they fit."""
    order = sorted(heights, key=lambda name: heights[name])
    result: dict[str, float] = {}
    floor = 0.0
    for name in order:
        result[name] = max(heights[name], floor)
        floor = result[name] + gap
    ceiling = 1.0
    for name in reversed(order):
        result[name] = min(result[name], ceiling)
        ceiling = result[name] - gap
    return result


def _legend(fig: Figure, spec: FigureSpec, size: tuple[float, float], columns: int) -> None:
    handles = [
        Line2D([], [], color=s.color, marker=s.marker, linestyle=s.line, markersize=4.5, linewidth=1.5, label=name)
        for name, s in spec.styles.items()
    ]
    handles.append(Line2D([], [], color=palette.MUTED, marker="x", linestyle="none", markersize=5, label="no number"))
    fig.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(_LEFT / size[0] - 0.01, 0.02 / size[1]),
        ncols=columns,
        frameon=False,
        fontsize=8.5,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def _chart(spec: FigureSpec, text: str, fig: Figure, drawn: Sequence[DrawnPanel]) -> Chart:
    width, height = (float(inches) * 72 for inches in fig.get_size_inches())
    boxes = []
    for panel in drawn:
        place = panel.axes.get_position()
        left, top = place.x0 * width - _LEFT * 72, (1 - place.y1) * height - _TOP * 72
        boxes.append((left, top, _cell_width(spec) * 72, (_TOP + _PLOT + _BOTTOM) * 72))
    svgs = svg.split_panels(text, boxes, [f"{spec.title}: {panel.title}" for panel in drawn])
    panels = tuple(Panel(panel.title, drawing, panel.notes) for panel, drawing in zip(drawn, svgs, strict=True))
    columns = max(column for _, column in _places(spec)) + 1
    return Chart(spec.metric, spec.stem, spec.title, spec.subtitle, panels, columns)
