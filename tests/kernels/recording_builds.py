"""Builds of the Hopper kernels with recording switched off, with its calls removed from the source, and switched on.

    python recording_builds.py          a JSON object with the builds of both kernels, as they fill the registers most
    python recording_builds.py all      in all shipped configurations and cases

Not a test module: a test runs it in a child process, where the interpreter is off.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import itertools
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from jfabench.kernels.attention import offline
from jfabench.sass import parse_assembler

ARCH = 90
KERNELS = ("forward_sm90_kernel", "backward_sm90_kernel")
NAMES = {"watch", "record", "since"}
CALLED = {"watch.now", "watch.waited", "watch.next", "start_watch"}
NAMED_BARRIERS = {"forward": r"0x[9a]", "backward": "0x9"}  # of consumers; 0xa of the backward is within the loader


class _Remover(ast.NodeTransformer):
    """Takes recording out of a module: statements, parameters and arguments."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:  # the name that ast calls
        ours = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in CALLED
        return None if ours else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:  # the name that ast calls
        ours = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in CALLED
        return None if ours else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:  # the name that ast calls
        node.args = [argument for argument in node.args if not _is_ours(argument)]
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:  # the name that ast calls
        node.args = [argument for argument in node.args if argument.arg not in NAMES]
        return node


def _is_ours(argument: ast.expr) -> bool:
    if isinstance(argument, ast.Name):
        return argument.id in NAMES
    return isinstance(argument, ast.Call) and ast.unparse(argument.func) == "record.buffer"


def without_recording(folder: Path) -> ModuleType:
    """The module `offline` of a copy of the kernels' package from which recording was removed."""
    copy = folder / "kernels_without_recording"
    shutil.copytree(Path(offline.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pipeline", "fwd_sm90", "bwd_sm90", "launch_sm90"):
        file = copy / f"{name}.py"
        tree = _Remover().visit(ast.parse(file.read_text()))
        left = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & NAMES
        assert not left, f"{name} still uses {left}"
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{copy.name}.offline")


def launches(module: ModuleType, everything: bool) -> dict[str, Any]:
    """The launches of the kernels that can be recorded, by what they are specialised for."""
    found = {
        f"{launch.name} {dict(launch.config)} {tuple(launch.case)}": launch
        for direction in ("forward", "backward")
        for launch in module.launches("sm90", direction, ARCH)
        if launch.name in KERNELS
    }
    fullest = [
        name
        for name, launch in found.items()
        if launch.case == module.FEW[0] and (launch.config.get("block_n") == 128 or launch.config.get("add_dq"))
    ]
    return found if everything else {name: found[name] for name in fullest}


def recorded(launch: Any) -> Any:
    """The same launch with something to record to."""
    place = launch.kernel.arg_names.index("record")
    words = torch.zeros(16, dtype=torch.int32)
    return dataclasses.replace(launch, args=(*launch.args[:place], words, *launch.args[place + 1 :]))


def instructions(module: ModuleType, binary: Any) -> str:
    """The machine code without what only says where it comes from."""
    lines = module.disassembly(binary.cubin).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("//"))


def without_clock(code: str, direction: str) -> list[str]:
    """Waits for matmuls and at named barriers that do not stand right between two readings of the clock."""
    barrier = rf"BAR\.SYNC\S* {NAMED_BARRIERS[direction]}, 0x100"
    found = re.findall(rf"SR_CLOCKLO|WARPGROUP\.DEPBAR|{barrier}", code)
    steps = [step for step, _ in itertools.groupby(found)]  # the assembler repeats a wait
    waits = [i for i, step in enumerate(steps) if step != "SR_CLOCKLO"]
    assert waits
    return [steps[i] for i in waits if {*steps[max(i - 1, 0) : i], *steps[i + 1 : i + 2]} != {"SR_CLOCKLO"}]


def build(everything: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        removed = without_recording(Path(folder))
        bare = launches(removed, everything)
        for name, launch in launches(offline, everything).items():
            off = offline.compile_launch(launch, ARCH)
            on = offline.compile_launch(recorded(launch), ARCH)
            code = instructions(offline, on)
            said = {
                key: parse_assembler(offline.assembler_report(b.ptx, ARCH)) for key, b in (("off", off), ("on", on))
            }
            found[name] = {
                "off": _hash(instructions(offline, off)),
                "removed": _hash(instructions(removed, removed.compile_launch(bare[name], ARCH))),
                "recorded": _hash(code),
                "spilled_bytes": {key: max(s.spill_store_bytes, s.spill_load_bytes) for key, s in said.items()},
                "serialised": said["on"].serialised,
                "shared_bytes": on.shared_bytes,
                "without_clock": without_clock(code, launch.direction),
            }
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(json.dumps(build(sys.argv[1:] == ["all"]), indent=1))
