"""The decorator for tests that run under many schedules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import faults
import pytest
import torch

from jfabench.sim import TargetError
from jfabench.sim.testing import under_schedules


@pytest.mark.parametrize("rows", [1, 2])
@under_schedules("sm_90", seeds=2)
def test_the_right_kernel(rows: int) -> None:
    out = torch.zeros(rows)
    faults.global_kernel[(rows,)](out, None, "equal stores")
    assert out[0] == 1


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="two programs write different values to one place")
@under_schedules("sm_90", seeds=1)
def test_a_race_fails_the_test() -> None:
    faults.global_kernel[(2,)](torch.zeros(1), None, "stores")


def test_schedules_are_tests_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import torch, triton\n"
        "import triton.language as tl\n"
        "from jfabench.sim.testing import under_schedules\n"
        "@triton.jit\n"
        "def kernel(out): tl.store(out, 1.0)\n"
        "@under_schedules('sm_90', seeds=[4, 9], policies=['late'])\n"
        "def test_something(): kernel[(1,)](torch.zeros(1))\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    for name in ("late-4", "late-9"):
        assert f"test_something[{name}] PASSED" in done.stdout


@pytest.mark.xfail(strict=True, raises=TargetError, reason="nothing is launched, so that nothing can be found")
@under_schedules("sm_90", seeds=1)
def test_nothing_launched_fails_the_test() -> None: ...
