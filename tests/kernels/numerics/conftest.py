from __future__ import annotations

import os

import pytest
import torch

# Every problem here is of another kind; to time candidates for each would take minutes on a GPU, and tests nothing.
os.environ["JFABENCH_TUNE"] = "0"


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
