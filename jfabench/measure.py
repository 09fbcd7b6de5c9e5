"""How long to measure, and in which order: warm-up, the stopping rule, and the interleaved loop over calls.

One rule serves all modes: warm up until stable, unless cold calls are wanted, then sample in rounds until the interval
of the median is narrow enough or a cap is reached. The interval is that of `jfabench.intervals`, which reports show,
too. How a single call is timed is the business of `jfabench.samplers`.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jfabench.intervals import is_precise
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
    "warm_up",
]

Reason = Literal["precision", "time", "iterations"]
Outcome = Measurement | Exception
Call = Callable[[], object]

# A case takes between `policy.rounds` rounds, if precision comes early, and about this many times as many. Where rounds
# differ by 0.5%, an interval of 1% takes seven of them, and where they differ by 1%, seventeen.
_ROUNDS_UNTIL_CAP = 8
# Warm-up ends when the last blocks differ by no more than this, relative to the fastest of them.
_STABLE = 0.02
_STABLE_BLOCKS = 3
# Each block of the warm-up lasts about this part of `policy.warmup_seconds`.
_WARMUP_BLOCK = 0.1


# The stopping rule: pure functions ----------------------------------------------------------------------------------


def decide(rounds: Sequence[Sequence[float]], policy: MeasurePolicy) -> Reason | None:
    """Why sampling ends after these rounds (seconds), or None if it must go on.

    `precision` is what `jfabench.intervals.is_precise` says for `policy.target`; a report asks it again. Sampling never
    ends before `policy.rounds` rounds and `policy.min_iterations` samples, whatever they cost: a slow call may thus
    take longer than `policy.max_seconds`.
    """
    samples = sum(map(len, rounds))
    if len(rounds) < policy.rounds or samples < policy.min_iterations:
        return None
    if is_precise(rounds, policy.target):
        return "precision"
    if samples >= policy.max_iterations:
        return "iterations"
    if sum(map(sum, rounds)) >= policy.max_seconds:
        return "time"
    return None


def iterations_for_round(estimate: float, policy: MeasurePolicy) -> int:
    """Iterations of one round of a call that takes about `estimate` seconds.

    At least what brings `policy.rounds` rounds to `policy.min_iterations`; beyond that, what lets about eight times
    `policy.rounds` rounds fill `policy.max_seconds` or `policy.max_iterations`. Many short rounds see drift better than
    few long ones, and let a case end as soon as it is precise.
    """
    rounds = policy.rounds * _ROUNDS_UNTIL_CAP
    least = math.ceil(policy.min_iterations / policy.rounds)
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


NO_WARM_UP = WarmUp(iterations=0, seconds=0.0, estimate=math.inf)
"""Nothing is known of the call, so that rounds are as short as may be."""


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
    spans: list[tuple[float, ...]] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)

    def sample(self, sampler: Sampler, policy: MeasurePolicy) -> Reason | None:
        """Samples one round; returns why it was the last one, or None if there must be more."""
        iterations = iterations_for_round(self.warm.estimate, policy)
        try:
            samples = sampler.sample(self.call, iterations)
        except MeasureError:  # the profiler may have lost an activity: no reason to throw away the rounds before
            samples = sampler.sample(self.call, iterations)
        self.rounds.append(tuple(samples))
        if sampler.last_spans is not None:
            self.spans.append(tuple(sampler.last_spans))
        if sampler.kernels_per_call is not None:
            self.kernels.append(sampler.kernels_per_call)
        return decide(self.rounds, policy)

    def measurement(self, sampler: Sampler, stopped_by: Reason, visit: str) -> Measurement:
        return Measurement(
            mode=sampler.mode,
            rounds=tuple(self.rounds),
            stopped_by=stopped_by,
            visit=visit,
            warmup_iterations=self.warm.iterations,
            warmup_seconds=self.warm.seconds,
            kernels_per_call=statistics.fmean(self.kernels) if self.kernels else None,
            spans=tuple(self.spans),
        )


def measure_interleaved(
    calls: Mapping[str, Call],
    sampler: Sampler,
    policy: MeasurePolicy,
    on_phase: Callable[[str, Literal["warmup", "measure"]], None] = lambda name, phase: None,
    visit: str | None = None,
) -> dict[str, Outcome]:
    """Measures `calls` in turns, so that drift of clocks and temperature hits all alike.

    Every call is warmed up, unless `policy.warm_up` is false, then sampled in rounds whose order alternates. A call
    leaves the loop as soon as `decide` says so for its own samples; the others go on. `on_phase(name, phase)` is called
    before each of these steps; where nothing is warmed up, there is no phase `warmup`. All measurements of the loop get
    the same `visit`, by default a fresh one: round `r` of any two of them ran side by side.

    A round that the sampler cannot time (`MeasureError`) is repeated once before its call has failed.

    Returns the outcome of each call in the order in which they ended: its `Measurement`, or the exception that it
    raised. A failing call does not disturb the others, with one exception: after a fault that leaves the device
    unusable (an illegal address, say) the loop ends, and the calls that had not ended are missing from the result. They
    have to be measured again in a new process.
    """
    outcomes: dict[str, Outcome] = {}
    visit = uuid.uuid4().hex if visit is None else visit

    def fail(name: str, error: Exception) -> bool:
        """Notes the failure; returns whether the device is lost."""
        outcomes[name] = _without_locals(error)
        return _device_lost(sampler.device)

    active: dict[str, _Progress] = {}
    for name, call in calls.items():
        if not policy.warm_up:
            active[name] = _Progress(call, NO_WARM_UP)
            continue
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
                stopped_by = active[name].sample(sampler, policy)
            except Exception as error:
                del active[name]
                if fail(name, error):
                    return outcomes
                continue
            if stopped_by is not None:
                outcomes[name] = active.pop(name).measurement(sampler, stopped_by, visit)
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
