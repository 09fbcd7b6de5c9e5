"""Compiles a family's kernels of one direction for one architecture, without a GPU; reports what the assembler says.

    python compile_report.py triton forward 90      one JSON object a kernel, config and mask

Not a test module: a test runs it in a child process, where the interpreter is off. What is compiled is what the launch
code launches: launches are recorded, with their arguments, instead of made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from jfabench.kernels.attention import config, config_sm90, launch_triton, tiles
from jfabench.kernels.attention.problem import Mask, Problem

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
MASKS = {"none": (-1, -1), "causal": (-1, 0), "window": (3, 5)}
SHARED_LIMIT = 227 * 1024  # bytes that one program may have on sm_90 and sm_100
ROWS = 256  # room for the windows, and whole tiles

CONFIGS: dict[str, Any] = {"triton": config, "sm90": config_sm90}
ROLES = {
    ("triton", "forward"): ("forward",),
    ("triton", "backward"): ("dkdv", "dq"),
    ("sm90", "forward"): ("forward",),
    ("sm90", "backward"): ("backward",),
}

# (head_dim, group, mask, broadcast): in full where the kernels were tuned, a few elsewhere.
FEW = [(128, 1, "none", True), (128, 4, "causal", False)]
FULL = [
    *((128, 1, mask, False) for mask in MASKS),
    *FEW,
    (64, 1, "none", True),
    (64, 4, "window", False),
]
CASES = {
    ("triton", 90): FULL,
    ("triton", 100): FEW,
    ("sm90", 90): [
        *FEW,
        (128, 1, "window", False),
        (128, 1, "causal", True),
        (64, 1, "window", False),
    ],  # two seconds each
}


def problem(head_dim: int, group: int, mask: str, broadcast: bool) -> Problem:
    """Values do not matter."""
    q, k = torch.zeros(ROWS, 2 * group, head_dim).bfloat16(), torch.zeros(ROWS, 2, head_dim).bfloat16()
    ends = torch.tensor([0, ROWS])
    sequences = tiles.Sequences(None if broadcast else ends, ends, ROWS, ROWS)
    return Problem(q, k, k, sequences, 0.1, Mask.from_window(*MASKS[mask], ROWS, ROWS), False)


def _plain_default(kernel: str, *_: Any) -> Any:
    """For the plain Triton kernels that another family launches."""
    return config.CANDIDATES[kernel][0]


def recorded_launches(family: str, direction: str, given: Problem, chosen: dict[str, Any]) -> list[tuple]:
    """`(kernel, arguments, options)` of every launch of a call."""
    launch = importlib.import_module(f"jfabench.kernels.attention.launch_{family}")
    launches: list[tuple] = []

    def record(kernel: Any, _grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    with contextlib.ExitStack() as patches:
        for module in {launch, launch_triton, tiles}:
            patches.enter_context(mock.patch.object(module, "run_kernel", record))
        patches.enter_context(mock.patch.object(launch_triton, "_choose", _plain_default))
        patches.enter_context(mock.patch.object(launch, "_choose", lambda kernel, *_: chosen[kernel]))
        out = torch.empty(given.sequences.rows, *given.q.shape[1:]).bfloat16()
        lse = torch.empty(given.heads, given.sequences.rows)
        if direction == "forward":
            launch.forward(given)
        else:
            launch.backward(given, out, lse, out, need_dq=True, need_dkdv=True)
    return launches


def source(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
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


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], arch: int) -> dict[str, Any]:
    """Registers, spilled bytes, shared memory, and whether the assembler had to serialise the matmuls."""
    constants = {key: value for key, value in options.items() if key in kernel.arg_names}
    launch_options = {key: value for key, value in options.items() if key not in constants}
    binary = triton.compile(source(kernel, args, constants), target=GPUTarget("cuda", arch, 32), options=launch_options)
    said = assembler_report(binary.asm["ptx"], arch)
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None, said
    assert spills is not None, said
    return {
        "kernel": kernel.__name__,
        "registers": int(registers[1]),
        "spilled_bytes": max(map(int, spills.groups())),
        "shared_bytes": binary.metadata.shared,
        "serialised": "serialized" in said,
    }


@functools.cache
def assembler_report(ptx: str, arch: int) -> str:
    name = "ptxas-blackwell" if arch >= 100 and (TOOLS / "ptxas-blackwell").exists() else "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [TOOLS / name, "-v", "--gpu-name", f"sm_{arch}a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _paired(roles: tuple[str, ...], usable: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A config for each role, so often that every config comes up."""
    longest = max(map(len, usable))
    return [
        {role: options[min(i, len(options) - 1)] for role, options in zip(roles, usable, strict=True)}
        for i in range(longest)
    ]


def report(family: str, direction: str, arch: int) -> list[dict[str, Any]]:
    configs, roles = CONFIGS[family], ROLES[family, direction]
    rows = []
    for head_dim, group, mask, broadcast in CASES[family, arch]:
        given = problem(head_dim, group, mask, broadcast)
        usable = [configs.candidates(given.kind(family, role), SHARED_LIMIT) for role in roles]
        launches = [
            (chosen, launch)
            for chosen in _paired(roles, usable)
            for launch in recorded_launches(family, direction, given, chosen)
        ]
        for chosen, (kernel, args, options) in launches:
            role = next((role for role in roles if kernel.__name__.startswith((role, f"broadcast_{role}"))), None)
            row = {
                "role": role,
                "head_dim": head_dim,
                "group": group,
                "mask": mask,
                "broadcast": broadcast,
                "arch": arch,
            }
            row["config"] = vars(chosen[role]) if role else None
            row["estimated_shared_bytes"] = configs.shared_bytes(role, chosen[role], head_dim) if role else None
            rows.append(row | compiled(kernel, args, options, arch))
    return rows


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
