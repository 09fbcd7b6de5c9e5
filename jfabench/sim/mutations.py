"""Small faults in a kernel's synchronisation: which there are, and their syntax.

A kernel and the ``@triton.jit`` functions that it calls, methods of aggregates among them, are searched for calls of
the TLX functions that synchronise. Each such call gives one :class:`Mutation` or several: the call left out, its phase
flipped, one more operation left pending. A change is made in the syntax tree, and takes effect where it is told to: at
every use of the function that contains it, or only where that function is reached by given lines.
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton.language.extra.tlx as tlx
from triton.runtime.jit import JITFunction

from .rewrite import parsed, replace_source

KINDS = {
    "barrier-wait": "a barrier_wait left out",
    "phase": "the phase of a barrier_wait, or of a step of cluster launch control, flipped",
    "barrier-arrive": "a barrier_arrive left out",
    "expect-bytes": "a barrier_expect_bytes left out",
    "dot-wait": "an async_dot_wait left out",
    "dot-pending": "an async_dot_wait that leaves one more matmul pending",
    "dot-arrive": "one of the mBarriers of an async_dot left out",
    "commit": "a tcgen05_commit left out",
    "fence": "a fence left out",
    "store-wait": "an async_descriptor_store_wait left out",
    "store-pending": "an async_descriptor_store_wait that leaves one more store pending",
    "named-wait": "a named_barrier_wait left out",
    "named-arrive": "a named_barrier_arrive left out",
    "copy-wait": "an async_load_wait_group left out",
    "copy-pending": "an async_load_wait_group that leaves one more group pending",
    "cluster-barrier": "a cluster_barrier left out",
}

Calls = tuple[tuple[str, int], ...]
"""Lines (file, line) that lead to a function, innermost first."""


@dataclass(frozen=True)
class Mutation:
    """A fault. It takes effect where ``calls`` lead to the function; everywhere if that is None."""

    kind: str
    fn: Callable[..., Any]
    site: tuple[int, int]  # line in the file, and column in the function's own text
    text: str  # source of the call
    element: int = 0  # of several of one kind at a call
    calls: Calls | None = None

    @property
    def file(self) -> str:
        return self.fn.__code__.co_filename

    @property
    def function(self) -> str:
        return self.fn.__qualname__

    @property
    def line(self) -> int:
        return self.site[0]

    def within(self, calls: Calls) -> Mutation:
        return replace(self, calls=calls)

    def __str__(self) -> str:
        lines = [f"{Path(self.file).name}:{self.line}"]
        lines += [f"{Path(file).name}:{line}" for file, line in self.calls or ()]
        return f"{self.name}  ({' <- '.join(lines)})"

    @property
    def name(self) -> str:
        """What it changes, without line numbers: the call, and the source of the lines that lead to it."""
        sources = [linecache.getline(file, line).strip() for file, line in self.calls or ()]
        return " <- ".join([f"{self.kind} in {self.function}: {self.text}", *sources])


@dataclass(frozen=True)
class _Form:
    """What is done to calls of a TLX function: the kinds, and where arguments of interest are."""

    drop: str = ""
    keeps: tuple[int, str] | None = None  # what stands in for the result of a call that is left out
    flip: tuple[int, str] | None = None
    pending: str = ""  # kind; the number is the first argument, `pendings`
    predicate: int | None = None  # position of `pred`


FORMS: dict[Any, _Form] = {
    tlx.barrier_wait: _Form("barrier-wait", flip=(1, "phase"), predicate=2),
    tlx.clc_producer: _Form(flip=(1, "p_producer")),
    tlx.clc_consumer: _Form(flip=(1, "p_consumer")),
    tlx.barrier_arrive: _Form("barrier-arrive", predicate=3),
    tlx.barrier_expect_bytes: _Form("expect-bytes", predicate=2),
    tlx.async_dot_wait: _Form("dot-wait", keeps=(1, "inp"), pending="dot-pending"),
    tlx.tcgen05_commit: _Form("commit"),
    tlx.fence: _Form("fence"),
    tlx.fence_async_shared: _Form("fence"),
    tlx.async_descriptor_store_wait: _Form("store-wait", pending="store-pending"),
    tlx.named_barrier_wait: _Form("named-wait"),
    tlx.named_barrier_arrive: _Form("named-arrive"),
    tlx.async_load_wait_group: _Form("copy-wait", pending="copy-pending"),
    tlx.cluster_barrier: _Form("cluster-barrier"),
}
_DOTS = (tlx.async_dot, tlx.async_dot_scaled)


def mutations(kernel: Any, kinds: Iterable[str] = KINDS) -> list[Mutation]:
    """All faults of these kinds in ``kernel`` and what it calls, in the order of the source.

    Raises:
        ValueError: a kind is not one of :data:`KINDS`.
    """
    kinds = set(kinds)
    if unknown := kinds - set(KINDS):
        raise ValueError(f"kinds: {', '.join(sorted(unknown))} not among {', '.join(KINDS)}")
    found = [mutation for fn in functions(kernel) for mutation in _of_function(fn) if mutation.kind in kinds]
    return sorted(found, key=lambda m: (m.file, m.site, list(KINDS).index(m.kind), m.element))


def functions(kernel: Any) -> list[Callable[..., Any]]:
    """The Python functions below ``kernel`` and all ``@triton.jit`` functions that its source can reach."""
    while not isinstance(kernel, JITFunction):
        if not hasattr(kernel, "fn"):
            raise TypeError(f"kernel: expected a @triton.jit function, got {type(kernel).__name__}")
        kernel = kernel.fn
    found: dict[Callable[..., Any], None] = {}
    pending = [kernel.fn]
    while pending:
        fn = pending.pop()
        if fn not in found:
            found[fn] = None
            pending += _mentioned(fn)
    return list(found)


def _mentioned(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    for node in ast.walk(parsed(fn)):
        if isinstance(node, ast.Name | ast.Attribute):
            value = _value(node, fn)
            methods = vars(value).values() if getattr(value, "__triton_aggregate__", False) else [value]
            yield from (method.fn for method in methods if isinstance(method, JITFunction))


def _value(expression: ast.expr, fn: Callable[..., Any]) -> Any:
    """What a dotted name means in a function's module; None if that is unknown, as for its own variables."""
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, fn), expression.attr, None)
    if not isinstance(expression, ast.Name):
        return None
    closed = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    if expression.id in closed:
        return closed[expression.id].cell_contents
    return fn.__globals__.get(expression.id)


