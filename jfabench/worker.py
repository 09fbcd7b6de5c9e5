"""The process that visits shapes (see `jfabench.visit`), and what it says to the process that started it.

It reads jobs (one JSON object a line) from standard input and writes events (one JSON object a line) to the file
descriptor named on its command line; standard output and error stay free for whatever providers print. Events:

    {"event": "phase", "case": <key or null>, "phase": <name>}
    {"event": "record", "record": {...}}
    {"event": "done", "again": <whether it is fit for another job>}

Phases are `inputs`, `oracle`, then for each case `prepare`, `first call` (which may load, compile and tune), `check`,
then in turns `warmup` and `measure`, and `finish`; what comes before them is `start`.

A phase is announced before it begins, so whoever reads the events knows what a worker that dies or hangs was doing.
After `done` it waits for the next job, and ends when there is none: what takes seconds once in a process (importing
torch and a provider's library, creating a CUDA context, loading and tuning kernels) then burdens the first job alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO

from jfabench.records import Case, Record
from jfabench.visit import Job, StartAfreshError, bytes_left_behind, run_job

EXIT_START_AFRESH = 75
"""The exit code of a worker that has recorded the case that spoilt it; a fresh one may go on with the rest."""

MOST_LEFT_BEHIND = 2**30
"""Bytes of device memory in use after a job beyond which a worker takes no other; libraries' workspaces take less."""

WORTH_NAMING = 1.0
"""Seconds from which the log names a phase of a single case."""

_MEASURING = ("warmup", "measure")


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

    def done(self, again: bool) -> None:
        self._write({"event": "done", "again": again})

    def _account(self, following: tuple[str, Case | None]) -> None:
        now = time.time()
        self.spent[self.present] = self.spent.get(self.present, 0.0) + now - self.since
        self.present, self.since = following, now

    def overhead(self, case: Case, cases: int) -> float:
        """Seconds so far that were neither warm-up nor measured calls: the case's own, and its share of the common."""
        self._account(self.present)
        own = sum(s for (phase, who), s in self.spent.items() if who == case and phase not in _MEASURING)
        common = sum(s for (_, who), s in self.spent.items() if who is None)
        return own + common / cases

    def phases(self) -> str:
        """The seconds of each phase, over all cases, for the log; then what took long in a single case."""
        self._account(self.present)
        total: dict[str, float] = {}
        for (phase, _), seconds in self.spent.items():
            total[phase] = total.get(phase, 0.0) + seconds
        long = [
            f"{phase} of {who.provider} {who.direction} {seconds:.2f} s"
            for (phase, who), seconds in self.spent.items()
            if who is not None and seconds >= WORTH_NAMING and phase not in _MEASURING
        ]
        text = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in total.items())
        return f"{text} ({', '.join(long)})" if long else text

    def _write(self, event: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(event) + "\n")
        self.stream.flush()


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


def _import_ahead() -> None:
    """The slow imports: a worker that is started ahead of its job waits for it with these done, the GPU untouched.

    torch imports its compiler, a thousand modules, when a dispatch mode is first at work, as one is in every check.
    """
    import torch

    import jfabench.measure  # noqa: F401
    from jfabench.check import poisoned_allocations

    with poisoned_allocations():
        torch.empty(1)


def _jobs() -> Iterator[Job]:
    """The jobs from standard input, which is taken away from everybody else: a provider might read it, too."""
    descriptor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with os.fdopen(descriptor, encoding="utf-8") as lines:
        for line in lines:
            yield Job.from_json(json.loads(line))


def _serve(job: Job, emit: Emitter) -> bool:
    """Does the job; returns whether this process is fit for another one. Does not return if it must end at once."""
    kind = job.device.split(":")[0]
    _limit_memory(kind)
    process = os.getpid()
    emit.since = job.asked or emit.since
    try:
        run_job(job, emit)
    except StartAfreshError as error:
        print(f"a fresh worker is needed: {error}", file=sys.stderr)
        _end(EXIT_START_AFRESH)
    if os.getpid() != process:
        _end(0)  # a provider forked, and this is the child: it has nothing to say
    print(f"{len(job.cases)} cases of {job.cases[0].operator}: {emit.phases()}", flush=True)
    left = bytes_left_behind(kind)
    if left > MOST_LEFT_BEHIND:
        print(f"{left} bytes of device memory are still in use: a fresh worker is needed for the next shape")
    return left <= MOST_LEFT_BEHIND


def _end(code: int) -> NoReturn:
    """Ends at once: interpreter shutdown unloads CUDA modules one by one, seconds that belong to no case."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str]) -> NoReturn:
    _die_with_parent()
    jobs = _jobs()
    _import_ahead()
    with os.fdopen(int(argv[0]), "w", encoding="utf-8") as stream:
        for job in jobs:
            emit = Emitter(stream)
            again = _serve(job, emit)
            emit.done(again)
            if not again:
                break
        _end(0)


if __name__ == "__main__":
    main(sys.argv[1:])
