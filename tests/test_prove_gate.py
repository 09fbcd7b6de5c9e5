"""`scripts/prove_gate.py`, as far as it needs no GPU: what it plants is in the copy, and nowhere else, and is found."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_tree
import pandas as pd
import pytest

from jfabench import trees
from jfabench.compare import CompareError
from jfabench.workers import SweepStoppedError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("prove_gate", ROOT / "scripts" / "prove_gate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def changed(tree: Path) -> list[str]:
    return [
        str(path.relative_to(tree))
        for path in sorted(tree.rglob("*.py"))
        if path.read_text() != (ROOT / path.relative_to(tree)).read_text()
    ]


def test_a_spin_at_the_end_of_the_forward(script: Any, tmp_path: Path) -> None:
    tree = script.planted("wait", tmp_path).root
    assert trees.is_tree(tree)
    assert changed(tree) == ["kernels/attention/fwd_sm90.py"]
    functions = {
        node.name: node
        for node in ast.walk(ast.parse((tree / "kernels/attention/fwd_sm90.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    body = [ast.unparse(statement) for statement in functions["forward_sm90_kernel"].body]
    assert body[-1] == "_linger(started)"
    assert body[1] == "started = _cycles()"  # behind the docstring
    assert ast.unparse(functions["_linger"]).count("_cycles()") == 2


def test_a_slot_of_queries_fewer(script: Any, tmp_path: Path) -> None:
    tree = script.planted("stage", tmp_path).root
    assert trees.is_tree(tree)
    assert changed(tree) == ["kernels/attention/config_sm90.py"]
    assert "q_stages: int = 1" in (tree / "kernels/attention/config_sm90.py").read_text()


def test_a_source_that_has_moved_on_is_noticed(script: Any) -> None:
    with pytest.raises(ValueError, match="stands 0 times in the source"):
        script.replace_once("x = 1", "x = 2", "x = 3")


# Whole runs, on a machine that seems to have a GPU --------------------------------------------------------------------


@pytest.fixture
def prove(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the script with these words, and expects this exit code; returns the folder of its results."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JFABENCH_TUNE", "0")

    def run(*words: str, code: int = 0) -> Path:
        monkeypatch.setattr(sys, "argv", ["prove_gate.py", str(tmp_path / "out"), *words])
        assert script.main() == code
        return tmp_path / "out"

    return run


def test_a_planted_slow_down_is_called_slower_and_the_tree_itself_is_not(
    script: Any, prove: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers answer at once with made-up times; all else is what runs on a GPU."""
    monkeypatch.setattr(script, "ROOT", fake_tree.make(tmp_path / "tree", gpu="NVIDIA H200"))
    monkeypatch.setattr(script, "SOURCES", ("jfabench", "kernels"))

    def slow(tree: Path) -> None:
        path = tree / "jfabench/worker.py"
        factor = "* (1.03 if case['direction'] == 'fwd' else 1) * noise.gauss"
        path.write_text(script.replace_once(path.read_text(), "* noise.gauss", factor))

    monkeypatch.setitem(script.PLANTS, "wait", slow)
    out = prove("--times", "1", "--only", "wait", "--only", "aa")
    summaries = json.loads((out / "summary.json").read_text())
    assert list(summaries) == ["wait-1", "aa-1"]
    assert len(summaries["wait-1"]["slower"]) == 3  # lengths
    assert summaries["wait-1"]["largest_change"] == pytest.approx(0.03, abs=0.005)
    assert (summaries["aa-1"]["slower"], summaries["aa-1"]["faster"], summaries["aa-1"]["cases_not_ok"]) == ([], [], 0)
    assert 0 < summaries["aa-1"]["floor"] < 0.01
    with (out / "wait.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["direction"] for row in rows if row["verdict"] == "slower"} == {"fwd"}
    with (out / "aa.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 30


@pytest.fixture
def comparisons(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the comparisons do, one after the other: seconds that one takes, or an exception that it ends with.

    In place of seconds, changes of the summary of one that takes a second. All others find what they should.
    """
    clock, events = [0.0], list[Any]()

    def compared(kind: str, other: Any, out: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        event = events.pop(0)
        if isinstance(event, Exception | KeyboardInterrupt):
            raise event
        changes = event if isinstance(event, dict) else {}
        clock[0] += 1.0 if changes else event
        summary = {"slower": [] if kind == "aa" else ["fwd M=256"], "cases_not_ok": 0, **changes}
        return summary, pd.DataFrame({name: [kind] for name in script.COLUMNS})

    monkeypatch.setattr(script, "compared", compared)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    return events


def test_what_ended_before_a_kill_is_on_disk(
    prove: Callable[..., Path], comparisons: list[Any], tmp_path: Path
) -> None:
    comparisons += [10.0, 10.0, 10.0, 10.0, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        prove()
    out = tmp_path / "out"
    assert list(json.loads((out / "summary.json").read_text())) == ["wait-1", "stage-1", "aa-1", "wait-2"]
    assert [len((out / f"{kind}.csv").read_text().splitlines()) for kind in ("wait", "stage", "aa")] == [3, 2, 2]


def test_a_comparison_that_cannot_be_made_costs_itself_alone(
    prove: Callable[..., Path], comparisons: list[Any]
) -> None:
    comparisons += [CompareError("too few blocks"), 1.0, 1.0]
    summaries = json.loads((prove("--times", "1", code=1) / "summary.json").read_text())
    assert summaries["wait-1"] == {"error": "too few blocks"}
    assert list(summaries) == ["wait-1", "stage-1", "aa-1"]


def test_nothing_starts_that_would_not_end_in_time(prove: Callable[..., Path], comparisons: list[Any]) -> None:
    comparisons += [50.0, 60.0, 100.0, 50.0, 60.0]  # another aa would end at 420, a third wait at 370
    summaries = json.loads((prove("--times", "3", "--seconds", "350") / "summary.json").read_text())
    assert list(summaries) == ["wait-1", "stage-1", "aa-1", "wait-2", "stage-2"]


# What it ends with ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([1.0, 1.0, {"slower": ["fwd M=256"]}], "aa-1 calls fwd M=256 slower"),
        ([1.0, 1.0, {"slower": ["bwd M=256", "fwd M=64"]}], "aa-1 calls bwd M=256, fwd M=64 slower"),
        ([{"slower": []}, 1.0, 1.0], "wait-1 calls no forward slower"),
        ([1.0, {"slower": []}, 1.0], "stage-1 calls no forward slower"),
        ([{"slower": ["fwd a", "bwd b", "bwd c"]}, 1.0, 1.0], "wait-1 calls bwd b, bwd c slower"),
        ([1.0, {"slower": ["bwd b"]}, 1.0], "stage-1 calls bwd b slower; stage-1 calls no forward slower"),
        ([1.0, 1.0, {"cases_not_ok": 3}], "aa-1 has 3 cases that are not ok"),
        ([{"cases_not_ok": 1}, 1.0, 1.0], "wait-1 has 1 cases that are not ok"),
        ([1.0, SweepStoppedError("no worker"), 1.0], "stage-1 failed"),
        ([CompareError("a"), 1.0, CompareError("b")], "wait-1 failed; aa-1 failed"),
        ([600.0], "stage was never compared, for want of time; aa was never compared, for want of time"),
    ],
)
def test_what_speaks_against_the_gate_is_told_and_fails(
    events: list[Any],
    said: str,
    prove: Callable[..., Path],
    comparisons: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    comparisons += events
    prove("--times", "1", code=1)
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_later_comparison_counts_like_the_first(
    prove: Callable[..., Path], comparisons: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    comparisons += [1.0, 1.0, {"slower": []}, 1.0]
    prove("--times", "2", "--only", "wait", "--only", "aa", code=1)
    assert capsys.readouterr().out.splitlines()[-1] == "wait-2 calls no forward slower"


def test_what_was_found_right_is_told(
    prove: Callable[..., Path], comparisons: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    comparisons += [1.0, 1.0]
    prove("--times", "2", "--only", "wait", "--only", "wait")  # which is one kind
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "all 2 comparisons found what they should, and nothing else"


@pytest.mark.parametrize(
    "words",
    [("--times", "0"), ("--times", "-1"), ("--times", "many"), ("--seconds", "0"), ("--seconds", "-5")],
    ids=" ".join,
)
def test_a_proof_of_nothing_is_refused(
    words: tuple[str, str], prove: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        prove(*words)
    assert ended.value.code == 2
    assert f"{words[0]}: {words[1]}: expected a" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
