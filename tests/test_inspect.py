from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from jfabench import cli, inspect_table
from jfabench.inspect_compare import LIMITS, compare, read_rows
from jfabench.inspect_kernels import (
    COLUMNS,
    Estimate,
    Inspected,
    InspectionError,
    Subject,
    flat_rows,
    write_rows,
)
from jfabench.sass import KINDS, AssemblerReport, Mix

COMPILER = "triton 3.7.4, ptxas 12.9.86"


def mix(role: str, copies: int = 1, **counts: int) -> Mix:
    return Mix(role, copies, dict.fromkeys(KINDS, 0) | counts)


def kernel(
    config: str = "block_n=128",
    spills: tuple[int, int] = (0, 0),
    registers: int = 168,
    shared_bytes: int = 1000,
    compiler: str = COMPILER,
    estimate: Estimate | None = None,
    unattributed: bool = False,
) -> Inspected:
    subject = Subject("forward", "sm_90", "forward", config, 128, "bfloat16", 1, "causal", True)
    roles = (mix("all", instructions=10, tensor=4), mix("load", instructions=3), mix("attend", 2, tensor=4))
    assembler = AssemblerReport(registers, *spills, 3, False)
    kept = roles[:1] if unattributed else roles
    return Inspected(subject, assembler, shared_bytes, 0, kept, unattributed, estimate, compiler)


# CSV


