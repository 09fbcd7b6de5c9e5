"""Compiles the kernels of one direction for one architecture, without a GPU, and reports what the assembler says.

    python compile_report.py forward 90      one JSON object a kernel, config and mask

Not a test module: a test runs it in a child process, where the interpreter is off. What is compiled is what the launch
code launches: launches are recorded, with their arguments, instead of made.
"""

from __future__ import annotations

import functools
import itertools
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

from jfabench.kernels.attention import config as configs
from jfabench.kernels.attention import launch, tiles

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
MASKS = {"none": (-1, -1), "causal": (-1, 0), "window": (3, 5)}


def problem(head_dim: int, group: int, mask: str, broadcast: bool) -> launch.Problem:
    """Inputs with room for the windows; values do not matter."""
    q, k = torch.zeros(64, 2 * group, head_dim).bfloat16(), torch.zeros(64, 2, head_dim).bfloat16()
    ends = torch.tensor([0, 64])
    sequences = tiles.Sequences(None if broadcast else ends, ends, 64, 64)
    return launch.Problem(q, k, k, sequences, 0.1, launch.Mask.from_window(*MASKS[mask], 64, 64), False)


def recorded_launches(direction: str, given: launch.Problem, chosen: dict[str, configs.Config]) -> list[tuple]:
    """`(kernel, arguments, options)` of every launch of a call."""
    launches: list[tuple] = []

    def record(kernel: Any, _grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    with (
        mock.patch.object(launch, "run_kernel", record),
        mock.patch.object(tiles, "run_kernel", record),
        mock.patch.object(launch, "_choose", lambda kernel, *_: chosen[kernel]),
    ):
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
    launch_options = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
    constants = {key: value for key, value in options.items() if key not in launch_options}
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


def cases(arch: int) -> list[tuple[int, int, str, bool]]:
    """`(head_dim, group, mask, broadcast)`: in full where the kernels were tuned, a few elsewhere."""
    if arch != 90:
        return [(128, 1, "none", True), (128, 4, "causal", False)]
    full = [(128, 1, mask, False) for mask in MASKS]
    return [*full, (128, 1, "none", True), (128, 4, "causal", False), (64, 1, "none", True), (64, 4, "window", False)]


def report(direction: str, arch: int) -> list[dict[str, Any]]:
    roles = ("forward",) if direction == "forward" else ("dkdv", "dq")
    choices = [
        dict(zip(roles, chosen, strict=True))
        for chosen in itertools.zip_longest(
            *(configs.CANDIDATES[role] for role in roles), fillvalue=configs.CANDIDATES[roles[-1]][-1]
        )
    ]
    rows = []
    for chosen, (head_dim, group, mask, broadcast) in itertools.product(choices, cases(arch)):
        given = problem(head_dim, group, mask, broadcast)
        for kernel, args, options in recorded_launches(direction, given, chosen):
            role = next((role for role in roles if role in kernel.__name__), None)
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
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]))))
