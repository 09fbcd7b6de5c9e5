"""Who may import whom, and that starting up stays cheap.

The packages form a chain (cli, run, worker, operators, kernels) with reports to its side; these tests read the imports
of every module from its syntax tree, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "jfabench": ROOT / "jfabench",
    "jfabench.kernels": ROOT / "kernels",
    "jfabench.operators": ROOT / "operators",
    "jfabench.reports": ROOT / "reports",
    "jfabench.sweeps": ROOT / "sweeps",
}
GPU_LIBRARIES = {"torch", "triton"}

# What the modules of a package may import of jfabench, by prefix of the module's name. The most specific line counts.
# Everything that is not named here belongs to the harness, which may use all but what `FORBIDDEN` says.
ALLOWED: dict[str, set[str]] = {
    "jfabench.records": set(),
    "jfabench.collector": set(),
    "jfabench.intervals": set(),
    "jfabench.from_tree": set(),
    "jfabench.command_line": {"jfabench.devices", "jfabench.exit_codes", "jfabench.sweep"},
    "jfabench.regression": {"jfabench.intervals", "jfabench.records"},
    "jfabench.changes": {"jfabench.records"},
    "jfabench.ncu": {"jfabench.ranges"},
    "jfabench.kernels": {"jfabench.kernels"},
    "jfabench.operators": {
        "jfabench.operator",
        "jfabench.records",
        "jfabench.check",
        "jfabench.env",
        "jfabench.kernels",
        "jfabench.operators",
    },
    "jfabench.reports": {
        f"jfabench.{name}"
        for name in ("records", "folder", "intervals", "regression", "changes", "collector", "reports")
    },
    "jfabench.sweeps": set(),
}
# Who alone may import a module.
ONLY_FOR: dict[str, set[str]] = {
    "jfabench.cli": {"jfabench.__main__"},
    "jfabench.__main__": set(),
    "jfabench.profile_sweep": {"jfabench.cli"},
    "jfabench.compare_command": {"jfabench.cli"},
    "jfabench.history_command": {"jfabench.cli", "jfabench.nightly_command"},
    "jfabench.nightly_command": {"jfabench.cli"},
    "jfabench.timeline_command": {"jfabench.cli"},
    "jfabench.tuning_commands": {"jfabench.cli"},
}
FORBIDDEN: dict[str, set[str]] = {"jfabench.sim": {"jfabench.operators"}}
# Modules that must be importable, at once, on a machine without a GPU or torch.
TORCH_FREE = (
    "jfabench.operators.jagged_attention",
    "jfabench.operators.lengths",
    "jfabench.operators.providers",
    "jfabench.reports",
    "jfabench.sweeps",
)


@dataclass(frozen=True)
class Import:
    """`target` is the dotted module (with the name, for `from package import name`) that a line imports."""

    target: str
    line: int
    at_module_level: bool
    for_types: bool


# Tensor code, which only the worker and the operators' oracles import, when they compute.
WITH_TORCH = ("jfabench.check",)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def module_files() -> dict[str, Path]:
    """Every module of ours by its import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


def imports_of(module: str, source: str, modules: set[str]) -> Iterator[Import]:
    """The imports of `module`, in absolute names. `modules` are those of ours: what else is imported is a name."""
    is_package = any(within(other, module) and other != module for other in modules)
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, at_module_level: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_module_level, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[:1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield Import(name if name in modules else origin, node.lineno, at_module_level, for_types)
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        type_checking = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_module_level and not inside_function, for_types or type_checking)

    yield from visit(ast.parse(source), True, False)


def complaints(module: str, source: str, modules: set[str]) -> list[str]:
    """What is wrong with the imports of `module`, one line each."""
    rule = max((prefix for prefix in ALLOWED if within(module, prefix)), key=len, default=None)
    found = []
    for imported in imports_of(module, source, modules):
        where = f"{module}:{imported.line} imports {imported.target}"
        top = imported.target.partition(".")[0]
        at_once = imported.at_module_level and not imported.for_types
        if top == "scripts":
            found.append(f"{where}: nothing imports scripts")
        if top in GPU_LIBRARIES and at_once and must_be_torch_free(module):
            found.append(f"{where} at module level")
        if top in GPU_LIBRARIES and within(module, "jfabench.reports"):
            found.append(f"{where}: reports never need it")
        if top != "jfabench" or imported.target == "jfabench":
            continue
        if rule is not None and not any(within(imported.target, allowed) for allowed in ALLOWED[rule]):
            found.append(f"{where}: not one of {sorted(ALLOWED[rule])}")
        if at_once and within(module, "jfabench.operators") and within(imported.target, "jfabench.kernels"):
            found.append(f"{where} at module level: operators import kernels inside functions")
        for target, importers in ONLY_FOR.items():
            if within(imported.target, target) and module not in importers:
                found.append(f"{where}: only {sorted(importers)} may")
        for prefix, targets in FORBIDDEN.items():
            if within(module, prefix) and any(within(imported.target, target) for target in targets):
                found.append(f"{where}: {prefix} must not know it")
    return found