def _of_function(fn: Callable[..., Any]) -> Iterator[Mutation]:
    definition = parsed(fn)
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and (form := _form(node, fn)):
            site, text = _site(node), _text(node)
            if form.drop:
                yield Mutation(form.drop, fn, site, text)
            if form.flip and _argument(node, *form.flip):
                yield Mutation("phase", fn, site, text)
            if form.pending:
                yield Mutation(form.pending, fn, site, text)
    for barriers in _lists_of_barriers(definition, fn):
        for i, barrier in enumerate(barriers.elts):
            yield Mutation("dot-arrive", fn, _site(barriers), f"mBarriers: {_text(barrier)}", i)


def _form(call: ast.Call, fn: Callable[..., Any]) -> _Form | None:
    value = _value(call.func, fn)
    return FORMS.get(value) if callable(value) else None


def _lists_of_barriers(definition: ast.FunctionDef, fn: Callable[..., Any]) -> list[ast.List]:
    """Those given to matmuls, and those of variables that are."""
    given: list[ast.AST] = []
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and _value(node.func, fn) in _DOTS:
            given += [keyword.value for keyword in node.keywords if keyword.arg == "mBarriers"]
    names = {node.id for node in given if isinstance(node, ast.Name)}
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
            given.append(node.value)
    return [node for value in given for node in ast.walk(value) if isinstance(node, ast.List)]


