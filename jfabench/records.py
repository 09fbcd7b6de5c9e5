"""What a sweep stores: one `Record` per measured `Case`, one JSON line each.

Records hold raw facts only (samples in seconds, work in FLOP and bytes, error norms). Whatever can be computed from
them - medians, TFLOP/s, intervals, speedups - is computed by `jfabench.reports.derive`, so that a corrected formula
needs no new run. All quantities are in base SI units.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

SCHEMA = 1

Direction = Literal["fwd", "bwd", "fwd_bwd"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Status = Literal["ok", "wrong", "failed", "timeout", "oom", "unsupported", "unavailable"]
STATUSES: tuple[Status, ...] = get_args(Status)
# A case with one of these was never expected to give a number here, so it does not fail a sweep.
NEUTRAL_STATUSES: frozenset[Status] = frozenset({"ok", "unsupported", "unavailable"})


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces. Raises `ValueError` for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, eq=False)
class Case:
    """One thing to measure: a provider computing one direction of an operator at one point of a grid.

    `params` is a JSON object that the operator's parameter model has validated and completed. Two cases are the same
    if their `key` is; the key serves as resume key, row key and counter key.
    """

    operator: str
    provider: str
    direction: Direction
    params: Mapping[str, Any]
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "provider": self.provider,
            "direction": self.direction,
            "params": dict(self.params),
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        return cls(data["operator"], data["provider"], data["direction"], data["params"], data["seed"])

    @cached_property
    def key(self) -> str:
        return canonical_json(self.to_json())

    @cached_property
    def shape_key(self) -> str:
        """Names the inputs alone: cases with the same shape key are measured together, on the same tensors."""
        return canonical_json({"operator": self.operator, "params": dict(self.params), "seed": self.seed})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class Work:
    """What the case must do at least: useful floating-point operations, and bytes moved if each is moved once."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class TensorCheck:
    """How far one result is from the oracle.

    `max_abs` and `rel_norm` (||x - ref|| / ||ref||) are None where they are not finite; `detail` then says why.
    `limit` is the largest `max_abs` allowed, `baseline` the error that plain PyTorch makes in the input dtype.
    """

    tensor: str
    passed: bool
    max_abs: float | None
    rel_norm: float | None
    limit: float
    baseline: float
    detail: str = ""


@dataclass(frozen=True)
class Measurement:
    """Raw samples of one case.

    `rounds[r]` holds the seconds of every iteration of round `r`. `visit` names the interleaved loop that they come
    from: round `r` of two records was measured side by side only if their visits are the same. `stopped_by` says which
    rule ended sampling: `precision` (the interval of the median is narrow enough), `time` or `iterations` (a cap was
    reached first). Profiler mode also has `kernels_per_call` and `spans`: shaped like `rounds`, the seconds from the
    start of the first kernel of a call to the end of its last, gaps included.
    """

    mode: str
    rounds: tuple[tuple[float, ...], ...]
    stopped_by: str
    visit: str = ""
    warmup_iterations: int = 0
    warmup_seconds: float = 0.0
    kernels_per_call: float | None = None
    spans: tuple[tuple[float, ...], ...] = ()


_MAPPINGS = ("env", "clocks", "inputs", "counters", "phases")


