"""The simulator has an interpreter of its own: with Triton's switched on, kernels are made for that one."""

from __future__ import annotations

import os

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []
