"""Fits to folders that are damaged or somebody else's: one sentence that names the folder, whatever is wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jfabench.calibration import fit_folder
from jfabench.cli import main
from jfabench.schedule_run import ScheduleError

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "reports" / "results" / "h200" / "jagged" / "records.jsonl.gz"
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def committed() -> str:
    with gzip.open(COMMITTED, "rt") as file:
        mine = [line for line in file if '"tlx_jfa"' in line and '"q_len":256' in line and '"bwd"' in line]
    return "".join(mine[-4:])  # long ones, which are cut alike


def write(folder: Path, records: Records) -> None:
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def records_of(text: str) -> Records:
    return [json.loads(line) for line in text.splitlines()]


def test_records_as_they_were_stored_give_a_fit(committed: str, tmp_path: Path) -> None:
    write(tmp_path, records_of(committed))
    (found,) = fit_folder(tmp_path)
    assert (found.direction, found.queries, len(found.labels)) == ("bwd", 256, 4)


def operator(record: dict[str, Any]) -> None:
    record["case"]["operator"] = "somebody_elses"


def parameter(record: dict[str, Any]) -> None:
    record["case"]["params"]["colour"] = "green"


def without_multiprocessors(record: dict[str, Any]) -> None:
    record["env"]["sm_count"] = 0


def multiprocessors_in_words(record: dict[str, Any]) -> None:
    record["env"]["sm_count"] = "many"


def times_in_words(record: dict[str, Any]) -> None:
    record["measurement"]["rounds"] = [["fast"]]


def without_time(record: dict[str, Any]) -> None:
    record["measurement"]["rounds"] = [[0.0, 0.0]]


def without_samples(record: dict[str, Any]) -> None:
    record["measurement"]["rounds"] = []


def lengths_elsewhere(record: dict[str, Any]) -> None:
    record["case"]["params"]["lengths"] = {"kind": "file", "path": "/no/such.csv"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (operator, "somebody_elses"),
        (parameter, "Extra inputs"),
        (without_multiprocessors, "sm_count 0"),
        (multiprocessors_in_words, "sm_count 'many'"),
        (times_in_words, ""),
        (without_time, "time of nan s"),
        (without_samples, "time of nan s"),
        (lengths_elsewhere, "no file '/no/such.csv'"),
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_foreign_record_is_told_with_its_folder(
    change: Callable[[dict[str, Any]], None],
    words: str,
    at: int,
    committed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = records_of(committed)
    change(records[at])
    write(tmp_path, records)
    with pytest.raises(ScheduleError) as failure:
        fit_folder(tmp_path)
    assert str(failure.value).startswith(f"{tmp_path}: ")
    assert words in str(failure.value)
    assert main(["schedule", "--calibrate", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"jfabench: {failure.value}\n"


def test_cases_that_tell_nothing_apart_are_told_with_their_folder(committed: str, tmp_path: Path) -> None:
    records = records_of(committed)
    for record in records:  # faster than what is beside the kernel of a forward: no cost explains it
        record["case"]["direction"] = "fwd"
        record["measurement"]["rounds"] = [[1e-6]]
    write(tmp_path, records)
    with pytest.raises(ScheduleError) as failure:
        fit_folder(tmp_path)
    assert str(failure.value) == f"{tmp_path}: the measured cases do not tell tiles from steps: measure more lengths"


def test_too_few_cases_are_told(committed: str, tmp_path: Path) -> None:
    write(tmp_path, records_of(committed)[:2])
    with pytest.raises(ScheduleError, match="needs at least 3 measured cases"):
        fit_folder(tmp_path)
