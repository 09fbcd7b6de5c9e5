from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jfabench import ceilings, cli, command_line, devices
from jfabench.folder import Ceilings, ResultFolder
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
        (["sweep", "--config", "jagged.yaml", "--device", "gpu"], cli.USAGE, "expected auto, cpu, cuda"),
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


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[list[str], argparse.Action]]:
    """Each argument of each command that takes free text, and words that would run the command but for it."""
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for sub in subs:
        for name, inner in sub.choices.items():
            yield from commands(inner, (*words, name))
    needed = {"config": ["--config", "jagged.yaml"], "lengths": ["--lengths", "l.csv"]}
    for action in parser._actions if not subs else ():
        if action.nargs == 0 or action.choices or action.type not in (None, command_line._folder):
            continue
        others = [other for other in parser._actions if other is not action]
        line = list(words)
        for other in others:
            one_of = [g for g in parser._mutually_exclusive_groups if action in g._group_actions]
            if other.required and not other.option_strings:
                line.append("x")
            elif other.required and not any(other in group._group_actions for group in one_of):
                line += needed.get(other.dest, [other.option_strings[-1], "x"])
        for group in parser._mutually_exclusive_groups:
            if group.required and action not in group._group_actions:
                line += needed[next(member.dest for member in group._group_actions if member.dest in needed)]
        yield line, action


ARGUMENTS = [
    pytest.param(line, action, id=" ".join([*line[:2], action.dest])) for line, action in commands(cli.build_parser())
]


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize(("line", "action"), ARGUMENTS)
def test_a_blank_value_is_refused_by_every_command(
    line: list[str], action: argparse.Action, blank: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = action.option_strings[-1] if action.option_strings else str(action.metavar)
    assert cli.main([*line, *action.option_strings[-1:], blank]) == cli.USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"jfabench: {name} ")
    assert error.count("\n") == 1


def test_options_that_name_files_are_among_them() -> None:
    names = {(param.values[0][0], param.values[1].dest) for param in ARGUMENTS}  # type: ignore[index,union-attr]
    assert {
        ("inspect", "against"), ("inspect", "out"), ("schedule", "lengths"), ("schedule", "calibrate"),
        ("schedule", "column"), ("schedule", "gpu"), ("report", "folders"), ("nightly", "db"), ("compare", "sides"),
        ("sweep", "config"), ("history", "folders"), ("history", "db"),
    } <= names  # fmt: skip


def test_profile_tells_a_file_that_is_not_there_before_a_gpu_that_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "gpu_names", list)
    for device in ("auto", "cuda"):
        assert cli.main(["profile", "--config", "nope.yaml", "--device", device]) == cli.USAGE
        assert "no sweep file 'nope.yaml'" in capsys.readouterr().err
        assert cli.main(["profile", "--config", "jagged.yaml", "--device", device]) == cli.MACHINE
        assert "GPU" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_needs_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(Case("op", "p", "fwd", {}), "unavailable", "2026-01-01T00:00:00+00:00")
    (tmp_path / "records.jsonl").write_text(record.to_line())
    (tmp_path / "file").touch()
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "file")]) == cli.MACHINE
    error = capsys.readouterr().err
    assert f"{tmp_path}/file" in error
    assert "another folder with --out" in error
    assert "try `jfabench report`" not in error


def test_ceilings_are_kept_whatever_becomes_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Ceilings("a CPU", {"bf16": 1e12}, 1e10, "measured", env={"cpu": "a CPU", "cores": 2, "torch": "2"})
    monkeypatch.setattr(ceilings, "measure", lambda device: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    command = ["ceilings", "--device", "cpu", "--out"]
    assert cli.main([*command, str(tmp_path / "file")]) == cli.MACHINE
    assert f"--out {tmp_path / 'file'} cannot be used" in (said := capsys.readouterr()).err
    assert "stored in" in said.out
    assert ceilings.load(made.env) == made
    # and the other way about: a cache that cannot be used does not cost the folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.main([*command, str(tmp_path / "out")]) == cli.MACHINE
    assert "XDG_CACHE_HOME" in capsys.readouterr().err
    assert ResultFolder(tmp_path / "out").read_ceilings() == made


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
