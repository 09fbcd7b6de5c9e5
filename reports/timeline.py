"""What a timeline shows: when each multiprocessor worked, what the roles of a kernel waited for, and both as pictures.

A folder holds `timeline_cases.csv` (a row for each recorded launch, a run) and `timeline.csv` (a row for each tile of
each role of each program, with the number of its run), which `jfabench.timeline` writes. From them come `waits.csv`,
pictures in `charts/`, and `timeline.trace.json`, for https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jfabench.folder import write_whole
from jfabench.reports import palette
from jfabench.reports.heatmap import Occupancy, heatmap
from jfabench.reports.pictures import RC, save

RUNS, SPANS, WAITS, TRACE = "timeline_cases.csv", "timeline.csv", "waits.csv", "timeline.trace.json"
LOADER = "loader"
WORK = "work"
"""Name of what is left of a role's time: it issues instructions, or waits for what is not recorded."""

_ARRIVALS = {"q": "Q", "k": "K", "v": "V", "dout": "dO"}
_OTHERS = {
    "turn": "a turn",
    "pair": "the other consumer",
    "stores": "stores",
    "matmul": "matmuls",
    WORK: "nothing recorded",
}
_SLOTS = {"matmul": 0, "turn": 1, "k": 2, "v": 3, "q": 4, "stores": 6, "dout": 7, "pair": 8}
_BUSY = palette.LINE


def wait_text(role: str, wait: str) -> str:
    """What `role` waits for at `wait`, in words."""
    if wait in _ARRIVALS:
        return f"a free slot of {_ARRIVALS[wait]}" if role == LOADER else _ARRIVALS[wait]
    return _OTHERS.get(wait, wait)


@dataclass(frozen=True)
class Timeline:
    """The two tables. `spans` has times in seconds from the first begin of a run, and waits in cycles."""

    runs: pd.DataFrame
    spans: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Timeline:
        return cls(pd.read_csv(folder / RUNS), pd.read_csv(folder / SPANS))

    @property
    def waits(self) -> list[str]:
        """The columns of `spans` that are waits."""
        return [str(name) for name in self.spans if str(name).startswith("wait_")]

    def of(self, run: int) -> pd.DataFrame:
        return self.spans[self.spans["run"] == run]


# Numbers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Balance:
    """How evenly a run used the multiprocessors, in seconds; `imbalance` is longest over mean.

    Predicted from tiles that cost `fixed_s + per_row_s * rows`, for the rows that a tile loops over, fitted to the
    run's own tiles: what the deal of the tiles alone would have made of it.
    """

    makespan_s: float
    imbalance: float
    fixed_s: float
    per_row_s: float
    predicted_makespan_s: float
    predicted_imbalance: float


def balance(spans: pd.DataFrame) -> Balance:
    """Of the spans of one run. A multiprocessor is busy from its first begin to its last end."""
    of_sm = spans.groupby("sm")
    busy = of_sm["end_s"].max() - of_sm["start_s"].min()
    consumers = spans[spans["role"] != LOADER]
    tiles = consumers.assign(seconds=consumers["end_s"] - consumers["start_s"]).groupby(["program", "step"])
    tile = pd.DataFrame({"seconds": tiles["seconds"].mean(), "rows": tiles["rows"].first()})
    if tile["rows"].nunique() > 1:
        per_row, fixed = np.polyfit(tile["rows"], tile["seconds"], 1)
    else:
        per_row, fixed = 0.0, tile["seconds"].mean()
    predicted = (fixed + per_row * tile["rows"]).groupby("program").sum()
    return Balance(
        makespan_s=float(spans["end_s"].max() - spans["start_s"].min()),
        imbalance=float(busy.max() / busy.mean()),
        fixed_s=float(fixed),
        per_row_s=float(per_row),
        predicted_makespan_s=float(predicted.max()),
        predicted_imbalance=float(predicted.max() / predicted.mean()),
    )


def waits(timeline: Timeline) -> pd.DataFrame:
    """A row for each run, role and wait, and one for the rest (`work`); waits that never occur are left out.

    `share` is of the role's time, over all programs; `seconds` are those of a program on average.
    """
    names = timeline.waits
    rows = []
    for run in timeline.runs.to_dict("records"):
        for role, spans in timeline.of(run["run"]).groupby("role", sort=True):
            cycles = {name.removeprefix("wait_"): int(spans[name].sum()) for name in names}
            total = int(spans["cycles"].sum())
            # A wait for the first data of a tile ends in the tile before, and so all of them are in some tile.
            cycles = {name: count for name, count in cycles.items() if count} | {WORK: total - sum(cycles.values())}
            for name, count in cycles.items():
                rows.append(
                    {
                        **{key: run[key] for key in ("run", "label", "direction", "kernel", "order")},
                        "role": role,
                        "wait": name,
                        "what": wait_text(str(role), name),
                        "cycles": count,
                        "share": count / max(total, 1),
                        "seconds": count / run["clock_hz"] / spans["program"].nunique(),
                    }
                )
    return pd.DataFrame(rows)


