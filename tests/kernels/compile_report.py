"""Compiles a family's kernels of one direction for one architecture, without a GPU; reports what the assembler says.

    python compile_report.py triton forward 90      one JSON object a kernel, config and mask

Not a test module: a test runs it in a child process, where the interpreter is off.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from jfabench.inspect_kernels import subject_of
from jfabench.kernels.attention import offline
from jfabench.sass import WHOLE, parse_assembler


def report(family: str, direction: str, arch: int) -> list[dict[str, Any]]:
    rows = []
    seen = set()
    for launch in offline.launches(family, direction, arch):
        binary = offline.compile_launch(launch, arch)
        code = launch.name, str(launch.config), binary.ptx  # other cases may lead to the same, which is listed once
        repeated = code in seen
        seen.add(code)
        said = parse_assembler(offline.assembler_report(binary.ptx, arch))
        rows.append(
            {
                "kernel": launch.name,
                "role": launch.role,
                **launch.case._asdict(),
                "arch": arch,
                "config": dict(launch.config),
                "estimated_shared_bytes": launch.estimated_shared_bytes,
                "registers": said.registers,
                "spilled_bytes": max(said.spill_store_bytes, said.spill_load_bytes),
                "shared_bytes": binary.shared_bytes,
                "serialised": said.serialised,
                "repeated": repeated,
                "inspected": {  # as in a row of inspect.csv
                    **{name: str(value) for name, value in asdict(subject_of(launch, arch)).items()},
                    **{name: str(value) for name, value in said._asdict().items()},
                    "shared_bytes": str(binary.shared_bytes),
                    "role": WHOLE,
                    "compiler": offline.compiler(arch),
                },
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
