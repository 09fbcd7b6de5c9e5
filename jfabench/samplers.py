"""The four ways to time one call. Each gives one sample per iteration, in seconds, and none leaves out an outlier.

On CUDA the L2 cache is flushed before every iteration, by zeroing a buffer of twice its size, and the flush is never
part of a sample. How each mode keeps it out is told at its class.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jfabench.collector import without_collector
from jfabench.policy import Mode

DEFAULT_L2_BYTES = 128 * 2**20
"""Assumed where the driver does not tell the size of the L2 cache; larger than that of any GPU up to the B200."""


class MeasureError(RuntimeError):
    """A call cannot be timed in the mode asked for. The message says why, and which mode can."""


class Sampler(Protocol):
    """Times calls on one device in one mode."""

    @property
    def mode(self) -> Mode: ...

    @property
    def device(self) -> str: ...

    @property
    def kernels_per_call(self) -> float | None:
        """GPU activities (kernels, memory copies and fills) that one call launched, mean over the last block.

        None in the modes that do not see them.
        """
        ...

    @property
    def last_spans(self) -> list[float] | None:
        """For each call of the last block, the seconds from the start of its first GPU activity to the end of its last.

        None in the modes that do not see activities.
        """
        ...

    def sample(self, call: Callable[[], object], iterations: int) -> list[float]:
        """Runs a block of `iterations` calls and returns the seconds of each.

        Returns only after the device has finished, so that an asynchronous fault surfaces here, at its own call.
        Raises `MeasureError` where the mode cannot time the call, and whatever the call raises.
        """
        ...


def make_sampler(mode: Mode, device: str) -> Sampler:
    """A sampler for `device` (`"cpu"`, `"cuda"` or `"cuda:N"`), which must be the current device.

    Raises `ValueError` for a mode that needs CUDA on a CPU.
    """
    if device == "cpu":
        if mode != "wall":
            raise ValueError(f"measure mode {mode!r} needs a CUDA device; on a CPU use 'wall'")
        return CpuWallSampler()
    kinds: dict[Mode, Callable[[str], Sampler]] = {
        "profiler": ProfilerSampler,
        "events": EventSampler,
        "cudagraph": GraphSampler,
        "wall": WallSampler,
    }
    return kinds[mode](device)


class CpuWallSampler:
    """Host time of each call. Caches are not flushed."""

    mode: Mode = "wall"
    device = "cpu"
    kernels_per_call: float | None = None
    last_spans: list[float] | None = None

    def sample(self, call: Callable[[], object], iterations: int) -> list[float]:
        samples = []
        with without_collector():
            for _ in range(iterations):
                begin = time.perf_counter()
                call()
                samples.append(time.perf_counter() - begin)
        return samples


class _CudaSampler:
    mode: Mode

    def __init__(self, device: str) -> None:
        import torch

        self.device = device
        self.kernels_per_call: float | None = None
        self.last_spans: list[float] | None = None
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or DEFAULT_L2_BYTES
        buffer = torch.empty(2 * l2, dtype=torch.int8, device=device)
        self._torch: Any = torch
        self._flush: Callable[[], object] = buffer.zero_
        self._synchronize: Callable[[], None] = torch.cuda.synchronize

    def _timing_events(self, count: int) -> list[Any]:
        return [self._torch.cuda.Event(enable_timing=True) for _ in range(count)]


class WallSampler(_CudaSampler):
    """Host time from before the call until the device is idle again: launch overhead and latency are part of it."""

    mode = "wall"

    def sample(self, call: Callable[[], object], iterations: int) -> list[float]:
        samples = []
        with without_collector():
            for _ in range(iterations):
                self._flush()
                self._synchronize()
                begin = time.perf_counter()
                call()
                self._synchronize()
                samples.append(time.perf_counter() - begin)
        return samples


class EventSampler(_CudaSampler):
    """CUDA events just before and after each call, on the current stream; the flush runs before the first of them.

    Nothing waits in between, so the host prepares a call while the flush of its iteration runs. Where a call needs more
    host time than that, the gap is part of the sample.
    """

    mode = "events"
    in_flight = 64  # iterations queued at once; more would only wait for room in the launch queue

    def sample(self, call: Callable[[], object], iterations: int) -> list[float]:
        samples: list[float] = []
        while len(samples) < iterations:
            count = min(self.in_flight, iterations - len(samples))
            pairs = list(zip(self._timing_events(count), self._timing_events(count), strict=True))
            with without_collector():
                for begin, end in pairs:
                    self._flush()
                    begin.record()
                    call()
                    end.record()
                self._synchronize()
            samples += [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]
        return samples


class GraphSampler(_CudaSampler):
    """Replays of a CUDA graph of `n` times (flush, call), less the replay, just before, of a graph of `n` flushes.

    One sample is the difference divided by `n`: the mean of `n` calls without launch gaps. `n` makes a graph last about
    `graph_seconds`. On a stream other than the default one the capture uses that stream; a backward, which autograd
    runs on the stream of its forward, can be captured only if that forward ran on the same stream.
    """

    mode = "cudagraph"
    graph_seconds = 2e-3
    most_calls = 20

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._flush_graphs: dict[int, Any] = {}

    def sample(self, call: Callable[[], object], iterations: int) -> list[float]:
        count = self._calls_per_graph(call)
        if count not in self._flush_graphs:
            self._flush_graphs[count] = self._capture(self._flush, count)
        flushes = self._flush_graphs[count]

        def flush_and_call() -> None:
            self._flush()
            call()

        calls = self._capture(flush_and_call, count)
        samples: list[float] = []
        flushes.replay()
        calls.replay()
        self._synchronize()
        for _ in range(iterations):
            begin, middle, end = self._timing_events(3)
            begin.record()
            flushes.replay()
            middle.record()
            calls.replay()
            end.record()
            self._synchronize()
            samples.append((middle.elapsed_time(end) - begin.elapsed_time(middle)) * 1e-3 / count)
        if min(samples) <= 0:
            raise MeasureError(
                "the call is too short to be told from the L2 flush in a CUDA graph; use `--measure profiler`"
            )
        return samples

    def _calls_per_graph(self, call: Callable[[], object]) -> int:
        begin, end = self._timing_events(2)
        begin.record()
        call()
        end.record()
        self._synchronize()
        seconds = max(begin.elapsed_time(end) * 1e-3, 1e-9)
        return min(max(int(self.graph_seconds / seconds), 1), self.most_calls)

    def _capture(self, body: Callable[[], object], count: int) -> Any:
        torch = self._torch
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(count):
                    body()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise MeasureError(
                f"the call cannot be captured in a CUDA graph ({first}); use `--measure profiler` or `events`"
            ) from error
        return graph


class ProfilerSampler(_CudaSampler):
    """GPU time of the kernels, memory copies and memory fills that each call launched, from Kineto (CUPTI).

    A sample is the *sum* of their durations: gaps between them do not count, and kernels that run at the same time on
    several streams all count in full. That favours calls of many kernels, so the span from the start of the first to
    the end of the last is kept beside it (`last_spans`). Only CUDA activity is recorded; recording CPU activity, too,
    slows launches down and makes a session an order of magnitude longer.

    Each iteration is: flush, synchronise, call, synchronise. `attribute` tells from the trace which activity belongs to
    which call, without knowing the name of the flush kernel.
    """

    mode = "profiler"

    def sample(self, call: Callable[[], object], iterations: int) -> list[float]:
        activities, stamps = self.trace(call, iterations)
        by_call = attribute(activities, iterations, stamps)
        self.kernels_per_call = sum(map(len, by_call)) / iterations
        self.last_spans = [(max(a.end for a in own) - min(a.start for a in own)) * 1e-9 for own in by_call]
        return [sum(activity.duration for activity in own) * 1e-9 for own in by_call]

    def trace(self, call: Callable[[], object], iterations: int) -> tuple[list[Activity], list[int]]:
        """The activities of a block of calls, and the host's clock at the middle of each synchronisation in it."""
        from torch.profiler import ProfilerActivity, profile

        stamps: list[int] = []

        def synchronize() -> None:
            before = time.time_ns()
            self._synchronize()
            stamps.append((before + time.time_ns()) // 2)

        self._synchronize()  # whatever is still running belongs to no iteration
        with profile(activities=[ProfilerActivity.CUDA]) as session, without_collector():
            for _ in range(iterations):
                self._flush()
                synchronize()
                call()
                synchronize()
        return activities_of(session), stamps


# From a trace to calls -----------------------------------------------------------------------------------------------

SYNCHRONIZE = "cudaDeviceSynchronize"
# Kineto puts these on a GPU's timeline, too, but they are no work.
_NOT_WORK = frozenset({"gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range", "overhead"})


@dataclass(frozen=True)
class Activity:
    """One entry of a CUPTI trace: work on the GPU, or a call of the CUDA runtime or driver on the host.

    `start` is in ns since the epoch and `duration` in ns; host and GPU entries share a clock, up to some microseconds.
    A launch and the work that it launched have the same `correlation` (0: none known).
    """

    name: str
    on_gpu: bool
    start: int
    duration: int
    correlation: int

    @property
    def end(self) -> int:
        return self.start + self.duration


def attribute(activities: Sequence[Activity], iterations: int, stamps: Sequence[int]) -> list[list[Activity]]:
    """The GPU activities that each of `iterations` calls launched.

    The trace is cut in time at the end of every `cudaDeviceSynchronize`. No work crosses a cut, since the device is
    idle there, so the pieces that launched any work must be flush, call, flush, call, ... Work belongs to the piece in
    which it was launched, by whichever thread: its correlation id leads to the launch. (Kineto leaves some driver calls
    out of its trace; work launched by one of those is placed by its own start.)

    The pieces are right only if there are two for each iteration and all flushes are the same single activity. If they
    are not - a call that synchronises the device itself makes more of them - the trace is cut at `stamps` instead,
    the host's own record of the synchronisations between flushes and calls, in ns since the epoch.

    Raises `MeasureError` if neither works.
    """
    ends = [a.end for a in activities if not a.on_gpu and a.name.startswith(SYNCHRONIZE)]
    found = []
    for cuts in (ends, stamps):
        pieces = _cut(activities, sorted(cuts))
        if _alternate(pieces, iterations):
            return pieces[1::2]
        found.append(len(pieces))
    if not any(activity.on_gpu for activity in activities):
        raise MeasureError(
            "the profiler recorded no GPU activity, not even the L2 flush; is another profiler attached to this "
            "process? `--measure events` needs none"
        )
    raise MeasureError(
        f"the profiler's trace cannot be divided into {iterations} calls: {2 * iterations} pieces with GPU work were "
        f"expected, {found[0]} found (by host time {found[1]}). Does the call launch GPU work every time? "
        "If so, use `--measure events`"
    )


def _cut(activities: Iterable[Activity], cuts: Sequence[int]) -> list[list[Activity]]:
    """The GPU activities between one cut and the next, without the pieces that have none."""
    launched_at = {a.correlation: a.start for a in activities if not a.on_gpu and a.correlation}
    pieces: list[list[Activity]] = [[] for _ in range(len(cuts) + 1)]
    for activity in activities:
        if activity.on_gpu:
            moment = launched_at.get(activity.correlation, activity.start)
            pieces[bisect_left(cuts, moment)].append(activity)
    return [piece for piece in pieces if piece]


def _alternate(pieces: Sequence[Sequence[Activity]], iterations: int) -> bool:
    flushes = pieces[0::2]
    return (
        len(pieces) == 2 * iterations
        and all(len(piece) == 1 for piece in flushes)
        and len({piece[0].name for piece in flushes}) == 1
    )


def activities_of(session: Any) -> list[Activity]:
    """The entries of a finished `torch.profiler` session, straight from Kineto: nothing is built or averaged."""
    activities = []
    for event in session.profiler.kineto_results.events():
        on_gpu = event.device_type().name == "CUDA"
        kind = event.activity_type() if hasattr(event, "activity_type") else ""
        if on_gpu and (event.is_user_annotation() or kind in _NOT_WORK):
            continue
        activities.append(Activity(event.name(), on_gpu, event.start_ns(), event.duration_ns(), event.correlation_id()))
    return activities
