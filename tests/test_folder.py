"""Packed results: whatever reads a result folder reads them as it reads plain ones, and nothing is added to them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from jfabench.cli import main
from jfabench.exit_codes import MACHINE, OK, USAGE
from jfabench.folder import ResultFolder
from jfabench.records import lines_of
from jfabench.run import FolderError, open_log

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "reports" / "results" / "h200" / "jagged" / "records.jsonl.gz"


@pytest.fixture(scope="module")
def lines() -> bytes:
    """Five cases of one kernel and number of queries: enough for a fit."""
    with gzip.open(COMMITTED) as file:
        mine = [line for line in file if b'"tlx_jfa"' in line and b'"q_len":256' in line and b'"bwd"' in line]
    return b"".join(mine[:5])


@pytest.fixture
def plain(lines: bytes, tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "records.jsonl").write_bytes(lines)
    return tmp_path / "plain"


@pytest.fixture
def packed(lines: bytes, tmp_path: Path) -> Path:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "records.jsonl.gz").write_bytes(gzip.compress(lines))
    return tmp_path / "packed"


def test_a_folder_that_goes_on_is_read_instead_of_what_was_packed_of_it(packed: Path) -> None:
    folder = ResultFolder(packed)
    assert folder.stored == folder.packed
    folder.records.write_bytes(b"")
    assert folder.stored == folder.records
    folder.records.unlink()
    folder.packed.unlink()
    assert folder.stored == folder.records  # the name for whoever says that there is none


def test_a_report_of_packed_results(plain: Path, packed: Path, tmp_path: Path) -> None:
    before = sorted(packed.iterdir())
    for folder in (plain, packed):
        assert main(["report", str(folder), "--out", str(tmp_path / f"{folder.name}-report")]) == OK
    assert sorted(packed.iterdir()) == before
    tables = [pd.read_csv(tmp_path / f"{name}-report" / "results.csv") for name in ("plain", "packed")]
    pd.testing.assert_frame_equal(*tables)
    assert len(tables[0]) == 5
    assert main(["report", str(packed)]) == OK
    assert (packed / "report.html").exists()
    assert not (packed / "records.jsonl").exists()


def test_a_packed_run_is_the_run_that_it_was(plain: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sqlalchemy")
    command = ["history", "import", str(packed), str(plain), "--db", f"sqlite:///{packed.parent}/h.sqlite"]
    assert main(command) == OK
    said = capsys.readouterr().out
    assert f"{packed}: a new run, 5 results" in said
    assert f"{plain}: known already, 0 results" in said


@pytest.mark.parametrize("sides", [("plain", "packed"), ("packed", "plain"), ("packed", "packed")])
def test_packed_and_plain_results_compare(sides: tuple[str, str], plain: Path, packed: Path) -> None:
    pytest.importorskip("scipy")
    root = plain.parent
    assert main(["compare", str(root / sides[0]), str(root / sides[1]), "--out", str(root / "found")]) == OK
    found = pd.read_csv(root / "found" / "comparison.csv")
    assert found["ratio"].tolist() == [1.0] * 5


def test_processes_of_a_comparison_may_be_packed(lines: bytes, tmp_path: Path) -> None:
    from jfabench.compare import read_side

    for pair in ("pair-00", "pair-01"):
        (tmp_path / "a" / pair).mkdir(parents=True)
        (tmp_path / "a" / pair / "records.jsonl.gz").write_bytes(gzip.compress(lines))
    assert [len(block) for block in read_side(tmp_path / "a")] == [5, 5]


def test_a_fit_to_packed_results(plain: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for folder in (plain, packed):
        assert main(["schedule", "--calibrate", str(folder)]) == OK
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert "5 cases" in told[0]


def cut_short(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def with_wrong_bits(whole: bytes) -> bytes:
    return whole[:40] + bytes(byte ^ 0xFF for byte in whole[40:400]) + whole[400:]


def not_gzip(whole: bytes) -> bytes:
    return b"something else"


@pytest.mark.parametrize("damage", [cut_short, with_wrong_bits, not_gzip])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["report", "{}"], MACHINE),
        (["history", "import", "{}", "--db", "sqlite:///{}/../h.sqlite"], MACHINE),
        (["compare", "{}", "{}"], USAGE),
        (["schedule", "--calibrate", "{}"], USAGE),
    ],
)
def test_damaged_packed_results_are_named(
    words: list[str],
    code: int,
    damage: Callable[[bytes], bytes],
    packed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = packed / "records.jsonl.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match="not packed by gzip, or damaged since"):
        list(lines_of(file))
    assert main([word.format(packed) for word in words]) == code
    error = capsys.readouterr().err
    assert str(packed) in error
    assert "not packed by gzip, or damaged since" in error
    assert "None" not in error
    assert error.count("\n") == 1


def test_nothing_is_added_to_packed_results(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in packed.iterdir()}
    with pytest.raises(FolderError, match="packed results"), open_log(ResultFolder(packed)):
        pass
    for more in ([], ["--resume"]):
        sweep = ["sweep", "--config", "jagged.yaml", "--device", "cpu", "--out", str(packed), *more]
        assert main(sweep) == MACHINE
        assert "holds packed results" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in packed.iterdir()} == before
