"""Which device a command uses, decided without importing torch where there is no GPU."""

from __future__ import annotations

import re
import subprocess
import sys


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that the driver shows, by name; none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        return [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    finally:
        pynvml.nvmlShutdown()


def torch_cuda_devices() -> int:
    """How many CUDA devices torch can use; asked in another process, so that this one stays free of CUDA."""
    probe = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def choose_device(wanted: str) -> tuple[str | None, str]:
    """The device that `wanted` (`auto`, `cpu`, `cuda`, `cuda:N`) means here, and what the user should know about it.

    Returns `(None, reason)` where the wanted device cannot be used. Raises ValueError for what names no device.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,8}))?", wanted):  # torch, too, takes no zeros in front
        raise ValueError(f"--device {wanted!r}: expected auto, cpu, cuda or cuda:N, such as cuda:1")
    if wanted == "cpu":
        return "cpu", "Running on the CPU: small shapes, and times that say nothing about a GPU."
    names = gpu_names()
    usable = torch_cuda_devices() if names else 0
    index = int(wanted.partition(":")[2] or 0)
    if usable > index:
        return wanted if wanted.startswith("cuda:") else "cuda", ""
    if not names:
        problem = "no NVIDIA GPU found"
    elif not usable:
        problem = f"{names[0]} found, but this torch cannot use it (`python -m jfabench doctor` says why)"
    else:
        problem = f"--device {wanted}: torch sees {usable} CUDA device(s), numbered from 0"
    if wanted == "auto":
        return "cpu", f"{problem}: running on the CPU, with small shapes and times that say nothing about a GPU."
    return None, f"{problem}; use --device cpu for the small scale"
