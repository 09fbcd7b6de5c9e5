"""The process that visits one shape: builds inputs and oracle, checks every provider, then times those that are right.

It reads a job (one JSON object) from standard input and writes events (one JSON object a line) to the file descriptor
named on its command line; standard output and error stay free for whatever providers print. Events:

    {"event": "phase", "case": <key or null>, "phase": "inputs" | "oracle" | "prepare" | "check" | "warmup" | "measure"}
    {"event": "record", "record": {...}}
    {"event": "done"}

A phase is announced before it begins, so whoever reads the events knows what a worker that dies or hangs was doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from jfabench.operator import Call, Expected, Operator, case_facts, load_operator, load_providers
from jfabench.policy import MeasurePolicy
from jfabench.ranges import nvtx_range
from jfabench.records import DIRECTIONS, Case, Direction, Measurement, Record, Status, TensorCheck

EXIT_START_AFRESH = 75
"""The exit code of a worker that has recorded the case that spoilt it; a fresh one may go on with the rest."""


@dataclass(frozen=True)
class Job:
    """Cases of one shape, to be measured on one device (`"cpu"`, `"cuda"` or `"cuda:N"`)."""

    cases: tuple[Case, ...]
    device: str
    policy: MeasurePolicy
    spawned: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "cases": [case.to_json() for case in self.cases],
            "device": self.device,
            "policy": self.policy.model_dump(),
            "spawned": self.spawned,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        cases = tuple(Case.from_json(case) for case in data["cases"])
        return cls(cases, data["device"], MeasurePolicy.model_validate(data["policy"]), data["spawned"])


@dataclass
class Emitter:
    """Writes events, and keeps account of the seconds spent in each phase, by case (None: for all of them)."""

    stream: TextIO
    since: float = field(default_factory=time.time)
    present: tuple[str, Case | None] = ("start", None)
    spent: dict[tuple[str, Case | None], float] = field(default_factory=dict)

    def phase(self, case: Case | None, phase: str) -> None:
        self._account((phase, case))
        self._write({"event": "phase", "case": case.key if case else None, "phase": phase})

    def record(self, record: Record) -> None:
        self._write({"event": "record", "record": record.to_json()})

    def done(self) -> None:
        self._write({"event": "done"})

    def _account(self, following: tuple[str, Case | None]) -> None:
        now = time.time()
        self.spent[self.present] = self.spent.get(self.present, 0.0) + now - self.since
        self.present, self.since = following, now

    def overhead(self, case: Case, cases: int) -> float:
        """Seconds so far that were neither warm-up nor measured calls: the case's own, and its share of the common."""
        self._account(self.present)
        own = sum(s for (phase, who), s in self.spent.items() if who == case and phase not in ("warmup", "measure"))
        common = sum(s for (_, who), s in self.spent.items() if who is None)
        return own + common / cases

    def phases(self) -> str:
        """The seconds of each phase, over all cases, for the log."""
        self._account(self.present)
        total: dict[str, float] = {}
        for (phase, _), seconds in self.spent.items():
            total[phase] = total.get(phase, 0.0) + seconds
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in total.items())

    def _write(self, event: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(event) + "\n")
        self.stream.flush()


class StartAfreshError(RuntimeError):
    """This process can measure nothing more: the device answers only errors, or a provider changed the inputs."""


