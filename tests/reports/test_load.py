"""Folders of every kind: whole, merged, unfinished, foreign, damaged, empty."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import synthetic

from jfabench.folder import ResultFolder
from jfabench.records import SCHEMA, Record
from jfabench.reports.load import Results, load, not_ok, write_table


def small(**changes: object) -> list[Record]:
    return synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "triton_jfa"), **changes)  # type: ignore[arg-type]


def found(results: Results, words: str) -> bool:
    return any(words in warning for warning in results.warnings)


def test_a_whole_run_needs_no_warning(tmp_path: Path) -> None:
    steady = tuple((seconds,) * 6 for seconds in (1e-3, 1.001e-3, 1e-3, 1.001e-3))
    records = [
        replace(r, measurement=replace(r.measurement, rounds=steady, spans=steady)) for r in small() if r.measurement
    ]
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


RUN = synthetic.manifest(8).to_json()
CEILINGS = synthetic.CEILINGS.to_json()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("run.json", [], "the whole"),
        ("run.json", {"axes": [], "unknown": 1}, "config: Field required"),
        ("run.json", {**RUN, "axes": 3}, "axes"),
        ("run.json", {**RUN, "providers": ["fa4"]}, "providers"),
        ("run.json", {**RUN, "cases": None}, "cases"),
        ("run.json", {**RUN, "policy": {"target": "1%"}}, "policy.target"),
        ("run.json", {**RUN, "schema": SCHEMA + 1}, "update jfabench"),
        ("ceilings.json", None, "the whole"),
        ("ceilings.json", {"gpu": "H200"}, "device: Field required"),
        ("ceilings.json", {**CEILINGS, "flops": [1.0]}, "flops"),
        ("ceilings.json", {**CEILINGS, "flops": {"bf16": "fast"}}, "flops.bf16"),
        ("ceilings.json", {**CEILINGS, "bytes": 0}, "not positive"),
        ("ceilings.json", {**CEILINGS, "source": "guessed"}, "source"),
    ],
)
def test_a_foreign_file_is_an_error_that_names_it_and_the_problem(
    tmp_path: Path, name: str, content: object, problem: str
) -> None:
    folder = synthetic.write_folder(tmp_path, small(), run=synthetic.manifest(8))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*{re.escape(problem)}"):
        load([folder])


def test_keys_of_a_newer_writer_of_the_same_schema_are_ignored(tmp_path: Path) -> None:
    folder = synthetic.write_folder(tmp_path, small())
    (tmp_path / "run.json").write_text(json.dumps({**RUN, "colour": "blue"}))
    (tmp_path / "ceilings.json").write_text(json.dumps({**CEILINGS, "colour": "blue"}))
    results = load([folder])
    assert (results.manifest, results.ceilings) == (synthetic.manifest(8), synthetic.CEILINGS)


def test_records_of_a_newer_schema_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    line = json.dumps({**small()[0].to_json(), "schema": SCHEMA + 1})
    folder = synthetic.write_folder(tmp_path, [], tail=line + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl: record schema"):
        load([folder])


def test_each_record_is_judged_by_the_precision_that_its_own_run_asked_for(tmp_path: Path) -> None:
    wide = tuple((seconds,) * 6 for seconds in (1e-3, 1.01e-3, 1e-3, 1.01e-3))  # interval: 1.8% of the median
    records = [replace(r, measurement=replace(r.measurement, rounds=wide)) for r in small() if r.measurement]
    strict = synthetic.manifest(4)
    loose = synthetic.manifest(4, policy={**strict.policy, "target": 0.03})
    one = synthetic.write_folder(tmp_path / "strict", records[:4], run=strict)
    two = synthetic.write_folder(tmp_path / "loose", records[4:], run=loose)
    results = load([one, two])
    assert results.rows["flags"].str.contains("imprecise").tolist() == [True] * 4 + [False] * 4
    assert found(results, "4 of 8 measured cases have an interval wider than what was asked for")


def test_integers_beside_missing_values_stay_integers(tmp_path: Path) -> None:
    records = small() + synthetic.dense((512, 4096), ("fa4",))
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(len(records)))])
    text = write_table(results).read_text()
    assert "512.0" not in text
    assert [len(grid) for grid in results.grids] == [8, 4]
    jagged, dense = results.grids
    assert "lengths.length" not in jagged
    assert dense["lengths.length"].tolist() == [512, 512, 4096, 4096]


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


def test_repeated_cases_are_told_of_and_never_mixed_over_devices(tmp_path: Path) -> None:
    records = small()
    one = synthetic.write_folder(tmp_path / "one", records, run=synthetic.manifest(8))
    two = synthetic.write_folder(tmp_path / "two", records[:3], run=synthetic.manifest(8))
    assert found(load([one, two]), "two repeats 3 cases of another folder")
    elsewhere = [replace(record, env={**record.env, "gpu": "NVIDIA B200"}) for record in records[:3]]
    other = synthetic.write_folder(tmp_path / "other", elsewhere, run=synthetic.manifest(8))
    with pytest.raises(ValueError, match="NVIDIA H200; results of different devices"):
        load([one, other])