def must_be_torch_free(module: str) -> bool:
    if any(within(module, prefix) for prefix in (*WITH_TORCH, "jfabench.kernels", "jfabench.sim")):
        return False
    return module.count(".") <= 1 or any(within(module, prefix) for prefix in TORCH_FREE)


MODULES = module_files()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module: str) -> None:
    assert complaints(module, MODULES[module].read_text(), set(MODULES)) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("jfabench.kernels.attention.api", "from jfabench.records import Case", "not one of"),
        ("jfabench.kernels.attention.api", "def f():\n    import jfabench.run", "not one of"),
        ("jfabench.kernels.attention.api", "from ... import records", "not one of"),
        ("jfabench.kernels", "from ..records import Case", "not one of"),
        ("jfabench.records", "from jfabench import folder", "not one of []"),
        ("jfabench.records", "from . import folder", "not one of []"),
        ("jfabench.reports.html", "from jfabench.operators.lengths import x", "not one of"),
        ("jfabench.reports.html", "def f():\n    import torch", "reports never need it"),
        ("jfabench.operators.jagged_attention", "import torch", "at module level"),
        ("jfabench.operators.providers.sdpa", "if True:\n    from torch.nn import functional", "at module level"),
        ("jfabench.operators.providers.sdpa", "from jfabench.kernels.attention import api", "inside functions"),
        ("jfabench.operators.providers.sdpa", "def f():\n    from jfabench.run import x", "not one of"),
        ("jfabench.worker", "import triton", "at module level"),
        ("jfabench.worker", "try:\n    import torch\nexcept ImportError:\n    pass", "at module level"),
        ("jfabench.worker", "from jfabench import cli", "only ['jfabench.__main__'] may"),
        ("jfabench.worker", "from scripts import install", "nothing imports scripts"),
        ("jfabench.sim.tasks", "def f():\n    from jfabench.operators import lengths", "must not know it"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, expected: str) -> None:
    known = {*MODULES, "jfabench.cli", "jfabench.folder"}
    assert any(expected in complaint for complaint in complaints(module, source, known))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jfabench.kernels.attention.api", "import torch\nfrom jfabench.kernels.attention import config"),
        ("jfabench.kernels.attention.api", "from . import config\nfrom .. import device\nfrom .config import x"),
        ("jfabench.kernels", "from . import attention\nfrom .attention.api import x"),
        ("jfabench.worker", "def f():\n    import torch\n    from jfabench.operators import lengths"),
        ("jfabench.worker", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("jfabench.operators.providers.ours", "def f():\n    from jfabench.kernels.attention import api"),
        ("jfabench.__main__", "from jfabench.cli import main"),
        ("jfabench.reports.html", "from jfabench.records import Case\nfrom jfabench.reports import derive"),
    ],
)
def test_a_right_import_is_not_blamed(module: str, source: str) -> None:
    assert complaints(module, source, set(MODULES)) == []


def run_python(*arguments: str) -> str:
    # The folder must not matter: what is tested is the installed package.
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60, cwd=Path(sys.prefix)
    )
    return done.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import jfabench",
        "import jfabench.cli",
        "import sys, runpy; sys.argv = ['jfabench', '--help']\n"
        "try: runpy.run_module('jfabench', run_name='__main__')\nexcept SystemExit: pass",
    ],
    ids=["jfabench", "cli", "help"],
)
def test_starting_imports_neither_torch_nor_triton(statement: str) -> None:
    report = "import sys, json; print(); print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    loaded = set(json.loads(run_python("-c", f"{statement}\n{report}").splitlines()[-1]))
    assert "jfabench" in loaded
    assert loaded.isdisjoint({*GPU_LIBRARIES, "pandas", "matplotlib", "numpy"})


def test_modules_without_torch_stay_so_with_all_they_import() -> None:
    program = (
        "import importlib, json, sys\n"
        "culprits = []\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    before = set(sys.modules)\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'triton'} & (set(sys.modules) - before): culprits.append(name)\n"
        "print(json.dumps(culprits))"
    )
    names = [name for name in sorted(MODULES) if must_be_torch_free(name) and name != "jfabench.__main__"]
    assert len(names) > 10
    assert json.loads(run_python("-c", program, json.dumps(names))) == []


def test_help_answers_at_once() -> None:
    assert "usage:" in run_python("-m", "jfabench", "--help")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run_python("-m", "jfabench", "--help")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their names alone, so that of two alike one is not run."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
