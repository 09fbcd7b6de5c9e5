"""Folders of every kind: whole, merged, unfinished, foreign, damaged, empty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import synthetic

from jfabench.folder import ResultFolder
from jfabench.records import Record
from jfabench.reports.load import Results, load, not_ok, write_table


def small(**changes: object) -> list[Record]:
    return synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "triton_jfa"), **changes)  # type: ignore[arg-type]


def found(results: Results, words: str) -> bool:
    return any(words in warning for warning in results.warnings)


def test_a_whole_run_needs_no_warning(tmp_path: Path) -> None:
    records = [replace(r, measurement=replace(r.measurement, stopped_by="precision")) for r in small() if r.measurement]
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(len(records)))])
    assert results.warnings == ()
    assert results.devices == ["NVIDIA H200"]
    assert not results.on_cpu
    assert results.axes == ["q_len", "lengths.fill", "lengths.max_len"]


def test_an_unfinished_run_says_so_and_names_the_torn_line(tmp_path: Path) -> None:
    results = load([synthetic.write_folder(tmp_path, small(), run=synthetic.manifest(20), tail='{"case": {"oper')])
    assert found(results, "Unfinished: 8 of 20 cases")
    assert found(results, "1 line of records.jsonl could not be read")
    assert results.bad_lines == ((str(tmp_path / "records.jsonl"), 9, "torn or not JSON"),)


def test_a_folder_without_manifest_and_ceilings(tmp_path: Path) -> None:
    results = load([synthetic.write_folder(tmp_path, small(), ceilings=None)])
    assert results.manifest is None
    assert results.baseline is None
    assert results.axes == ["lengths.max_len"]
    assert found(results, "no run.json")
    assert results.rows["roofline_fraction"].isna().all()
    assert (results.rows["speedup_note"] == "no baseline chosen").all()


def test_merging_keeps_the_last_record_of_a_case(tmp_path: Path) -> None:
    records = small()
    again = replace(records[0], status="failed", reason="second time", measurement=None)
    one = synthetic.write_folder(tmp_path / "one", records, run=synthetic.manifest(8))
    two = synthetic.write_folder(tmp_path / "two", [again], run=synthetic.manifest(1, providers={"new": "text"}))
    results = load([one, two], ResultFolder(tmp_path / "both"))
    assert len(results.rows) == 8
    assert results.rows["reason"].tolist().count("second time") == 1
    assert set(results.manifest.providers if results.manifest else ()) == {*synthetic.SUMMARIES, "new"}
    assert not found(results, "Unfinished")
    assert load([two, one]).rows["status"].eq("ok").all()


def test_mixed_machines_and_software_are_told(tmp_path: Path) -> None:
    records = small()
    env = {**synthetic.ENV, "gpu": "NVIDIA B200", "torch": "2.12.0", "triton": {"fbtriton": "3.8"}}
    one = synthetic.write_folder(tmp_path / "one", records[::2], run=synthetic.manifest(4))
    other = [replace(record, env=env) for record in records[1::2]]
    two = synthetic.write_folder(tmp_path / "two", other, run=synthetic.manifest(4))
    results = load([one, two])
    assert found(results, "More than one device is mixed here (NVIDIA H200, NVIDIA B200)")
    assert found(results, "different torch are mixed: 2.11.0, 2.12.0")
    assert found(results, "different triton.fbtriton are mixed")
    # Each provider is on one device here, so that no speedup against the baseline is left but its own.
    assert set(results.rows["provider"][results.rows["speedup"].notna()]) == {"fa4_kernel"}


def test_ceilings_of_another_device_are_not_used(tmp_path: Path) -> None:
    ceilings = replace(synthetic.CEILINGS, device="NVIDIA B200")
    results = load([synthetic.write_folder(tmp_path, small(), run=synthetic.manifest(8), ceilings=ceilings)])
    assert found(results, "ceilings are those of NVIDIA B200")
    assert results.rows["roofline_fraction"].isna().all()


def test_cpu_runs_are_told_from_gpu_runs(tmp_path: Path) -> None:
    records = [replace(record, env={**synthetic.ENV, "gpu": None}) for record in small()]
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(8, device="cpu", scale="cpu"))])
    assert results.on_cpu
    assert found(results, "no performance result")


def test_a_baseline_without_a_right_result_in_a_direction_is_told(tmp_path: Path) -> None:
    records = [
        replace(r, status="oom", measurement=None)
        if (r.case.provider, r.case.direction) == ("fa4_kernel", "bwd")
        else r
        for r in small()
    ]
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(8))])
    assert found(results, "No speedups for bwd: the baseline fa4_kernel has no ok record")
    assert not found(results, "No speedups for fwd")


def test_uncommitted_changes_are_told(tmp_path: Path) -> None:
    records = [replace(record, env={**synthetic.ENV, "dirty": True}) for record in small()]
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(8))])
    assert found(results, "uncommitted changes")


def test_flags_are_counted(tmp_path: Path) -> None:
    records = [replace(record, clocks={"throttled": ["hw_slowdown"]}) for record in small()[:2]] + small()[2:]
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(8))])
    assert found(results, "2 of 8 measured cases ran while the GPU was throttled")


def test_failures_are_told_from_what_was_never_expected_to_run(tmp_path: Path) -> None:
    records = synthetic.grid()
    failed, neutral = not_ok(load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(len(records)))]))
    assert failed["status"].value_counts().to_dict() == {"oom": 6, "wrong": 2, "timeout": 1}
    assert neutral["status"].value_counts().to_dict() == {"unsupported": 15}


def test_nothing_to_read_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no records\.jsonl; name a folder"):
        load([ResultFolder(tmp_path)])


@pytest.mark.parametrize("name", ["run.json", "ceilings.json"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    folder = synthetic.write_folder(tmp_path, small(), run=synthetic.manifest(8))
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        load([folder])


def test_a_manifest_of_another_version_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = synthetic.write_folder(tmp_path, small())
    (tmp_path / "run.json").write_text('{"axes": [], "unknown": 1}')
    with pytest.raises(ValueError, match=r"run\.json"):
        load([folder])


def test_the_csv_holds_every_column_and_reads_back(tmp_path: Path) -> None:
    results = load([synthetic.write_folder(tmp_path, synthetic.grid(), run=synthetic.manifest(180))])
    back = pd.read_csv(write_table(results))
    assert list(back.columns) == list(results.rows.columns)
    pd.testing.assert_series_equal(back["tflops"], results.rows["tflops"], rtol=1e-9)
    assert back["shape"].nunique() == 15


def test_an_empty_record_file(tmp_path: Path) -> None:
    results = load([synthetic.write_folder(tmp_path, [], run=synthetic.manifest(4))])
    assert found(results, "Unfinished: 0 of 4 cases")
    assert len(pd.read_csv(write_table(results))) == 0
