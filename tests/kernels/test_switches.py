"""Variants of a kernel's module: what edits do, that stale ones are noticed, and what the compiler makes of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jfabench.kernels.attention.rewrite import Body, Edit, StaleEditError, Swap, variant

SOURCE = """
from other import imported

LIMIT = 3

class Holder:
    def method(self, x):
        return touch(x) + 1

def touch(x):
    return 2 * x

def work(x, seen):
    # a comment
    note(seen, x)
    if x > LIMIT:
        note(seen, "large")
    return touch(x + touch(1)) + imported(x)

def note(seen, what):
    seen.append(what)
"""


class Jit:
    """As `triton.jit` leaves a function: the function itself is in `fn`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, x: int) -> int:
        return int(self.fn(x))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "other.py").write_text("def raw(x):\n    return 100 * x\n")
    (tmp_path / "original.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("other", "original"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    other: Any = importlib.import_module("other")
    other.imported = Jit(other.raw)
    return importlib.import_module("original")


def outcome(module: Any, *edits: Edit, x: int = 5) -> tuple[int, list[object]]:
    seen: list[object] = []
    return variant(module, edits).work(x, seen), seen  # type: ignore[attr-defined]


def test_without_edits_it_is_the_same(module: ModuleType) -> None:
    assert outcome(module) == (14 + 500, [5, "large"])


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Swap("work", "note"), (514, [])),
        (Swap("work", "note", "note({0}, 0)"), (514, [0, 0])),
        (Swap("work", "note", "if {1} == 5:\n    note({0}, 'five')"), (514, ["five"])),
        (Swap("work", "touch", "({0} + 1)"), (5 + 2 + 1 + 500, [5, "large"])),  # also inside an argument
        (Body("touch", ("x",), "return 0"), (500, [5, "large"])),
        (Body("imported", ("x",), "return LIMIT"), (14 + 3, [5, "large"])),
        (Body("Holder.method", ("self", "x"), "return 7"), (514, [5, "large"])),
    ],
)
def test_edits(module: ModuleType, edit: Edit, expected: tuple[int, list[object]]) -> None:
    assert outcome(module, edit) == expected
    assert outcome(module) == (514, [5, "large"])  # the original is what it was


def test_a_method_gets_another_body(module: ModuleType) -> None:
    made: Any = variant(module, [Body("Holder.method", ("self", "x"), "return 7")])
    assert made.Holder().method(1) == 7


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (Swap("work", "notice"), "does not call notice any more"),
        (Swap("gone", "note"), "has no function gone"),
        (Body("gone", (), "pass"), "has no function gone"),
        (Body("touch", ("y",), "return 0"), "touch of original does not take y any more"),
        (Body("imported", ("x", "z", "y"), "return 0"), "does not take y, z any more"),
        (Swap("work", "touch", "if {0}:\n    pass"), "part of an expression"),
    ],
)
def test_a_stale_edit_is_noticed(module: ModuleType, edit: Edit, part: str) -> None:
    with pytest.raises(StaleEditError, match=part):
        variant(module, [edit])


# The kernels. In a child process, where the interpreter is off: variants in the first configuration and case.
Variants = dict[str, dict[str, int]]
FEW = ("no exponentials", "no dQ", "all left out")
"""Variants in which every edit occurs, so that a stale one, or one that does not compile, is found in a minute."""

PROGRAM = """
import contextlib, io, json, sys
from dataclasses import replace
from jfabench import sass
from jfabench.kernels.attention import offline
from jfabench.kernels.attention.switches_sm90 import SWITCHES

def described(launch):
    with contextlib.redirect_stdout(io.StringIO()):  # where a compilation fails, Triton prints all of the PTX
        binary = offline.compile_launch(launch, 90)
    (whole,) = sass.mixes(offline.disassembly(binary.cubin), [])
    said = sass.parse_assembler(offline.assembler_report(binary.ptx, 90))
    return {**whole.counts, "spilled": said.spill_store_bytes + said.spill_load_bytes, "serialised": said.serialised}

found = {}
for direction in ("forward", "backward"):
    launch = next(l for l in offline.launches("sm90", direction, 90) if l.role)
    found[direction] = {"as shipped": described(launch)}
    names = launch.kernel.arg_names
    for switch in SWITCHES:
        wanted = not sys.argv[1:] or switch.name in sys.argv[1:]
        if wanted and switch.kernel == launch.name and switch.serves(launch.options):
            args = tuple(None if name in switch.unused else value for name, value in zip(names, launch.args))
            options = {**launch.options, **switch.options}
            made = replace(launch, kernel=switch.made(), args=args, options=options)
            found[direction][switch.name] = described(made)
print(json.dumps(found))
"""


@pytest.mark.parametrize("names", [FEW, pytest.param((), id="all", marks=pytest.mark.slow)])
def test_switches_leave_their_stage_out_of_the_machine_code(names: tuple[str, ...]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Variants] = json.loads(done.stdout.splitlines()[-1])
    for variants in found.values():
        for name, counts in variants.items():
            assert counts["spilled"] == 0, name
            assert not counts["serialised"], name
    _check_forward(found["forward"])
    _check_backward(found["backward"])
    if not names:
        assert (len(found["forward"]), len(found["backward"])) == (6, 7)


def _check_forward(forward: Variants) -> None:
    base = forward.pop("as shipped")
    for name, counts in forward.items():
        without = name in ("no exponentials", "no softmax", "all left out")
        assert (counts["exp2"] == 0) == without, name
        assert counts["tensor"] == base["tensor"], name  # every matmul is still there
        assert counts["tma_load"] == base["tma_load"], name
        if name in ("no mask", "no store of out and lse", "all left out"):
            assert counts["instructions"] < base["instructions"], name
        if name in ("no softmax", "all left out"):
            assert counts["fp32"] < base["fp32"], name
        if name == "no loads of K and V":
            assert counts["barrier_sync"] != base["barrier_sync"], name


def _check_backward(backward: Variants) -> None:
    base = backward.pop("as shipped")
    for name, counts in backward.items():
        assert (counts["exp2"] == 0) == (name in ("no exponentials", "all left out")), name
        assert (counts["tma_reduce"] == 0) == (name in ("no addition of dQ", "no dQ", "all left out")), name
        assert (counts["tma_store"] == 0) == (name in ("no stores of dK and dV", "all left out")), name
        assert (counts["tensor"] < base["tensor"]) == (name == "no dQ"), name
        # But for the step without exponentials, where an instruction more bounds the numbers.
        assert counts["instructions"] < base["instructions"] or name == "no exponentials", name
        if name in ("no exchange of dS", "all left out"):
            assert counts["barrier_sync"] < base["barrier_sync"], name