def test_rows_are_one_a_role_and_survive_the_file(tmp_path: Path) -> None:
    rows = flat_rows([kernel(spills=(4, 8), estimate=Estimate(2048.0, 1024.0, None, 65536, 3568.9, "tensor"))])
    assert [row["role"] for row in rows] == ["all", "load", "attend"]
    assert rows[0]["estimate_tensor_cycles"] == "2048.0"
    assert (rows[0]["estimate_global_bytes"], rows[0]["estimate_memory_cycles"]) == ("65536", "3568.9")
    assert rows[0]["estimate_shared_cycles"] == rows[1]["estimate_bound"] == ""
    assert {row["registers"] for row in rows} == {"168"}
    path = tmp_path / "new" / "inspect.csv"
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("a,b\n1,2\n", "lacks arch, "),
        ("", "lacks arch, "),
        (",".join(COLUMNS) + "\n" + ",".join("x" for _ in COLUMNS) + "\n", "no number"),
    ],
)
def test_another_file_is_no_baseline(content: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    with pytest.raises(InspectionError, match=part):
        read_rows(path)


# comparing


def compared(before: list[Inspected], after: list[Inspected]) -> tuple[str, bool]:
    found = compare(flat_rows(before), flat_rows(after))
    words = [f"{change.now} {change.what}, before {change.before}" for change in found.worse]
    return "; ".join((*words, *found.notes)), found.fails


def test_nothing_changed() -> None:
    assert compared([kernel()], [kernel()]) == ("", False)


@pytest.mark.parametrize(
    ("before", "after", "part", "fails"),
    [
        (kernel(), kernel(spills=(0, 4)), "4 bytes spilled, before 0", True),
        (kernel(spills=(4, 4)), kernel(spills=(4, 8)), "8 bytes spilled, before 4", False),
        (kernel(spills=(4, 4)), kernel(spills=(4, 5 + LIMITS["spilled"])), "21 bytes spilled, before 4", True),
        (kernel(), kernel(registers=168 + LIMITS["registers"]), "176 registers, before 168", False),
        (kernel(), kernel(registers=169 + LIMITS["registers"]), "177 registers, before 168", True),
        (kernel(), kernel(shared_bytes=2024), "2024 bytes of shared memory, before 1000", False),
        (kernel(), kernel(shared_bytes=2025), "2025 bytes of shared memory, before 1000", True),
        (kernel("block_n=64"), kernel(spills=(4, 4)), "4 bytes spilled, before None", True),
        (kernel("block_n=64"), kernel(), "1 not in the baseline; 1 of the baseline's are not compiled any more", False),
        (kernel(compiler="triton 3.6"), kernel(spills=(4, 4)), "not compared, the baseline is of triton 3.6", False),
    ],
)
def test_what_got_worse_is_named(before: Inspected, after: Inspected, part: str, fails: bool) -> None:
    said, failed = compared([before], [after])
    assert part in said
    assert failed == fails


def test_what_got_better_is_not() -> None:
    worst = kernel(spills=(4, 4), registers=200, shared_bytes=2000)
    assert compared([worst], [kernel()]) == ("", False)


def test_only_what_was_compiled_is_compared() -> None:
    found = compare(flat_rows([kernel()]), [])
    assert (found.compared, found.worse, found.notes) == (0, (), ())


# the table


def shown(kernels: list[Inspected]) -> str:
    console = Console(file=io.StringIO(), width=140)
    inspect_table.show(kernels, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_what_differs() -> None:
    first = kernel("block_n=128 stages=2", estimate=Estimate(2048.0, 1024.0, None, 65536, 3568.9, "tensor"))
    text = shown([first, kernel("block_n=64 stages=2", spills=(4, 8))])
    assert "forward sm_90" in text
    assert "config 1: block_n=64\n" in text
    assert "every config: stages=2" in text
    assert "4/8" in text
    assert "attend x2" in text
    assert "TMEM" not in text  # a column of zeros
    assert "2,048" in text
    assert "65,536" in text
    assert "3,569" in text
    assert "tensor, or shared" in text
    assert COMPILER in text


def test_what_bounds_is_named_in_the_table_and_the_rows() -> None:
    found = kernel("ctas=1", estimate=Estimate(2560.0, 1024.0, 3840.0, 132096, 4802.0, "shared"))
    even = kernel("ctas=2", estimate=Estimate(2048.0, 1024.0, 2048.0, 66560, 2419.6, "tensor and shared"))
    same = kernel("ctas=3", estimate=found.estimate)
    lines = [" ".join(line.split()) for line in shown([found, even, same]).splitlines()]
    assert {"config 0: ctas=1", "config 1: ctas=2", "config 2: ctas=3"} <= set(lines)
    assert "forward sm_90 0, 2 128 2,560 1,024 3,840 shared 132,096 4,802" in lines
    assert "forward sm_90 1 128 2,048 1,024 2,048 tensor and shared 66,560 2,420" in lines
    assert "forward sm_90 128 2,560 1,024 3,840 shared 132,096 4,802" in " ".join(shown([found]).split())
    bounds = [row["estimate_bound"] for row in flat_rows([found, even]) if row["role"] == "all"]
    assert bounds == ["shared", "tensor and shared"]


def test_the_table_says_when_roles_are_not_told_apart() -> None:
    assert "does not tell them apart" in shown([kernel(unattributed=True)])
    assert "does not tell them apart" not in shown([kernel()])


def test_the_comparison_is_printed() -> None:
    console = Console(file=io.StringIO(), width=140)
    worse = [kernel(registers=170), kernel("block_n=64", spills=(4, 4))]
    found = compare(flat_rows([kernel()]), flat_rows(worse))
    inspect_table.show_comparison(found, "before.csv", console)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines[0] == "against before.csv: 1 compared, 2 got worse"
    shown = [line for line in lines if line.startswith(("fails", "within limits"))]
    assert shown == [
        "fails forward sm_90 block_n=64; D=128 group=1 mask=causal broadcast bytes spilled new 4",
        "within limits forward sm_90 block_n=128; D=128 group=1 mask=causal broadcast registers 168 170",
    ]
    assert "note: 1 not in the baseline" in lines


# the command


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    for option in ("--arch", "--kernel", "--out", "--against"):
        assert option in text


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where the interpreter is off unless `environment` says so."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "jfabench", "inspect", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**inherited, **environment}, check=False
    )


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--arch", "sm_91"], cli.USAGE, "did you mean 'sm_90'?"),
        (["--arch", ","], cli.USAGE, "--arch needs one of sm_90, sm_100"),
        (["--out", " "], cli.USAGE, "--out"),
        (["--against", "/no/such.csv"], cli.USAGE, "/no/such.csv cannot be read"),
    ],
)
def test_errors_are_one_sentence(words: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", *words]) == code
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_an_unknown_kernel_gets_the_nearest(tmp_path: Path) -> None:
    done = run("--arch", "sm_90", "--kernel", "forward_sm9_kernel", "--out", str(tmp_path))
    assert done.returncode == cli.USAGE
    assert "no such kernel for sm_90 (did you mean 'forward_sm90_kernel'?)" in done.stderr
    assert not list(tmp_path.iterdir())


def test_interpreted_kernels_are_refused(tmp_path: Path) -> None:
    done = run("--arch", "sm_90", "--out", str(tmp_path), TRITON_INTERPRET="1")
    assert done.returncode == cli.MACHINE
    assert "unset TRITON_INTERPRET" in done.stderr


def fake_launches(monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception) -> None:
    """One launch for each architecture, of which nothing is compiled; the function `failing` raises `error`."""
    from jfabench.kernels.attention import offline

    def fail(*_: object) -> None:
        raise error

    kernel = SimpleNamespace(__name__="forward_kernel", arg_names=[], fn=fake_launches)
    launch = offline.Launch(
        kernel, (), {}, offline.FEW[0], "triton", "forward", None, {"block_m": 64, "block_n": 64}, 0
    )
    monkeypatch.setattr(offline, "launches", lambda *_: iter([launch]))
    monkeypatch.setattr(offline, "compile_launch", lambda *_: offline.Binary("", b"", 0, 0))
    monkeypatch.setattr(offline, failing, fail)


@pytest.mark.parametrize(
    ("failing", "error", "code", "part"),
    [
        ("compile_launch", RuntimeError("too much\nof it"), cli.FAILED, "forward_kernel does not compile for sm_90"),
        ("disassembly", FileNotFoundError("nvdisasm"), cli.MACHINE, "install fbtriton anew"),
        ("assembler_report", subprocess.CalledProcessError(255, "ptxas"), cli.MACHINE, "install fbtriton anew"),
    ],
)
def test_what_fails_is_said(
    failing: str,
    error: Exception,
    code: int,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fake_launches(monkeypatch, failing, error)
    if failing != "disassembly":
        from jfabench.kernels.attention import offline

        monkeypatch.setattr(offline, "disassembly", lambda _: "")
    assert cli.main(["inspect", "--arch", "sm_90", "--out", str(tmp_path)]) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert part in said[-1]
    assert not list(tmp_path.iterdir())


def test_one_kernel_that_does_not_compile_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from jfabench.kernels.attention import offline

    fake_launches(monkeypatch, "disassembly", RuntimeError())
    (launch,) = offline.launches("triton", "forward", 90)
    bad = replace(launch, kernel=SimpleNamespace(__name__="bad_kernel", arg_names=[], fn=fake_launches))

    def compiled(given: offline.Launch, _arch: int) -> offline.Binary:
        if given is bad:
            raise RuntimeError("no such layout")
        return offline.Binary("ptx", b"", 0, 0)

    monkeypatch.setattr(offline, "launches", lambda *_: iter([bad, launch]))
    monkeypatch.setattr(offline, "compile_launch", compiled)
    monkeypatch.setattr(offline, "disassembly", lambda _: "")
    said = "Used 40 registers, used 1 barriers\n0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    monkeypatch.setattr(offline, "assembler_report", lambda *_: said)
    assert cli.main(["inspect", "--arch", "sm_90", "--out", str(tmp_path)]) == cli.FAILED
    assert "bad_kernel does not compile for sm_90" in capsys.readouterr().err
    assert {row["kernel"] for row in read_rows(tmp_path / "inspect.csv")} == {"forward_kernel"}


def test_a_kernel_is_compiled_and_compared(tmp_path: Path) -> None:
    words = ("--kernel", "delta_kernel", "--out", str(tmp_path))
    done = run(*words)
    assert done.returncode == cli.OK, done.stderr
    assert "delta_kernel sm_100" in done.stdout
    path = tmp_path / "inspect.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["arch"] for row in rows} == {"sm_90", "sm_100"}
    assert {row["head_dim"] for row in rows} >= {"64", "128"}
    for row in rows:
        assert (row["role"], row["config"], row["spill_load_bytes"]) == ("all", f"d={row['head_dim']} block=64", "0")
        assert int(row["registers"]) > 0
        assert int(row["fp32"]) > 0
        assert int(row["tensor"]) == 0
        assert "ptxas" in row["compiler"]

    # The baseline is the file that is written anew.
    path.write_text(path.read_text().replace(f",{rows[0]['registers']},0,0,", ",16,0,0,"))
    again = run(*words, "--against", str(path))
    assert again.returncode == cli.FAILED, again.stderr
    failing = [line.split() for line in again.stdout.splitlines() if line.split()[:1] == ["fails"]]
    assert ["registers", "16", rows[0]["registers"]] in [words[-3:] for words in failing]
