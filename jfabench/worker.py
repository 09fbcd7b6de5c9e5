"""The process that visits one shape (see `jfabench.visit`), and what it says to the process that started it.

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
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from jfabench.records import Case, Record
from jfabench.visit import Job, StartAfreshError, run_job

EXIT_START_AFRESH = 75
"""The exit code of a worker that has recorded the case that spoilt it; a fresh one may go on with the rest."""


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
            emit.since = job.spawned or emit.since
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
