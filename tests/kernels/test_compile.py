"""Every shipped configuration compiles offline, within the machine's limits and without spilling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_LIMIT = 227 * 1024  # bytes that one program may have on sm_90 and sm_100
# dkdv keeps two accumulators of 64 registers each; with a window's bounds a few words spill, outside the loops.
SPILL_LIMIT = {"dkdv_kernel": 32}


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_compile_within_limits(direction: str, arch: int) -> None:
    script = Path(__file__).parent / "compile_report.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, script, direction, str(arch)], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    rows = json.loads(child.stdout.splitlines()[-1])
    expected = {
        "forward": {"forward_kernel"},
        "backward": {"delta_kernel", "dkdv_kernel", "dq_kernel", "broadcast_dq_kernel"},
    }
    assert {row["kernel"] for row in rows} == expected[direction] | {"tile_kernel"}
    for row in rows:
        limit = SPILL_LIMIT.get(row["kernel"], 0) if row["mask"] != "none" else 0
        assert row["spilled_bytes"] <= limit, row
        assert row["shared_bytes"] <= SHARED_LIMIT, row
        assert not row["serialised"], row
        if arch == 90 and row["role"]:
            assert row["shared_bytes"] <= row["estimated_shared_bytes"], row
