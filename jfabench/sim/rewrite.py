"""A kernel's source as Python that runs on the simulator.

The syntax tree is changed only where Triton's compiler gives Python another meaning: operators, calls, truth values,
assignments and loops go through :mod:`.language`, and the bodies of ``with tlx.async_task(...)`` become closures. File
names and line numbers stay those of the source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from . import language, operators, places, tasks
from .runtime import KernelError

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Not: "not"}
# Functions that rewritten code calls; their names get a prefix that no kernel uses.
RUNTIME: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(
            language.assigned,
            language.call,
            language.call_method,
            language.constant,
            language.item,
            language.transposed,
        ),
        *(operators.binary, operators.unary, operators.logical_and, operators.logical_or, operators.truth),
        operators.goes_on,
        *(operators.unwrap, tasks.add_task, tasks.begin_tasks, tasks.captured, tasks.run_tasks),
    )
}
PREFIX = "__sim_"

_rewritten: dict[Any, Callable[..., Any]] = {}


def rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The simulated form of a Python function that was decorated with ``@triton.jit``."""
    found = _rewritten.get(fn)
    if found is None:
        found = _rewritten[fn] = _rewrite(fn)
    return found


def replace_source(fn: Callable[..., Any], changed: Callable[[ast.FunctionDef], ast.FunctionDef]) -> Callable[[], None]:
    """Simulate ``fn`` with its syntax tree changed; returns what takes that back.

    ``changed`` gets the function's definition, with the line numbers of its file, and may change it in place.
    """
    before = _rewritten.pop(fn, None)
    _rewritten[fn] = _rewrite(fn, changed)

    def undo() -> None:
        if before is None:
            del _rewritten[fn]
        else:
            _rewritten[fn] = before

    return undo


def parsed(fn: Callable[..., Any]) -> ast.FunctionDef:
    """The definition of ``fn``, without decorators, with the line numbers of its file."""
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    return definition


def _rewrite(
    fn: Callable[..., Any], changed: Callable[[ast.FunctionDef], ast.FunctionDef] | None = None
) -> Callable[..., Any]:
    definition = parsed(fn)
    if changed is not None:
        definition = changed(definition)
    constants = [a.arg for a in definition.args.args if a.annotation and "constexpr" in ast.unparse(a.annotation)]
    for argument in definition.args.args:
        argument.annotation = None
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.returns = None
    first = definition.body[0]
    definition = _Rewriter(_bound_names(definition)).visit(definition)
    definition.body[:0] = [ast.copy_location(_unwrapped(name), first) for name in constants]
    # What the kernel closes over, and the runtime, are bound by a function around it.
    free = (*[PREFIX + name for name in RUNTIME], *fn.__code__.co_freevars)
    module = ast.fix_missing_locations(ast.Module([_enclosing(definition, free)], []))
    code = compile(module, inspect.getsourcefile(fn) or "?", "exec")
    places.register(code)
    namespace: dict[str, Any] = {}
    exec(code, fn.__globals__, namespace)
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    made: Any = namespace["__enclosing__"](*RUNTIME.values(), *cells)
    made.__defaults__ = fn.__defaults__
    return made  # type: ignore[no-any-return]


def _unwrapped(name: str) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], _runtime("unwrap", ast.Name(name, ast.Load())))


def _enclosing(definition: ast.FunctionDef, free: tuple[str, ...]) -> ast.FunctionDef:
    arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
    result = ast.Return(ast.Name(definition.name, ast.Load()))
    return _function("__enclosing__", arguments, [definition, result])