def run_job(job: Job, emit: Emitter) -> None:
    """Emits one record for each case of the job, in an order that keeps what is known as soon as it is known."""
    kind = job.device.split(":")[0]
    emit.since = job.spawned or emit.since
    _select_device(job.device)
    operator = load_operator(job.cases[0].operator)
    params = operator.parse(job.cases[0].params)
    blank = _blank_records(job, operator)

    def finish(case: Case, status: Status, reason: str = "", **values: Any) -> None:
        overhead = emit.overhead(case, len(job.cases))
        emit.record(
            replace(blank[case], status=status, reason=reason, when=_now(), overhead_seconds=overhead, **values)
        )

    providers = load_providers(operator.name).by_name
    possible: list[Case] = []
    for case in job.cases:
        provider = providers[case.provider]
        try:
            if missing := provider.unavailable(kind):
                finish(case, "unavailable", str(missing))
            elif reason := provider.unsupported(params, case.direction):
                finish(case, "unsupported", reason)
            else:
                possible.append(case)
        except Exception as error:
            finish(case, *describe_failure(error))
    if not possible:
        return

    try:
        emit.phase(None, "inputs")
        with nvtx_range("inputs"):
            inputs = operator.make_inputs(params, job.cases[0].seed, kind)
            untouched = operator.fingerprint(inputs)
        emit.phase(None, "oracle")
        directions = [d for d in DIRECTIONS if any(case.direction == d for case in possible)]
        with nvtx_range("oracle"):
            expected = operator.oracle(inputs, directions)
    except Exception as error:
        status, reason = describe_failure(error)
        for case in possible:
            finish(case, status, f"before any provider ran: {reason}")
        return

    ready: dict[Case, Call] = {}
    settings = _torch_settings()
    for case in possible:
        try:
            emit.phase(case, "prepare")
            with nvtx_range(f"prepare/{case.provider}/{case.direction}"):
                call = providers[case.provider].prepare(inputs, case.direction)
            if not isinstance(call, Call):
                raise TypeError(f"prepare() must return a jfabench.operator.Call, not {type(call).__name__}")
            emit.phase(case, "check")
            with nvtx_range(f"check/{case.provider}/{case.direction}"):
                checks, doubts = _check(operator, call, params, expected, case.direction, kind)
        except Exception as error:
            status, reason = describe_failure(error)
            finish(case, status, reason)
            del error
            _restore_torch_settings(settings)
            _free()
            _require_device(kind)
            continue
        blank[case] = replace(blank[case], checks=checks)
        if left_changed := _restore_torch_settings(settings):
            doubts = [*doubts, f"it leaves torch's {left_changed} changed for everybody else"]
        changed = _changed(untouched, operator.fingerprint(inputs))
        wrong = [f"{check.tensor}: {check.detail or _distance(check)}" for check in checks if not check.passed]
        if changed:
            finish(case, "wrong", f"it writes to its inputs ({changed})")
            raise StartAfreshError(f"{case.provider} changed the inputs")
        if wrong or doubts or not checks:
            finish(case, "wrong", "; ".join([*wrong, *doubts]) or "it returned no tensor that the operator knows")
        else:
            ready[case] = call
    del expected
    _free()

    for direction in directions:
        calls = {case: ready.pop(case) for case in list(ready) if case.direction == direction}
        _measure(calls, job, kind, emit, finish, lambda: _changed(untouched, operator.fingerprint(inputs)))
        _require_device(kind)


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    return ", ".join(name for name in before if before[name] != after[name])


def _measure(
    calls: dict[Case, Call], job: Job, kind: str, emit: Emitter, finish: Any, changed: Callable[[], str]
) -> None:
    from jfabench import env
    from jfabench.measure import make_sampler, measure_interleaved

    if not calls:
        return
    by_key = {case.key: case for case in calls}
    before = env.clocks(kind)
    emit.phase(None, "measure")
    sampler = make_sampler(job.policy.mode_on(kind), kind)
    with nvtx_range("measure"):
        outcomes = measure_interleaved(
            {case.key: _in_range(case, call) for case, call in calls.items()},
            sampler,
            job.policy,
            on_phase=lambda key, phase: emit.phase(by_key[key], phase),
        )
    emit.phase(None, "finish")
    after = env.clocks(kind)
    clocks = {"before": before, "after": after, "throttled": env.throttled(before, after)}
    spoilt = "" if any(isinstance(outcome, Exception) for outcome in outcomes.values()) else changed()
    for key, outcome in outcomes.items():
        if spoilt:
            finish(by_key[key], "failed", f"an input ({spoilt}) was changed while it was timed beside others")
        elif isinstance(outcome, Measurement):
            finish(by_key[key], "ok", measurement=outcome, clocks=clocks)
        else:
            status, reason = describe_failure(outcome)
            finish(by_key[key], status, f"while it was timed: {reason}", clocks=clocks)


def _in_range(case: Case, call: Call) -> Any:
    """The timed call inside its NVTX range, so that a profiler attached to the worker can filter by case."""
    name = f"{case.provider}/{case.direction}"

    def run() -> Any:
        with nvtx_range(name):
            return call.run()

    return run


def _check(
    operator: Operator, call: Call, params: Any, expected: Expected, direction: Direction, kind: str
) -> tuple[tuple[TensorCheck, ...], list[str]]:
    """Calls twice and compares the second results with the oracle's.

    What is timed is never the first call: that one may compile and tune, and it is left undisturbed. Its results are
    then overwritten and fresh memory is poisoned, so that neither a result kept from it nor an unwritten row passes.
    Returns the comparisons, and what else is wrong.
    """
    from jfabench.check import poisoned_allocations

    first = call.results(call.run())
    if not isinstance(first, Mapping):
        raise TypeError(f"results() must return a mapping of names to tensors, not {type(first).__name__}")
    first = dict(first)
    _synchronize(kind)  # an asynchronous fault surfaces here, at the case that caused it
    promised = getattr(params, "deterministic", False)
    kept = {name: tensor.clone() for name, tensor in first.items()} if promised else {}
    for tensor in first.values():
        tensor.detach().fill_(float("nan"))
    with poisoned_allocations(like=tuple(expected.tensors.values())):
        raw = call.run()
        _synchronize(kind)
    results = call.results(raw)
    differ = [name for name, tensor in kept.items() if not _same_bits(tensor, results[name])]
    doubts = [f"{', '.join(differ)}: not the same bits in two calls, though deterministic"] if differ else []
    return operator.check(results, expected, direction), doubts


