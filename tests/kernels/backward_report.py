"""Compiles the backward kernel for sm_100a, without a GPU; reports what the machine code says.

    python backward_report.py few bfloat16      one JSON object a configuration and case

`few` cases, or `all`, in every configuration, or one that is `masked` in the default configuration.

Not a test module: a test runs it in a child process, where the interpreter is off.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import torch

from jfabench import sass
from jfabench.kernels.attention import offline

FAMILY = "bwd_sm100"
FEW = offline.CASES[FAMILY, 100]
MASKED = offline.Case(128, 4, "causal", False)
CASES = {
    "few": FEW,
    "all": (*FEW, MASKED, offline.Case(128, 1, "window", False), offline.Case(64, 1, "none", True)),
    "masked": (MASKED,),
}


def report(cases: str, dtype: str) -> list[dict[str, Any]]:
    offline.CASES[FAMILY, 100] = CASES[cases]
    offline.DTYPE = getattr(torch, dtype)
    launches = (launch for launch in offline.launches(FAMILY, "backward", 100) if "sm100" in launch.name)
    return [row(launch) for launch in islice(launches, 1 if cases == "masked" else None)]


def row(launch: offline.Launch) -> dict[str, Any]:
    binary = offline.compile_launch(launch, 100)
    said = sass.parse_assembler(offline.assembler_report(binary.ptx, 100))
    regions = [sass.Region(task.role, task.copies, task.file, task.first, task.last) for task in offline.tasks(launch)]
    roles = {mix.role: mix.counts for mix in sass.mixes(offline.disassembly(binary.cubin), regions)}
    return {
        **launch.case._asdict(),
        "dtype": str(launch.args[0].base.dtype).removeprefix("torch."),
        "config": dict(launch.config),
        "registers": said.registers,
        "spilled_bytes": max(said.spill_store_bytes, said.spill_load_bytes),
        "shared_bytes": binary.shared_bytes,
        "estimated_shared_bytes": launch.estimated_shared_bytes,
        "tmem_columns": binary.tmem_columns,
        "roles": roles,
    }


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], sys.argv[2])))
