"""Runs `numerics/` under Triton's interpreter on a machine without a GPU: one child process, and one test, a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NUMERICS = Path(__file__).parent / "numerics"
FILES = sorted(path.name for path in NUMERICS.glob("test_*.py"))

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="the numerics tests run in this process",
)


@pytest.mark.parametrize("name", FILES)
def test_numerics_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(NUMERICS / name)]
    # An inherited worker id would make a child believe that it is part of this run's pool of workers.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    child = subprocess.run(
        command, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