def _same_bits(a: Any, b: Any) -> bool:
    import torch

    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _blank_records(job: Job, operator: Operator) -> dict[Case, Record]:
    from jfabench import env

    machine = env.environment(job.device.split(":")[0])
    blank: dict[Case, Record] = {}
    for case in job.cases:
        work, facts = case_facts(operator, case)
        blank[case] = Record(case, "failed", _now(), env=machine, inputs=facts, work=work)
    return blank


def describe_failure(error: BaseException) -> tuple[Status, str]:
    """Classifies an exception of a provider, and says in one line what it was and where it came from."""
    # Whatever a provider says must fit into UTF-8 files and on terminals.
    printable = "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in str(error))
    text = " ".join(printable.split()) or "no message"
    name = type(error).__name__
    out_of_memory = (
        isinstance(error, MemoryError)
        or name == "OutOfMemoryError"
        or "out of memory" in text.lower()
        or "can't allocate memory" in text
    )
    frame = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
    where = f" (at {Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    limit = 600
    shown = text if len(text) <= limit else f"{text[:limit]}…"
    return ("oom" if out_of_memory else "failed"), f"{name}: {shown}{where}"


def _torch_settings() -> dict[str, Any]:
    """What every provider of the process shares, and may change only while it runs."""
    import torch

    return {
        "number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def _restore_torch_settings(settings: Mapping[str, Any]) -> str:
    """Puts the settings back, and returns the names of those that differed."""
    import torch

    present = _torch_settings()
    changed = [name for name, value in settings.items() if present[name] != value]
    if changed:
        torch.set_num_threads(settings["number of threads"])
        torch.set_grad_enabled(settings["grad mode"])
        torch.set_default_dtype(settings["default dtype"])
        torch.use_deterministic_algorithms(settings["deterministic mode"])
        torch.set_float32_matmul_precision(settings["float32 matmul precision"])
    return ", ".join(changed)


def _distance(check: Any) -> str:
    return f"max |error| {check.max_abs:.3g} exceeds {check.limit:.3g}, relative norm {check.rel_norm:.3g}"


def _select_device(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(int(device.partition(":")[2] or 0))


@contextlib.contextmanager
def _stream_of(job: Job) -> Iterator[None]:
    """A side stream where graphs are to be captured: a backward can be, only on the stream of its forward.

    The default stream cannot be captured, and autograd runs a backward on the stream that its forward ran on.
    """
    if job.device == "cpu" or job.policy.mode_on("cuda") != "cudagraph":
        yield
        return
    import torch

    _select_device(job.device)
    side: Any = torch.cuda.Stream  # torch leaves it untyped
    with torch.cuda.stream(side()):
        yield


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        import torch

        torch.cuda.synchronize()


def _require_device(kind: str) -> None:
    """Raises `StartAfreshError` when an earlier fault left the CUDA context unusable, as an illegal address does."""
    try:
        _synchronize(kind)
    except Exception as error:
        raise StartAfreshError(str(error)) from None


def _free() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _die_with_parent() -> None:
    """A killed sweep must not leave a worker behind that goes on using the GPU (Linux: PR_SET_PDEATHSIG is 1)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(kind: str) -> None:
    """On a CPU an allocation beyond the machine's memory must raise, not wake the kernel's out-of-memory killer."""
    if kind == "cpu":
        import resource

        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resource.setrlimit(resource.RLIMIT_DATA, (physical, physical))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _events(descriptor: int) -> Iterator[Emitter]:
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        yield Emitter(stream)


def main(argv: Sequence[str]) -> int:
    _die_with_parent()
    # The slow imports first: a worker that is started ahead of its job waits for it with these done.
    import jfabench.check
    import jfabench.measure  # noqa: F401

    job = Job.from_json(json.load(sys.stdin))
    _limit_memory(job.device.split(":")[0])
    with _events(int(argv[0])) as emit:
        try:
            with _stream_of(job):
                run_job(job, emit)
        except StartAfreshError as error:
            print(f"a fresh worker is needed: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_START_AFRESH)
        emit.done()
        print(f"{len(job.cases)} cases of {job.cases[0].operator}: {emit.phases()}")
        sys.stdout.flush()
        sys.stderr.flush()
        emit.stream.flush()
        # Interpreter shutdown unloads CUDA modules one by one, seconds that belong to no case.
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