def bottleneck(table: pd.DataFrame) -> str:
    """A sentence on what the consumers of one run wait for most; `table` has its rows of :func:`waits`."""
    consumers = table[table["role"] != LOADER]
    shares = consumers.groupby("wait")["share"].sum() / max(consumers["role"].nunique(), 1)
    waiting = shares.drop(WORK, errors="ignore").sort_values(ascending=False)
    if waiting.empty:
        return "consumers never wait"
    first = str(waiting.index[0])
    text = f"consumers wait {waiting.sum():.0%} of their time, most for {wait_text('consumer', first)}"
    return f"{text} ({waiting.iloc[0]:.0%})"


# The trace -----------------------------------------------------------------------------------------------------------


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Events of the Chrome trace format: a process for each multiprocessor of a run, a thread for each role.

    Times are microseconds. A span's `args` are its tile and the microseconds that it waited.
    """
    names = timeline.waits
    for run in timeline.runs.to_dict("records"):
        spans = timeline.of(run["run"])
        first = spans.groupby("sm")["program"].rank("dense").astype(int) - 1  # which of the multiprocessor's programs
        roles = sorted(spans["role"].unique(), key=lambda role: (role != LOADER, role))
        threads = first * len(roles) + spans["role"].map({role: i for i, role in enumerate(roles)})
        base = int(run["run"]) * 1000
        for sm in sorted(spans["sm"].unique()):
            name = f"{run['kernel']} {run['order']}, SM {sm:03d}"
            yield {"ph": "M", "name": "process_name", "pid": base + int(sm), "args": {"name": name}}
        for sm, thread in sorted(set(zip(spans["sm"], threads, strict=True))):
            name = f"program {thread // len(roles)}: {roles[thread % len(roles)]}"
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": base + int(sm),
                "tid": int(thread),
                "args": {"name": name},
            }
        per_us = run["clock_hz"] * 1e-6
        for thread, span in zip(threads, spans.to_dict("records"), strict=True):
            waited = {
                f"waited for {wait_text(span['role'], name.removeprefix('wait_'))}": round(span[name] / per_us, 3)
                for name in names
                if span[name]
            }
            yield {
                "ph": "X",
                "name": f"{span['k_len']} keys",
                "cat": run["kernel"],
                "pid": base + int(span["sm"]),
                "tid": int(thread),
                "ts": round(span["start_s"] * 1e6, 3),
                "dur": round((span["end_s"] - span["start_s"]) * 1e6, 3),
                "args": {name: span[name] for name in ("tile", "head", "block", "q_len", "step")} | waited,
            }


# Pictures ------------------------------------------------------------------------------------------------------------


def build(folder: Path) -> list[Path]:
    """Writes `waits.csv`, the trace and the pictures of the tables in `folder`, and returns the pictures' paths."""
    timeline = Timeline.read(folder)
    table = waits(timeline)
    write_whole(folder / WAITS, table.to_csv(index=False, float_format="%.6g").encode())
    events = {"displayTimeUnit": "ns", "traceEvents": list(trace_events(timeline))}
    write_whole(folder / TRACE, json.dumps(events, separators=(",", ":")).encode())
    written: list[Path] = []
    keys = ["operator", "provider", "direction", "seed", "shape", "kernel"]
    for number, (_, runs) in enumerate(timeline.runs.groupby(keys, sort=False)):
        part = Timeline(runs, timeline.spans)
        stem = folder / "charts" / f"timeline-{number}-{runs['kernel'].iloc[0]}"
        written += save(occupancy(part), stem.with_name(f"{stem.name}-sms"))
        written += save(bars(part, table), stem.with_name(f"{stem.name}-waits"))
    return written


def _headline(runs: pd.DataFrame) -> str:
    first = runs.iloc[0]
    return f"{first['provider']}, {first['kernel']}: {first['label']}"


