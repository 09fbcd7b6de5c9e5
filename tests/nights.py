"""Made-up histories: result folders of many nights, fast to write, with realistic noise from night to night."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jfabench.folder import Manifest, ResultFolder, write_json
from jfabench.records import Case, Measurement, Record, TensorCheck, Work

ENV = {
    "gpu": "NVIDIA H200",
    "sm_count": 132,
    "driver": "580.1",
    "cuda": "13.0",
    "cpu": "a CPU",
    "torch": "2.11.0",
    "triton": {"fbtriton": "3.7.4"},
    "commit": "0" * 40,
    "dirty": False,
}


def case(n: int, provider: str = "tlx_jfa", direction: Any = "fwd") -> Case:
    return Case("jagged_attention", provider, direction, {"lengths": {"kind": "fill", "max_len": n}, "dtype": "bf16"})


def record(which: Case, seconds: float, when: datetime, env: dict[str, Any] | None = None, **changes: Any) -> Record:
    samples = tuple(seconds * factor for factor in (0.999, 1.0, 1.0005))
    made = Record(
        which,
        "ok",
        when.isoformat(timespec="seconds"),
        env=ENV if env is None else env,
        work=Work(1e12, 1e9),
        checks=(TensorCheck("out", True, 1e-3, 2e-3, 8e-3, 4e-3),),
        measurement=Measurement("profiler", (samples,) * 4, "precision"),
        inputs={"label": f"N={which.params['lengths']['max_len']}"},
    )
    return replace(made, **changes)


def write(root: Path, records: Sequence[Record], config: str = "nightly") -> ResultFolder:
    folder = ResultFolder(root)
    root.mkdir(parents=True, exist_ok=True)
    folder.records.write_text("".join(r.to_line() for r in records), encoding="utf-8")
    manifest = Manifest(
        config, "", "jagged_attention", None, "cuda", "full", (), {}, {}, len(records), records[0].when, "", "0.1.0"
    )
    write_json(folder.manifest, manifest.to_json())
    return folder


def night(number: int) -> datetime:
    return datetime(2026, 1, 1, 2, tzinfo=UTC) + timedelta(days=number)


def noise(rng: np.random.Generator, nights: int, sd: float = 0.008) -> NDArray[np.float64]:
    """Logarithms of the times of one case: white noise, some memory from night to night, and bad nights."""
    memory = np.zeros(nights)
    for i in range(1, nights):
        memory[i] = 0.6 * memory[i - 1] + rng.normal(0, sd / 3)
    bad = np.where(rng.random(nights) < 0.03, rng.exponential(0.06, nights), 0.0)
    return rng.normal(0, sd, nights) + memory + bad


def planted(rng: np.random.Generator, nights: int, effect: float) -> tuple[NDArray[np.float64], int]:
    """Noise with a step of `effect` (relative, up or down), and the first night after it."""
    at = int(rng.integers(10, nights - 10))
    logs = noise(rng, nights)
    logs[at:] += rng.choice([-1, 1]) * math.log1p(effect)
    return logs, at
