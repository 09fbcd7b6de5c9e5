"""Variants of a kernel's module, made by editing its syntax tree: the kernel that is shipped knows nothing of them.

An edit names a function and what to change in it. One that no longer finds what it names is an error, so that a change
of the kernel cannot turn a variant into the original unnoticed. Formatting and comments do not matter.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType


class StaleEditError(LookupError):
    """Says which edit does not find its place in the module any more."""


@dataclass(frozen=True)
class Swap:
    """Calls of ``call`` inside ``function`` become ``by``, in which ``{0}``, ``{1}``, ... are the call's arguments.

    Without ``by`` the statements that are such calls are left out. Statements may take the place of a statement.
    """

    function: str
    call: str
    by: str = ""


@dataclass(frozen=True)
class Body:
    """``function`` gets another body; one that is imported is defined here instead.

    ``parameters`` are those of its parameters that the body counts on.
    """

    function: str
    parameters: tuple[str, ...]
    source: str


Edit = Swap | Body
_numbers = itertools.count()


def variant(module: ModuleType, edits: Sequence[Edit]) -> ModuleType:
    """A new module: ``module`` with ``edits`` made in order. Raises :class:`StaleEditError`.

    It is in ``sys.modules`` and its source in ``linecache``, where Triton looks for it.
    """
    tree = ast.parse(inspect.getsource(module))
    for edit in edits:
        if isinstance(edit, Swap):
            _swap(tree, edit, module)
        else:
            _set_body(tree, edit, module)
    source = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    name = f"{module.__name__}_variant{next(_numbers)}"
    made = ModuleType(name, module.__doc__)
    made.__package__ = module.__package__
    made.__file__ = f"<{name}>.py"
    linecache.cache[made.__file__] = (len(source), None, source.splitlines(keepends=True), made.__file__)
    sys.modules[name] = made
    exec(compile(source, made.__file__, "exec"), made.__dict__)  # our own source, edited by our own table
    return made


def _function(tree: ast.Module, name: str, module: ModuleType) -> ast.FunctionDef:
    """``name`` at the top level, or ``Class.name``."""
    body: list[ast.stmt] = tree.body
    *owners, last = name.split(".")
    for owner in owners:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == last:
            return node
    raise StaleEditError(f"{module.__name__} has no function {name}: its variants are out of date")


class _Swapper(ast.NodeTransformer):
    def __init__(self, edit: Swap) -> None:
        self._edit = edit
        self.found = 0

    def _is_it(self, node: ast.AST | None) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == self._edit.call

    def _replacement(self, call: ast.Call) -> list[ast.stmt]:
        self.found += 1
        arguments = [ast.unparse(argument) for argument in call.args]
        return ast.parse(textwrap.dedent(self._edit.by).format(*arguments) or "pass").body

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:  # the name that ast calls
        if isinstance(node.value, ast.Call) and self._is_it(node.value):
            return self._replacement(node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:  # the name that ast calls
        self.generic_visit(node)
        if not self._is_it(node):
            return node
        (statement,) = self._replacement(node)
        if not isinstance(statement, ast.Expr):
            raise StaleEditError(
                f"{self._edit.call} in {self._edit.function} is part of an expression: give one for it"
            )
        return statement.value


def _swap(tree: ast.Module, edit: Swap, module: ModuleType) -> None:
    swapper = _Swapper(edit)
    swapper.visit(_function(tree, edit.function, module))
    if not swapper.found:
        raise StaleEditError(
            f"{edit.function} of {module.__name__} does not call {edit.call} any more: its variants are out of date"
        )


def _set_body(tree: ast.Module, edit: Body, module: ModuleType) -> None:
    try:
        function = _function(tree, edit.function, module)
    except StaleEditError:
        function = _defined_here(tree, edit.function, module)
    missing = set(edit.parameters) - {argument.arg for argument in function.args.args}
    if missing:
        raise StaleEditError(
            f"{edit.function} of {module.__name__} does not take {', '.join(sorted(missing))} any more: "
            "its variants are out of date"
        )
    function.body = ast.parse(textwrap.dedent(edit.source)).body


def _defined_here(tree: ast.Module, name: str, module: ModuleType) -> ast.FunctionDef:
    """The definition of an imported jit function, copied to behind the imports, where it takes the import's place."""
    imported = getattr(getattr(module, name, None), "fn", None)
    if imported is None:
        raise StaleEditError(f"{module.__name__} has no function {name}: its variants are out of date")
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(imported))).body
    assert isinstance(definition, ast.FunctionDef)
    definition.name = name
    last = max(i for i, node in enumerate(tree.body) if isinstance(node, ast.Import | ast.ImportFrom))
    tree.body.insert(last + 1, definition)
    return definition
