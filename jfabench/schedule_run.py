"""The command `schedule`: what each policy is predicted to make of some lengths, as a table, a CSV and a picture."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfabench import tile_costs
from jfabench.folder import write_whole
from jfabench.operator import load_operator
from jfabench.schedule import MEANINGS, Policy, Schedule, Shape, Tiles, compared, count_tiles, intervals, tiles
from jfabench.tile_costs import TileCost

if TYPE_CHECKING:
    from rich.console import Console

    from jfabench.sweep import Sweep

COLUMNS = (
    *("label", "direction", "sms", "programs", "policy", "tiles", "steps", "makespan", "lower_bound", "unit"),
    *("makespan_over_bound", "imbalance", "busy_share", "predicted_call_s", "cost_gpu", "a", "b", "cost_source"),
)
"""Columns of `schedule.csv`: a row for each case and policy. `imbalance` is that of the busiest multiprocessor's work
over the average; `predicted_call_s` adds what a call does beside its attention kernel."""

QUERIES, HEADS = 256, 4
"""What lengths in a file are taken to meet, unless told otherwise."""

MOST_PICTURES = 8
MOST_TILES = 1_000_000
"""Of a case: so many are placed, drawn and written in about a minute."""


class ScheduleError(ValueError):
    """Says what is wrong with what was asked for, and the remedy."""


@dataclass(frozen=True)
class Work:
    """The lengths of a case, `[B]` each, and what else decides about its tiles."""

    label: str
    direction: str
    queries: Any
    keys: Any
    heads: int
    kv_heads: int
    head_dim: int
    bounds: tuple[int, int]
    broadcast: bool  # all sequences share their queries

    @property
    def shape(self) -> Shape:
        """Of its tiles."""
        return tile_costs.default_shape(
            self.direction, self.head_dim, self.queries, self.keys, self.bounds, broadcast=self.broadcast
        )


@dataclass(frozen=True)
class Prediction:
    work: Work
    cost: TileCost
    tiles: Tiles
    schedules: tuple[Schedule, ...]

    @property
    def unit(self) -> str:
        """What times are in."""
        if self.cost.gpu:
            return "s"
        return f"steps of {self.cost.shape.step} {'queries' if self.cost.shape.over_keys else 'keys'}"


def of_sweep(sweep: Sweep) -> list[Work]:
    """The shapes of a sweep file in each of its directions, whatever its providers; `fwd_bwd` is both."""
    operator = load_operator(sweep.config.operator)
    found: dict[tuple[str, str], Work] = {}
    for case in sweep.cases:
        params = operator.parse(case.params)
        for direction in ("fwd", "bwd") if case.direction == "fwd_bwd" else (case.direction,):
            if (case.shape_key, direction) not in found:
                queries, keys = params.draw_lengths(case.seed)
                sizes = params.heads, params.kv_heads, params.head_dim
                label = operator.label(params)
                rest = params.bounds, params.broadcast_q
                found[case.shape_key, direction] = Work(label, direction, queries, keys, *sizes, *rest)
    return list(found.values())


def of_file(
    path: str, column: str | None, queries: int, heads: int, head_dim: int, directions: Sequence[str]
) -> list[Work]:
    """Broadcast queries over the lengths in a file, a row a sequence.

    Raises `ScheduleError`, which names the option that is wrong.
    """
    from pydantic import ValidationError

    from jfabench.operators.jagged_attention import JaggedAttentionParams

    spec = {"kind": "file", "path": path, **({"column": column} if column else {})}
    shape = {"heads": heads, "head_dim": head_dim, "broadcast_q": True, "q_len": queries, "lengths": spec}
    options = {"lengths": f"--lengths {path}", "heads": f"--heads {heads}", "q_len": f"--q-len {queries}"}
    options["column"] = f"--column {column}"
    try:
        params = JaggedAttentionParams.model_validate(shape)
        drawn = params.draw_lengths(0)
    except ValidationError as error:
        why = first_line(error)
        name = str((error.errors(include_url=False)[0]["loc"] or ("q_len",))[0])  # the whole: batch times queries
        name = "column" if f"has no column {column!r}" in why else name
        raise ScheduleError(f"{options[name]}: {why}") from error
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{options['lengths']}: {first_line(error)}") from error
    label = f"{Path(path).name} M={queries} B={params.batch} H={heads}"
    works = [Work(label, direction, *drawn, heads, heads, head_dim, (-1, -1), True) for direction in directions]
    for work in works:
        tile = work.shape
        count = count_tiles(*drawn, tile, heads)
        # What is far from the default is to blame, unless the file has too many rows for any queries and heads.
        excess = {"heads": heads / HEADS, "q_len": 1.0 if tile.over_keys else queries / QUERIES}
        option = max(excess, key=lambda name: excess[name])
        _require_few(count, options[option if count / excess[option] <= MOST_TILES else "lengths"], work)
    return works


def _require_few(count: int, asked: str, work: Work) -> None:
    """Raises `ScheduleError` where there are more tiles than can be placed, written and drawn in a minute."""
    if count > MOST_TILES:
        raise ScheduleError(
            f"{asked}: {count:,} tiles ({work.direction} {work.label}), of which {MOST_TILES:,} can be scheduled at "
            "most: choose less"
        )


def first_line(error: Exception) -> str:
    """What is wrong, in a line; of what pydantic finds, the first thing."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return str(first["msg"]).removeprefix("Value error, ")
    return str(error.args[0] if isinstance(error, KeyError) else error).splitlines()[0]