def _source(runs: pd.DataFrame) -> str:
    slower = runs["recorded_s"] / runs["unrecorded_s"] - 1
    text = f"Recorded inside the kernel on {runs['gpu'].iloc[0]}"
    return text if slower.isna().all() else f"{text}; recording makes a call {slower.max():.1%} longer."


def occupancy(part: Timeline) -> Figure:
    """Multiprocessor by time, a panel for each run of one case."""
    panels = []
    for run in part.runs.to_dict("records"):
        spans = part.of(run["run"])
        tiles = spans[spans["role"] == "consumer 0"]
        intervals = pd.DataFrame(
            {"sm": tiles["sm"], "start": tiles["start_s"], "end": tiles["end_s"], "label": tiles["k_len"]}
        )
        found = balance(spans)
        note = (
            f"{found.makespan_s * 1e6:.0f} us, imbalance {found.imbalance:.3f}; "
            f"predicted {found.predicted_makespan_s * 1e6:.0f} us, {found.predicted_imbalance:.3f}"
        )
        lanes = math.ceil(spans["program"].nunique() / max(spans["sm"].nunique(), 1))
        panels.append(Occupancy(str(run["order_text"]), intervals, sms=int(run["sms"]), lanes=lanes, note=note))
    return heatmap(panels, title=_headline(part.runs), subtitle=_source(part.runs), label="keys of the tile's sequence")


_BAR, _ROW, _SIDE, _FOOT = 4.6, 0.34, 1.1, 0.95  # inches


def bars(part: Timeline, table: pd.DataFrame) -> Figure:
    """What each role does with its time, a panel for each run of one case, below each other."""
    mine = {run["run"]: table[table["run"] == run["run"]] for run in part.runs.to_dict("records")}
    heights = {number: 0.75 + _ROW * rows["role"].nunique() for number, rows in mine.items()}
    width = _SIDE + _BAR + 0.2
    head = textwrap.wrap(_source(part.runs), int(width / 0.075))
    top = 0.45 + 0.18 * len(head)
    height = top + sum(heights.values()) + _FOOT
    with rc_context(RC):
        figure = Figure(figsize=(width, height))
        figure.text(0.1 / width, 1 - 0.2 / height, _headline(part.runs), size=12, weight="bold", va="center")
        for i, line in enumerate(head):
            figure.text(0.1 / width, 1 - (0.42 + 0.18 * i) / height, line, size=9, color=palette.MUTED, va="center")
        y = height - top
        for run in part.runs.to_dict("records"):
            rows = mine[run["run"]]
            y -= heights[run["run"]]
            box = (_SIDE / width, (y + 0.3) / height, _BAR / width, (heights[run["run"]] - 0.7) / height)
            ax = figure.add_axes(box)
            _stack(ax, rows)
            sentence = bottleneck(rows)
            ax.set_title(f"{run['order_text']}: {sentence}", loc="left", size=9, pad=4, x=-_SIDE / _BAR + 0.02)
        present = {name for rows in mine.values() for name in rows["wait"]}
        patches = [
            Patch(color=_color(name), label=wait_text("consumer", name)) for name in (*_SLOTS, WORK) if name in present
        ]
        figure.legend(
            handles=patches,
            loc="lower left",
            bbox_to_anchor=(0.02 / width, 0.02),
            ncols=5,
            frameon=False,
            fontsize=8.5,
            columnspacing=1.4,
            handlelength=1.2,
            alignment="left",
            title="waiting for (the loader: for a free slot of Q, K, V, dO)",
            title_fontsize=8.5,
        )
    return figure


def _color(wait: str) -> str:
    return palette.STYLES[_SLOTS[wait]].color if wait in _SLOTS else _BUSY


def _stack(ax: Axes, rows: pd.DataFrame) -> None:
    roles = sorted(rows["role"].unique(), key=lambda role: (role != LOADER, role))
    shares: Mapping[Any, float] = rows.set_index(["role", "wait"])["share"].to_dict()
    for place, role in enumerate(roles):
        left = 0.0
        for wait in (*_SLOTS, WORK):
            share = max(shares.get((role, wait), 0.0), 0.0)
            ax.barh(place, share, left=left, height=0.72, color=_color(wait), linewidth=0)
            if share >= 0.045:
                ink = palette.TEXT if wait == WORK else palette.BACKGROUND
                ax.text(left + share / 2, place, f"{share:.0%}", ha="center", va="center", size=8, color=ink)
            left += share
    ax.set_yticks(range(len(roles)), roles)
    ax.invert_yaxis()
    ax.set_xlim(0.0, 1.0)
    ax.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    ax.tick_params(length=0, labelsize=8)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