@dataclass(frozen=True)
class Record:
    """The outcome of one case.

    `env` describes machine and software, `clocks` the GPU just before and after. `phases` says where the time of the
    sweep went, in seconds (see `jfabench.phases`): over all records they add up to the whole of it, its start-up
    excepted. `worker` is the id of the process that the case was visited in. `overhead_seconds` is what older versions
    stored instead of `phases`; `overhead` reads either.
    """

    case: Case
    status: Status
    when: str
    reason: str = ""
    env: Mapping[str, Any] = field(default_factory=dict)
    work: Work | None = None
    checks: tuple[TensorCheck, ...] = ()
    measurement: Measurement | None = None
    clocks: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    worker: int | None = None
    overhead_seconds: float | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["case"] = self.case.to_json()
        data["work"] = _plain(self.work)
        data["checks"] = [_plain(check) for check in self.checks]
        data["measurement"] = _plain(self.measurement)
        for name in _MAPPINGS:
            data[name] = dict(data[name])
        return data

    def to_line(self) -> str:
        return canonical_json(self.to_json()) + "\n"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Raises `ValueError` for a record of a newer schema, `KeyError` or `TypeError` for what is no record."""
        schema = data["schema"]
        if schema > SCHEMA:
            raise ValueError(f"record schema {schema} is newer than this jfabench reads ({SCHEMA}): update jfabench")
        for name in _MAPPINGS:
            if not isinstance(data.get(name, {}), dict):
                raise TypeError(f"{name} is no mapping")
        work, measurement = data.get("work"), data.get("measurement")
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in data.items() if name in known}
        values["case"] = Case.from_json(data["case"])
        values["work"] = Work(**work) if work else None
        values["checks"] = tuple(TensorCheck(**check) for check in data.get("checks", ()))
        if measurement:
            blocks = {
                name: tuple(tuple(samples) for samples in measurement.get(name, ())) for name in ("rounds", "spans")
            }
            values["measurement"] = Measurement(**{**measurement, **blocks})
        return cls(**values)


_WARMING = frozenset({"first call", "warmup"})


def overhead(record: Record) -> float | None:
    """Seconds that the sweep spent on a case beyond its first call, its warm-up and its measured calls; None: unknown.

    So it is all that passed from the end of the case or the visit before: handing over to a worker, creating a CUDA
    context, inputs, oracle and checks, but also the flushes and the profiler's sessions between measured calls. Exact
    but in mode `cudagraph`, where a sample is the mean of several calls: there it is an upper bound. The first call of
    a provider may load, compile and tune; records of older versions count it as overhead.
    """
    if not record.phases:
        return record.overhead_seconds
    rounds = record.measurement.rounds if record.measurement else ()
    # Kernels that ran at the same time all count in full in a sample: the sum may exceed what passed.
    calls = min(math.fsum(map(math.fsum, rounds)), record.phases.get("measure", 0.0))
    return math.fsum(seconds for phase, seconds in record.phases.items() if phase not in _WARMING) - calls


@dataclass(frozen=True)
class Cost:
    """What the harness itself cost, in seconds: the overhead of the first case, and of those after it.

    `first_calls` is what the first calls of all took together; they are no overhead.
    """

    first: float
    mean: float
    most: float
    first_calls: float


def cost(records: Iterable[Record]) -> Cost | None:
    """Of the records that say where their time went, in the order of measurement; None for fewer than two."""
    known = [record for record in records if record.phases]
    if len(known) < 2:
        return None
    first, *later = (overhead(record) or 0.0 for record in known)
    first_calls = math.fsum(record.phases.get("first call", 0.0) for record in known)
    return Cost(first, math.fsum(later) / len(later), max(later), first_calls)


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN and no infinity: they are stored as None beside a reason."""
    return value if math.isfinite(value) else None


def _plain(value: Any) -> dict[str, Any] | None:
    return None if value is None else {f.name: getattr(value, f.name) for f in fields(value)}


@dataclass(frozen=True)
class RecordFile:
    """The records of one file, and the lines of it that could not be read (`(line number, why)`)."""

    records: tuple[Record, ...]
    bad_lines: tuple[tuple[int, str], ...] = ()


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file of records, which is packed by gzip where its name ends with `.gz`.

    Raises `OSError`, and `ValueError` where a packed file is damaged.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"not packed by gzip, or damaged since ({error}): restore the file") from None


def read_records(path: Path) -> RecordFile:
    """Reads `records.jsonl`, or a packed one. A torn line (its run was killed) is reported, not raised.

    Where a case occurs more than once (it was repeated by a resumed run), the last record counts.
    Raises `OSError`, and `ValueError` where the file holds records of a newer schema, or is packed and damaged.
    """
    by_key: dict[str, Record] = {}
    bad: list[tuple[int, str]] = []
    for number, raw in enumerate(lines_of(path), start=1):
        if not raw.strip():
            continue
        try:
            data = json.loads(raw)
        except ValueError:
            bad.append((number, "torn or not JSON"))
            continue
        try:
            record = Record.from_json(data)
            key = record.case.key
        except (KeyError, TypeError, AttributeError) as error:
            bad.append((number, f"not a record: {error}"))
            continue
        by_key.pop(key, None)
        by_key[key] = record
    return RecordFile(tuple(by_key.values()), tuple(bad))


def failing(records: Iterable[Record]) -> list[Record]:
    """The records that make a sweep fail: wrong, failed, timed out, out of memory."""
    return [record for record in records if record.status not in NEUTRAL_STATUSES]
