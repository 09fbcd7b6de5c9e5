"""Choosing a configuration by timing a few: once for each kind of problem, within a bound, kept on disk.

``JFABENCH_TUNE=0`` switches it off: the default, which is the first candidate, then serves everywhere.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from triton.errors import TritonError

from . import choices
from .kinds import Kind

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

BUDGET_SECONDS = 20.0  # of a call, from its beginning, compilation included
RESERVE_SECONDS = 5.0  # what a candidate is expected to cost at least: most of it is its compilation
ROUNDS = 7
MARGIN = 0.01  # that a candidate must gain over the one before: less may be chance

clock = time.monotonic
is_capturing = torch.cuda.is_current_stream_capturing

_chosen: dict[tuple[str, Kind], Any] = {}
# One at a time: two would disturb each other's times. Only a launch that is being timed may choose, for what it needs.
_tuning = threading.RLock()


@dataclass(frozen=True)
class Trial(Generic[C]):
    """Median seconds of the candidates that were tried, and those for which there was no time."""

    seconds: dict[C, float]
    untried: tuple[C, ...]

    @property
    def best(self) -> C:
        first = next(iter(self.seconds))
        best = min(self.seconds, key=lambda config: self.seconds[config])
        return best if self.seconds[best] < (1 - MARGIN) * self.seconds[first] else first

    def to_json(self) -> dict[str, Any]:
        return {
            "config": asdict(self.best),
            "seconds": [{**asdict(config), "median": seconds} for config, seconds in self.seconds.items()],
            "untried": [asdict(config) for config in self.untried],
        }


def choose(kind: Kind, gpu: str, candidates: Sequence[C], launch: Callable[[C], object], began: float) -> C:
    """The candidate with the least median time of ``launch`` on a GPU named ``gpu``, remembered for the ``kind``.

    ``launch`` must be repeatable; the first candidate is the default. Timing waits for the device, and ends
    ``BUDGET_SECONDS`` after the call ``began`` (``time.monotonic``), unless a compilation takes longer than those seen
    before and than ``RESERVE_SECONDS``. Candidates for which there was no time are tried by the next process. While a
    CUDA graph is captured nothing can be timed, and what is known serves, or else the default.
    """
    if len(candidates) == 1 or os.environ.get("JFABENCH_TUNE") == "0":
        return candidates[0]
    if (gpu, kind) not in _chosen:
        with _tuning:
            if (gpu, kind) not in _chosen:
                known, untried = _stored(gpu, kind, candidates)
                if is_capturing():
                    return known or candidates[0]
                if known is None or untried:
                    order = candidates if known is None else (known, *untried)
                    try:
                        trial = try_out(order, launch, began + BUDGET_SECONDS)
                    except torch.OutOfMemoryError:  # what one launch needs may still be there
                        return order[0]
                    choices.save(gpu, kind, trial.to_json())
                    known = trial.best
                _chosen[gpu, kind] = known
    chosen: C = _chosen[gpu, kind]
    return chosen


def _stored(gpu: str, kind: Kind, candidates: Sequence[C]) -> tuple[C | None, tuple[C, ...]]:
    """The best candidate so far according to the cache, and those that were not tried."""
    record = choices.load(gpu, kind) or {}
    untried = record.get("untried")
    known = next((config for config in candidates if asdict(config) == record.get("config")), None)
    return known, tuple(config for config in candidates if isinstance(untried, list) and asdict(config) in untried)


def try_out(candidates: Sequence[C], launch: Callable[[C], object], deadline: float) -> Trial[C]:
    """Time ``candidates`` in interleaved rounds. The first is tried whatever the time; it would be launched anyway."""
    seconds_of = gpu_timer()
    samples: dict[C, list[float]] = {}
    expected = RESERVE_SECONDS
    tried, failure = 0, None
    for config in candidates:
        start = clock()
        if samples and start + expected > deadline:
            break
        tried += 1
        try:
            seconds_of(lambda config=config: launch(config))  # type: ignore[misc]  # compiles
        except TritonError as error:  # it cannot be compiled, or needs more than the device has
            failure = error
            continue
        samples[config] = []
        expected = max(expected, clock() - start)
    if not samples:
        raise RuntimeError(
            f"jagged_flash_attention: no configuration of a kernel runs on this GPU: {failure}"
        ) from failure
    for config in [*samples] * ROUNDS:
        if clock() > deadline and all(samples.values()):
            break
        samples[config].append(seconds_of(lambda config=config: launch(config)))  # type: ignore[misc]
    medians = {config: statistics.median(times) for config, times in samples.items()}
    return Trial(medians, tuple(candidates[tried:]))


def gpu_timer() -> Callable[[Callable[[], object]], float]:
    """A function that calls its argument and returns the seconds of the device that it took, with a cold L2 cache."""
    cuda: Any = torch.cuda  # parts of it are untyped
    device = cuda.current_device()
    scratch = torch.empty(2 * cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))

    def seconds_of(run: Callable[[], object]) -> float:
        scratch.zero_()
        cuda._sleep(1_000_000)  # cycles, about half a millisecond: until the host has queued all that is timed
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    return seconds_of
