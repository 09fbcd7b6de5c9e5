"""How long to measure, and in which order: warm-up, the stopping rule, and the interleaved loop over calls.

One rule serves all modes: warm up until stable, then sample in rounds until the interval of the median is narrow
enough or a cap is reached. How a single call is timed is the business of `jfabench.samplers`.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from jfabench.policy import MeasurePolicy
from jfabench.records import Measurement
from jfabench.samplers import MeasureError, Sampler, make_sampler

__all__ = [
    "MeasureError",
    "Outcome",
    "Sampler",
    "WarmUp",
    "decide",
    "interleave",
    "iterations_for_round",
    "make_sampler",
    "measure_interleaved",
    "median_interval",
    "warm_up",
]

Reason = Literal["precision", "time", "iterations"]
Outcome = Measurement | Exception
Call = Callable[[], object]

# A case takes between `policy.rounds` rounds, if precision comes early, and about this many times as many.
_ROUNDS_UNTIL_CAP = 4
# Warm-up ends when the last blocks differ by no more than this, relative to the fastest of them.
_STABLE = 0.02
_STABLE_BLOCKS = 3
# Each block of the warm-up lasts about this part of `policy.warmup_seconds`.
_WARMUP_BLOCK = 0.1


# The stopping rule: pure functions ----------------------------------------------------------------------------------


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the two ends of an interval that holds the true median with at least 95% confidence.

    The interval lies between two order statistics whose ranks follow from the binomial distribution; nothing is assumed
    about how samples are distributed. Fewer than six samples allow no such interval: its ends are then infinite.
    Samples of one block are not independent of each other, so the interval is a stopping rule, no error bar between
    runs. Raises `ValueError` (`statistics.StatisticsError`) for no samples.
    """
    ordered = sorted(samples)
    middle = statistics.median(ordered)
    rank = _interval_rank(len(ordered))
    if rank == 0:
        return middle, -math.inf, math.inf
    return middle, ordered[rank - 1], ordered[-rank]


@cache
def _interval_rank(count: int) -> int:
    """The largest k with P(X < k) <= 2.5% for X ~ Binomial(count, 1/2), in exact arithmetic."""
    limit, cumulative, term, rank = 2**count, 0, 1, 0
    while 40 * (cumulative + term) <= limit:
        cumulative += term
        term = term * (count - rank) // (rank + 1)
        rank += 1
    return rank


def decide(rounds: Sequence[Sequence[float]], policy: MeasurePolicy) -> Reason | None:
    """Why sampling ends after these rounds (seconds), or None if it must go on.

    It never ends before `policy.rounds` rounds and `policy.min_iterations` samples, whatever they cost: a slow call may
    thus take longer than `policy.max_seconds`.
    """
    samples = [sample for block in rounds for sample in block]
    if len(rounds) < policy.rounds or len(samples) < min(policy.min_iterations, policy.max_iterations):
        return None
    middle, low, high = median_interval(samples)
    if high - low <= policy.target * middle:
        return "precision"
    if len(samples) >= policy.max_iterations:
        return "iterations"
    if sum(samples) >= policy.max_seconds:
        return "time"
    return None


def iterations_for_round(estimate: float, policy: MeasurePolicy) -> int:
    """Iterations of one round of a call that takes about `estimate` seconds.

    At least what brings `policy.rounds` rounds to `policy.min_iterations`; beyond that, what lets about four times
    `policy.rounds` rounds fill `policy.max_seconds` or `policy.max_iterations`. Many short rounds see drift better than
    few long ones, and let a case end as soon as it is precise.
    """
    rounds = policy.rounds * _ROUNDS_UNTIL_CAP
    least = math.ceil(min(policy.min_iterations, policy.max_iterations) / policy.rounds)
    most = max(math.ceil(policy.max_iterations / rounds), least)
    affordable = policy.max_seconds / rounds / max(estimate, 1e-9)
    return min(max(int(min(affordable, most)), least), most)


def interleave(round_index: int, names: Sequence[str]) -> tuple[str, ...]:
    """The order of a round: forward in even rounds, backward in odd ones (ABBA), so that linear drift cancels out."""
    return tuple(names) if round_index % 2 == 0 else tuple(reversed(names))


