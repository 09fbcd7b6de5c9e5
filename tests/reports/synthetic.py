"""Realistic, made-up records: a jagged grid with providers that fail, throttle and are wrong here and there."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jfabench.folder import Ceilings, Manifest, ResultFolder, write_json
from jfabench.intervals import is_precise
from jfabench.records import Case, Direction, Measurement, Record, Status, TensorCheck, Work

PEAK_FLOPS, PEAK_BYTES = 800e12, 4.3e12
FRACTION = {
    "sdpa_padded": 0.22,
    "torch_varlen": 0.38,
    "triton_jfa": 0.55,
    "fa3": 0.6,
    "fa4": 0.5,
    "fa4_kernel": 0.52,
}
SUMMARIES = {
    "sdpa_padded": "scaled_dot_product_attention on sequences padded to the longest",
    "torch_varlen": "torch.nn.attention.varlen on the packed sequences",
    "triton_jfa": "the plain Triton jagged kernel of this project",
    "fa3": "flash-attention 3 forward, queries expanded outside the timed region",
    "fa4": "flash-attention 4, with the sum of dQ over the batch",
    "fa4_kernel": "flash-attention 4, without the sum of dQ over the batch",
}
ENV = {
    "gpu": "NVIDIA H200",
    "sm_count": 132,
    "compute_capability": "9.0",
    "memory_bytes": 150_000_000_000,
    "l2_bytes": 62_914_560,
    "driver": "580.95.05",
    "cuda": "13.0",
    "cpu": "AMD EPYC 9575F 64-Core Processor",
    "cpu_cores": 16,
    "jfabench": "0.1.0",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "python": "3.12.3",
    "torch": "2.11.0",
    "triton": {"fbtriton": "3.7.4"},
    "flash_attn_4": "4.0.0b36",
    "fa3_fwd": "0.0.3",
    "os": "Ubuntu 24.04 LTS",
    "kernel": "6.8.0",
    "variables": {},
}
CEILINGS = Ceilings(
    device="NVIDIA H200",
    flops={"bf16": PEAK_FLOPS, "fp16": 790e12},
    bytes=PEAK_BYTES,
    source="measured",
    when="2026-01-02T03:04:05+00:00",
)
LENGTHS = (512, 1024, 2048, 4096, 8192)
FILLS = (0.1, 0.5, 0.9)


def params(n: int = 1024, fill: float = 0.5, m: int = 256, **changes: Any) -> dict[str, Any]:
    return {
        "batch": 768 if n < 8192 else 256,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 128,
        "dtype": "bf16",
        "broadcast_q": True,
        "q_len": m,
        "lengths": {"kind": "fill", "max_len": n, "fill": fill},
        "q_lengths": None,
        "causal": False,
        "window": [-1, -1],
        "sm_scale": None,
        "deterministic": False,
        **changes,
    }


def mean_length(n: int, fill: float) -> float:
    low, high = (max(1, (2 * fill - 1) * n), n) if fill >= 0.5 else (1, max(2, 2 * fill * n))
    return (low + high) / 2


def work(p: dict[str, Any], direction: Direction) -> Work:
    total = p["batch"] * mean_length(p["lengths"]["max_len"], p["lengths"]["fill"])
    pairs = total * p["q_len"]
    flops = 4 * p["head_dim"] * p["heads"] * pairs
    row = p["heads"] * p["head_dim"] * 2
    nbytes = row * (2 * total + p["q_len"] + p["batch"] * p["q_len"])
    return Work(flops, nbytes) if direction == "fwd" else Work(2.5 * flops, 2.2 * nbytes)


def record(
    case: Case,
    rng: random.Random,
    status: Status = "ok",
    reason: str = "",
    throttled: Iterable[str] = (),
    rounds: int = 4,
) -> Record:
    p = dict(case.params)
    w = work(p, case.direction)
    n, fill = p["lengths"]["max_len"], p["lengths"]["fill"]
    tensors = ("out", "lse") if case.direction == "fwd" else ("dq", "dk", "dv")
    if case.provider == "sdpa_padded":
        tensors = tuple(t for t in tensors if t != "lse")
    checks: tuple[TensorCheck, ...] = ()
    if status in ("ok", "wrong"):
        checks = tuple(
            TensorCheck(t, status == "ok" or t != tensors[0], rng.uniform(1, 4) * 1e-3, 2.1e-3, 8e-3, 4e-3)
            for t in tensors
        )
    measurement = None
    if status == "ok":
        fraction = (
            FRACTION.get(case.provider, 0.4) * (1 - math.exp(-n * fill / 700)) * (0.8 if case.direction == "bwd" else 1)
        )
        seconds = max(w.flops / PEAK_FLOPS, w.bytes / PEAK_BYTES) / max(fraction, 0.02)
        samples = []
        for _ in range(rounds):
            drift = rng.gauss(0, 0.0015)
            samples.append(tuple(seconds * (1 + drift + abs(rng.gauss(0, 0.003))) for _ in range(6)))
        measurement = Measurement(
            mode="profiler",
            rounds=tuple(samples),
            stopped_by="precision" if is_precise(samples, 0.01) else "time",
            visit=f"visit to N={n} fill={fill} M={p['q_len']} {case.direction} seed={case.seed}",
            warmup_iterations=5,
            warmup_seconds=0.4,
            kernels_per_call=1.0 if case.direction == "fwd" else 3.0,
            spans=tuple(tuple(1.01 * sample for sample in block) for block in samples),
        )
    clocks = {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "temperature_c": 48,
        "power_w": 610.5,
        "power_limit_w": 700.0,
        "reasons": [],
    }
    return Record(
        case=case,
        status=status,
        when="2026-01-02T03:04:05+00:00",
        reason=reason,
        env=ENV,
        work=w,
        checks=checks,
        measurement=measurement,
        clocks={"before": clocks, "after": {**clocks, "sm_mhz": 1755}, "throttled": list(throttled)},
        inputs={
            "label": f"N={n} fill={fill} M={p['q_len']}",
            "sum_k": int(p["batch"] * mean_length(n, fill)),
            "max_k": n,
        },
        overhead_seconds=2.5,
    )


def measured(record: Record) -> Measurement:
    assert record.measurement is not None
    return record.measurement


def grid(
    lengths: Sequence[int] = LENGTHS,
    fills: Sequence[float] = FILLS,
    queries: Sequence[int] = (256,),
    providers: Sequence[str] = tuple(FRACTION),
    directions: Sequence[Direction] = ("fwd", "bwd"),
    seeds: Sequence[int] = (0,),
) -> list[Record]:
    rng = random.Random(1)
    records = []
    points = itertools.product(seeds, queries, fills, lengths, directions, providers)
    for seed, m, fill, n, direction, provider in points:
        case = Case("jagged_attention", provider, direction, params(n, fill, m), seed)
        status: Status = "ok"
        reason = ""
        throttled: list[str] = []
        if provider == "fa3" and direction == "bwd":
            status, reason = "unsupported", "fa3-fwd has no backward"
        elif provider == "sdpa_padded" and n == 8192:
            status, reason = (
                "oom",
                "OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 GiB (at attention.py:42)",
            )
        elif provider == "torch_varlen" and (n, fill) == (4096, 0.5):
            status, reason = "wrong", "dq: max |error| 0.031 exceeds 0.008, relative norm 0.12"
        elif provider == "fa4" and (n, fill, direction) == (2048, 0.1, "bwd"):
            status, reason = "timeout", "nothing was heard for 300 s during 'measure'"
        elif provider == "triton_jfa" and n == 8192:
            throttled = ["sw_power_cap"]
        records.append(record(case, rng, status, reason, throttled))
    return records


def dense(lengths: Sequence[int], providers: Sequence[str] = tuple(FRACTION)) -> list[Record]:
    """Equal lengths: another grid, whose parameters have other names."""
    records = []
    for record in grid(lengths, (0.9,), providers=providers):
        p = dict(record.case.params)
        n = p["lengths"]["max_len"]
        del p["q_len"]
        p |= {"broadcast_q": False, "lengths": {"kind": "constant", "length": n}}
        case = Case("jagged_attention", record.case.provider, record.case.direction, p)
        records.append(replace(record, case=case, inputs={**record.inputs, "label": f"N={n}"}))
    return records


def manifest(cases: int, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "config": "jagged",
        "description": "Broadcast queries over jagged keys and values",
        "operator": "jagged_attention",
        "baseline": "fa4_kernel",
        "device": "cuda",
        "scale": "full",
        "axes": ("q_len", "lengths.fill", "lengths.max_len"),
        "providers": SUMMARIES,
        "policy": {"mode": "profiler", "target": 0.01, "rounds": 4, "max_seconds": 1.0},
        "cases": cases,
        "started": "2026-01-02T03:00:00+00:00",
        "command": "python -m jfabench sweep --config jagged.yaml",
        "version": "0.1.0",
        **changes,
    }
    return Manifest(**values)


def write_folder(
    root: Path,
    records: Sequence[Record],
    *,
    run: Manifest | None = None,
    ceilings: Ceilings | None = CEILINGS,
    tail: str = "",
) -> ResultFolder:
    folder = ResultFolder(root)
    root.mkdir(parents=True, exist_ok=True)
    folder.records.write_text("".join(record.to_line() for record in records) + tail, encoding="utf-8")
    if run is not None:
        write_json(folder.manifest, run.to_json())
    if ceilings is not None:
        write_json(folder.ceilings, ceilings.to_json())
    return folder
