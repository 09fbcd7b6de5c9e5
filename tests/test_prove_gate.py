"""`scripts/prove_gate.py`, as far as it needs no GPU: what it plants is in the copy, and nowhere else."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("prove_gate", ROOT / "scripts" / "prove_gate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def changed(tree: Path) -> list[str]:
    return [
        str(path.relative_to(tree))
        for path in sorted(tree.rglob("*.py"))
        if path.read_text() != (ROOT / path.relative_to(tree)).read_text()
    ]


def test_a_spin_at_the_end_of_the_forward(script: Any, tmp_path: Path) -> None:
    tree = script.planted("wait", tmp_path).root
    assert changed(tree) == ["kernels/attention/fwd_sm90.py"]
    functions = {
        node.name: node
        for node in ast.walk(ast.parse((tree / "kernels/attention/fwd_sm90.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    body = [ast.unparse(statement) for statement in functions["forward_sm90_kernel"].body]
    assert body[-1] == "_linger(started)"
    assert body[1] == "started = _cycles()"  # behind the docstring
    assert ast.unparse(functions["_linger"]).count("_cycles()") == 2


def test_a_slot_of_queries_fewer(script: Any, tmp_path: Path) -> None:
    tree = script.planted("stage", tmp_path).root
    assert changed(tree) == ["kernels/attention/config_sm90.py"]
    assert "q_stages: int = 1" in (tree / "kernels/attention/config_sm90.py").read_text()


def test_a_source_that_has_moved_on_is_noticed(script: Any) -> None:
    with pytest.raises(ValueError, match="stands 0 times in the source"):
        script.replace_once("x = 1", "x = 2", "x = 3")
