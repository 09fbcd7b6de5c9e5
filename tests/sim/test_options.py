"""What `simulate` and `mutate` have in common: what one refuses, the other refuses in the same words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jfabench.cli import main
from jfabench.sim import options
from jfabench.sim.targets import TargetError

FILE = """
import os, torch, triton
import triton.language as tl

@triton.jit
def kernel(out, n, value: tl.constexpr):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(out + i, value, mask=i < n)

@triton.jit
def plain(out, n):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(out + i, 1.0, mask=i < n)

tuned = triton.autotune([triton.Config({"value": float(i)}) for i in range(3)], key=[])(kernel)

def check():
    out = torch.zeros(50)
    plain[(2,)](out, 50)
    assert (out == 1).all()

def check_tuned():
    check()
    out = torch.zeros(50)
    tuned[(2,)](out, 50)
    assert (out == 2).all(), "not configuration 2"

def fail():
    check()
    raise AssertionError("wrong")

def remove():
    check()
    os.rmdir(os.path.join(os.path.dirname(__file__), "out"))

def remove_and_fail():
    remove()
    raise AssertionError("wrong")

def go_elsewhere():
    check()
    os.chdir(os.path.dirname(os.path.dirname(__file__)))
"""
OURS = ["fwd_sm90", "bwd_sm90", "fwd_sm100", "bwd_sm100"]
COMMANDS = ["simulate", "mutate"]
QUICK = ["--seeds", "1", "--policy", "early"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(FILE)
    return str(path)


def of_a_function(command: str, file: str, function: str = "check") -> list[str]:
    return [command, f"{file}:{function}", *(["--kernel", f"{file}:plain"] if command == "mutate" else [])]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which a command refuses its arguments, before it has done anything."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch("jfabench: .+\n", shown.err)
    return shown.err


# Architectures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["90", "sm90", "sm_90a", "sm_7", "sm_80", "SM_90", " sm_90", "hopper", "sm_90_"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_architecture_that_there_is_not(
    command: str, arch: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = f"jfabench: arch: expected sm_90 or sm_100, got {arch!r}\n"
    for words in [*([command, f"kernels.attention.{name}"] for name in OURS), of_a_function(command, file)]:
        assert refused([*words, "--arch", arch], capsys) == sentence


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_architecture_that_the_name_contradicts(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    direction, _, number = name.partition("_sm")
    other = {"90": "100", "100": "90"}[number]
    target = f"kernels.attention.{name}"
    assert refused([command, target, "--arch", f"sm_{other}"], capsys) == (
        f"jfabench: --arch sm_{other}: {target} is for sm_{number}; leave --arch out, or name "
        f"kernels.attention.{direction}_sm{other}\n"
    )


@pytest.mark.parametrize("prefix", ["kernels.attention.", "jfabench.kernels.attention.", ""])
@pytest.mark.parametrize("name", OURS)
def test_our_kernels_by_name(prefix: str, name: str) -> None:
    direction, _, number = name.partition("_sm")
    for arch in (None, f"sm_{number}"):
        assert options.our_kernel(prefix + name, arch) == (direction, f"sm_{number}")


@pytest.mark.parametrize("target", ["kernels.attention.fwd_sm80", "elsewhere.fwd_sm90", "kernels.fwd_sm90", ".", ""])
def test_what_is_none_of_our_kernels(target: str) -> None:
    with pytest.raises(TargetError, match=r"expected one of kernels\.attention\.fwd_sm90, "):
        options.our_kernel(target, None)


# Options that say nothing for a target -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["window", "packed"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_function_has_its_own_inputs(command: str, case: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused([*of_a_function(command, file), "--case", case], capsys)
    assert error == "jfabench: --case is for our kernels; a function has its own inputs\n"


def test_of_our_kernels_the_target_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["mutate", "kernels.attention.fwd_sm90", "--kernel", "x:y"], capsys)
    assert error.startswith("jfabench: --kernel is for a function; ")


BLANK = [(command, option) for command in COMMANDS for option in ("--arch", "--json", "--case")]


@pytest.mark.parametrize(("command", "option"), [*BLANK, ("mutate", "--kernel"), ("mutate", "--kind")])
def test_blanks_are_not_taken_for_nothing(
    command: str, option: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([command, "kernels.attention.fwd_sm90"], [command, f"{file}:check"]):
        for blank in ("", "  "):
            assert option in refused([*words, option, blank], capsys)


# Configurations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_configuration_that_our_kernel_does_not_have(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, f"kernels.attention.{name}", "--case", "keys=1", "--seeds", "1", "--configuration", "99"]
    error = refused(words, capsys)
    assert re.fullmatch(r"jfabench: configuration 99: for this case the kernel has those from 0 to \d+\n", error)


@pytest.mark.parametrize("number", ["-1", "-3", "1.5", "first", ""])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_number_of_a_configuration(
    command: str, number: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([command, "kernels.attention.fwd_sm90"], of_a_function(command, file)):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--configuration", number])
        assert ended.value.code == 2
        assert f"--configuration: {number}: expected a whole number, at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("number", [3, 5, 99])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_configuration_that_a_functions_kernel_does_not_have(
    command: str, number: int, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*of_a_function(command, file, "check_tuned"), "--seeds", "1", "--configuration", str(number)]
    sentence = f"jfabench: configuration {number}: with these arguments kernel has those from 0 to 2\n"
    assert refused(words, capsys) == sentence


@pytest.mark.parametrize("command", COMMANDS)
def test_a_configuration_where_there_are_none(command: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*of_a_function(command, file), "--seeds", "1", "--configuration", "1"]
    line = FILE.splitlines().index("def check():") + 1
    error = refused(words, capsys)
    assert re.match(rf"jfabench: configuration 1: \S+:{line}: check launches no autotuned kernel, ", error)


@pytest.mark.parametrize(("number", "code"), [(0, 1), (1, 1), (2, 0)])
def test_the_configuration_is_the_one_of_that_number(number: int, code: int, file: str) -> None:
    assert main(["simulate", f"{file}:check_tuned", *QUICK, "--configuration", str(number)]) == code


# The file of the report ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/report.json", "(No such file or directory)"),
        ("afile/report.json", "(Not a directory)"),
        ("afolder", "(Is a directory)"),
        ("n" * 300, "(File name too long)"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_any_run(
    command: str,
    name: str,
    reason: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "afile").write_text("kept")
    (tmp_path / "afolder").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for words in ([command, "kernels.attention.fwd_sm90"], of_a_function(command, file)):
        assert reason in refused([*words, "--json", name], capsys)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "afile").read_text() == "kept"


@pytest.mark.parametrize("words", [["no_such_file.py:f"], ["kernels.attention.fwd_sm90", "--case", "keys=x"]])
def test_trying_the_file_leaves_it_as_it_was(words: list[str], tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("earlier")
    for path in (old, new):
        assert main(["simulate", *words, "--json", str(path)]) == 2
    assert old.read_text() == "earlier"
    assert not new.exists()


@pytest.mark.parametrize(("function", "code"), [("remove", 3), ("remove_and_fail", 1)])
def test_a_report_that_can_no_longer_be_written(
    function: str, code: int, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the runs have found stays the answer; without any, the missing report is one."""
    folder = tmp_path / "out"
    folder.mkdir()
    words = ["simulate", f"{file}:{function}", *QUICK, "--json", str(folder / "report.json")]
    assert main(words) == code
    shown = capsys.readouterr()
    assert ("nothing found" in shown.out) is (code == 3)
    assert shown.err == f"jfabench: {folder}/report.json: the report cannot be written (No such file or directory)\n"


def test_a_device_takes_a_report(file: str) -> None:
    assert main(["simulate", f"{file}:fail", *QUICK, "--json", "/dev/full"]) == 1
    assert main(["simulate", f"{file}:check", *QUICK, "--json", "/dev/null"]) == 0
    assert main(["simulate", f"{file}:check", *QUICK, "--json", "/dev/full"]) == 3


def test_a_report_goes_where_it_was_to_go_when_the_command_began(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    monkeypatch.chdir(start)
    assert main(["simulate", f"{file}:go_elsewhere", *QUICK, "--json", "report.json"]) == 0
    assert Path.cwd() == tmp_path.parent
    assert json.loads((start / "report.json").read_text())[0]["ok"] is True
