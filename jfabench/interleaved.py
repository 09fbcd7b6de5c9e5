"""Measures two builds in turns: pairs of worker processes, one of each build, visit every shape one after the other.

The order within a pair alternates from shape to shape and from pair to pair (ABBA), so that a linear drift cancels, and
whatever comes first is a different build each time. Every process is a fresh one and measures each case in one visit:
one block (see `jfabench.regression`). The records of each process are a result folder of their own:

    <root>/a/pair-00/records.jsonl, <root>/b/pair-00/records.jsonl, <root>/a/pair-01/...
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from jfabench.folder import ResultFolder
from jfabench.operator import load_operator
from jfabench.policy import MeasurePolicy
from jfabench.records import Case, Record
from jfabench.run import RecordLog, open_log
from jfabench.trees import Tree
from jfabench.visit import Job
from jfabench.workers import Workers

SIDES = ("a", "b")
WORKER = "jfabench.worker"

BLOCK = {"target": 0.5, "rounds": 1}
"""A block is one round of samples, however precise: more pairs of processes are worth more than longer blocks."""

_PERHAPS_INHERITED = ("failed", "timeout", "oom")
_WARM_UP = MeasurePolicy(
    mode=None, target=0.9, rounds=1, min_iterations=1, max_iterations=1, max_seconds=0.01, warmup_seconds=0
)


@dataclass(frozen=True)
class Plan:
    """`pairs` pairs of processes measure `cases` on `device`; one that says nothing for `timeout` seconds is killed."""

    trees: tuple[Tree, Tree]
    cases: tuple[Case, ...]
    policy: MeasurePolicy
    device: str
    pairs: int
    timeout: float = 300.0


def block_policy(policy: MeasurePolicy, settings: Sequence[str] = ()) -> MeasurePolicy:
    """The policy of a sweep file with what `BLOCK` says, unless `settings` (`measure.target=...`) ask for another."""
    asked = {setting.partition("=")[0] for setting in settings}
    return policy.model_copy(update={key: value for key, value in BLOCK.items() if f"measure.{key}" not in asked})


class Quiet:
    """A listener that does not listen."""

    def phase(self, case: Case | None, phase: str) -> None: ...

    def record(self, record: Record) -> None: ...


def measure(plan: Plan, root: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Measures all pairs and leaves their records below `root`.

    Raises `jfabench.workers.SweepStoppedError` where a folder cannot be used or a worker cannot be ended.
    """
    shapes = [tuple(group) for _, group in itertools.groupby(plan.cases, key=lambda case: case.shape_key)]
    # The tuner would choose anew in each process and each build; what it chooses by chance is no change of a build.
    os.environ.setdefault("JFABENCH_TUNE", "0")
    with ExitStack() as stack:
        # Workers die with whoever started them, and that is a thread: these must last as long as the processes.
        threads = stack.enter_context(ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))))
        pairs = [tuple(_Side(plan, side, root, pair, stack) for side in range(2)) for pair in range(plan.pairs)]
        if plan.device != "cpu":
            say("starting processes")
            _warm_up([side for pair in pairs for side in pair], shapes, threads)
        hopeless: set[tuple[int, Case]] = set()
        for number, pair in enumerate(pairs):
            for place, shape in enumerate(shapes):
                say(f"pair {number + 1} of {plan.pairs}, shape {place + 1} of {len(shapes)}")
                for side in pair if (number + place) % 2 == 0 else pair[::-1]:
                    cases = tuple(case for case in shape if (side.index, case) not in hopeless)
                    for record in side.visit(cases):
                        if record.status != "ok":
                            hopeless.add((side.index, record.case))
            for side in pair:
                side.workers.close()


class _Side:
    """The process of one build in one pair, and the folder of its records."""

    def __init__(self, plan: Plan, index: int, root: Path, pair: int, stack: ExitStack) -> None:
        self.plan, self.index = plan, index
        folder = ResultFolder(root / SIDES[index] / f"pair-{pair:02d}")
        self.log: RecordLog = stack.enter_context(open_log(folder))
        self.log.mend()
        self.workers = Workers(plan.device, folder.root / "worker.log", plan.timeout, plan.trees[index].command(WORKER))
        stack.callback(self.workers.close)

    def visit(self, cases: tuple[Case, ...]) -> Iterator[Record]:
        """Measures the cases of a shape; what failed in a process that had done others before gets a fresh one."""
        if not cases:
            return
        job = Job(cases, self.plan.device, self.plan.policy)
        records = {record.case: record for record in self.workers.run(job, Quiet())}
        doubtful = tuple(case for case in cases if case not in records or records[case].status in _PERHAPS_INHERITED)
        if doubtful and not self.workers.fresh:
            again = self.workers.run(replace(job, cases=doubtful), Quiet())
            records |= {record.case: record for record in again}
        for record in records.values():
            self.log.append(record)
            yield record


def _warm_up(sides: Sequence[_Side], shapes: Sequence[tuple[Case, ...]], threads: ThreadPoolExecutor) -> None:
    """Lets all processes visit the smallest shape at once, for nothing: contexts, libraries and kernels are loaded."""

    def memory(shape: tuple[Case, ...]) -> int:
        operator = load_operator(shape[0].operator)
        return operator.memory(operator.parse(shape[0].params), shape[0].seed)

    smallest = min(shapes, key=memory)

    def visit(side: _Side) -> None:
        for _ in side.workers.run(Job(smallest, side.plan.device, _WARM_UP), Quiet()):
            pass

    list(threads.map(visit, sides))
