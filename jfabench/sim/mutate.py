"""How strong is a test? Puts small faults into a kernel, one at a time, and counts those that its simulation reports.

    report = mutate(test, kernel, arch="sm_90")
    print(report)            # scores by kind of fault, and the survivors with their lines
    report.score("phase")    # (caught, executed)

``test`` calls host code that launches the kernel, and raises an :class:`AssertionError`, or returns False, if the
results are wrong. Of a function that is used in several places, such as a wait of a ring of buffers, every use is a
fault of its own: a fault is one instruction of the kernel with all calls inlined, as the compiler has it. Which uses
there are is seen by running the unchanged kernel. A fault that is caught everywhere at once would say little: the
obvious uses would hide those that no test covers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from . import host, launching, places
from .cta import AbandonedError
from .launching import checked
from .machine import Machine
from .mutations import KINDS, Calls, Mutation, functions, inject, mutations, observe
from .operators import truth
from .report import Finding, Run
from .runtime import machine
from .scheduler import POLICIES, Policy
from .targets import TargetError, defined, told

SLACK = 4  # a mutant may take so many times the steps of the unchanged kernel
MORE_STEPS = 5_000  # and these

Schedule = tuple[int, Policy]


class BaselineError(AssertionError):
    """The unchanged kernel fails, so that nothing can be learnt from its mutants."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation.

    ``verdict`` is "caught"; "survived"; "redundant", if it was not caught because the wait that it changes told its
    task nothing new in any run of the unchanged kernel; or "not executed".
    """

    mutation: Mutation
    verdict: str
    by: str = ""  # kind of the finding that caught it; see :data:`.report.KINDS`; "error": an exception
    message: str = ""
    seed: int = 0
    policy: str = ""
    note: str = ""
    seconds: float = 0.0


@dataclass
class MutationReport:
    kernel: str
    arch: str
    schedules: list[Schedule]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def executed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict != "not executed"]

    @property
    def caught(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "caught"]

    @property
    def survivors(self) -> list[Outcome]:
        """Those that are redundant included."""
        return [outcome for outcome in self.outcomes if outcome.verdict in ("survived", "redundant")]

    def score(self, *kinds: str) -> tuple[int, int]:
        """How many mutations of these kinds (or of all) were caught, of how many that were executed."""
        wanted = [outcome for outcome in self.executed if not kinds or outcome.mutation.kind in kinds]
        return sum(outcome.verdict == "caught" for outcome in wanted), len(wanted)

    def scores(self) -> dict[str, tuple[int, int]]:
        """:meth:`score` of every kind that was executed."""
        present = {outcome.mutation.kind for outcome in self.executed}
        return {kind: self.score(kind) for kind in KINDS if kind in present}

    def __str__(self) -> str:
        caught, executed = self.score()
        share = f" ({caught / executed:.0%})" if executed else ""
        lines = [
            f"{self.kernel} (simulated {self.arch}): {caught} of {executed} mutations caught{share}, each under up to "
            f"{len(self.schedules)} schedules",
            *map(self._line, self.scores()),
        ]
        if self.survivors:
            lines += ["not caught:", *(f"  {o.mutation}\n      {o.note or 'survived'}" for o in self.survivors)]
        idle = Counter(outcome.mutation.function for outcome in self.outcomes if outcome.verdict == "not executed")
        if idle:
            lines.append("never executed in this case: " + ", ".join(f"{n} in {name}" for name, n in idle.items()))
        return "\n".join(lines)

    def _line(self, kind: str) -> str:
        caught, executed = self.score(kind)
        ours = [outcome for outcome in self.outcomes if outcome.mutation.kind == kind]
        how = Counter(outcome.by or outcome.verdict for outcome in ours if outcome.verdict != "not executed")
        return f"  {kind:16} {caught:3} of {executed:3}   " + ", ".join(f"{n} {name}" for name, n in how.most_common())

    def to_json(self) -> str:
        data: dict[str, Any] = {"kernel": self.kernel, "arch": self.arch, "simulated": True}
        data["schedules"] = [{"seed": seed, "policy": policy} for seed, policy in self.schedules]
        data["scores"] = {kind: {"caught": c, "executed": n} for kind, (c, n) in self.scores().items()}
        data["mutations"] = [_as_json(outcome) for outcome in self.outcomes]
        return json.dumps(data, indent=1)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    mutation = outcome.mutation
    where = {"file": mutation.file, "line": mutation.line, "function": mutation.function, "text": mutation.text}
    calls = [{"file": file, "line": line} for file, line in mutation.calls or ()]
    rest = {name: value for name, value in vars(outcome).items() if name != "mutation"}
    return {"kind": mutation.kind, **where, "calls": calls, **rest}


def mutate(
    run: Callable[[], object],
    kernel: Any,
    *,
    arch: str = "sm_90",
    seeds: int | Iterable[int] = 2,
    policies: Iterable[Policy] = POLICIES,
    kinds: Iterable[str] = KINDS,
    within: Callable[[str], contextlib.AbstractContextManager[object]] | None = None,
    progress: Callable[[Outcome], object] = lambda _outcome: None,
    **options: Any,
) -> MutationReport:
    """Simulate ``run`` with every mutation of ``kernel`` in turn, each under every seed and policy until it is caught.

    ``run`` launches the kernel, and others perhaps, and checks the results. ``options`` go to
    :func:`.host.simulated_gpu`, and ``within`` gives a further context, as for :func:`.host.simulate_calls`.

    Raises:
        BaselineError: ``run`` fails with the unchanged kernel.
        TargetError: ``run`` returns something else than None, True or False, or launches no kernel that has the
            configuration that ``config`` numbers.
        ValueError: a kind is not one of :data:`.mutations.KINDS`.
    """
    found = mutations(kernel, kinds)
    seeds = range(seeds) if isinstance(seeds, int) else list(seeds)
    policies = list(policies)
    report = MutationReport(_name(kernel), arch, [(seed, policy) for seed in seeds for policy in policies])
    trial = functools.partial(_trial, run, arch, within, options)
    uses, most_steps = _observed(kernel, report, trial)
    limit = SLACK * most_steps + MORE_STEPS
    for mutation in found:
        ways = {calls: use for (site, calls), use in uses.items() if site == (mutation.fn, mutation.site)}
        outcomes: Iterable[Outcome] = [Outcome(mutation, "not executed")]
        if ways:
            outcomes = (_judged(mutation.within(calls), use, report, trial, limit) for calls, use in ways.items())
        for outcome in outcomes:
            report.outcomes.append(outcome)
            progress(outcome)
    return report


def _name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(kernel.__name__)


def _judged(mutation: Mutation, use: _Use, report: MutationReport, trial: Callable[..., _Trial], limit: int) -> Outcome:
    if not use.taken:
        return Outcome(mutation, "not executed", note="its predicate is never true")
    began = time.perf_counter()
    undo = inject(mutation, lambda: _calls() == mutation.calls)
    try:
        for seed, policy in report.schedules:
            made = trial(seed, policy, max_steps=limit)
            if made.by:
                seconds = time.perf_counter() - began
                return Outcome(mutation, "caught", made.by, made.message, seed, policy, seconds=seconds)
    finally:
        undo()
    redundant = mutation.kind.endswith(("-wait", "-pending")) and not use.orders
    verdict, note = ("redundant", use.why_redundant()) if redundant else ("survived", "")
    return Outcome(mutation, verdict, note=note, seconds=time.perf_counter() - began)


# Running the unchanged kernel ----------------------------------------------------------------------------------------


@dataclass
class _Use:
    """A call that synchronises, reached by certain lines, in all runs of the unchanged kernel."""

    taken: int = 0  # times that its predicate was true
    orders: bool = False  # the task learnt something by it
    again: bool = False  # its barrier had completed a phase

    def why_redundant(self) -> str:
        if self.again:
            return "redundant in this case: the task knows already of all that it waits for"
        return "redundant in this case: there is nothing yet to wait for whenever it is executed"


Site = tuple[Callable[..., Any], tuple[int, int]]  # function, and place in it
Uses = dict[tuple[Site, Calls], _Use]


def _observed(kernel: Any, report: MutationReport, trial: Callable[..., _Trial]) -> tuple[Uses, int]:
    """Every use of the calls that synchronise, and the most steps that a run took."""
    uses: Uses = {}
    main = functions(kernel)[0]
    with contextlib.ExitStack() as stack:
        for fn in functions(kernel):
            stack.callback(observe(fn, functools.partial(_note_use, uses, main, fn)))
        runs = [(trial(seed, policy), seed, policy) for seed, policy in report.schedules]
    for run, seed, policy in runs:
        if run.by:
            raise BaselineError(f"the unchanged kernel fails, seed={seed}, policy={policy!r}: {run.by}: {run.message}")
    return uses, max(run.steps for run, _, _ in runs)


def _note_use(
    uses: Uses,
    main: Callable[..., Any],
    fn: Callable[..., Any],
    site: tuple[int, int],
    predicate: Any,
    barrier: Any,
    call: Callable[[], Any],
) -> Any:
    calls = _calls()
    if not _is_within(main, fn, calls):  # another kernel calls the same function
        return call()
    use = uses.setdefault(((fn, site), calls), _Use())
    if not truth(predicate):
        return call()
    use.taken += 1
    task = machine().scheduler.current
    before = task.clock.copy()
    result = call()
    after = task.clock.rows.copy()
    after[:, task.lane.index] = 0
    known = np.zeros_like(after)
    known[:, : before.rows.shape[1]] = before.rows[:, : after.shape[1]]
    use.orders = use.orders or bool((after > known).any())
    use.again = use.again or (barrier is not None and task.cta.barrier(barrier.handle).completed > 0)
    return result


def _is_within(main: Callable[..., Any], fn: Callable[..., Any], calls: Calls) -> bool:
    if fn is main:
        return True
    lines, first = inspect.getsourcelines(main)
    return bool(calls) and calls[-1][0] == main.__code__.co_filename and 0 <= calls[-1][1] - first < len(lines)


def _calls() -> Calls:
    """The lines of the kernel that lead to the function that calls this, innermost first."""
    frame: Any = sys._getframe(1)
    lines: list[tuple[str, int]] = []
    while frame is not None:
        code = frame.f_code
        if id(code) in places._kernel_code and code.co_name != "<lambda>":
            lines.append((code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines[1:])


# One run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trial:
    by: str  # kind of what was found; "" if nothing
    message: str
    steps: int


class _FoundError(Exception):
    """Ends the host code of a launch that found something."""


def _trial(
    run: Callable[[], object],
    arch: str,
    within: Callable[[str], contextlib.AbstractContextManager[object]] | None,
    options: dict[str, Any],
    seed: int,
    policy: Policy,
    max_steps: int | None = None,
) -> _Trial:
    """``run`` under one schedule, up to the first thing that is found or goes wrong."""
    found: list[Finding] = []
    launches: list[Run] = []
    if max_steps is not None:
        options = {**options, "max_steps": max_steps}
    with host.simulated_gpu(arch, seed, policy, **options) as simulation, _stopping_early(found):
        launches = simulation.runs
        try:
            with within(arch) if within else contextlib.nullcontext():
                found += checked(run, Run("", seed, policy))
            if not found:
                host.require_configuration(simulation, defined(run), options.get("config", 0))
        except _FoundError:
            pass
        except (TargetError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a mutant may fail in any way: in the front end, or in the simulator
            return _Trial("error", told(error), 0)
    if found:
        return _Trial(found[0].kind, found[0].message, 0)
    return _Trial("", "", max((launch.steps for launch in launches), default=0))


@contextlib.contextmanager
def _stopping_early(found: list[Finding]) -> Iterator[None]:
    """A launch ends at the first finding, which goes to ``found``, and so does the host code that made it."""
    find, launch = Machine.find, launching.launch

    def find_and_stop(self: Machine, kind: str, *args: Any) -> None:
        find(self, kind, *args)
        if kind not in ("deadlock", "endless"):  # which have ended it
            raise AbandonedError

    def launch_and_stop(*args: Any, **kwargs: Any) -> Run:
        run = launch(*args, **kwargs)
        if run.findings:
            found.extend(run.findings)
            raise _FoundError
        return run

    with mock.patch.object(Machine, "find", find_and_stop), mock.patch.object(host, "launch", launch_and_stop):
        yield
