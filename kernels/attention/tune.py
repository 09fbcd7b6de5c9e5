"""Choosing among a handful of configurations by timing them, once per kind of problem and process."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch
import triton.testing
from triton.runtime.errors import OutOfResources

from .config import Config

_chosen: dict[Hashable, Config] = {}


def fastest(key: Hashable, candidates: Sequence[Config], launch: Callable[[Config], object]) -> Config:
    """The candidate with the least median time of ``launch``, remembered under ``key``.

    ``launch`` must be repeatable. Timing waits for the device, on the first call for a ``key`` only; while a CUDA graph
    is captured nothing can be timed, and the first candidate serves.
    """
    if key in _chosen:
        return _chosen[key]
    if len(candidates) == 1 or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times = {config: _median_ms(config, launch) for config in candidates}
    _chosen[key] = min(times, key=lambda config: times[config])
    return _chosen[key]


def _median_ms(config: Config, launch: Callable[[Config], object]) -> float:
    try:
        return float(triton.testing.do_bench(lambda: launch(config), warmup=5, rep=20, return_mode="median"))
    except OutOfResources:
        return math.inf
