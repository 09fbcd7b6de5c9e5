"""The command `simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jfabench.cli import main

KERNEL = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(out, n):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(out + i, {value}, mask=i < n)

def check():
    out = torch.zeros(50)
    kernel[(2,)](out, 50)
    assert (out == 1).all(), "not all ones"
"""


def write(folder: Path, value: str) -> str:
    path = folder / "mine.py"
    path.write_text(KERNEL.format(value=value))
    return f"{path}:check"


def test_a_function_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert main(["simulate", write(tmp_path, "1.0"), "--arch", "sm_100", "--seeds", "2", "--json", str(out)]) == 0
    assert "check (simulated sm_100): 6 runs" in capsys.readouterr().out
    (report,) = json.loads(out.read_text())
    assert report["ok"] is True
    assert [(run["seed"], run["policy"]) for run in report["runs"][:2]] == [(0, "random"), (0, "early")]


def test_a_wrong_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", write(tmp_path, "i * 1.0"), "--seeds", "1", "--policy", "late"]) == 1
    out = capsys.readouterr().out
    assert "wrong-result: not all ones" in out
    assert "seed=0, policy='late'" in out


def test_our_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--case", "keys=40:90,D=64,causal", "--seeds", "1", "--policy", "early", "--first-seed", "7"]
    assert main(["simulate", "kernels.attention.fwd_sm90", *arguments, "--barriers"]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("keys=40:90,D=64,causal: forward_sm90 (simulated sm_90)")
    assert table[0].split() == ["barrier", "arrivals", "phases", "waits", "blocked"]
    assert {"k.full[0]", "k.empty[0]", "v.full[0]"} <= {line.split()[0] for line in table[1:]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels.attention.fwd_sm80"], "expected one of kernels.attention.fwd_sm90"),
        (["kernels.attention.fwd_sm90", "--case", "sideways"], "'sideways' is neither a case (broadcast"),
        (["no_such_file.py:f"], "there is no such file"),
        (["no.such.module:f"], "cannot be imported"),
        (["json:no_such_function"], "json has no function no_such_function"),
        (["json:loads", "--case", "causal"], "--case is for our kernels"),
        (["kernels.attention.fwd_sm90", "--case", "keys=x"], "'keys=x': expected numbers"),
        (["kernels.attention.fwd_sm90", "--case", "D"], "'D': expected numbers"),
        (
            ["kernels.attention.bwd_sm100", "--case", "causal", "--case", "queries=64"],
            "lacks the keys of each sequence",
        ),
        (["kernels.attention.fwd_sm90", "--case", "keys=9,heads=3,kv_heads=2"], "heads=3: expected a multiple of"),
        (["gc:isenabled"], "isenabled launched no kernel"),
        (["json:loads"], "loads cannot be called without arguments"),
    ],
)
def test_what_cannot_be_simulated(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_imports_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "1.0")
    (tmp_path / "mine.py").rename(tmp_path / "kernel_beside.py")
    (tmp_path / "test_beside.py").write_text("from kernel_beside import check\n")
    assert main(["simulate", f"{tmp_path / 'test_beside.py'}:check", "--seeds", "1", "--policy", "early"]) == 0


def test_what_mutate_is_to_change_has_to_be_a_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write(tmp_path, "1.0")
    assert main(["mutate", target, "--kernel", target]) == 2
    assert "mine.py:check: expected a @triton.jit function" in capsys.readouterr().err
