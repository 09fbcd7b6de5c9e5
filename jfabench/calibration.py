"""Costs of a tile from a result folder: `jfabench.tile_costs.calibrate` over the calls of our own kernels in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jfabench.folder import ResultFolder
from jfabench.intervals import median_interval
from jfabench.operator import load_operator
from jfabench.records import Record, read_records
from jfabench.schedule import Shape, compared, tiles
from jfabench.schedule_run import ScheduleError, first_line
from jfabench.tile_costs import Fit, Sample, calibrate, default_shape

PROVIDER = "tlx_jfa"
LIST_SECONDS = 10e-6
"""What a forward does beside its kernel: the list of tiles. Taken where all cases have as many tiles, so that no fit
can tell it from their costs."""


@dataclass(frozen=True)
class FolderFit:
    """A fit of one kernel and shape on one device, and the labels of the cases that it was made from."""

    gpu: str
    direction: str
    head_dim: int
    queries: int
    shape: Shape
    fit: Fit
    c_given: bool
    labels: tuple[str, ...]


Group = tuple[str, str, int, int, Shape]
"""GPU, direction, head dimension, queries of a sequence, shape of tiles."""


def fit_folder(folder: Path) -> list[FolderFit]:
    """A fit for each direction, number of queries and shape of tiles of which the folder has enough cases.

    Only broadcast queries without a mask count, which a call computes by one attention kernel, in default
    configurations: they must have been measured with JFABENCH_TUNE=0. What a call does beside that kernel grows with
    the number of queries, so that each number is fitted by itself. Raises `ScheduleError`, which names the folder.
    """
    groups: dict[Group, list[tuple[str, Sample]]] = {}
    for record in _records(folder):
        try:
            found = _sample(record)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            case = f"{record.case.direction} {record.inputs.get('label', '')}".strip()
            raise ScheduleError(
                f"{folder}: the record of {PROVIDER} {case} cannot be used ({first_line(error)}); name a result folder "
                "that `sweep` wrote"
            ) from error
        if found is not None:
            group, label, sample = found
            groups.setdefault(group, []).append((label, sample))
    try:
        fits = list(_fits(groups))
    except ValueError as error:
        raise ScheduleError(f"{folder}: {error}") from error
    if not fits:
        raise ScheduleError(
            f"{folder}: needs at least 3 measured cases of {PROVIDER} with broadcast queries and no mask, on a GPU"
        )
    return fits


def _sample(record: Record) -> tuple[Group, str, Sample] | None:
    """What a record says of the costs of tiles, with its group and its label; None for a case that does not count.

    Whatever a foreign or damaged record makes of it is raised.
    """
    operator = load_operator(record.case.operator)
    params = operator.parse(record.case.params)
    sms = record.env.get("sm_count")  # none on a CPU
    counts = params.broadcast_q and params.bounds == (-1, -1) and params.heads == params.kv_heads
    if not counts or record.measurement is None or sms is None:
        return None
    if type(sms) is not int or sms < 1:
        raise ValueError(f"sm_count {sms!r} is no number of multiprocessors")
    seconds = median_interval(record.measurement.rounds).middle
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time of {seconds:g} s")
    direction = record.case.direction
    queries, keys = params.draw_lengths(record.case.seed)
    shape = default_shape(direction, params.head_dim, queries, keys, params.bounds, broadcast=params.broadcast_q)
    work = tiles(queries, keys, shape, params.heads)
    weight = queries if shape.over_keys else keys
    placed = compared(work, np.ones(len(work)), weight, ["zigzag"], sms, shape.residents)[0]
    group = str(record.env.get("gpu", "")), direction, params.head_dim, int(queries[0]), shape
    return group, operator.label(params), Sample.of(work, placed, seconds)


def _fits(groups: dict[Group, list[tuple[str, Sample]]]) -> Iterator[FolderFit]:
    for (gpu, direction, head_dim, M, shape), group in groups.items():
        samples = [sample for _, sample in group]
        counts = [float(sample.tiles.sum()) for sample in samples]
        alike = max(counts) < 1.1 * min(counts)
        if len(samples) >= 3:
            fit = calibrate(samples, LIST_SECONDS if alike and direction == "fwd" else None)
            yield FolderFit(gpu, direction, head_dim, M, shape, fit, alike, tuple(label for label, _ in group))


def _records(folder: Path) -> Iterator[Record]:
    """Right results of our own kernels."""
    try:
        found = read_records(ResultFolder(folder).stored).records
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(
            f"{folder}: records.jsonl cannot be read ({why}); name a result folder that `sweep` wrote"
        ) from error
    for record in found:
        if record.case.provider == PROVIDER and record.status == "ok" and record.case.direction in ("fwd", "bwd"):
            yield record


def lines(fits: Iterable[FolderFit]) -> Iterator[str]:
    """Each fit, and how far each of its cases is from it, for people."""
    for found in fits:
        side = "keys" if found.shape.over_keys else "queries"
        fit = found.fit
        given = " (given)" if found.c_given and found.direction == "fwd" else ""
        yield (
            f"{found.gpu} {found.direction} M={found.queries} D={found.head_dim}, tiles of {found.shape.tile} {side}, "
            f"steps of {found.shape.step}: a = {fit.a * 1e6:.3f} us, b = {fit.b * 1e6:.3f} us a step, "
            f"beside the kernel {fit.c * 1e6:.1f} us{given}; "
            f"{len(found.labels)} cases, off by {fit.residual:.1%} at most"
        )
        for label, error in zip(found.labels, fit.errors, strict=True):
            yield f"  {error:+.1%}  {label}"
