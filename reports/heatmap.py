"""The occupancy of a GPU's multiprocessors over time, from a table of intervals, measured or predicted.

A table has one row for each stretch of work that a multiprocessor did:

    sm     which multiprocessor: a whole number
    start  when it began, in seconds
    end    when it ended, in seconds
    label  optional, what it was: words (a role, a kind of wait) or a number (blocks of keys of a tile)

The picture has a line for each multiprocessor and a column for each short span of time. A cell's strength is the share
of the span in which the multiprocessor worked; its colour is the label. What is idle stays blank. Programs that share a
multiprocessor share its line.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jfabench.reports import palette
from jfabench.reports.pictures import RC, save

__all__ = ["Occupancy", "busy_shares", "heatmap", "save"]

Array = np.ndarray[Any, np.dtype[np.float64]]

BINS = 480
"""Columns of a picture."""

_WEAK, _STRONG = "#b9d4ec", "#0b3d78"  # of the least and of the largest number
_OTHER = "other"
_MOST_LABELS = 8
_WIDTH, _PLOT = 3.4, 2.1  # inches of a panel's plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.55, 0.25, 0.5, 0.45


@dataclass(frozen=True)
class Occupancy:
    """One panel: `intervals` is a table as told above; `sms` how many multiprocessors there are, else as many as occur.

    `lanes` is how many stretches of work a multiprocessor does at a time when it is full (resident programs, or roles
    that are listed each for itself); `note` is a line below the title.
    """

    title: str
    intervals: pd.DataFrame
    sms: int | None = None
    lanes: int = 1
    note: str = ""

    @property
    def lines(self) -> int:
        """How many multiprocessors are drawn."""
        most = int(self.intervals["sm"].max()) + 1 if len(self.intervals) else 1
        return most if self.sms is None else max(self.sms, most)


def heatmap(
    panels: Sequence[Occupancy], *, title: str, subtitle: str = "", unit: str | None = None, label: str = ""
) -> Figure:
    """A figure with a panel for each of `panels`, side by side, on one axis of time that begins at the first start.

    Args:
        panels: what is compared, such as one case with and without load balancing. At least one.
        title: the figure's headline.
        subtitle: where the numbers come from: the device, or that they are predicted.
        unit: what times are counted in, where that is not seconds.
        label: what the labels mean; the heading of the legend or the colour bar.
    """
    if not panels:
        raise ValueError("a heatmap needs at least one panel")
    for panel in panels:
        _check(panel)
    begins = [float(p.intervals["start"].min()) if len(p.intervals) else 0.0 for p in panels]
    ends = [float(p.intervals["end"].max()) if len(p.intervals) else 0.0 for p in panels]
    span = max(end - begin for begin, end in zip(begins, ends, strict=True)) or 1.0
    scale, name = (1.0, unit) if unit else _time_unit(span)
    colors = _colors(panels)
    with rc_context(RC):
        columns = min(len(panels), 3)
        rows = math.ceil(len(panels) / columns)
        cell = (_LEFT + _WIDTH + _RIGHT, _TOP + _PLOT + _BOTTOM)
        width = cell[0] * columns
        words = textwrap.wrap(subtitle, int((width - _LEFT) / 0.072))
        header, footer = 0.42 + 0.18 * len(words), 0.42 if colors.needs_key else 0.08
        height = header + cell[1] * rows + footer
        figure = Figure(figsize=(width, height))
        figure.text(_LEFT / width, 1 - 0.2 / height, title, size=12, weight="bold", va="center")
        for i, line in enumerate(words):
            figure.text(_LEFT / width, 1 - (0.42 + 0.18 * i) / height, line, size=9, color=palette.MUTED, va="center")
        for i, (panel, begin) in enumerate(zip(panels, begins, strict=True)):
            row, column = divmod(i, columns)
            bottom = footer + cell[1] * (rows - 1 - row) + _BOTTOM
            ax = figure.add_axes(((column * cell[0] + _LEFT) / width, bottom / height, _WIDTH / width, _PLOT / height))
            _panel(ax, panel, begin, span, scale, name, colors)
        if colors.needs_key:
            _key(figure, colors, label, width, height)
    return figure


def busy_shares(intervals: pd.DataFrame, edges: Array, sms: int) -> Array:
    """`[sms, len(edges) - 1]`: in which share of each span between two edges a multiprocessor worked.

    More than 1 where stretches of one multiprocessor overlap.
    """
    shares = np.zeros((sms, len(edges) - 1))
    for sm, group in intervals.groupby("sm"):
        start, end = group["start"].to_numpy(float), group["end"].to_numpy(float)
        # Work done before each edge, summed over the stretches.
        done = np.clip(edges[None, :] - start[:, None], 0.0, (end - start)[:, None]).sum(axis=0)
        shares[int(str(sm))] = np.diff(done) / np.diff(edges)
    return shares


# Drawing -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Colors:
    """`names` are words with a colour each; or there is a `scale` of numbers; or neither, for tables without labels."""

    names: dict[str, str]
    scale: Normalize | None

    @property
    def needs_key(self) -> bool:
        return bool(self.names) or self.scale is not None

    @property
    def ramp(self) -> LinearSegmentedColormap:
        return LinearSegmentedColormap.from_list("work", [_WEAK, _STRONG])


def _check(panel: Occupancy) -> None:
    missing = [name for name in ("sm", "start", "end") if name not in panel.intervals]
    if missing:
        raise ValueError(f"{panel.title}: the table of intervals lacks {', '.join(missing)}")
    if (panel.intervals["end"] < panel.intervals["start"]).any():
        raise ValueError(f"{panel.title}: an interval ends before it starts")
    if len(panel.intervals) and int(panel.intervals["sm"].min()) < 0:
        raise ValueError(f"{panel.title}: a multiprocessor has a negative number")


def _colors(panels: Sequence[Occupancy]) -> _Colors:
    labelled = [panel.intervals["label"] for panel in panels if "label" in panel.intervals and len(panel.intervals)]
    if not labelled:
        return _Colors({}, None)
    labels = pd.concat(labelled)
    if pd.api.types.is_numeric_dtype(labels):
        low, high = float(labels.min()), float(labels.max())
        return _Colors({}, Normalize(low, high) if high > low else None)
    names = list(dict.fromkeys(map(str, labels)))
    kept = names if len(names) <= _MOST_LABELS else [*names[: _MOST_LABELS - 1], _OTHER]
    return _Colors({name: palette.STYLES[i].color for i, name in enumerate(kept)}, None)


def _panel(ax: Axes, panel: Occupancy, begin: float, span: float, scale: float, unit: str, colors: _Colors) -> None:
    edges = begin + np.linspace(0.0, span, BINS + 1)
    ax.imshow(
        _pixels(panel, edges, colors),
        aspect="auto",
        interpolation="none",
        extent=(0.0, span * scale, panel.lines, 0.0),
    )
    if len(panel.intervals):
        last = (float(panel.intervals["end"].max()) - begin) * scale
        ax.axvline(last, color=palette.TEXT, linewidth=0.8, linestyle=(0, (4, 2)))
    ax.set_title(panel.title, loc="left", size=10, weight="bold", pad=16 if panel.note else 4)
    if panel.note:
        ax.text(0.0, 1.02, panel.note, transform=ax.transAxes, size=8, color=palette.MUTED, va="bottom")
    ax.set_xlim(0.0, span * scale * 1.02)
    ax.set_ylim(panel.lines, 0.0)
    ax.set_xlabel(unit, labelpad=2)
    ax.set_ylabel("multiprocessor", labelpad=2)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.tick_params(length=2, labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _pixels(panel: Occupancy, edges: Array, colors: _Colors) -> Array:
    """`[lines, BINS, 4]`: red, green, blue, and as opacity the share of each span that was worked in."""
    intervals = panel.intervals
    busy = busy_shares(intervals, edges, panel.lines) / panel.lanes
    pixels = np.zeros((*busy.shape, 4))
    if colors.names:
        names = intervals["label"].astype(str) if "label" in intervals else pd.Series("", index=intervals.index)
        for name, group in intervals.groupby(names.where(names.isin(list(colors.names)), _OTHER)):
            share = busy_shares(group, edges, panel.lines) / panel.lanes
            pixels[..., :3] += share[..., None] * np.array(to_rgb(colors.names.get(str(name), palette.MUTED)))
        pixels[..., :3] /= np.maximum(busy, 1e-300)[..., None]
    elif colors.scale is not None and "label" in intervals:
        weighted = np.zeros_like(busy)
        for value, group in intervals.groupby("label"):
            weighted += float(str(value)) * busy_shares(group, edges, panel.lines) / panel.lanes
        pixels[..., :3] = colors.ramp(colors.scale(weighted / np.maximum(busy, 1e-300)))[..., :3]
    else:
        pixels[..., :3] = to_rgb(palette.STYLES[0].color)
    pixels[..., 3] = busy
    return pixels.clip(0.0, 1.0)


def _key(figure: Figure, colors: _Colors, label: str, width: float, height: float) -> None:
    if colors.scale is None:
        patches = [Patch(color=color, label=name) for name, color in colors.names.items()]
        figure.legend(
            handles=patches,
            loc="lower left",
            bbox_to_anchor=(_LEFT / width - 0.01, 0.02 / height),
            ncols=max(1, min(len(patches), int(width / 1.3))),
            frameon=False,
            fontsize=8.5,
            title=label or None,
        )
        return
    ax = figure.add_axes((_LEFT / width, 0.24 / height, 1.6 / width, 0.09 / height))
    ax.imshow(np.linspace(0.0, 1.0, 64)[None, :], aspect="auto", cmap=colors.ramp, extent=(0.0, 1.0, 0.0, 1.0))
    ax.set_yticks([])
    ax.set_xticks([0.0, 1.0], [f"{colors.scale.vmin:g}", f"{colors.scale.vmax:g}"])
    ax.tick_params(length=0, labelsize=8)
    for spine in ax.spines.values():
        spine.set_visible(False)
    figure.text((_LEFT + 1.75) / width, 0.285 / height, label, size=8.5, color=palette.MUTED, va="center")


def _time_unit(span: float) -> tuple[float, str]:
    """The factor from seconds to what the axis shows, and its name."""
    if span >= 1.0:
        return 1.0, "seconds"
    return (1e3, "milliseconds") if span >= 1e-3 else (1e6, "microseconds")
