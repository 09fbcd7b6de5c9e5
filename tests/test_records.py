from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfabench.records import SCHEMA, Case, Measurement, Record, TensorCheck, Work, failing, read_records

PARAMS = {"heads": 4, "lengths": {"kind": "fill", "fill": 0.5}, "window": [-1, -1]}


def case(**changes: object) -> Case:
    return Case(**{"operator": "op", "provider": "p", "direction": "fwd", "params": PARAMS, **changes})  # type: ignore[arg-type]


def record(**changes: object) -> Record:
    values = {
        "case": case(),
        "status": "ok",
        "when": "2026-01-01T00:00:00+00:00",
        "env": {"gpu": "X"},
        "work": Work(1e9, 2e6),
        "checks": (TensorCheck("out", True, 0.1, 1e-3, 0.2, 0.1),),
        "measurement": Measurement("wall", ((0.1, 0.2), (0.3,)), "precision", 3, 0.5),
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def test_a_record_survives_its_line() -> None:
    original = record()
    assert Record.from_json(json.loads(original.to_line())) == original


def test_the_key_does_not_depend_on_the_order_of_parameters() -> None:
    again = case(params=dict(reversed(list(PARAMS.items()))))
    assert again == case()
    assert hash(again) == hash(case())
    assert len({again, case()}) == 1


@pytest.mark.parametrize(
    "change",
    [{"provider": "q"}, {"direction": "bwd"}, {"seed": 1}, {"params": {**PARAMS, "heads": 5}}, {"operator": "x"}],
)
def test_every_part_of_a_case_is_in_its_key(change: dict[str, object]) -> None:
    assert case(**change) != case()


def test_cases_of_one_shape_share_its_key() -> None:
    assert case(provider="q", direction="bwd").shape_key == case().shape_key
    assert case(seed=1).shape_key != case().shape_key


def test_not_a_number_never_reaches_a_file() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        record(work=Work(float("nan"), 1)).to_line()


def test_the_last_record_of_a_case_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(record(status="failed").to_line() + record(case=case(seed=2)).to_line() + record().to_line())
    found = read_records(path).records
    assert [(r.case.seed, r.status) for r in found] == [(2, "ok"), (0, "ok")]


@given(cut=st.integers(min_value=1))
def test_a_torn_line_anywhere_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "records.jsonl"
    line = record(case=case(seed=2)).to_line()
    torn = line[: 1 + cut % (len(line) - 2)]
    path.write_text(record().to_line() + torn)
    found = read_records(path)
    assert [r.case.seed for r in found.records] == [0]
    assert [number for number, _ in found.bad_lines] == [2]


def test_foreign_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"schema": 1}\n[1]\n\xff\xfe\n\n' + record().to_line().encode())
    found = read_records(path)
    assert len(found.records) == 1
    assert [number for number, _ in found.bad_lines] == [1, 2, 3]


def test_packed_records_are_those_that_were_packed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "records.jsonl", tmp_path / "records.jsonl.gz"
    plain.write_text(record().to_line() + record(case=case(seed=2)).to_line() + "torn")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_records(packed) == read_records(plain)
    assert [number for number, _ in read_records(packed).bad_lines] == [3]


def test_packed_records_that_are_damaged_anywhere_are_never_half_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.gz"
    whole = gzip.compress(record().to_line().encode())
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged"):
            read_records(path)
    for place in range(10, len(whole)):  # after the header, of which some is of no use
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            read_records(path)


def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({**record().to_json(), "schema": SCHEMA + 1}) + "\n")
    with pytest.raises(ValueError, match="update jfabench"):
        read_records(path)


def test_what_was_never_possible_does_not_fail_a_sweep() -> None:
    statuses = ["ok", "unsupported", "unavailable", "wrong", "failed", "timeout", "oom"]
    assert [r.status for r in failing(record(status=status) for status in statuses)] == statuses[3:]
