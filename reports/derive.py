"""Records -> one tidy row per case, and geometric means over a grid. Every number of a report is computed here.

Definitions:

- `median_s`, `low_s`, `high_s`: geometric mean of the rounds' medians, with its 95% interval (`jfabench.intervals`).
- `span_s`: median time from the start of a call's first kernel to the end of its last (profiler mode).
- `tflops`: `work.flops / median / 1e12`; `bytes_per_s`: `work.bytes / median`.
- `roofline_s = max(flops / peak FLOP/s, bytes / peak bytes/s)`; `roofline_fraction = roofline_s / median`.
- `speedup`: how many times faster than the baseline, of the same inputs and direction on the same GPU in the same mode:
  the geometric mean of the ratios of the medians of the rounds that both have. Where one had more rounds it differs a
  little from the ratio of `median_s`: a drift of the clocks cancels in it.

Derived columns are filled for `ok` records only: a wrong result has no speed.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jfabench.folder import Ceilings
from jfabench.intervals import Rounds, is_precise, median_interval
from jfabench.records import DIRECTIONS, STATUSES, Measurement, Record, canonical_json, overhead
from jfabench.reports import statistics as tables
from jfabench.reports.statistics import geometric_mean

CPU = "CPU"
DEFAULT_TARGET = 0.01
"""The relative width of an interval that counts as precise, where no `run.json` says what was asked for."""
_GAPS = 1.1  # a span this many times as long as the sum of its kernels is flagged


def table(
    records: Iterable[Record],
    ceilings: Ceilings | None = None,
    baseline: str | None = None,
    targets: Sequence[float] = (),
) -> pd.DataFrame:
    """One row per record, in the records' order. `targets` is the precision that each was measured for.

    The parameters stand between the columns `label` and `status`, under dotted names (`param_columns`). Error columns
    are `<tensor>_rel` and `<tensor>_max_abs`. `flags` holds words separated by spaces:

    - `throttled`: the GPU had a reason to lower its clocks (column `throttled`).
    - `imprecise`: the interval of the median is wider than the target, or its rounds are too few to tell.
    - `single-round`: the interval cannot show drift.
    - `not-interleaved`: the speedup compares with a baseline that was not measured in turns with this case.
    - `gaps`: the GPU idled between the kernels of a call, which the sum of their times does not hold.
    - `unchecked`, `partly-checked`: see `not_checked`.
    - `above-roofline`: faster than the ceilings allow; see the report for what that can mean.
    """
    rows = list(records)
    frame = _facts_table(rows)
    ok = (frame["status"] == "ok").to_numpy(dtype=bool)

    cases: list[Rounds] = [record.measurement.rounds if record.measurement else () for record in rows]
    timing = tables.columns(map(median_interval, cases))
    columns: dict[str, Any] = {
        "median_s": timing.middle,
        "low_s": timing.low,
        "high_s": timing.high,
        "samples": [sum(map(len, rounds)) for rounds in cases],
        "rounds": [sum(1 for samples in rounds if samples) for rounds in cases],
        "target": list(targets) or [DEFAULT_TARGET] * len(rows),
        "mode": [record.measurement.mode if record.measurement else "" for record in rows],
        "stopped_by": [record.measurement.stopped_by if record.measurement else "" for record in rows],
        "kernels_per_call": _floats(r.measurement.kernels_per_call if r.measurement else None for r in rows),
        "span_s": _floats(_median_span(record.measurement) for record in rows),
    }

    flops = _floats(record.work.flops if record.work else None for record in rows)
    nbytes = _floats(record.work.bytes if record.work else None for record in rows)
    median = np.where(ok, timing.middle, np.nan)
    columns |= {"flops": flops, "bytes": nbytes, "tflops": flops / median / 1e12, "bytes_per_s": nbytes / median}
    floor = _roofline_seconds(rows, flops, nbytes, ceilings)
    columns |= {
        "roofline_s": floor,
        "roofline_fraction": floor / median,
        "ceiling_source": np.where(np.isnan(floor), "", ceilings.source if ceilings else ""),
    }

    base, note = _baseline_rows(rows, baseline)
    base = [row if right else -1 for row, right in zip(base, ok, strict=True)]
    paired = [other == row or _in_turns(rows[other], rows[row]) for row, other in enumerate(base)]
    ratios = tables.speedups(cases, base, paired)
    columns |= {
        "speedup": ratios.middle,
        "speedup_low": ratios.low,
        "speedup_high": ratios.high,
        "speedup_note": note,
    }
    columns |= _check_columns(rows)
    columns["throttled"] = [" ".join(map(str, record.clocks.get("throttled") or ())) for record in rows]
    unpaired = [other >= 0 and not turns for other, turns in zip(base, paired, strict=True)]
    columns["flags"] = _flags(rows, columns, ok, unpaired)
    columns |= _machine_columns(rows)
    return pd.concat([frame, pd.DataFrame(columns, index=frame.index)], axis=1)


def param_columns(rows: pd.DataFrame) -> list[str]:
    """The names of the columns that hold parameters."""
    names = list(rows.columns)
    return names[names.index("label") + 1 : names.index("status")]


def directions(rows: pd.DataFrame) -> list[str]:
    """The directions that occur: forward before backward, whatever was measured first."""
    found = list(rows["direction"].unique())
    return [*(name for name in DIRECTIONS if name in found), *(name for name in found if name not in DIRECTIONS)]


def summary(rows: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Geometric means per direction and provider (and per value of the parameters in `by`, such as `lengths.fill`).

    `speedup` is the mean over the `speedup_cases` shapes where this provider and the baseline are both ok, `roofline`
    over its `roofline_cases`; `cases` counts the shapes of the grid (or of this slice of it) in this direction that any
    provider has a record of. `complete` tells whether `speedup` is over all of them: means over different cases
    do not compare. A column for each status counts this provider's records. Forward comes before backward.
    """
    keys = ["direction", *by]
    result = []
    order = directions(rows)
    groups: list[tuple[Any, pd.DataFrame]] = list(rows.groupby(keys, sort=False, dropna=False))
    groups.sort(key=lambda item: order.index(item[0][0] if isinstance(item[0], tuple) else item[0]))
    for place, group in groups:
        cases = group["shape"].nunique()
        for provider, mine in group.groupby("provider", sort=False):
            ratio = mine["speedup"].dropna()
            fraction = mine["roofline_fraction"].dropna()
            status = mine["status"].value_counts()
            result.append(
                dict(zip(keys, place if isinstance(place, tuple) else (place,), strict=True))
                | {
                    "provider": provider,
                    "speedup": geometric_mean(ratio),
                    "speedup_cases": len(ratio),
                    "roofline": geometric_mean(fraction),
                    "roofline_cases": len(fraction),
                    "cases": cases,
                    "complete": len(ratio) == cases,
                }
                | {name: int(status.get(name, 0)) for name in STATUSES}
            )
    head = [*keys, "provider", "speedup", "speedup_cases", "roofline", "roofline_cases", "cases", "complete", *STATUSES]
    return pd.DataFrame(result, columns=head)


