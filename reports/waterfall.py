"""The bars of a waterfall: the time of a kernel without each of its stages, and what that saves."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jfabench.reports import palette
from jfabench.reports.pictures import RC

NOTE = "Wrong by design: variants of the kernel for diagnosis. Not a speed, and in no speedup."

_KEPT, _SAVED = palette.STYLES[0].color, palette.LINE
_WIDTH, _NAMES, _RIGHT, _BAR = 3.0, 1.75, 0.75, 0.26  # inches
_TITLE, _BOTTOM, _GAP = 0.34, 0.42, 0.12


def read(path: Path) -> pd.DataFrame:
    """The rows of a `waterfall.csv`. Raises `OSError`, and `ValueError` where it is none."""
    rows = pd.read_csv(path, keep_default_na=False, na_values=[""])
    missing = {"shape", "seed", "direction", "label", "gpu", "variant", "median_s", "saved"} - set(rows)
    if missing:
        raise ValueError(f"{path} is no waterfall: it lacks {', '.join(sorted(missing))}")
    return rows


def draw(rows: pd.DataFrame) -> Figure:
    """A panel for each case in the rows of a `waterfall.csv`, at least one; of each the first is the shipped kernel."""
    cases = list(rows.groupby(["shape", "seed", "direction"], sort=False))
    columns = min(2, len(cases))
    lines = [cases[i : i + columns] for i in range(0, len(cases), columns)]
    heights = [_TITLE + _BOTTOM + _BAR * max(len(group) for _, group in line) + _GAP for line in lines]
    width = columns * (_NAMES + _WIDTH + _RIGHT)
    gpus = ", ".join(dict.fromkeys(rows["gpu"].astype(str)))
    words = textwrap.wrap(f"{gpus}. {NOTE}", int((width - 0.2) / 0.072))
    header = 0.42 + 0.18 * len(words)
    height = header + sum(heights)
    with rc_context(RC):
        figure = Figure(figsize=(width, height))
        figure.text(0.1 / width, 1 - 0.2 / height, "What each stage costs", size=12, weight="bold", va="center")
        for i, line in enumerate(words):
            figure.text(0.1 / width, 1 - (0.42 + 0.18 * i) / height, line, size=9, color=palette.MUTED, va="center")
        top = height - header
        for row, tall in zip(lines, heights, strict=True):
            for column, (_, group) in enumerate(row):
                left = column * (_NAMES + _WIDTH + _RIGHT) + _NAMES
                bars = _BAR * len(group)
                box = (left / width, (top - _TITLE - bars) / height, _WIDTH / width, bars / height)
                _panel(figure.add_axes(box), group)
            top -= tall
    return figure


def _panel(ax: Axes, group: pd.DataFrame) -> None:
    scale, unit = (1e6, "microseconds") if group["median_s"].max() < 1e-3 else (1e3, "milliseconds")
    times = group["median_s"].to_numpy(float) * scale
    base = times[0]
    names = group["variant"].astype(str).to_list()
    places = range(len(group))
    looks: dict[str, Any] = {"height": 0.72}
    ax.barh(places, times, color=[palette.MUTED, *[_KEPT] * (len(times) - 1)], **looks)
    ax.barh(places, (base - times).clip(min=0.0), left=times, color=_SAVED, **looks)
    ax.axvline(base, color=palette.TEXT, linewidth=0.8, linestyle=(0, (4, 2)))
    for place, share in zip(places, group["saved"].to_numpy(float), strict=True):
        text = "" if math.isnan(share) else f"{-100 * share:+.1f}%"
        ax.text(max(base, times[place]), place, f" {text}", size=8.5, va="center", color=palette.TEXT)
    ax.set_yticks(list(places), names)
    ax.set_ylim(len(group) - 0.4, -0.6)
    ax.set_xlim(0.0, max(base, times.max()) * 1.02)
    ax.set_title(f"{group['direction'].iloc[0]}  {group['label'].iloc[0]}", loc="left", size=9.5, weight="bold")
    ax.set_xlabel(unit, labelpad=2)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.tick_params(length=0, labelsize=8.5, axis="y", labelcolor=palette.TEXT)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
