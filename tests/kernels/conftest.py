"""The kernels run compiled on a GPU or interpreted on the CPU, and a process can do only one of the two.

`numerics/` runs in this process where there is a GPU, or where `TRITON_INTERPRET=1` is set. Elsewhere
`test_interpreted.py` runs it, file by file, in child processes that set it.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = [] if INTERPRETED or torch.cuda.is_available() else ["numerics"]
