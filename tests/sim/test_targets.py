"""Mistakes in what is to be simulated: one sentence with their line, and never a success."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from jfabench.cli import main
from jfabench.sim import targets
from jfabench.sim.targets import RaisedError, TargetError

HEAD = """\
import torch, triton
import triton.language as tl

@triton.jit
def kernel(out, n):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    tl.store(out + i, 1.0, mask=i < n)

def check():
    out = torch.zeros(50)
    kernel[(2,)](out, 50)
"""
LINE = len(HEAD.splitlines()) + 1  # of what a test puts after it

ODD = {  # exceptions that are not like others
    "not an Exception": ("raise type('Odd', (BaseException,), {})('odd')\n", "Odd: odd"),
    "of a generator": ("raise GeneratorExit\n", "GeneratorExit"),
    "of pytest": ("import pytest; pytest.skip('no GPU', allow_module_level=True)\n", "Skipped: no GPU"),
    "without a message": (
        "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})\n",
        "Mute: (its __str__ raises ZeroDivisionError)",
    ),
    "with a message that is no text": (
        "raise type('Mute', (BaseException,), {'__str__': lambda self: 7})\n",
        "Mute: (its __str__ raises TypeError)",
    ),
    "syntax error without a message": ("raise SyntaxError\n", "SyntaxError: None"),
    "syntax error of no file": ("raise SyntaxError('odd', (7, 'x', 1, 'y'))\n", "SyntaxError: odd"),
}
NOT_LOADED = {
    **ODD,
    "syntax error": ("def broken(:\n", "SyntaxError: invalid syntax"),
    "indentation": ("x = 1\n  y = 2\n", "IndentationError: unexpected indent"),
    "missing package": ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
    "missing name in a package": ("from torch import no_such_name\n", "ImportError: cannot import name 'no_such_name'"),
    "missing attribute": ("torch.no_such_function()\n", "AttributeError: module 'torch' has no attribute"),
    "exit": ("raise SystemExit(0)\n", "SystemExit: 0"),
    "in a library": ("torch.zeros(2) @ torch.zeros(3)\n", "RuntimeError: "),
}
RAISED = {
    **{name: (f"    {text}", message) for name, (text, message) in ODD.items()},
    "name": ("    undefined\n", "NameError: name 'undefined' is not defined"),
    "attribute": ("    torch.no_such_function()\n", "AttributeError: module 'torch' has no attribute"),
    "in a library": ("    out.view(7, 7)\n", "RuntimeError: shape '[7, 7]' is invalid"),
    "value": ("    raise ValueError('two\\n  lines')\n", "ValueError: two lines"),
    "exit": ("    raise SystemExit(0)\n", "SystemExit: 0"),
    "arguments of the kernel": ("    kernel[(1,)](out)\n", "TypeError: missing a required argument: 'n'"),
    "option of the kernel": ("    kernel[(1,)](out, 50, BLOK=3)\n", "KernelError: kernel has no argument BLOK"),
}
RETURNED = {
    "tensor": ("    return (out == 1).all()\n", "Tensor"),
    "text": ("    return 'fine'\n", "str"),
    "number": ("    return 0\n", "int"),
}


def write(folder: Path, text: str) -> str:
    """The target in a new file of its own name, which no other test has loaded."""
    path = folder / f"{folder.name}.py"
    path.write_text(HEAD + text)
    return f"{path}:check"


def commands(target: str) -> list[list[str]]:
    few = ["--seeds", "1", "--arch", "sm_90"]
    kernel = f"{target.removesuffix(':check')}:kernel"
    return [["simulate", target, "--policy", "early", *few], ["mutate", target, "--kernel", kernel, *few]]


def said(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which a command says why it has ended with ``code``."""
    assert main(words) == code
    error = capsys.readouterr().err
    assert error.startswith("jfabench: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("mistake", NOT_LOADED)
def test_a_file_that_cannot_be_loaded(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = NOT_LOADED[mistake]
    target = write(tmp_path, text)
    line = LINE + (mistake == "indentation")
    for words in commands(target):
        error = said(words, 2, capsys)
        assert "cannot be imported: " in error
        assert f"{tmp_path.name}.py:{line}: {message}" in error
    assert tmp_path.name not in sys.modules


@pytest.mark.parametrize("mistake", RAISED)
def test_a_function_that_raises(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = RAISED[mistake]
    for words in commands(write(tmp_path, text)):
        assert f"{tmp_path.name}.py:{LINE}: {message}" in said(words, 1, capsys)


@pytest.mark.parametrize("kind", RETURNED)
def test_a_function_without_a_verdict(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, name = RETURNED[kind]
    for words in commands(write(tmp_path, text)):
        error = said(words, 2, capsys)
        assert f"{tmp_path.name}.py:9: check returned a value of type {name}: expected None, True, or False" in error


def test_a_verdict_without_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write(tmp_path, "    raise type('Mute', (AssertionError,), {'__str__': lambda self: 1 / 0})\n")
    simulated, mutated = commands(target)
    assert main(simulated) == 1
    assert "wrong-result: (its __str__ raises ZeroDivisionError)" in capsys.readouterr().out
    assert "wrong-result: (its __str__ raises ZeroDivisionError)" in said(mutated, 1, capsys)


@pytest.mark.parametrize("indent", ["", "    "], ids=["loaded", "called"])
def test_an_interruption_is_none_of_the_targets_mistakes(
    indent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(write(tmp_path, f"{indent}raise KeyboardInterrupt\n")):
        assert main(words) == 130
        assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_module_that_raises_when_it_is_asked_for_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write(tmp_path, "def __getattr__(name): raise BaseException(name)\n").replace(":check", ":other")
    assert f"{tmp_path.name}.py:{LINE}: BaseException: other\n" in said(["simulate", target], 2, capsys)


GONE = {
    "loaded": ("import os; os.chdir('/'); undefined\n", "{name}.py cannot be imported: {name}.py:{line}: NameError"),
    "called": ("    import os; os.chdir('/'); undefined\n", "{name}.py:{line}: NameError"),
    "wrong type": ("    import os; os.chdir('/'); return 7\n", "{name}.py:9: check returned a value of type int"),
}


@pytest.mark.parametrize("when", GONE)
def test_places_are_shown_from_the_folder_at_the_start(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = GONE[when]
    monkeypatch.setattr(targets, "_START", tmp_path)
    target = Path(write(tmp_path, text)).name
    for words in commands(target):
        monkeypatch.chdir(tmp_path)
        error = said(words, 2 if when != "called" else 1, capsys)
        assert Path.cwd() == Path("/")
        expected = message.format(name=tmp_path.name, line=LINE)
        assert error.startswith(f"jfabench: {expected}") or f"error: {expected}" in error


def test_a_kernels_file_is_found_wherever_the_functions_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goes_away.py").write_text("import os; os.chdir('/')\ndef check(): pass\n")
    (tmp_path / "stays_here.py").write_text("kernel = 3\n")
    error = said(["mutate", "goes_away.py:check", "--kernel", "stays_here.py:kernel"], 2, capsys)
    assert error == "jfabench: stays_here.py:kernel: expected a @triton.jit function\n"


def test_a_function_that_launches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write(tmp_path, "def check(): return True\n")
    error = said(["simulate", target, "--seeds", "1"], 2, capsys)
    assert f"{tmp_path.name}.py:{LINE}: check launched no kernel under seed 0, policy 'random'" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_function", "has no function no_such_function"),
        ("kernel", "is a kernel: name a function without arguments that launches it"),
        ("number", "is of type int: expected a function without arguments"),
        ("needy", f".py:{LINE + 1}: needy cannot be called without arguments: missing a required argument: 'x'"),
    ],
)
def test_what_is_no_function_to_call(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write(tmp_path, "number = 3\ndef needy(x): pass\n").replace(":check", f":{name}")
    assert message in said(["simulate", target], 2, capsys)


def test_a_mistake_beside_the_file_has_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "lies_beside.py").write_text("\n\n1 / 0\n")
    target = write(tmp_path, "import lies_beside\n")
    assert "lies_beside.py:3: ZeroDivisionError: division by zero" in said(["simulate", target], 2, capsys)


def test_a_mistake_in_the_kernel_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write(tmp_path, "")
    path = Path(target.removesuffix(":check"))
    path.write_text(path.read_text().replace("1.0", "undefined"))
    for words in commands(target):
        assert main(words) == 1
        error = capsys.readouterr().err
        assert f"NameError: name 'undefined' is not defined\n    at {path.name}:7 in kernel\n" in error


@pytest.mark.parametrize("target", [":check", "json:"])
def test_half_a_name(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{target}: expected module:function" in said(["simulate", target], 2, capsys)


def test_a_module_that_there_is_not_has_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = said(["simulate", "no.such.module:check"], 2, capsys)
    assert error == "jfabench: no.such.module cannot be imported: ModuleNotFoundError: No module named 'no'\n"


@pytest.mark.parametrize("module", ["kernels.attention.fwd_sm90", "operators.providers"])
def test_a_module_of_ours_by_half_its_name(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "kernels").exists()])
    top = module.partition(".")[0]
    assert said(["simulate", f"{module}:check"], 2, capsys) == (
        f"jfabench: {module} cannot be imported: ModuleNotFoundError: No module named '{top}' (did you mean "
        f"jfabench.{module}?)\n"
    )


def test_the_process_ends_without_a_traceback(tmp_path: Path) -> None:
    target = write(tmp_path, "    import os; os.chdir('/'); raise SystemExit(0)\n")
    command = [sys.executable, "-m", "jfabench", "simulate", target, "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"jfabench: {tmp_path.name}.py:{LINE}: SystemExit: 0\n"


def test_verdicts_are_no_mistakes() -> None:
    def wrong() -> None:
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        targets.telling(wrong)()
    assert targets.telling(lambda: False)() is False


def test_the_line_is_the_innermost_that_is_no_librarys() -> None:
    def inner() -> None:
        functools.reduce(lambda a, b: a / b, [1, 0])

    first = inner.__code__.co_firstlineno
    with pytest.raises(RaisedError) as raised:
        targets.telling(inner)()
    assert f"test_targets.py:{first + 1}: ZeroDivisionError: division by zero" in str(raised.value)


def test_a_file_is_loaded_once(tmp_path: Path) -> None:
    target = write(tmp_path, "")
    kernel = targets.find(target.replace(":check", ":kernel"))
    assert targets.function(target).__globals__["kernel"] is kernel  # type: ignore[attr-defined]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One that modules are imported from, and one that is not. Everything that a test loads is forgotten."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return here, there


@pytest.mark.parametrize("name", ["json", "wave", "time", "torch", "imported", "found", "pytest", "conftest"])
def test_a_file_with_another_modules_name(name: str, folders: tuple[Path, Path]) -> None:
    """Of the standard library, loaded, not yet or built in; installed; one's own, loaded or not."""
    here, there = folders
    for own in ("imported", "found"):
        (here / f"{own}.py").write_text("")
    importlib.import_module("imported")
    sys.modules.pop("wave", None)
    (there / f"{name}.py").write_text(HEAD)
    kept = dict(sys.modules)
    assert main(["simulate", f"{there / name}.py:check", "--seeds", "1", "--policy", "early"]) == 0
    kernel = targets.find(f"{there / name}.py:kernel")
    assert targets.function(f"{there / name}.py:check").__globals__["kernel"] is kernel  # type: ignore[attr-defined]
    assert {loaded: sys.modules[loaded] for loaded in kept} == kept
    assert getattr(importlib.import_module(name), "__file__", "") != str(there / f"{name}.py")


def test_two_files_of_one_name(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        (folder / "twice.py").write_text(f"def check(): return {folder.name!r}\n")
    for _ in range(2):
        assert [targets.find(f"{folder / 'twice.py'}:check")() for folder in folders] == ["here", "there"]
    assert importlib.import_module("twice").check() == "here"


@pytest.mark.parametrize("name", ["json", "imported", "new"])
@pytest.mark.parametrize("mistake", ["1 / 0", "import sys; del sys.modules[__name__]; 1 / 0"])
def test_a_file_that_cannot_be_loaded_takes_no_module_with_it(
    name: str, mistake: str, folders: tuple[Path, Path]
) -> None:
    here, there = folders
    (here / "imported.py").write_text("")
    importlib.import_module("imported")
    (there / f"{name}.py").write_text(mistake)
    kept = dict(sys.modules)
    with pytest.raises(TargetError, match="ZeroDivisionError"):
        targets.find(f"{there / name}.py:check")
    assert sys.modules == kept


def test_built_in_functions_have_no_place() -> None:
    assert targets.defined(len) == "len"
    with pytest.raises(TargetError, match=r"no_such_file\.py: there is no such file"):
        targets.find("no_such_file.py:f")