# One record's facts --------------------------------------------------------------------------------------------------


def _facts_table(records: Sequence[Record]) -> pd.DataFrame:
    """Head, parameters, status and reason; for records that bring no label, one of whatever varies."""
    of_shape = {record.case.shape_key: record.case.params for record in records}
    flat_shape = {shape: flatten(params) for shape, params in of_shape.items()}
    flat = [flat_shape[record.case.shape_key] for record in records]
    params = list(dict.fromkeys(name for facts in flat for name in facts))
    columns: dict[str, Any] = {
        "operator": [record.case.operator for record in records],
        "provider": [record.case.provider for record in records],
        "direction": [record.case.direction for record in records],
        "seed": [record.case.seed for record in records],
        "shape": [hashlib.sha256(record.case.shape_key.encode()).hexdigest()[:10] for record in records],
        "label": [str(record.inputs.get("label", "")) for record in records],
        **{name: _column([facts.get(name) for facts in flat]) for name in params},
        "status": [record.status for record in records],
        "reason": [record.reason for record in records],
    }
    frame = pd.DataFrame(columns)
    missing = frame["label"] == ""
    if missing.any():
        varying = [name for name in params if frame[name].nunique(dropna=False) > 1]
        shown = varying or list(params[:1])
        texts = [" ".join(f"{n}={v}" for n, v in zip(shown, values, strict=True)) for values in frame[shown].to_numpy()]
        frame.loc[missing, "label"] = pd.Series(texts, index=frame.index, dtype=object)[missing]
    return frame