def _site(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 100 else f"{text[:97]}..."


# Changing the syntax -------------------------------------------------------------------------------------------------

# What changed source calls: a global of its module, of its own for each function.


def _runtime_name(fn: Callable[..., Any]) -> str:
    return f"__mutation_{fn.__code__.co_firstlineno}"


def inject(mutation: Mutation, here: Callable[[], bool]) -> Callable[[], None]:
    """Simulate the mutation's function with the fault, wherever ``here()`` says so; returns what takes that back."""
    fn = mutation.fn

    def changed(definition: ast.FunctionDef) -> ast.FunctionDef:
        return _Mutator(mutation).visit(definition)  # type: ignore[no-any-return]

    return _replaced(fn, changed, here)


def observe(fn: Callable[..., Any], observer: Callable[..., Any]) -> Callable[[], None]:
    """Simulate ``fn`` with every call that synchronises made by ``observer(site, predicate, barrier, call)``.

    ``predicate`` is True where the call has none, and ``barrier`` None unless it waits for one.
    """

    def changed(definition: ast.FunctionDef) -> ast.FunctionDef:
        lists = {id(node) for node in _lists_of_barriers(definition, fn)}
        return _Observer(fn, lists).visit(definition)  # type: ignore[no-any-return]

    return _replaced(fn, changed, observer)


def _replaced(
    fn: Callable[..., Any], changed: Callable[[ast.FunctionDef], ast.FunctionDef], called: Callable[..., Any]
) -> Callable[[], None]:
    undo_source = replace_source(fn, changed)
    fn.__globals__[_runtime_name(fn)] = called

    def undo() -> None:
        undo_source()
        fn.__globals__.pop(_runtime_name(fn), None)

    return undo


class _Mutator(ast.NodeTransformer):
    """Puts ``changed if here() else original`` in the place of one expression."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation

    def _choice(self, changed: ast.expr, original: ast.expr) -> ast.expr:
        test = ast.copy_location(ast.Call(ast.Name(_runtime_name(self.mutation.fn), ast.Load()), [], []), original)
        return ast.copy_location(ast.IfExp(test, ast.copy_location(changed, original), original), original)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        mutation = self.mutation
        if _site(node) != mutation.site or mutation.kind == "dot-arrive":
            return node
        form = _form(node, mutation.fn)
        return node if form is None else self._choice(_faulty(copy.deepcopy(node), form, mutation.kind), node)

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        if _site(node) != self.mutation.site or self.mutation.kind != "dot-arrive":
            return node
        changed = copy.deepcopy(node)
        del changed.elts[self.mutation.element]
        return self._choice(changed, node)


def _faulty(call: ast.Call, form: _Form, kind: str) -> ast.expr:
    if kind == form.drop:
        kept = form.keeps and _argument(call, *form.keeps)
        return kept.value if kept else ast.Constant(None)
    place, operator, amount = (form.flip, ast.BitXor(), 1) if kind == "phase" else ((0, "pendings"), ast.Add(), 1)
    assert place is not None
    argument = _argument(call, *place)
    assert argument is not None
    changed = ast.copy_location(ast.BinOp(argument.value, operator, ast.Constant(amount)), argument.value)
    argument.put(changed)
    return call


@dataclass
class _Argument:
    value: ast.expr
    put: Callable[[ast.expr], None]


def _argument(call: ast.Call, index: int, name: str) -> _Argument | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return _Argument(keyword.value, lambda value, keyword=keyword: setattr(keyword, "value", value))  # type: ignore[misc]
    if index < len(call.args):
        return _Argument(call.args[index], lambda value: call.args.__setitem__(index, value))
    return None


class _Observer(ast.NodeTransformer):
    def __init__(self, fn: Callable[..., Any], lists: set[int]) -> None:
        self.fn = fn
        self.lists = lists

    def _observed(self, node: ast.expr, predicate: ast.expr, barrier: ast.expr) -> ast.expr:
        no_arguments = ast.arguments([], [], None, [], [], None, [])
        site = ast.Tuple([ast.Constant(number) for number in _site(node)], ast.Load())
        call = ast.Call(
            ast.Name(_runtime_name(self.fn), ast.Load()), [site, predicate, barrier, ast.Lambda(no_arguments, node)], []
        )
        return ast.copy_location(call, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        form = _form(node, self.fn)
        if form is None:
            return node
        given = None if form.predicate is None else _argument(node, form.predicate, "pred")
        barrier = _argument(node, 0, "bar") if form.drop == "barrier-wait" else None
        return self._observed(
            node,
            copy.deepcopy(given.value) if given else ast.Constant(True),
            copy.deepcopy(barrier.value) if barrier else ast.Constant(None),
        )

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        return self._observed(node, ast.Constant(True), ast.Constant(None)) if id(node) in self.lists else node
