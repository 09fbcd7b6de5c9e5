"""What the launch code launches, compiled for any architecture without a GPU.

Launches are recorded, with their arguments, instead of made, so that nothing is compiled here that a call would not
compile. The values of the tensors do not matter, nor where they are.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config, config_bwd_sm100, config_sm90, config_sm100, launch_triton, tiles
from .fwd_triton import forward_kernel
from .interpret import is_interpreted
from .problem import Mask, Problem

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
DTYPE = torch.bfloat16  # of the inputs
MASKS = {"none": (-1, -1), "causal": (-1, 0), "window": (3, 5)}
SHARED_LIMIT = 227 * 1024  # bytes that one program may have on sm_90 and sm_100
# As Triton has it: without them registers are allocated otherwise, and other kernels spill.
ASSEMBLER_OPTIONS = ("-lineinfo", "--regAllocOptLevel=2")
ROWS = 256  # keys of a sequence: room for the windows, and whole tiles

# A family has a module `launch_<family>`.
CONFIGS: dict[str, Any] = {
    "triton": config,
    "sm90": config_sm90,
    "sm100": config_sm100,
    "bwd_sm100": config_bwd_sm100,
}
# Kernels whose configuration is chosen, by family and direction.
ROLES = {
    ("triton", "forward"): ("forward",),
    ("triton", "backward"): ("dkdv", "dq"),
    ("sm90", "forward"): ("forward",),
    ("sm90", "backward"): ("backward",),
    ("sm100", "forward"): ("forward",),
    ("bwd_sm100", "backward"): ("backward",),
}


class InterpretedError(RuntimeError):
    """Triton's interpreter is on, so that kernels are not compiled at all."""


class Case(NamedTuple):
    """What a kernel is specialised for, besides its configuration."""

    head_dim: int
    group: int  # query heads per key/value head
    mask: str  # one of MASKS
    broadcast: bool  # one block of queries for all sequences


# In full where the kernels were tuned, a few elsewhere.
FEW = (Case(128, 1, "none", True), Case(128, 4, "causal", False))
FULL = (
    *(Case(128, 1, mask, False) for mask in MASKS),
    *FEW,
    Case(64, 1, "none", True),
    Case(64, 4, "window", False),
)
CASES = {
    ("triton", 90): FULL,
    ("triton", 100): FEW,
    # Two seconds each, on Blackwell ten.
    ("sm90", 90): (
        *FEW,
        Case(128, 1, "window", False),
        Case(128, 1, "causal", True),
        Case(64, 1, "window", False),
        # The orders of the backward's steps differ with masks, groups and head dimensions.
        Case(64, 1, "none", True),
        Case(128, 4, "none", False),
    ),
    ("sm100", 100): (*FEW, Case(64, 4, "window", False)),
    ("bwd_sm100", 100): (Case(128, 1, "none", True), Case(64, 4, "causal", False)),
}
ARCHITECTURES = tuple(sorted({arch for _, arch in CASES}))


@dataclass(frozen=True)
class Launch:
    """One launch that a call makes. ``role`` is None where a kernel has no configuration that is chosen in its family.

    ``config`` has the fields of the configuration, or what else the kernel was specialised with.
    """

    kernel: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    case: Case
    family: str
    direction: str
    role: str | None
    config: Mapping[str, Any]
    estimated_shared_bytes: int | None

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key in self.kernel.arg_names}


@dataclass(frozen=True)
class Binary:
    """A compiled kernel; shared memory in bytes, tensor memory in columns."""

    ptx: str
    cubin: bytes
    shared_bytes: int
    tmem_columns: int


@dataclass(frozen=True)
class Task:
    """The lines of ``file``, ``first`` to ``last``, that are one role of a warp-specialised kernel."""

    role: str
    copies: int
    file: str  # its name alone
    first: int
    last: int


