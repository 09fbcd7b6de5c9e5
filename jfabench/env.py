"""The machine and software that a record was made with, and the GPU's clocks around a measurement.

Everything here fails softly: what cannot be found out is None. Nothing changes a clock or a limit. torch is used where
it is already imported or where a CUDA device is asked about; for everything else package metadata and NVML suffice.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, TypeVar

from jfabench import __version__

T = TypeVar("T")

FLASH_4_DISTRIBUTIONS = ("flash-attn-4", "fa4")
"""Names under which FlashAttention-4 is installed: from PyPI, and from its sources."""

TRITON_DISTRIBUTIONS = ("fbtriton", "triton", "pytorch-triton")
"""Distributions that install the folder `triton/`."""

# Variables that can change a measured number. None of them holds a secret; paths are left out.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "JFABENCH_TUNE",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "NVTX_DISABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_ALWAYS_COMPILE",
    "TRITON_DEBUG",
    "TRITON_DISABLE_LINE_INFO",
    "TRITON_INTERPRET",
)

# nvml.h, nvmlClocksEventReasons: what keeps clocks below their maximum, and whether that slows a benchmark down. An
# idle GPU and clocks that someone has set are no fault of the run.
_REASONS = (
    (0x001, "gpu_idle", False),
    (0x002, "applications_clocks_setting", False),
    (0x004, "sw_power_cap", True),
    (0x008, "hw_slowdown", True),
    (0x010, "sync_boost", True),
    (0x020, "sw_thermal_slowdown", True),
    (0x040, "hw_thermal_slowdown", True),
    (0x080, "hw_power_brake_slowdown", True),
    (0x100, "display_clock_setting", False),
    (0x200, "board_limit", True),
    (0x400, "reliability", True),
)
# NVML counts the time that some of them were in effect, in ns since the driver was loaded (nvml.h, field values).
_COUNTERS = {
    "sw_power_cap": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP",
    "sync_boost": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST",
    "sw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "hw_thermal_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "hw_power_brake_slowdown": "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}
_SLOWED_FRACTION = 0.01  # of the time between two readings, below which a counter is not worth a flag


# Static part ----------------------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """What stays the same during a run on `device` (`"cpu"`, `"cuda"` or `"cuda:N"`), as a JSON object.

    Sizes are in bytes. `gpu` is None for a CPU run, whatever GPUs the machine has. `triton` maps each installed
    distribution that owns the folder `triton/` to its version; two of them are a fault that `jfabench doctor` explains.
    `commit` and `dirty` are those of the checkout that jfabench is imported from; outside of one, `commit` is what the
    environment variable JFABENCH_COMMIT says.
    """
    return {
        **_gpu(device),
        "cpu": cpu_model(),
        "cpu_cores": _soft(lambda: len(os.sched_getaffinity(0))) or os.cpu_count(),
        "jfabench": __version__,
        **_checkout(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": {name: found for name in TRITON_DISTRIBUTIONS if (found := version(name))},
        "flash_attn_4": version(*FLASH_4_DISTRIBUTIONS),
        "flash_attn_3": _flash_attention_3(),
        "fa3_fwd": version("fa3-fwd"),
        "os": _soft(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]) or platform.system(),
        "kernel": platform.release(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def machine_key(env: Mapping[str, Any]) -> str:
    """One text for machines whose measured ceilings and histories can be compared: same device, driver and torch."""
    parts = [
        env.get("gpu") or f"CPU {env.get('cpu')}",
        f"{env.get('sm_count')} SMs" if env.get("gpu") else f"{env.get('cpu_cores')} cores",
        *(f"{name} {env[name]}" for name in ("driver", "cuda", "torch") if env.get(name)),
    ]
    return ", ".join(parts)


def device_name(env: Mapping[str, Any]) -> str:
    """`NVIDIA H200`, or `CPU (AMD EPYC)`: what numbers measured in this environment are labelled with."""
    return str(env.get("gpu") or (f"CPU ({env['cpu']})" if env.get("cpu") else "CPU"))


def version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed, without importing it."""
    for name in distributions:
        found = _soft(lambda name=name: metadata.version(name))  # type: ignore[misc]
        if found is not None:
            return found
    return None


def _flash_attention_3() -> str | None:
    """The version of a build from source; "unversioned" where its module lies on the path without a distribution."""
    found = version("flash-attn-3")
    return found or ("unversioned" if _soft(lambda: util.find_spec("flash_attn_interface")) else None)