def _column(values: list[Any]) -> pd.Series[Any]:
    """Values as they are: beside a missing one pandas would turn 512 into 512.0."""
    return pd.Series(values, dtype=object if None in values else None)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings under dotted names. A list becomes its JSON text, a long one its length and a hash."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{prefix}{key}.")
        elif isinstance(item, list | tuple):
            text = canonical_json(list(item))
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            flat[prefix + key] = text if len(text) <= 40 else f"{len(item)} values, sha256 {digest}"
        else:
            flat[prefix + key] = item
    return flat


def _floats(values: Iterable[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _median_span(measurement: Measurement | None) -> float | None:
    spans = [span for block in measurement.spans for span in block] if measurement else []
    return statistics.median(spans) if spans else None


# Comparisons ---------------------------------------------------------------------------------------------------------


def gpu_name(env: Mapping[str, Any]) -> str:
    """`NVIDIA H200`, or `CPU (<model>)`; empty where the environment is not known (its worker died at once)."""
    cpu = f"{CPU} ({env['cpu']})" if env.get("cpu") else CPU
    return str(env.get("gpu") or cpu) if env else ""


def _roofline_seconds(records: Sequence[Record], flops: Any, nbytes: Any, ceilings: Ceilings | None) -> Any:
    """The least time that the device needs; NaN where no ceiling for this device and dtype is known."""
    if ceilings is None:
        return np.full(len(records), np.nan)
    on_device = {gpu: gpu == ceilings.device for gpu in {gpu_name(record.env) for record in records}}
    peak = _floats(
        ceilings.flops.get(str(record.case.params.get("dtype"))) if on_device[gpu_name(record.env)] else None
        for record in records
    )
    return np.where(np.isnan(peak), np.nan, np.maximum(flops / peak, nbytes / ceilings.bytes))


def _in_turns(one: Record, other: Record) -> bool:
    """Whether round `r` of both was measured side by side."""
    a, b = one.measurement, other.measurement
    return a is not None and b is not None and a.visit == b.visit != ""


def _baseline_rows(records: Sequence[Record], baseline: str | None) -> tuple[list[int], list[str]]:
    """For each record the index of the baseline's record to compare with (-1: none), and why there is none."""
    if baseline is None:
        return [-1] * len(records), ["no baseline chosen"] * len(records)
    places = [(record.case.shape_key, record.case.direction) for record in records]
    of_baseline = {place: row for row, place in enumerate(places) if records[row].case.provider == baseline}
    indices, notes = [], []
    for record, place in zip(records, places, strict=True):
        row = of_baseline.get(place, -1)
        note = ""
        if row < 0:
            note = f"{baseline} has no record of this case"
        elif records[row].status != "ok":
            note = f"{baseline} is {records[row].status}"
        elif gpu_name(records[row].env) != gpu_name(record.env):
            note = f"{baseline} ran on another GPU"
        elif (mode := _mode(record)) and _mode(records[row]) != mode:
            note = f"{baseline} was measured in mode {_mode(records[row])}"
        indices.append(-1 if note else row)
        notes.append(note or ("the baseline" if record.case.provider == baseline else ""))
    return indices, notes


def _mode(record: Record) -> str:
    return record.measurement.mode if record.measurement else ""


# Checks, flags, machine ----------------------------------------------------------------------------------------------


def _check_columns(records: Sequence[Record]) -> dict[str, Any]:
    """Errors per tensor, whether all passed, and which tensors were not checked though another provider's were."""
    tensors: dict[str, None] = {}
    expected: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        for check in record.checks:
            tensors[check.tensor] = None
            expected.setdefault((record.case.operator, record.case.direction), {})[check.tensor] = None
    by_name = [{check.tensor: check for check in record.checks} for record in records]
    columns: dict[str, Any] = {
        "checks_passed": pd.array(
            [all(c.passed for c in record.checks) if record.checks else None for record in records], dtype="boolean"
        ),
        "not_checked": [
            " ".join(t for t in expected.get((record.case.operator, record.case.direction), {}) if t not in checks)
            if record.status in ("ok", "wrong")
            else ""
            for record, checks in zip(records, by_name, strict=True)
        ],
    }
    for tensor in tensors:
        found = [checks.get(tensor) for checks in by_name]
        columns[f"{tensor}_rel"] = _floats(check.rel_norm if check else None for check in found)
        columns[f"{tensor}_max_abs"] = _floats(check.max_abs if check else None for check in found)
    return columns


def _flags(records: Sequence[Record], columns: Mapping[str, Any], ok: Any, unpaired: Sequence[bool]) -> list[str]:
    def where(values: Iterable[Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.array([bool(value) for value in values], dtype=bool)

    tests = {
        "throttled": where(columns["throttled"]),
        "imprecise": where(
            record.measurement is not None and not is_precise(record.measurement.rounds, target)
            for record, target in zip(records, columns["target"], strict=True)
        ),
        "single-round": np.equal(columns["rounds"], 1),
        "not-interleaved": unpaired,
        "gaps": columns["span_s"] > _GAPS * columns["median_s"],
        "unchecked": where(not record.checks for record in records),
        "partly-checked": where(r.checks and n for r, n in zip(records, columns["not_checked"], strict=True)),
        "above-roofline": columns["roofline_fraction"] > 1,
    }
    return [" ".join(f for f, test in tests.items() if ok[row] and test[row]) for row in range(len(records))]


def _machine_columns(records: Sequence[Record]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    nested = {
        "clocks": [flatten({k: r.clocks.get(k) or {} for k in ("before", "after")}, "clocks.") for r in records],
        "inputs": [flatten({k: v for k, v in r.inputs.items() if k != "label"}, "inputs.") for r in records],
        "counters": [flatten(r.counters, "counters.") for r in records],
    }
    for dictionaries in nested.values():
        for name in dict.fromkeys(name for dictionary in dictionaries for name in dictionary):
            columns[name] = [dictionary.get(name) for dictionary in dictionaries]
    columns["gpu"] = [gpu_name(record.env) for record in records]
    columns["commit"] = [commit_name(record.env) for record in records]
    columns["overhead_s"] = _floats(overhead(record) for record in records)
    columns["when"] = [record.when for record in records]
    return columns


def commit_name(env: Mapping[str, Any]) -> str:
    """The short commit, with `+` where the work tree had changes."""
    commit = env.get("commit")
    return "" if not commit else str(commit)[:12] + ("+" if env.get("dirty") else "")


def environments(records: Iterable[Record]) -> list[tuple[dict[str, Any], int]]:
    """The distinct environments, and how many records each has, in order of appearance."""
    counts: dict[str, int] = {}
    for record in records:
        text = canonical_json(dict(record.env))
        counts[text] = counts.get(text, 0) + 1
    return [(flatten(json.loads(text)), count) for text, count in counts.items()]
