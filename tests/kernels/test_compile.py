"""Every shipped configuration compiles offline, within the machine's limits and without spilling."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jfabench import inspect_compare
from jfabench.sass import WHOLE

BASELINE = Path(__file__).parent.parent / "data" / "inspect_baseline.csv"
SHARED_LIMIT = 227 * 1024  # bytes that one program may have on sm_90 and sm_100


EXPECTED = {
    ("triton", "forward"): {"forward_kernel"},
    ("triton", "backward"): {"delta_kernel", "dkdv_kernel", "dq_kernel", "broadcast_dq_kernel"},
    ("sm90", "forward"): {"forward_sm90_kernel"},
    ("sm90", "backward"): {"backward_sm90_kernel", "delta_kernel", "round_kernel", "dq_kernel", "broadcast_dq_kernel"},
}


def spill_limit(row: dict[str, Any], arch: int) -> int:
    """Bytes that a kernel may spill: none, but for three that were looked at."""
    if row["kernel"] == "dkdv_kernel" and row["mask"] != "none":
        return 32  # two accumulators of 64 registers each; with a window's bounds a few words spill, outside the loops
    if row["kernel"] == "forward_kernel" and arch == 100 and row["config"]["block_m"] == 128 and row["mask"] != "none":
        return 20  # a candidate of sm_90, where it does not spill; on sm_100 it is one of three, and not the default
    if row["kernel"] == "backward_sm90_kernel" and row["mask"] != "none":
        return 16  # words about a tile or a step, read once in it, beside 240 registers in use
    return 0


@pytest.mark.parametrize(
    ("family", "direction", "arch"),
    [
        (family, direction, arch)
        for family, direction in EXPECTED
        for arch in (90, 100)
        if family != "sm90" or arch == 90
    ],
)
def test_kernels_compile_within_limits(family: str, direction: str, arch: int) -> None:
    script = Path(__file__).parent / "compile_report.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), family, direction, str(arch)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    rows = json.loads(child.stdout.splitlines()[-1])
    assert {row["kernel"] for row in rows} == EXPECTED[family, direction] | {"tile_kernel"}
    for row in rows:
        assert row["spilled_bytes"] <= spill_limit(row, arch), row
        assert row["shared_bytes"] <= SHARED_LIMIT, row
        assert not row["serialised"], row
        if arch == 90 and row["role"]:
            assert row["shared_bytes"] <= row["estimated_shared_bytes"], row
            assert row["registers"] <= register_limit(family, row["config"]), row
    new = [row for row in rows if not row["repeated"]]
    assert_no_worse_than_the_baseline([row["inspected"] for row in new])
    # What families share is in the baseline as compiled for the first of them.
    assert_in_the_baseline([row["inspected"] for row in new if row["role"]])


def assert_no_worse_than_the_baseline(rows: list[dict[str, str]]) -> None:
    """No kernel spills, or takes more registers or shared memory, than when the baseline was written.

    Where a change is meant, or kernels are new, write the baseline anew: `python -m jfabench inspect --out NEW`, then
    copy `NEW/inspect.csv` to `tests/data/inspect_baseline.csv`.
    """
    comparison = inspect_compare.compare(inspect_compare.read_rows(BASELINE), rows)
    assert not comparison.fails, [change for change in comparison.worse if change.fails]


def assert_in_the_baseline(rows: list[dict[str, str]]) -> None:
    notes = inspect_compare.compare(inspect_compare.read_rows(BASELINE), rows).notes
    another = any(note.startswith("sm_") for note in notes)  # compiler, or architecture
    stale = any(note.endswith(" not in the baseline") for note in notes)
    assert another or not stale, f"the baseline is out of date: {notes}"


def register_limit(family: str, config: dict[str, Any]) -> int:
    """Registers of a thread at launch with which the intended programs fit a multiprocessor (of 65536)."""
    if family == "triton":
        return 255
    threads = 128 * (1 + config.get("consumers", 2)) * config.get("residents", 1)
    return 65536 // threads


@pytest.mark.parametrize(
    ("column", "grown", "fails"),
    [
        ("spill_store_bytes", 4, True),
        ("registers", 9, True),
        ("registers", 8, False),
        ("shared_bytes", 1025, True),
        ("shared_bytes", 1024, False),
    ],
)
def test_a_kernel_that_gets_worse_is_noticed(column: str, grown: int, fails: bool) -> None:
    rows = inspect_compare.read_rows(BASELINE)
    assert_no_worse_than_the_baseline(rows)
    kernel = next(row for row in rows if row["kernel"] == "forward_sm90_kernel" and row["role"] == WHOLE)
    kernel[column] = str(int(kernel[column]) + grown)
    with pytest.raises(AssertionError, match="forward_sm90_kernel") if fails else contextlib.nullcontext():
        assert_no_worse_than_the_baseline(rows)


def test_a_baseline_of_other_kernels_is_noticed() -> None:
    rows = inspect_compare.read_rows(BASELINE)
    renamed = [{**row, "kernel": "another"} for row in rows if row["kernel"] == "delta_kernel"]
    with pytest.raises(AssertionError, match="out of date"):
        assert_in_the_baseline(renamed)