@cache
def cpu_model() -> str | None:
    for line in (_soft(lambda: Path("/proc/cpuinfo").read_text()) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _gpu(device: str) -> dict[str, Any]:
    empty = dict.fromkeys(
        ("gpu", "sm_count", "compute_capability", "memory_bytes", "l2_bytes", "driver", "cuda"),
    )
    if not device.startswith("cuda"):
        return empty

    def read() -> dict[str, Any]:
        import torch

        properties: Any = torch.cuda.get_device_properties(device)
        return {
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
        }

    return _soft(read) or empty


@cache
def _checkout() -> dict[str, Any]:
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    def read() -> dict[str, Any]:
        # An installed copy may lie inside a checkout of something else (a virtual environment does): ask for this file.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}

    # A copy without its history (in an image) is told by its builder what it is a copy of.
    return _soft(read) or {"commit": os.environ.get("JFABENCH_COMMIT"), "dirty": None}


# Clocks ---------------------------------------------------------------------------------------------------------------


def clocks(device: str) -> dict[str, Any]:
    """The state of the GPU at this moment; `{}` for a CPU or without NVML.

    `sm_mhz` and `memory_mhz` in MHz, `temperature_c` in degrees Celsius, `power_w` and `power_limit_w` in watts,
    `reasons` the names of what keeps the clocks below their maximum just now. `slowed_s` has the seconds, since the
    driver was loaded, during which a reason was in effect, and `at_s` the moment of reading on a clock that only counts
    up: two readings tell about the time between them, which the momentary reasons do not.
    """
    if not device.startswith("cuda"):
        return {}

    def read() -> dict[str, Any]:
        with _nvml() as nvml:
            handle = _handle(nvml, device)
            mask = _soft(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
            if mask is None:  # drivers before 535 have it under its old name
                mask = _soft(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            power = _soft(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
            limit = _soft(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
            return {
                "sm_mhz": _soft(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                "memory_mhz": _soft(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
                "temperature_c": _soft(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                "power_w": None if power is None else power / 1000,
                "power_limit_w": None if limit is None else limit / 1000,
                "reasons": None if mask is None else reason_names(mask),
                "slowed_s": _slowed_seconds(nvml, handle),
                "at_s": time.monotonic(),
            }

    return _soft(read) or {}


def reason_names(mask: int) -> list[str]:
    """The names of the bits of NVML's clock event reasons; a bit that is not known is given as its number."""
    names = [name for bit, name, _ in _REASONS if mask & bit]
    unknown = mask & ~sum(bit for bit, _, _ in _REASONS)
    return names + [hex(1 << i) for i in range(unknown.bit_length()) if unknown >> i & 1]


def _slowed_seconds(nvml: Any, handle: Any) -> dict[str, float]:
    seconds = {}
    for name, field in _COUNTERS.items():
        value = _soft(lambda field=field: nvml.nvmlDeviceGetFieldValues(handle, [getattr(nvml, field)])[0])  # type: ignore[misc]
        if value is not None and value.nvmlReturn == nvml.NVML_SUCCESS:
            seconds[name] = value.value.ullVal * 1e-9
    return seconds


def throttled(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The reasons that made the GPU slower than it could be between two readings of `clocks`.

    A reason counts if it was in effect at either reading, or for more than 1% of the time between them.
    """
    present = {*(before.get("reasons") or ()), *(after.get("reasons") or ())}
    if before and after:
        elapsed = after["at_s"] - before["at_s"]
        for name, seconds in after["slowed_s"].items():
            if seconds - before["slowed_s"].get(name, seconds) > _SLOWED_FRACTION * elapsed:
                present.add(name)
    return [name for _, name, slows in _REASONS if slows and name in present]


def driver_version() -> str | None:
    """The version of the NVIDIA driver, None without one."""

    def read() -> str:
        with _nvml() as nvml:
            return _text(nvml.nvmlSystemGetDriverVersion())

    return _soft(read)


def compute_capability() -> tuple[int, int] | None:
    """Of torch's current device, or before torch uses CUDA, of the first GPU that is visible; None if none is found."""

    def read() -> tuple[int, int]:
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            major, minor = torch.cuda.get_device_capability()
            return major, minor
        with _nvml() as nvml:
            handle = _handle_by_visibility(nvml, 0, os.environ.get("CUDA_VISIBLE_DEVICES"))
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            return major, minor

    return _soft(read)


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, device: str) -> Any:
    """The NVML handle of a CUDA device. NVML numbers all GPUs by PCI bus, CUDA only the visible ones, fastest first."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        for find in (
            lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}"),
            lambda: nvml.nvmlDeviceGetHandleByPciBusId(
                f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
            ),
        ):
            found = _soft(find)
            if found is not None:
                return found
    return _handle_by_visibility(nvml, int(device.partition(":")[2] or 0), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _handle_by_visibility(nvml: Any, ordinal: int, visible: str | None) -> Any:
    """The handle of CUDA device `ordinal` among `visible`, the value of `CUDA_VISIBLE_DEVICES` (indices or UUIDs)."""
    entry = str(ordinal) if not visible else [part.strip() for part in visible.split(",")][ordinal]
    if entry.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(entry))
    handles: Sequence[Any] = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    for handle in handles:
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(entry):  # CUDA accepts abbreviated UUIDs
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(entry)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _soft(read: Callable[[], T]) -> T | None:
    """What `read` returns, or None if it fails in any way: an environment is worth having even in part."""
    try:
        return read()
    except Exception:
        return None
