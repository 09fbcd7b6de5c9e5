"""What got worse since another version: kernels of two `inspect.csv` side by side.

A kernel that starts to spill fails the comparison, and so does one that takes more registers or shared memory beyond
the limits below, within which two versions of a kernel may differ for no reason that matters.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jfabench.inspect_kernels import KEY, FlatRow, InspectionError
from jfabench.sass import WHOLE

SPILLS = ("spill_store_bytes", "spill_load_bytes")
COMPARED = {"registers": "registers", "shared_bytes": "bytes of shared memory"}
LIMITS = {"registers": 8, "shared_bytes": 1024, "spilled": 16}
"""The growth that still passes. Registers are allocated in eights; 1 KiB of shared memory is what the runtime takes; a
kernel that spills already may spill four words more."""


@dataclass(frozen=True)
class Change:
    """A kernel that got worse: in `what`, from `before` (None: it is new) to `now`. `fails` if beyond the limits."""

    kernel: str
    arch: str
    config: str
    case: str
    what: str
    before: int | None
    now: int
    fails: bool


@dataclass(frozen=True)
class Comparison:
    """`worse` is what got worse, `notes` says what was not compared, and why; `compared` counts kernels."""

    worse: tuple[Change, ...]
    notes: tuple[str, ...]
    compared: int

    @property
    def fails(self) -> bool:
        return any(change.fails for change in self.worse)


def compare(baseline: Iterable[FlatRow], rows: Iterable[FlatRow]) -> Comparison:
    """Of the kernels in `rows` with those of the same name, configuration and case in `baseline`.

    A kernel that the baseline lacks starts to spill if it spills. What different compilers make is not compared.
    """
    before = {_key(row): row for row in baseline if row["role"] == WHOLE}
    now = {_key(row): row for row in rows if row["role"] == WHOLE}
    compilers = {row["arch"]: row["compiler"] for row in before.values()}
    worse: list[Change] = []
    notes: dict[str, None] = {}
    compared = new = 0
    for key, row in now.items():
        used = compilers.get(row["arch"])
        if used is None:
            notes[f"{row['arch']}: not in the baseline"] = None
            continue
        if used != row["compiler"]:
            notes[f"{row['arch']}: not compared, the baseline is of {used} and this is {row['compiler']}"] = None
            continue
        old = before.get(key)
        compared += old is not None
        new += old is None
        worse += _changes(old, row)
    if new:
        notes[f"{new} not in the baseline"] = None
    kinds = {(row["arch"], row["kernel"]) for row in now.values()}
    gone = sum((row["arch"], row["kernel"]) in kinds and key not in now for key, row in before.items())
    if gone:
        notes[f"{gone} of the baseline's are not compiled any more"] = None
    return Comparison(tuple(sorted(worse, key=lambda change: not change.fails)), tuple(notes), compared)


def _changes(old: FlatRow | None, row: FlatRow) -> list[Change]:
    def change(what: str, was: int | None, value: int, fails: bool) -> Change:
        return Change(row["kernel"], row["arch"], row["config"], _case(row), what, was, value, fails)

    found = []
    was, spilled = _spilled(old) if old else 0, _spilled(row)
    if spilled > was:
        starts = was == 0 or spilled - was > LIMITS["spilled"]
        found.append(change("bytes spilled", was if old else None, spilled, starts))
    for column, unit in COMPARED.items():
        before = int(old[column]) if old else int(row[column])
        grown = int(row[column]) - before
        if grown > 0:
            found.append(change(unit, before, int(row[column]), grown > LIMITS[column]))
    return found


def _key(row: FlatRow) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _spilled(row: FlatRow) -> int:
    return max(int(row[name]) for name in SPILLS)


def _case(row: FlatRow) -> str:
    broadcast = " broadcast" if row["broadcast"] == "True" else ""
    return f"D={row['head_dim']} group={row['group']} mask={row['mask']}{broadcast}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of an `inspect.csv`, perhaps by another version that counted other instructions. Raises `InspectionError`."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InspectionError(
            f"{path} cannot be read as a baseline ({why}); take an inspect.csv that `jfabench inspect` wrote"
        ) from error
    needed = {*KEY, "role", *COMPARED, *SPILLS, "compiler"}
    missing = sorted(needed - columns)
    if missing:
        raise InspectionError(
            f"{path} is no baseline: it lacks {', '.join(missing)}; take an inspect.csv that `jfabench inspect` wrote"
        )
    for row in rows:
        if not all((row[name] or "").isdigit() for name in (*COMPARED, *SPILLS)):
            raise InspectionError(f"{path} is no baseline: {row['kernel']} has no number where one is needed")
    return rows
