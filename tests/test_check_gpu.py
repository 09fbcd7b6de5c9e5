"""`scripts/check_gpu.py`, as far as it needs no GPU: what it starts, and what it says of what fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_gpu", ROOT / "scripts" / "check_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_each_stage_collects_tests(script: Any) -> None:
    """A test that is renamed must not make a stage an empty one."""
    wanted = {word for stage in script.STAGES for p in script.processes(stage, 1, 1) for word in p.command}
    names = sorted(word for word in wanted if word.startswith(script.NUMERICS))
    command = (sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0", "-p", "no:cacheprovider", *names)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert name in done.stdout


def test_random_problems_are_shared_out(script: Any) -> None:
    started = script.processes("random", 5, 64)
    shares = [(p.environment["JFABENCH_RANDOM_SHARD"], p.environment["JFABENCH_RANDOM_CASES"]) for p in started]
    assert shares == [(f"{share}/5", "5") for share in range(5)]
    assert len({p.name for p in started}) == 5


def run(script: Any, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], *words: str, gpu: bool = True) -> int:
    """With stand-ins for the stages that end with `codes`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", *words])

    def processes(stage: str, *_: int) -> list[Any]:
        command = (sys.executable, "-c", f"print('of {stage}'); raise SystemExit({codes.get(stage, 0)})")
        return [script.Process(stage, command)]

    monkeypatch.setattr(script, "processes", processes)
    return int(script.main())


def lines(capsys: pytest.CaptureFixture[str]) -> Sequence[str]:
    return [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]


def test_a_stage_that_fails_is_told_and_the_others_run(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    logs = tmp_path / "new" / "logs"
    assert run(script, monkeypatch, {"values": 1}, "--logs", str(logs)) == 1
    assert lines(capsys) == [
        "gpu: passed",
        f"values: FAILED, see {logs / 'values.log'}",
        "random: passed",
        "repeat: passed",
        "memcheck: passed",
    ]
    assert (logs / "values.log").read_text() == "of values\n"
    assert run(script, monkeypatch, {}, "--only", "random", "--logs", str(logs)) == 0


def test_what_is_missing_is_said(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(script, monkeypatch, {}, gpu=False) == 3
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert run(script, monkeypatch, {}, "--only", "memcheck", "--logs", str(tmp_path)) == 3
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
    assert run(script, monkeypatch, {}, "--only", "memcheck", "--only", "gpu", "--logs", str(tmp_path)) == 0
    for words in (("--cases", "0"), ("--shards", "many"), ("--logs", " ")):
        with pytest.raises(SystemExit) as stopped:
            run(script, monkeypatch, {}, *words)
        assert stopped.value.code == 2
        assert words[0] in capsys.readouterr().err