def launches(family: str, direction: str, arch: int) -> Iterator[Launch]:
    """Of every case and every configuration that fits."""
    if is_interpreted(forward_kernel):
        raise InterpretedError("interpreted kernels cannot be compiled: unset TRITON_INTERPRET before Python starts")
    configs, roles = CONFIGS[family], ROLES[family, direction]
    for case in CASES[family, arch]:
        given = problem(case)
        usable = [configs.candidates(given.kind(family, role), SHARED_LIMIT) for role in roles]
        for chosen in _paired(roles, usable):
            for kernel, args, options in _recorded(family, direction, given, chosen):
                role = next((role for role in roles if _serves(kernel, role)), None)
                estimated = configs.shared_bytes(role, chosen[role], case.head_dim) if role else None
                fields = _fields(kernel, options, chosen[role] if role else None)
                yield Launch(kernel, args, options, case, family, direction, role, fields, estimated)


def problem(case: Case) -> Problem:
    """Inputs of a case, zeros on the CPU: two sequences of 256 keys, and as many queries or 128 that are shared.

    ``q`` is ``[512 or 128, 2 * group, D]``, ``k`` and ``v`` ``[512, 2, D]``.
    """
    keys = 2 * ROWS
    queries = ROWS // 2 if case.broadcast else keys
    q = torch.zeros(queries, 2 * case.group, case.head_dim, dtype=DTYPE)
    k = torch.zeros(keys, 2, case.head_dim, dtype=DTYPE)
    ends = torch.tensor([0, ROWS, keys])
    sequences = tiles.Sequences(None if case.broadcast else ends, ends, queries, keys)
    return Problem(q, k, k, sequences, 0.1, Mask.from_window(*MASKS[case.mask], queries, keys), False)


def _serves(kernel: Any, role: str) -> bool:
    return bool(kernel.__name__.startswith((role, f"broadcast_{role}")))


def _fields(kernel: Any, options: Mapping[str, Any], chosen: Any) -> dict[str, Any]:
    if chosen is None and _serves(kernel, "dq"):  # a plain Triton kernel that another family launches
        chosen = _plain_default("dq")
    if chosen is not None:
        return dict(vars(chosen))
    return {key.lower(): value for key, value in options.items() if key in kernel.arg_names}


def _plain_default(kernel: str, *_: Any) -> Any:
    """For the plain Triton kernels that another family launches."""
    return config.CANDIDATES[kernel][0]


