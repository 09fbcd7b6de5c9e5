"""The records of a result folder, with the counters that `profile` left beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jfabench.folder import ResultFolder
from jfabench.records import Record, read_records


def read_folder(folder: ResultFolder) -> tuple[Record, ...]:
    """Raises `OSError`, and `ValueError`, which names the file, where one is of a newer schema or damaged."""
    records = _read(folder.stored)
    counted = folder.root / "profile.jsonl"
    if not counted.exists():
        return records
    counters = {record.case: record.counters for record in _read(counted) if record.counters}
    return tuple(replace(record, counters={**record.counters, **counters.get(record.case, {})}) for record in records)


def _read(path: Path) -> tuple[Record, ...]:
    try:
        return read_records(path).records
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
