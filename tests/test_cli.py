from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jfabench import cli, devices
from jfabench.records import Case, Record


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jfabench", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "120", **environment},
        check=False,
    )


@pytest.mark.parametrize("words", [["--help"], ["sweep", "--help"], ["report", "--help"], ["ceilings", "--help"]])
def test_help_has_examples_or_explains_every_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert (len(words) == 2 and words[0] != "sweep") or "examples:" in text
    for line in text.splitlines():
        if line.startswith("  --") and "  " not in line.strip():
            assert text.splitlines()[text.splitlines().index(line) + 1].startswith("      "), line


def test_misspelt_words_get_the_nearest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["jfabench", "sweeep"])
    with pytest.raises(SystemExit) as stop:
        cli.main(["sweeep"])
    assert stop.value.code == cli.USAGE
    assert "did you mean 'sweep'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["sweep", "--config", "no.yaml", "--device", "cpu"], cli.USAGE, "no sweep file"),
        (["sweep", "--config", "jagged.yaml", "--device", "gpu"], cli.MACHINE, "expected auto, cpu, cuda"),
        (
            ["sweep", "--config", "jagged.yaml", "--device", "cpu", "--measure", "events"],
            cli.USAGE,
            "needs a CUDA device",
        ),
        (["sweep", "--config", "jagged.yaml", "--resume"], cli.USAGE, "--out"),
        (["sweep", "--config", "jagged.yaml", "--retry-failed"], cli.USAGE, "--resume"),
        (["report", "/nonexistent"], cli.USAGE, "no records.jsonl"),
    ],
)
def test_usage_errors_are_one_sentence(
    words: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_dry_run_prints_the_cases_and_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["sweep", "--config", "jagged", "--device", "cpu", "--dry-run", "--out", str(out)]) == cli.OK
    text = capsys.readouterr().out
    assert "36 cases at cpu scale" in text
    assert "GFLOP" in text
    assert not out.exists()


def test_list_names_every_provider_and_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == cli.OK
    text = capsys.readouterr().out
    for name in ("reference", "sdpa_padded", "torch_varlen", "triton_jfa", "tlx_jfa", "fa3", "fa4", "fa4_kernel"):
        assert name in text
    assert "jagged.yaml" in text


def test_the_exit_code_tells_whether_all_went_well() -> None:
    case = Case("op", "p", "fwd", {})
    verdict = {
        status: cli._verdict([Record(case, "ok", ""), Record(case, status, "")])  # type: ignore[arg-type]
        for status in ("ok", "unsupported", "unavailable", "wrong", "failed", "timeout", "oom")
    }
    assert verdict == {
        "ok": cli.OK,
        "unsupported": cli.OK,
        "unavailable": cli.OK,
        "wrong": cli.FAILED,
        "failed": cli.FAILED,
        "timeout": cli.FAILED,
        "oom": cli.FAILED,
    }
    assert cli._verdict([Record(case, "unavailable", "")]) == cli.FAILED


def test_a_real_sweep_on_the_cpu_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("sweep", "--config", "jagged.yaml", "--device", "cpu", "--set", "lengths.max_len=32", "--out", str(out))
    assert done.returncode == cli.OK, done.stderr
    assert "on the CPU" in done.stdout
    assert done.stdout.rstrip().endswith(str((out / "report.html").resolve()))
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3 * 2
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        flops = float(row["tflops"]) * 1e12 * float(row["median_s"])
        assert flops == pytest.approx(float(row["flops"]), rel=1e-6)
    again = run("report", str(out))
    assert again.returncode == cli.OK, again.stderr


def test_auto_falls_back_to_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", list)
    device, note = devices.choose_device("auto")
    assert device == "cpu"
    assert "no NVIDIA GPU found" in note
    device, note = devices.choose_device("cuda")
    assert device is None
    assert "--device cpu" in note


def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(devices, "torch_cuda_devices", lambda: 0)
    device, note = devices.choose_device("auto")
    assert device == "cpu"
    assert "NVIDIA H200 found, but" in note
    assert "doctor" in note


def test_devices_are_chosen_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["A", "B"])
    monkeypatch.setattr(devices, "torch_cuda_devices", lambda: 2)
    assert devices.choose_device("auto") == ("cuda", "")
    assert devices.choose_device("cuda:1") == ("cuda:1", "")
    assert devices.choose_device("cuda:2")[0] is None
