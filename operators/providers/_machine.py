"""What is installed on this machine, asked without importing it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jfabench.operator import Unavailable


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def needs_cuda(device: str) -> Unavailable | None:
    if device == "cuda":
        return None
    return Unavailable("its kernels run on NVIDIA GPUs only", "run on a machine with a GPU, with --device cuda")


def compute_capability() -> tuple[int, int] | None:
    """Of torch's current device, or before torch uses CUDA, of the first GPU that is visible; None if none is found."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        major, minor = torch.cuda.get_device_capability()
        return major, minor
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    try:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        handle = by_index(int(first)) if first.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(first)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return major, minor
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def needs_capability(*majors: int) -> Unavailable | None:
    """`majors` are the major compute capabilities that an implementation has kernels for."""
    found = compute_capability()
    if found is None or found[0] in majors:  # where it cannot be asked, running it will tell
        return None
    known = " or ".join(f"{n}.x" for n in majors)
    return Unavailable(
        f"this GPU has compute capability {found[0]}.{found[1]}", f"run it on one with compute capability {known}"
    )