# Warm-up ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmUp:
    """`iterations` calls were made in `seconds`; `estimate` is what one took at last, in seconds of host time.

    The first call of all, which may compile, is in `iterations` but not in `seconds`.
    """

    iterations: int
    seconds: float
    estimate: float


def warm_up(
    call: Call, policy: MeasurePolicy, device: str, *, clock: Callable[[], float] = time.perf_counter
) -> WarmUp:
    """Repeats `call` until the time that it takes is stable, or for `policy.warmup_seconds` after the first call.

    Stable means that three blocks in a row, each a tenth of `policy.warmup_seconds` long, agree within 2%. A GPU raises
    its clocks only under load, and within the first milliseconds of it.
    """
    synchronize = _synchronizer(device)
    call()
    synchronize()
    iterations, count = 1, 1
    blocks: list[float] = []
    begin = now = clock()
    while not blocks or now - begin < policy.warmup_seconds:
        block_begin = now
        for _ in range(count):
            call()
        synchronize()
        now = clock()
        iterations += count
        blocks.append((now - block_begin) / count)
        last = blocks[-_STABLE_BLOCKS:]
        if len(last) == _STABLE_BLOCKS and max(last) <= (1 + _STABLE) * min(last):
            break
        count = max(1, int(_WARMUP_BLOCK * policy.warmup_seconds / max(blocks[-1], 1e-7)))
    return WarmUp(iterations, now - begin, blocks[-1])


# The loop -----------------------------------------------------------------------------------------------------------


@dataclass
class _Progress:
    call: Call
    warm: WarmUp
    rounds: list[tuple[float, ...]] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)

    def visit(self, sampler: Sampler, policy: MeasurePolicy) -> Measurement | None:
        """Samples one round; returns the measurement if it was the last."""
        self.rounds.append(tuple(sampler.sample(self.call, iterations_for_round(self.warm.estimate, policy))))
        if sampler.kernels_per_call is not None:
            self.kernels.append(sampler.kernels_per_call)
        reason = decide(self.rounds, policy)
        if reason is None:
            return None
        return Measurement(
            mode=sampler.mode,
            rounds=tuple(self.rounds),
            stopped_by=reason,
            warmup_iterations=self.warm.iterations,
            warmup_seconds=self.warm.seconds,
            kernels_per_call=statistics.fmean(self.kernels) if self.kernels else None,
        )


def measure_interleaved(
    calls: Mapping[str, Call],
    sampler: Sampler,
    policy: MeasurePolicy,
    on_phase: Callable[[str, Literal["warmup", "measure"]], None] = lambda name, phase: None,
) -> dict[str, Outcome]:
    """Measures `calls` in turns, so that drift of clocks and temperature hits all alike.

    Every call is warmed up, then sampled in rounds whose order alternates. A call leaves the loop as soon as `decide`
    says so for its own samples; the others go on. `on_phase(name, phase)` is called before each step.

    Returns the outcome of each call in the order in which they ended: its `Measurement`, or the exception that it
    raised. A failing call does not disturb the others, with one exception: after a fault that leaves the device
    unusable (an illegal address, say) the loop ends, and the calls that had not ended are missing from the result. They
    have to be measured again in a new process.
    """
    outcomes: dict[str, Outcome] = {}

    def fail(name: str, error: Exception) -> bool:
        """Notes the failure; returns whether the device is lost."""
        outcomes[name] = _without_locals(error)
        return _device_lost(sampler.device)

    active: dict[str, _Progress] = {}
    for name, call in calls.items():
        on_phase(name, "warmup")
        try:
            active[name] = _Progress(call, warm_up(call, policy, sampler.device))
        except Exception as error:
            if fail(name, error):
                return outcomes
    index = 0
    while active:
        for name in interleave(index, tuple(active)):
            on_phase(name, "measure")
            try:
                measurement = active[name].visit(sampler, policy)
            except Exception as error:
                del active[name]
                if fail(name, error):
                    return outcomes
                continue
            if measurement is not None:
                outcomes[name] = measurement
                del active[name]
        index += 1
    return outcomes


def _without_locals(error: Exception) -> Exception:
    """The error with its traceback's local variables dropped: they would keep tensors, and so GPU memory, alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error


def _synchronizer(device: str) -> Callable[[], None]:
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _device_lost(device: str) -> bool:
    try:
        _synchronizer(device)()
    except Exception:
        return True
    return False
