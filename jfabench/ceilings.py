"""How fast a device can go at best: a large matrix product and a large copy, measured here or from a datasheet."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jfabench import env as environments
from jfabench.folder import Ceilings, write_json
from jfabench.policy import MeasurePolicy
from jfabench.records import Measurement
from jfabench.samplers import Sampler

# By the exact name that torch and NVML give: boards of the same chip differ (an H100 PCIe is slower than an H100 SXM).
# Dense bf16 (= fp16) tensor-core FLOP/s, memory bytes/s.
_DATASHEET = {
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12, "NVIDIA H100 SXM datasheet, dense bf16"),
    "NVIDIA H200": (989e12, 4.8e12, "NVIDIA H200 SXM datasheet, dense bf16"),
    "NVIDIA B200": (2250e12, 8e12, "NVIDIA HGX B200 datasheet, dense bf16"),
}

# A ceiling is what the device can do at best. Under a second of full load it meets its power limit and lowers its
# clocks, so it is measured in short bursts with pauses; what it sustains is measured after that, and told in the note.
_BURSTS, _BURST_ITERATIONS, _PAUSE_SECONDS = 8, 12, 0.25
_SUSTAINED = MeasurePolicy(
    mode=None, target=0.005, rounds=5, min_iterations=15, max_iterations=400, max_seconds=1.0, warmup_seconds=0.5
)


def measure(device: str) -> Ceilings:
    """Measures `device` (`"cpu"`, `"cuda"` or `"cuda:N"`), in some seconds; `cuda:N` becomes the current device.

    The matrix product is `torch.matmul` (cuBLAS) of two square matrices, n = 8192 on CUDA and 512 on a CPU. They are
    normally distributed: zeros switch fewer transistors and run faster. The copy moves a buffer several times as large
    as the last cache, and counts bytes read and bytes written. The rate is that of the fastest tenth of the calls, made
    in short bursts with pauses and timed by CUDA events or by host time; `note` has the median rate under steady load.

    Raises whatever torch raises, and `RuntimeError` if a product cannot be timed.
    """
    import torch

    from jfabench.measure import make_sampler, measure_interleaved

    on_cuda = device.startswith("cuda")
    if ":" in device:
        torch.cuda.set_device(device)
    env = environments.environment(device)
    n = 8192 if on_cuda else 512
    generator = torch.Generator(device=device).manual_seed(0)

    def product(dtype: torch.dtype) -> Any:
        a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, b, out=out)

    source = torch.ones(max(2**28, 8 * (env["l2_bytes"] or 0)), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    calls = {
        "bf16": product(torch.bfloat16),
        "fp16": product(torch.float16),
        "copy": lambda: target.copy_(source),
    }
    work = {"bf16": 2.0 * n**3, "fp16": 2.0 * n**3, "copy": 2.0 * source.nbytes}
    sampler = make_sampler("events" if on_cuda else "wall", device)
    best = {name: work[name] / _fastest_tenth(call, sampler) for name, call in calls.items()}

    before = environments.clocks(device)
    outcomes = measure_interleaved(calls, sampler, _SUSTAINED)
    slowed = environments.throttled(before, environments.clocks(device))
    steady: dict[str, float] = {}
    for name in calls:
        outcome = outcomes.get(name)
        if not isinstance(outcome, Measurement):
            raise RuntimeError(f"the {name} ceiling of {device} cannot be measured: {outcome or 'the device was lost'}")
        steady[name] = work[name] / statistics.median(sample for block in outcome.rounds for sample in block)
    return Ceilings(
        device=environments.device_name(env),
        flops={dtype: best[dtype] for dtype in ("bf16", "fp16")},
        bytes=best["copy"],
        source="measured",
        note=f"matrix product n = {n}, copy of {source.nbytes} bytes, fastest tenth of short bursts; under steady load "
        f"{steady['bf16'] / 1e12:.3g} TFLOP/s bf16, {steady['copy'] / 1e9:.4g} GB/s"
        + (f" (slowed by {', '.join(slowed)})" if slowed else ""),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        env=env,
    )


def _fastest_tenth(call: Callable[[], object], sampler: Sampler) -> float:
    """Seconds of a call that nine tenths of the calls do not fall below."""
    samples: list[float] = []
    for _ in range(_BURSTS):
        time.sleep(_PAUSE_SECONDS)
        samples += sampler.sample(call, _BURST_ITERATIONS)
    return sorted(samples)[len(samples) // 10]


def datasheet(name: str) -> Ceilings | None:
    """The vendor's figures for the GPU of this name, None where the table has none."""
    if name not in _DATASHEET:
        return None
    flops, rate, note = _DATASHEET[name]
    return Ceilings(device=name, flops={"bf16": flops, "fp16": flops}, bytes=rate, source="datasheet", note=note)


def store_path() -> Path:
    """Where measured ceilings are kept between runs: in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jfabench" / "ceilings.json"


def store(ceilings: Ceilings) -> Path:
    """Keeps measured ceilings for later runs on the same machine; returns the file."""
    path = store_path()
    write_json(path, {**_stored(), environments.machine_key(ceilings.env): ceilings.to_json()})
    return path


def load(env: Mapping[str, Any]) -> Ceilings | None:
    """The ceilings that were measured on the machine that `env` describes, None if there are none that can be read."""
    try:
        return Ceilings(**_stored()[environments.machine_key(env)])
    except (KeyError, TypeError):
        return None


def for_device(env: Mapping[str, Any]) -> Ceilings | None:
    """Measured ceilings if there are any, else the datasheet's, else None."""
    return load(env) or datasheet(str(env.get("gpu")))


def _stored() -> dict[str, Any]:
    try:
        data = json.loads(store_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