def _paired(roles: tuple[str, ...], usable: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A configuration for each role, so often that every one comes up."""
    longest = max(map(len, usable))
    return [
        {role: options[min(i, len(options) - 1)] for role, options in zip(roles, usable, strict=True)}
        for i in range(longest)
    ]


def _recorded(
    family: str, direction: str, given: Problem, chosen: Mapping[str, Any]
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """``(kernel, arguments, options)`` of every launch of a call."""
    launch = importlib.import_module(f".launch_{family}", __package__)
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(kernel: Any, _grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found.append((kernel, args, options))

    with contextlib.ExitStack() as patches:
        for module in {launch, launch_triton, tiles}:
            patches.enter_context(mock.patch.object(module, "run_kernel", record))
        patches.enter_context(mock.patch.object(launch_triton, "_choose", _plain_default))
        patches.enter_context(mock.patch.object(launch, "_choose", lambda kernel, *_: chosen[kernel]))
        if family == "sm90":
            # So few that a program has several tiles, and so many that they are of one head: it can keep its queries.
            patches.enter_context(mock.patch.object(launch, "multiprocessors", return_value=given.heads))
        out = torch.empty(given.sequences.rows, *given.q.shape[1:], dtype=DTYPE)
        lse = torch.empty(given.heads, given.sequences.rows)
        if direction == "forward":
            launch.forward(given)
        else:
            launch.backward(given, out, lse, out, need_dq=True, need_dkdv=True)
    return found


def compile_launch(launch: Launch, arch: int) -> Binary:
    """The binary that the JIT would make of ``launch`` on a device of ``arch``, such as 90."""
    constants = launch.constants
    options = {key: value for key, value in launch.options.items() if key not in constants}
    source = _source(launch.kernel, launch.args, constants)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Binary(built.asm["ptx"], built.asm["cubin"], built.metadata.shared, built.metadata.tmem_size)


def _source(kernel: Any, args: tuple[Any, ...], constants: Mapping[str, Any]) -> ASTSource:
    """The specialisation that the JIT would derive from these arguments."""
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **constants}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in constants or value is None:
            signature[name] = "constexpr"
            constexprs[(i,)] = value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(kernel, signature, constexprs, attributes)


def tasks(launch: Launch) -> tuple[Task, ...]:
    """The roles that the kernel's source declares, ``with tlx.async_task(...)``; none if it is not warp specialised.

    A role has the name of the function, or of the object, that its last statement that is a call names, without
    underscore. One that an ``if`` on the kernel's constants leaves out is not among them.
    """
    lines, start = inspect.getsourcelines(launch.kernel.fn)
    file = Path(inspect.getfile(launch.kernel.fn)).name
    found: list[Task] = []
    for node in _compiled(ast.parse(textwrap.dedent("".join(lines))), launch.constants):
        if not isinstance(node, ast.With):
            continue
        call = node.items[0].context_expr
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "tlx.async_task"):
            continue
        copies = next((keyword.value for keyword in call.keywords if keyword.arg == "replicate"), None)
        calls = [n.value.func for n in ast.walk(node) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
        last = max(calls, key=lambda function: function.lineno, default=None)
        role = ast.unparse(last).partition(".")[0].strip("_") if last else f"task {len(found)}"
        first, end = node.lineno + start - 1, (node.end_lineno or node.lineno) + start - 1
        found.append(Task(role, _value(copies, launch.constants), file, first, end))
    return tuple(found)


def _compiled(node: ast.AST, constants: Mapping[str, Any]) -> Iterator[ast.AST]:
    """The nodes below this one, without the branches that the kernel's constants rule out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and all(
            n.id in constants for n in ast.walk(child.test) if isinstance(n, ast.Name)
        ):
            taken = eval(compile(ast.Expression(child.test), "", "eval"), {}, dict(constants))
            child = ast.Module(child.body if taken else child.orelse, [])
        yield child
        yield from _compiled(child, constants)


def _value(expression: ast.expr | None, constants: Mapping[str, Any]) -> int:
    """Of a number or of the name of a constant; 1 if there is none."""
    if isinstance(expression, ast.Name):
        return int(constants[expression.id])
    return int(ast.literal_eval(expression)) if expression is not None else 1


def tool(name: str, arch: int | None = None) -> Path:
    """A program of the CUDA toolkit that comes with Triton; some have a variant for Blackwell."""
    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    variant = folder / f"{name}-blackwell"
    return variant if arch is not None and arch >= 100 and variant.exists() else folder / name


def _ran(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *options], capture_output=True, text=True, check=True)


@functools.cache
def assembler_report(ptx: str, arch: int) -> str:
    """What the assembler says about registers, spills and barriers."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        options = [*ASSEMBLER_OPTIONS, "-v", "--gpu-name", f"sm_{arch}a", file.name, "-o", "/dev/null"]
        return _ran(tool("ptxas", arch), *options).stderr


def disassembly(cubin: bytes) -> str:
    """The machine code as text, each change of source line announced with the calls it was inlined through."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _ran(tool("nvdisasm"), "--print-line-info-inline", "--print-code", file.name).stdout


@functools.cache
def compiler(arch: int) -> str:
    """The versions that decide what comes out, in one line."""
    said = _ran(tool("ptxas", arch), "--version").stdout
    return f"triton {triton.__version__}, ptxas {said.rpartition(' V')[2].split()[0]}"
