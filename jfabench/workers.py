"""Worker processes: one at work at a time, and the next ones prepared while it measures.

A worker is prepared when all is done that takes seconds once in a process and is the host's work alone: starting
Python, importing torch, triton and the libraries of the sweep's providers (`jfabench.worker`). A CUDA context is not
created ahead. It would take hundreds of MB from the shape that is measured meanwhile, its creation makes launches of
other processes wait in the driver, and a GPU that two processes use switches between them. The gap between two shapes
is the place for it, where it costs tenths of a second; the previous worker has ended then, and its memory is free.

A sweep has a worker for each shape, unless it shares them, which makes it faster still: then one in which all went well
takes the next shape, too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jfabench.phases import Account
from jfabench.records import NEUTRAL_STATUSES, Case, Record, Status
from jfabench.visit import Job, Preparation
from jfabench.worker import EXIT_START_AFRESH

MOST_AHEAD = 3
"""Workers prepared ahead at most: preparing one takes longer than measuring a shape of one or two cases."""

CORES_PER_WORKER = 4
"""Cores of this machine for each worker that is prepared ahead: the one that measures launches kernels meanwhile."""


class SweepStoppedError(RuntimeError):
    """The sweep cannot go on; the message says why and what to do. What was measured is in the result folder."""


class Listener(Protocol):
    """Told what happens while a sweep runs (the progress bar is one)."""

    def phase(self, case: Case | None, phase: str) -> None: ...

    def record(self, record: Record) -> None: ...


@dataclass
class Visit:
    """What came of one job: which case the worker was at when it ended, and how it ended."""

    done: bool = False
    again: bool = False
    """The worker can take another job, and every case of this one went well."""
    ended: str = ""
    status: Status = "failed"
    current: Case | None = None
    phase: str = "start"
    recorded: set[Case] = field(default_factory=set)


class Workers:
    """Worker processes for one device, one at work at a time."""

    def __init__(
        self,
        device: str,
        log: Path,
        timeout: float,
        command: Sequence[str] = (sys.executable, "-m", "jfabench.worker"),
        *,
        operator: str = "",
        providers: Sequence[str] = (),
        per_shape: bool = False,
    ) -> None:
        """`log` collects what providers print; `timeout` is how many seconds without an event count as a hang.

        The libraries of `providers` of `operator` are imported ahead. A worker in which all went well takes the next
        job, too, unless with `per_shape` each has one of its own. `command` may start a worker of another revision.
        """
        self._device = device
        self._log = log
        self._timeout = timeout
        self._preparation = Preparation(operator, tuple(providers), device)
        self._per_shape = per_shape
        self._command = command
        self._idle: list[_Worker] = []  # the next one is the last: one that has done its jobs well, else the oldest
        self._account = Account()
        self.fresh = True
        """Whether the worker of the latest job had done no other before."""
        self.startup_seconds = 0.0
        """How long the first worker took to be prepared, which is part of no case's time."""

    def start(self, listener: Listener) -> None:
        """Prepares the first worker and waits for it."""
        listener.phase(None, "start")
        while not self._idle:
            worker = self._spawn()
            for event in worker.stream:
                if event is None or worker.note(event):
                    break
            if worker.ready or not worker.importing:
                self._idle.append(worker)
            else:
                self._end(worker, 0.0)
                self._import_no_more(worker.importing)
        self.startup_seconds = self._account.restart()

    def close(self) -> None:
        while self._idle:
            worker = self._idle.pop()
            self._end(worker, 0.0 if worker.fresh else 5.0)

    def run(self, job: Job, listener: Listener, following: int = 0) -> Iterator[Record]:
        """Has a worker do the job and yields its records, then one for the case that it died at, if it died.

        `following` is how many jobs are known to follow: workers are prepared for them.
        """
        self._account.open(job.cases)
        while True:
            listener.phase(None, "start")
            worker = self._take()
            self.fresh = worker.fresh
            self._prepare_ahead(following)
            for record in self._visit(worker, job, listener):
                yield replace(record, worker=worker.process.pid)
            if worker.ready or not worker.importing:
                return
            self._import_no_more(worker.importing)

    def _take(self) -> _Worker:
        """The next one that is alive. If there is none, a new one, whose visit tells if it cannot live."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            os.close(worker.events)
        return self._spawn()

    def _prepare_ahead(self, jobs: int) -> None:
        """Not on a CPU, where it would disturb the measurement of the present worker."""
        if self._device == "cpu":
            return
        cores = len(os.sched_getaffinity(0))
        most = min(MOST_AHEAD, max(1, cores // CORES_PER_WORKER)) if self._per_shape else 1
        for _ in range(sum(worker.fresh for worker in self._idle), min(jobs, most)):
            self._idle.insert(0, self._spawn())

    def _import_no_more(self, provider: str) -> None:
        """Importing its library has ended or blocked a worker: it is left to a case of this provider to do so again."""
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"a worker did not survive importing the library of {provider}: it is not imported ahead again\n")
        left = tuple(name for name in self._preparation.providers if name != provider)
        self._preparation = replace(self._preparation, providers=left)
        self.close()

    def _visit(self, worker: _Worker, job: Job, listener: Listener) -> Iterator[Record]:
        log_start = self._log.stat().st_size if worker.ready else worker.log_start
        visit = Visit()
        cases = {case.key: case for case in job.cases}
        well = True
        code, patience = 0, 0.0  # an interruption or a time-out kills it at once
        try:
            _send(worker.process, job)
            for event in worker.stream:
                if event is None:
                    visit.status = "timeout"
                    visit.ended = f"nothing was heard for {self._timeout:g} s"
                    break
                worker.note(event)
                at = event.get("at", time.monotonic())  # a worker of an older revision does not say
                if event["event"] == "phase":
                    visit.current, visit.phase = cases.get(event["case"]), event["phase"]
                    self._account.enter(visit.phase, visit.current, at)
                    listener.phase(visit.current, visit.phase)
                elif event["event"] == "record":
                    record = Record.from_json(event["record"])
                    if record.case.key in cases and record.case not in visit.recorded:  # a forked child repeats them
                        visit.recorded.add(record.case)
                        well = well and record.status in NEUTRAL_STATUSES
                        yield replace(record, phases=self._account.finish(record.case, at))
                elif event["event"] == "done":
                    visit.done = True
                    fit = event.get("again") is True and well and len(visit.recorded) == len(cases)
                    visit.again = fit and not self._per_shape
                    patience = 30.0
                    break
            else:
                patience = 30.0
        finally:
            if visit.again:
                worker.fresh = False
                self._idle.append(worker)
            else:
                code = self._end(worker, patience)
        if not visit.done and (worker.ready or not worker.importing):
            yield from self._records_of_a_death(job, visit, code, log_start)

    def _end(self, worker: _Worker, patience: float) -> int:
        os.close(worker.events)
        return _end(worker.process, patience)

    def _spawn(self) -> _Worker:
        read_end, write_end = os.pipe()
        try:
            with self._log.open("ab") as output:
                log_start = output.tell()
                process = subprocess.Popen(
                    [*self._command, str(write_end), json.dumps(self._preparation.to_json())],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=[write_end],
                    env=_worker_environment(self._device),
                    start_new_session=True,
                )
        finally:
            os.close(write_end)
        return _Worker(process, read_end, _events(read_end, process, self._timeout), log_start)

    def _records_of_a_death(self, job: Job, visit: Visit, code: int, log_start: int) -> Iterator[Record]:
        if not visit.ended:
            visit.status, visit.ended = _explain_exit(code)
        if code == EXIT_START_AFRESH and visit.recorded:
            return  # it has recorded the case that spoilt it and gave up: the rest gets a fresh worker
        if visit.current is None and not self.fresh:
            return  # no case of this job can be blamed: all get a fresh worker
        blamed = [visit.current] if visit.current else list(job.cases)
        tail = _last_lines(self._log, log_start)
        for case in blamed:
            if case not in visit.recorded:
                phases = self._account.finish(case, time.monotonic())
                reason = f"{visit.ended} during {visit.phase!r}{tail}"
                yield Record(case, visit.status, _now(), reason=reason, phases=phases)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    events: int
    """The file descriptor to read its events from."""
    stream: Iterator[dict[str, Any] | None]
    """Its events, read from there as they come; None when nothing has come for too long."""
    log_start: int
    """Where in the log its output may begin."""
    importing: str = ""
    """The provider whose library it imports, or imported last."""
    ready: bool = False
    """It has imported everything."""
    fresh: bool = True
    """It has done no job yet."""

    def note(self, event: Mapping[str, Any]) -> bool:
        """Notes what the worker says of its preparation; returns whether that has ended."""
        if event["event"] == "import":
            self.importing = str(event["provider"])
        self.ready = self.ready or event["event"] == "ready"
        return self.ready


def _worker_environment(device: str) -> dict[str, str]:
    values = dict(os.environ)
    if device == "cpu":
        # The plain Triton kernel runs under Triton's interpreter, chosen when triton is imported.
        values["TRITON_INTERPRET"] = "1"
        values["CUDA_VISIBLE_DEVICES"] = ""
        # The shapes of the CPU scale are tiny: threads that wait for each other cost more than they compute.
        values.setdefault("OMP_NUM_THREADS", "1")
    if sys.flags.safe_path:
        values["PYTHONSAFEPATH"] = "1"
    return values


def _send(process: subprocess.Popen[bytes], job: Job) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # if it died at once, its exit code tells
        process.stdin.write(json.dumps(job.to_json()).encode() + b"\n")
        process.stdin.flush()


def _events(descriptor: int, process: subprocess.Popen[bytes], timeout: float) -> Iterator[dict[str, Any] | None]:
    """Yields events until the worker ends; None whenever nothing came for `timeout` seconds."""
    buffer = b""
    deadline = time.monotonic() + timeout
    while True:
        # The pipe alone does not tell that the worker is dead: a child that it forked may still hold the other end.
        dead = process.poll() is not None
        readable, _, _ = select.select([descriptor], [], [], 0 if dead else 0.2)
        if readable:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                with suppress(ValueError):  # a provider that writes to a descriptor which is not its own
                    event = json.loads(line)
                    if isinstance(event, dict) and "event" in event:
                        yield event
            deadline = time.monotonic() + timeout
        elif dead:
            return
        elif time.monotonic() > deadline:
            yield None
            deadline = time.monotonic() + timeout


def _end(process: subprocess.Popen[bytes], wait: float) -> int:
    """Gives the worker no more jobs, waits for it to end by itself, then kills what is left of it and its children."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        raise SweepStoppedError(
            f"worker process {process.pid} cannot be killed: it hangs in the GPU's driver. Restart the machine, then "
            "repeat the command (a sweep with --resume)"
        ) from None


def _explain_exit(code: int) -> tuple[Status, str]:
    if code == EXIT_START_AFRESH:
        return "failed", "the device answered nothing but errors, or the inputs were changed,"
    if code == -signal.SIGKILL:
        return "oom", "the process was killed (SIGKILL), most likely for want of host memory,"
    if code < 0:
        return "failed", f"the process died of {signal.Signals(-code).name}"
    return "failed", f"the process exited with code {code}"


def _last_lines(log: Path, start: int, limit: int = 300) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 4096))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"; last output: {lines[-1].strip()[:limit]}" if lines else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