def _function(name: str, arguments: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    """Made from source, since the fields that a definition must have differ between versions of Python."""
    made = ast.parse(f"def {name}(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.args, made.body = arguments, body
    return made


def _bound_names(definition: ast.FunctionDef) -> set[str]:
    names = {argument.arg for argument in definition.args.args}
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _runtime(name: str, *arguments: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(PREFIX + name, ast.Load()), list(arguments), keywords or [])


def _is_tlx(expression: ast.expr, name: str) -> bool:
    if not isinstance(expression, ast.Call):
        return False
    function = expression.func
    return (isinstance(function, ast.Attribute) and function.attr == name) or (
        isinstance(function, ast.Name) and function.id == name
    )


class _Rewriter(ast.NodeTransformer):
    def __init__(self, bound: set[str]) -> None:
        self.bound = bound
        self.tasks = 0

    # Expressions

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        name = _OPERATORS.get(type(node.op))
        left, right = self.visit(node.left), self.visit(node.right)
        if name is None:
            return ast.copy_location(ast.BinOp(left, node.op, right), node)
        return ast.copy_location(_runtime("binary", ast.Constant(name), left, right), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) != 1 or type(node.ops[0]) not in _OPERATORS:
            operands = [self.visit(operand) for operand in (node.left, *node.comparators)]
            unwrapped: list[ast.expr] = [_runtime("unwrap", operand) for operand in operands]
            return ast.copy_location(ast.Compare(unwrapped[0], node.ops, unwrapped[1:]), node)
        name = _OPERATORS[type(node.ops[0])]
        call = _runtime("binary", ast.Constant(name), self.visit(node.left), self.visit(node.comparators[0]))
        return ast.copy_location(call, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if isinstance(node.operand, ast.Constant) and not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(_runtime("unary", ast.Constant(_UNARY[type(node.op)]), self.visit(node.operand)), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        no_arguments = ast.arguments([], [], None, [], [], None, [])
        later = [ast.Lambda(no_arguments, self.visit(value)) for value in node.values]
        name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
        return ast.copy_location(_runtime(name, *later), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        arguments = [self.visit(argument) for argument in node.args]
        keywords = [ast.keyword(keyword.arg, self.visit(keyword.value)) for keyword in node.keywords]
        if isinstance(node.func, ast.Attribute):  # a method may be a kernel's function, which binds no `self`
            owner, name = self.visit(node.func.value), ast.Constant(node.func.attr)
            return ast.copy_location(_runtime("call_method", owner, name, *arguments, keywords=keywords), node)
        return ast.copy_location(_runtime("call", self.visit(node.func), *arguments, keywords=keywords), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        value = self.visit(node.value)
        if node.attr == "T" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(_runtime("transposed", value), node)
        return ast.copy_location(ast.Attribute(value, node.attr, node.ctx), node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        value, index = self.visit(node.value), self._index(node.slice)
        if isinstance(node.ctx, ast.Load):
            return ast.copy_location(_runtime("item", value, index), node)
        return ast.copy_location(ast.Subscript(value, index, node.ctx), node)

    def _index(self, index: ast.expr) -> ast.expr:
        if isinstance(index, ast.Slice):
            parts = [
                self.visit(part) if part else ast.Constant(None) for part in (index.lower, index.upper, index.step)
            ]
            return ast.copy_location(ast.Call(ast.Name("slice", ast.Load()), parts, []), index)
        if isinstance(index, ast.Tuple):
            return ast.copy_location(ast.Tuple([self._index(part) for part in index.elts], ast.Load()), index)
        return self.visit(index)  # type: ignore[no-any-return]

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = _runtime("truth", self.visit(node.test))
        return ast.copy_location(ast.IfExp(test, self.visit(node.body), self.visit(node.orelse)), node)

    # Statements

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        target = node.targets[0]
        name = ast.Constant(target.id if isinstance(target, ast.Name) else None)
        names = (
            [ast.Tuple([ast.Constant(ast.unparse(e)) for e in target.elts], ast.Load())]
            if isinstance(target, ast.Tuple)
            else [name]
        )
        value = _runtime("assigned", self.visit(node.value), *names)
        return ast.copy_location(ast.Assign([self._target(t) for t in node.targets], value), node)

    def _target(self, target: ast.expr) -> ast.expr:
        return target if isinstance(target, ast.Name) else self.generic_visit(target)  # type: ignore[return-value]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        assert node.value is not None
        function = "constant" if "constexpr" in ast.unparse(node.annotation) else "assigned"
        value = _runtime(function, self.visit(node.value), ast.Constant(ast.unparse(node.target)))
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        load = ast.parse(ast.unparse(node.target), mode="eval").body
        value = ast.copy_location(ast.BinOp(ast.copy_location(load, node.target), node.op, node.value), node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_If(self, node: ast.If) -> ast.stmt:
        test = ast.copy_location(_runtime("truth", self.visit(node.test)), node.test)
        return ast.copy_location(ast.If(test, self._block(node.body), self._block(node.orelse)), node)

    def visit_While(self, node: ast.While) -> ast.stmt:
        test = ast.copy_location(_runtime("goes_on", self.visit(node.test)), node.test)
        return ast.copy_location(ast.While(test, self._block(node.body), self._block(node.orelse)), node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        return ast.copy_location(ast.For(node.target, self.visit(node.iter), self._block(node.body), []), node)

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = ast.copy_location(_runtime("truth", self.visit(node.test)), node.test)
        return ast.copy_location(ast.Assert(test, node.msg), node)

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        statements: list[ast.stmt] = []
        for statement in body:
            made = self.visit(statement)
            statements.extend(made if isinstance(made, list) else [made])
        return statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.body = self._block(node.body)
        return node

    # Warp specialisation

    def visit_With(self, node: ast.With) -> Any:
        context = node.items[0].context_expr
        if _is_tlx(context, "async_tasks"):
            begin = ast.copy_location(ast.Expr(_runtime("begin_tasks")), node)
            end = ast.copy_location(ast.Expr(_runtime("run_tasks")), node)
            return [begin, *self._block(node.body), end]
        if _is_tlx(context, "async_task"):
            return self._task(node, context)
        raise KernelError(f"`with {ast.unparse(context)}` at line {node.lineno}: it cannot be simulated")

    def _task(self, node: ast.With, context: Any) -> list[ast.stmt]:
        """The body as a function, and its announcement.

        Names that it changes become its own, with the value that they have outside: parameters with defaults.
        """
        self.tasks += 1
        name = _role(node.body) or f"task{self.tasks}"
        stored = {
            n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        captured = sorted(stored & self.bound)
        arguments = ast.arguments([], [ast.arg(name_) for name_ in captured], None, [], [], None, [])
        local = ast.Call(ast.Name("locals", ast.Load()), [], [])
        arguments.defaults = [_runtime("captured", local, ast.Constant(name_)) for name_ in captured]
        function = _function(f"__{name}_{self.tasks}", arguments, self._block(node.body))
        settings = [ast.keyword(k.arg, self.visit(k.value)) for k in context.keywords]
        given = [self.visit(argument) for argument in context.args]
        made = ast.Name(function.name, ast.Load())
        announce = _runtime("add_task", made, ast.Constant(name), *given, keywords=settings)
        return [ast.copy_location(function, node), ast.copy_location(ast.Expr(announce), node)]


def _role(body: list[ast.stmt]) -> str:
    """The name of the kernel's function that a short body ends with."""
    last = body[-1]
    if len(body) <= 3 and isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        function = last.value.func
        return function.id.strip("_") if isinstance(function, ast.Name) else ""
    return ""
