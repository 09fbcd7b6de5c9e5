"""What an implementation needs of this machine, asked without importing it."""

from __future__ import annotations

from jfabench.env import compute_capability
from jfabench.operator import Unavailable


def needs_cuda(device: str) -> Unavailable | None:
    if device == "cuda":
        return None
    return Unavailable("its kernels run on NVIDIA GPUs only", "run on a machine with a GPU, with --device cuda")


def needs_capability(*majors: int) -> Unavailable | None:
    """`majors` are the major compute capabilities that an implementation has kernels for."""
    found = compute_capability()
    if found is None or found[0] in majors:  # where it cannot be asked, running it will tell
        return None
    known = " or ".join(f"{n}.x" for n in majors)
    return Unavailable(
        f"this GPU has compute capability {found[0]}.{found[1]}", f"run it on one with compute capability {known}"
    )
