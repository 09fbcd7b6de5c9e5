"""One visit to a shape: builds inputs and oracle, checks every provider, then times those that are right.

This is what a worker process does with a job. It reports through a `Reporter` as it goes, so that what is known is
kept if the process dies.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jfabench.operator import Call, Expected, Operator, Provider, case_facts, load_operator, load_providers
from jfabench.policy import MeasurePolicy
from jfabench.ranges import nvtx_range
from jfabench.records import DIRECTIONS, Case, Direction, Measurement, Record, Status, TensorCheck


@dataclass(frozen=True)
class Job:
    """Cases of one shape, to be measured on one device (`"cpu"`, `"cuda"` or `"cuda:N"`)."""

    cases: tuple[Case, ...]
    device: str
    policy: MeasurePolicy

    def to_json(self) -> dict[str, Any]:
        # A worker of an older revision refuses fields that it does not know, unless they are left out.
        newer = {"warm_up"} if self.policy.warm_up else set()
        return {
            "cases": [case.to_json() for case in self.cases],
            "device": self.device,
            "policy": self.policy.model_dump(exclude=newer),
            "asked": 0.0,  # workers of older revisions read it, and ignore 0
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        cases = tuple(Case.from_json(case) for case in data["cases"])
        return cls(cases, data["device"], MeasurePolicy.model_validate(data["policy"]))


@dataclass(frozen=True)
class Preparation:
    """What a worker can do before it has a job: import the libraries of these providers, for this device."""

    operator: str
    providers: tuple[str, ...]
    device: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Preparation:
        return cls(data["operator"], tuple(data["providers"]), data["device"])


class Reporter(Protocol):
    """Where a visit tells what it is about to do, and what came of a case."""

    def phase(self, case: Case | None, phase: str) -> None: ...

    def record(self, record: Record) -> None: ...


class StartAfreshError(RuntimeError):
    """This process can measure nothing more: the device answers only errors, or a provider changed the inputs."""


def run_job(job: Job, report: Reporter, unimportable: Mapping[str, str] | None = None) -> None:
    """Reports one record for each case of the job, as soon as it is known.

    `unimportable` are providers whose library could not be imported, and why: their cases are unavailable.
    Leaves the process as it was for the next job, as far as that is possible: no tensors, no memory held, torch's
    settings put back. Raises `StartAfreshError` after the record of the case that made it necessary; the cases without
    a record need another process.
    """
    report.phase(None, "set-up")
    with _stream_of(job):
        _Visit(job, report, unimportable or {}).run()
    _free()


@dataclass
class _Visit:
    job: Job
    report: Reporter
    unimportable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from jfabench import env

        _select_device(self.job.device)
        self.kind = self.job.device.split(":")[0]
        first = self.job.cases[0]
        self.operator: Operator = load_operator(first.operator)
        self.params = self.operator.parse(first.params)
        self.providers: Mapping[str, Provider] = load_providers(self.operator.name).by_name
        machine = env.environment(self.kind)
        self.blank: dict[Case, Record] = {}
        for case in self.job.cases:
            work, facts = case_facts(self.operator, case)
            self.blank[case] = Record(case, "failed", _now(), env=machine, inputs=facts, work=work)

    def run(self) -> None:
        possible = [case for case in self.job.cases if self._is_possible(case)]
        if not possible:
            return
        directions = [d for d in DIRECTIONS if any(case.direction == d for case in possible)]
        try:
            self._build(directions)
        except Exception as error:
            status, reason = describe_failure(error)
            for case in possible:
                self._finish(case, status, f"before any provider ran: {reason}")
            return
        settings = torch_settings()
        ready = {case: call for case in possible if (call := self._right_call(case, settings)) is not None}
        del self.expected
        _free()
        for direction in directions:
            self._measure({case: ready.pop(case) for case in list(ready) if case.direction == direction})
            _require_device(self.kind)
        restore_torch_settings(settings)

    def _finish(self, case: Case, status: Status, reason: str = "", **values: Any) -> None:
        self.report.record(replace(self.blank[case], status=status, reason=reason, when=_now(), **values))

    def _is_possible(self, case: Case) -> bool:
        provider = self.providers[case.provider]
        try:
            if missing := provider.unavailable(self.kind):
                self._finish(case, "unavailable", str(missing))
            elif why := self.unimportable.get(case.provider):
                self._finish(case, "unavailable", f"its library cannot be imported ({why}): reinstall it")
            elif reason := provider.unsupported(self.params, case.direction):
                self._finish(case, "unsupported", reason)
            else:
                return True
        except Exception as error:
            self._finish(case, *describe_failure(error))
        return False

    def _build(self, directions: Sequence[Direction]) -> None:
        """Makes `inputs`, their fingerprint `untouched`, and the right answers `expected`."""
        self.report.phase(None, "inputs")
        with nvtx_range("inputs"):
            self.inputs = self.operator.make_inputs(self.params, self.job.cases[0].seed, self.kind)
            self.untouched = self.operator.fingerprint(self.inputs)
        self.report.phase(None, "oracle")
        with nvtx_range("oracle"):
            self.expected: Expected = self.operator.oracle(self.inputs, directions)

    def _changed_inputs(self) -> str:
        """The names of the inputs that are not what they were, empty if all are."""
        now = self.operator.fingerprint(self.inputs)
        return ", ".join(name for name, was in self.untouched.items() if now[name] != was)

    def _right_call(self, case: Case, settings: Mapping[str, Any]) -> Call | None:
        """The call of a case whose results are right; otherwise the case is finished, and None."""
        try:
            self.report.phase(case, "prepare")
            with nvtx_range(f"prepare/{case.provider}/{case.direction}"):
                call = self.providers[case.provider].prepare(self.inputs, case.direction)
            if not isinstance(call, Call):
                raise TypeError(f"prepare() must return a jfabench.operator.Call, not {type(call).__name__}")
            self.report.phase(case, "first call")
            with nvtx_range(f"first_call/{case.provider}/{case.direction}"):
                kept = self._first_call(call)
            self.report.phase(case, "check")
            with nvtx_range(f"check/{case.provider}/{case.direction}"):
                checks, doubts = self._check(call, case.direction, kept)
        except Exception as error:
            self._finish(case, *describe_failure(error))
            del error
            restore_torch_settings(settings)
            _free()
            _require_device(self.kind)
            return None
        self.blank[case] = replace(self.blank[case], checks=checks)
        if left := restore_torch_settings(settings):
            doubts = [*doubts, f"it leaves torch's {left} changed for everybody else"]
        if changed := self._changed_inputs():
            self._finish(case, "wrong", f"it writes to its inputs ({changed})")
            raise StartAfreshError(f"{case.provider} changed the inputs")
        wrong = [f"{check.tensor}: {check.detail or _distance(check)}" for check in checks if not check.passed]
        if wrong or doubts or not checks:
            reason = "; ".join([*wrong, *doubts]) or "it returned no tensor that the operator knows"
            self._finish(case, "wrong", reason)
            return None
        return call

    def _first_call(self, call: Call) -> dict[str, Any]:
        """The call that may load, compile and tune: it is left undisturbed, and neither checked nor timed.

        Its results are overwritten, so that no later call can pass by returning them. What it returned is returned
        where equal bits are promised.
        """
        first = call.results(call.run())
        if not isinstance(first, Mapping):
            raise TypeError(f"results() must return a mapping of names to tensors, not {type(first).__name__}")
        first = dict(first)
        _synchronize(self.kind)  # an asynchronous fault surfaces here, at the case that caused it
        promised = getattr(self.params, "deterministic", False)
        kept = {name: tensor.clone() for name, tensor in first.items()} if promised else {}
        for tensor in first.values():
            tensor.detach().fill_(float("nan"))
        return kept

    def _check(
        self, call: Call, direction: Direction, kept: Mapping[str, Any]
    ) -> tuple[tuple[TensorCheck, ...], list[str]]:
        """Calls once more, into poisoned memory so that an unwritten row shows, and compares with the oracle.

        Returns the comparisons, and what else is wrong; `kept` are the results that must be repeated to the bit.
        """
        from jfabench.check import poisoned_allocations

        with poisoned_allocations(like=tuple(self.expected.tensors.values())):
            raw = call.run()
            _synchronize(self.kind)
        results = call.results(raw)
        differ = [name for name, tensor in kept.items() if not _same_bits(tensor, results[name])]
        doubts = [f"{', '.join(differ)}: not the same bits in two calls, though deterministic"] if differ else []
        return self.operator.check(results, self.expected, direction), doubts

    def _measure(self, calls: Mapping[Case, Call]) -> None:
        """Times the calls of one direction side by side, and finishes their cases."""
        from jfabench import env
        from jfabench.measure import make_sampler, measure_interleaved

        if not calls:
            return
        by_key = {case.key: case for case in calls}
        before = env.clocks(self.kind)
        self.report.phase(None, "measure")
        sampler = make_sampler(self.job.policy.mode_on(self.kind), self.kind)
        with nvtx_range("measure"):
            outcomes = measure_interleaved(
                {case.key: _in_range(case, call) for case, call in calls.items()},
                sampler,
                self.job.policy,
                on_phase=lambda key, phase: self.report.phase(by_key[key], phase),
            )
        self.report.phase(None, "finish")
        after = env.clocks(self.kind)
        clocks = {"before": before, "after": after, "throttled": env.throttled(before, after)}
        failed = any(isinstance(outcome, Exception) for outcome in outcomes.values())
        spoilt = "" if failed else self._changed_inputs()
        for key, outcome in outcomes.items():
            if spoilt:
                self._finish(by_key[key], "failed", f"an input ({spoilt}) was changed while it was timed beside others")
            elif isinstance(outcome, Measurement):
                self._finish(by_key[key], "ok", measurement=outcome, clocks=clocks)
            else:
                status, reason = describe_failure(outcome)
                self._finish(by_key[key], status, f"while it was timed: {reason}", clocks=clocks)


def _in_range(case: Case, call: Call) -> Any:
    """The timed call inside its NVTX range, so that a profiler attached to the worker can filter by case."""
    name = f"{case.provider}/{case.direction}"

    def run() -> Any:
        with nvtx_range(name):
            return call.run()

    return run


def _same_bits(a: Any, b: Any) -> bool:
    import torch

    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


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


def torch_settings() -> dict[str, Any]:
    """What every provider of the process shares, and may change only while it runs."""
    import torch

    return {
        "number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def restore_torch_settings(settings: Mapping[str, Any]) -> str:
    """Puts the settings back, and returns the names of those that differed."""
    import torch

    present = torch_settings()
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


def bytes_left_behind(kind: str) -> int:
    """Device memory that somebody still holds after a visit; libraries keep some for themselves."""
    if kind == "cpu":
        return 0
    import torch

    return torch.cuda.memory_allocated()


def _free() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