def cost_of(work: Work, sms: int, gpu: str | None) -> TileCost:
    """Measured costs where they are those of the device that is asked about, else a model in steps."""
    shape = work.shape
    queries = int(work.queries[0]) if len(set(work.queries.tolist())) == 1 else None
    found = tile_costs.known_cost(work.direction, work.head_dim, shape, gpu, queries)
    if found is None and gpu is not None:
        have = ", ".join(dict.fromkeys(f"{c.direction} D={c.head_dim} on {c.gpu}" for c in tile_costs.KNOWN))
        raise ScheduleError(
            f"--gpu {gpu}: no tile like those of {work.direction} D={work.head_dim} {work.label} was measured there; "
            f"known are {have}"
        )
    if found is not None and (gpu is not None or tile_costs.MULTIPROCESSORS[found.gpu] == sms):
        return found
    return tile_costs.model(work.direction, work.head_dim, shape)


def predict(work: Work, sms: int, policies: Sequence[Policy], gpu: str | None = None) -> Prediction:
    cost = cost_of(work, sms, gpu)
    backward = cost.shape.over_keys
    heads, group = (work.kv_heads, work.heads // work.kv_heads) if backward else (work.heads, 1)
    _require_few(count_tiles(work.queries, work.keys, cost.shape, heads), work.label, work)
    cut = tiles(work.queries, work.keys, cost.shape, heads, group, work.bounds)
    weight = work.queries if backward else work.keys
    made = compared(cut, cost.seconds(cut), weight, policies, sms, cost.shape.residents)
    return Prediction(work, cost, cut, tuple(made))


# Results -------------------------------------------------------------------------------------------------------------


def rows(predictions: Iterable[Prediction]) -> Iterator[dict[str, Any]]:
    for found in predictions:
        cost = found.cost
        for placed in found.schedules:
            yield {
                "label": found.work.label,
                "direction": found.work.direction,
                "sms": placed.sms,
                "programs": placed.programs,
                "policy": placed.policy,
                "tiles": len(found.tiles),
                "steps": int(found.tiles.steps.sum()),
                "makespan": f"{placed.makespan:.6g}",
                "lower_bound": f"{placed.lower_bound:.6g}",
                "unit": found.unit,
                "makespan_over_bound": f"{placed.over_bound:.5g}",
                "imbalance": f"{placed.imbalance:.5g}",
                "busy_share": f"{placed.busy_share:.5g}",
                "predicted_call_s": f"{placed.makespan + cost.c:.6g}" if cost.gpu else "",
                "cost_gpu": cost.gpu or "model",
                "a": f"{cost.a:.6g}",
                "b": f"{cost.b:.6g}",
                "cost_source": cost.source,
            }


def write_csv(path: Path, lines: Iterable[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, text.getvalue().encode())


def write_tiles(path: Path, predictions: Iterable[Prediction]) -> None:
    """A row a tile and policy: where and when it runs, in the prediction's unit, and what it is."""
    names = ("sm", "start", "end", "label", "sequence", "head", "block")
    lines = (
        {"case": f"{found.work.direction} {found.work.label}", "policy": placed.policy, "unit": found.unit, **line}
        for found in predictions
        for placed in found.schedules
        for line in intervals(found.tiles, placed).to_dict("records")
    )
    write_csv(path, lines, ("case", "policy", "unit", *names))


def provenance(found: Prediction) -> str:
    """Where the costs come from, in a sentence."""
    cost = found.cost
    if cost.gpu:
        return (
            f"Predicted, not measured: a tile costs {cost.a * 1e6:.2f} us and {cost.b * 1e6:.2f} us a step, fitted to "
            f"{cost.cases} cases measured on an {cost.gpu} (off by {cost.residual:.1%} at most)."
        )
    return (
        f"A model in {found.unit}, not seconds: of this device and kernel nothing is measured. A tile is taken to cost "
        f"{cost.a:.2f} steps more than it has, as with D=128 on the {tile_costs.KNOWN[0].gpu}."
    )


def show(predictions: Sequence[Prediction], console: Console) -> None:
    from rich import box
    from rich.table import Table

    for found in predictions:
        placed = found.schedules[0]
        head = f"{found.work.direction} {found.work.label}: {len(found.tiles):,} tiles on {placed.sms} multiprocessors"
        console.print(f"\n{head}", markup=False, highlight=False, soft_wrap=True, style="bold")
        console.print(provenance(found), markup=False, highlight=False, soft_wrap=True)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("policy", "makespan", "over the bound", "max/avg", "busy"):
            table.add_column(heading, justify="left" if heading == "policy" else "right")
        for placed in found.schedules:
            end = f"{placed.makespan * 1e6:,.1f} us" if found.cost.gpu else f"{placed.makespan:,.1f}"
            shares = f"{placed.over_bound:.3f}", f"{placed.imbalance:.3f}", f"{placed.busy_share:.1%}"
            table.add_row(placed.policy, end, *shares)
        console.print(table)
    for policy in dict.fromkeys(placed.policy for found in predictions for placed in found.schedules):
        console.print(f"{policy}: {MEANINGS[policy]}", markup=False, highlight=False, soft_wrap=True)


def draw(found: Prediction, folder: Path) -> Path:
    """Writes the heatmap of each policy into one picture, PNG and SVG, and returns the PNG's path."""
    from jfabench.reports.heatmap import Occupancy, heatmap, save

    panels = [
        Occupancy(
            placed.policy,
            intervals(found.tiles, placed),
            placed.sms,
            found.cost.shape.residents,
            f"{placed.over_bound:.3f} of the lower bound, {placed.busy_share:.1%} busy",
        )
        for placed in found.schedules
    ]
    figure = heatmap(
        panels,
        title=f"{found.work.direction} {found.work.label}",
        subtitle=f"{found.schedules[0].sms} multiprocessors. {provenance(found)}",
        unit=None if found.cost.gpu else found.unit,
        label="steps of a tile",
    )
    words = f"{found.work.direction}-{found.work.label}-{found.schedules[0].sms}sms"
    return save(figure, folder / f"schedule-{re.sub(r'[^A-Za-z0-9.=]+', '_', words)}")[0]
