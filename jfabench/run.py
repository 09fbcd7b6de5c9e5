"""Runs a sweep: shapes are visited by worker processes, records appended to the result folder as they come.

The parent process imports neither torch nor triton and never touches the GPU, so nothing that a provider does to its
process can take the sweep down: it is recorded against the case at hand, and a fresh worker goes on. A worker in which
all went well takes the next shape, too. The first failure of a provider counts only in a fresh worker: elsewhere it may
come from an earlier shape, and the case is repeated.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jfabench.folder import Manifest, ResultFolder, write_json
from jfabench.operator import case_facts, load_operator
from jfabench.records import NEUTRAL_STATUSES, Case, Record, Status, read_records
from jfabench.sweep import Sweep
from jfabench.visit import Job
from jfabench.worker import EXIT_START_AFRESH


class SweepStoppedError(RuntimeError):
    """The sweep cannot go on; the message says why and what to do. What was measured is in the result folder."""


class FolderError(SweepStoppedError):
    """The result folder cannot be used."""


class Listener(Protocol):
    """Told what happens while a sweep runs (the progress bar is one)."""

    def phase(self, case: Case | None, phase: str) -> None: ...

    def record(self, record: Record) -> None: ...


# The result folder ---------------------------------------------------------------------------------------------------


@dataclass
class RecordLog:
    """The only writer of a `records.jsonl`: whole lines, on disk before the sweep goes on."""

    path: Path
    descriptor: int

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def mend(self) -> None:
        """Ends the last line: with a newline if it is whole, else by cutting off what a killed run left of it."""
        start = _start_of_last_line(self.descriptor)
        tail = os.pread(self.descriptor, self.size - start, start)
        try:
            whole = isinstance(json.loads(tail), dict)
        except ValueError:
            whole = False
        if whole:
            os.pwrite(self.descriptor, b"\n", self.size)
        else:
            os.ftruncate(self.descriptor, start)

    def append(self, record: Record) -> None:
        """Raises `FolderError` when the line could not be written; what stood in the file before is whole."""
        line = record.to_line().encode()
        start = os.lseek(self.descriptor, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(line):
                written += os.write(self.descriptor, line[written:])
            os.fsync(self.descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.descriptor, start)
            raise FolderError(
                f"{self.path}: cannot be written ({error.strerror}). All earlier records are safe; make room or fix "
                "the permission, then repeat the command with --resume"
            ) from None


@contextmanager
def open_log(folder: ResultFolder) -> Iterator[RecordLog]:
    """Opens the record log for this process alone."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.records, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise FolderError(
            f"{folder.root}: cannot be written ({error.strerror}); choose another folder with --out"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(
                f"{folder.root}: another sweep is writing here; wait for it or choose another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield RecordLog(folder.records, descriptor)
    finally:
        os.close(descriptor)


def _start_of_last_line(descriptor: int) -> int:
    """Where the unfinished last line starts; the end of the file if the last line is finished."""
    end = os.fstat(descriptor).st_size
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


# One worker ----------------------------------------------------------------------------------------------------------


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
    """Worker processes for one device, one at work at a time, and on request a fresh one held ready.

    Starting Python and importing torch takes seconds in which nothing is measured. A worker that waits for its first
    job has done that, and has not touched the GPU yet.
    """

    def __init__(
        self, device: str, log: Path, timeout: float, command: Sequence[str] = (sys.executable, "-m", "jfabench.worker")
    ) -> None:
        """`log` collects what providers print; `timeout` is how many seconds without an event count as a hang."""
        self._device = device
        self._log = log
        self._timeout = timeout
        self._command = command
        self._idle: list[_Worker] = []  # a fresh one, and on top of it one that has done its jobs well
        self.fresh = True
        """Whether the worker of the latest job had done no other before."""

    def hold_ready(self) -> None:
        """Starts a fresh worker; not on a CPU, where that would disturb the measurement of the present one."""
        if not self._idle and self._device != "cpu":
            self._idle.append(self._spawn())

    def close(self) -> None:
        while self._idle:
            worker = self._idle.pop()
            os.close(worker.events)
            _end(worker.process, 0.0 if worker.fresh else 5.0)

    def run(self, job: Job, listener: Listener) -> Iterator[Record]:
        """Has a worker do the job and yields its records, then one for the case that it died at, if it died."""
        worker = self._idle.pop() if self._idle else self._spawn()
        self.fresh = worker.fresh
        return self._visit(worker, job, listener)

    def _visit(self, worker: _Worker, job: Job, listener: Listener) -> Iterator[Record]:
        log_start = self._log.stat().st_size
        visit = Visit()
        cases = {case.key: case for case in job.cases}
        well = True
        code, patience = 0, 0.0  # an interruption or a time-out kills it at once
        try:
            _send(worker.process, job)
            for event in _events(worker.events, worker.process, self._timeout):
                if event is None:
                    visit.status = "timeout"
                    visit.ended = f"nothing was heard for {self._timeout:g} s"
                    break
                if event["event"] == "phase":
                    visit.current, visit.phase = cases.get(event["case"]), event["phase"]
                    listener.phase(visit.current, visit.phase)
                elif event["event"] == "record":
                    record = Record.from_json(event["record"])
                    if record.case.key in cases and record.case not in visit.recorded:  # a forked child repeats them
                        visit.recorded.add(record.case)
                        well = well and record.status in NEUTRAL_STATUSES
                        yield record
                elif event["event"] == "done":
                    visit.done = True
                    visit.again = well and len(visit.recorded) == len(cases) and event.get("again") is True
                    patience = 30.0
                    break
            else:
                patience = 30.0
        finally:
            if visit.again:
                worker.fresh = False
                self._idle.append(worker)
            else:
                os.close(worker.events)
                code = _end(worker.process, patience)
        if not visit.done:
            yield from self._records_of_a_death(job, visit, code, log_start)

    def _spawn(self) -> _Worker:
        read_end, write_end = os.pipe()
        try:
            with self._log.open("ab") as output:
                process = subprocess.Popen(
                    [*self._command, str(write_end)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=[write_end],
                    env=_worker_environment(self._device),
                    start_new_session=True,
                )
        finally:
            os.close(write_end)
        return _Worker(process, read_end)

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
                yield Record(case, visit.status, _now(), reason=f"{visit.ended} during {visit.phase!r}{tail}")


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    events: int
    """The file descriptor to read its events from."""
    fresh: bool = True
    """It has done no job yet."""


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
    """Yields events until the worker ends; None when nothing came for `timeout` seconds."""
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
            return


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
            "repeat the command with --resume"
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


# One sweep -----------------------------------------------------------------------------------------------------------

_PERHAPS_INHERITED = frozenset({"failed", "timeout", "oom"})
"""Outcomes that a process can owe to what happened in it before, at another shape; a wrong result is a verdict."""


def run_sweep(
    sweep: Sweep,
    folder: ResultFolder,
    *,
    device: str,
    command_line: str,
    summaries: Mapping[str, str],
    listener: Listener,
    resume: bool = False,
    retry_failed: bool = False,
    workers: Workers,
) -> list[Record]:
    """Measures every case of `sweep` that the folder does not hold yet, and returns all records of the sweep.

    Raises:
        FolderError: the folder holds another run, is in use, or cannot be written.
        SweepStoppedError: no worker can go on. Nothing measured is lost.
    """
    with closing(workers), open_log(folder) as log:
        if log.size and not resume:
            raise FolderError(f"{folder.records}: exists already; add --resume to go on, or choose another --out")
        log.mend()
        known = _read(folder)
        _start(sweep, folder, known, device, command_line, summaries)
        finished = {case: r for case, r in known.items() if not (retry_failed and r.status != "ok")}
        result = {case: finished[case] for case in sweep.cases if case in finished}
        for record in result.values():
            listener.record(record)
        left = [case for case in sweep.cases if case not in result]
        visits = deque(list(group) for _, group in itertools.groupby(left, key=lambda case: case.shape_key))
        broken: set[tuple[str, str]] = set()  # what has failed in a fresh worker is not doubted again
        asked = time.time()
        while visits:
            cases = visits.popleft()
            records = workers.run(Job(tuple(cases), device, sweep.config.measure, asked), listener)
            if visits:
                workers.hold_ready()
            alone: list[list[Case]] = []
            for record in records:
                asked = time.time()
                who = (record.case.provider, record.case.direction)
                if record.status in _PERHAPS_INHERITED and not workers.fresh and who not in broken:
                    continue  # it stays unmeasured, for a fresh worker
                if record.status == "oom" and len(cases) > 1:
                    alone.append([record.case])  # beside others it found too little memory: it gets another chance
                    continue
                if record.status in _PERHAPS_INHERITED:
                    broken.add(who)
                record = _completed(record, result, folder)
                log.append(record)
                result[record.case] = record
                listener.record(record)
            unmeasured = [case for case in cases if case not in result and [case] not in alone]
            if len(unmeasured) == len(cases) and workers.fresh:
                raise SweepStoppedError(f"a worker ended without a word; see {folder.root / 'worker.log'}")
            visits.extendleft(reversed([*([unmeasured] if unmeasured else []), *alone]))
        return list(result.values())


def _read(folder: ResultFolder) -> dict[Case, Record]:
    try:
        return {record.case: record for record in read_records(folder.records).records}
    except ValueError as error:
        raise FolderError(f"{folder.records}: {error}") from None


def _start(
    sweep: Sweep,
    folder: ResultFolder,
    known: Mapping[Case, Record],
    device: str,
    command_line: str,
    summaries: Mapping[str, str],
) -> None:
    from jfabench import __version__

    manifest = Manifest(
        config=sweep.name,
        description=sweep.config.description,
        operator=sweep.config.operator,
        baseline=sweep.config.baseline,
        device=device,
        scale=sweep.scale,
        axes=tuple(sweep.config.axes),
        providers=dict(summaries),
        policy={**sweep.config.measure.model_dump(), "mode": sweep.config.measure.mode_on(device.split(":")[0])},
        cases=len({*known, *sweep.cases}),
        started=_now(),
        command=command_line,
        version=__version__,
    )
    try:
        earlier = folder.read_manifest()
    except ValueError as error:
        raise FolderError(str(error)) from None
    if known and earlier is not None:
        for name in ("operator", "device", "scale", "policy"):
            was, now = getattr(earlier, name), getattr(manifest, name)
            if was != now:
                if isinstance(was, Mapping):  # show what differs, not all of it
                    was, now = ({k: v for k, v in a.items() if b.get(k) != v} for a, b in ((was, now), (now, was)))
                raise FolderError(
                    f"{folder.root}: was started with {name} {was!r}, this command asks for {now!r}; "
                    "choose another --out, or repeat the first command with --resume"
                )
        # What was asked for at first stays; a later command may add to the grid and to the providers.
        manifest = replace(
            earlier,
            axes=tuple(dict.fromkeys([*earlier.axes, *manifest.axes])),
            providers={**earlier.providers, **manifest.providers},
            cases=max(earlier.cases, manifest.cases),
        )
    try:
        write_json(folder.manifest, manifest.to_json())
    except OSError as error:
        raise FolderError(f"{folder.manifest}: cannot be written ({error.strerror})") from None


def _completed(record: Record, result: Mapping[Case, Record], folder: ResultFolder) -> Record:
    """Gives the record of a dead worker what is known of its case, and stores the ceilings with the first record."""
    if record.work is None:
        work, facts = case_facts(load_operator(record.case.operator), record.case)
        env = next((r.env for r in reversed(list(result.values())) if r.env), {})
        record = replace(record, work=work, inputs=facts, env=env)
    if record.env and not any(r.env for r in result.values()):
        from jfabench import ceilings

        found = ceilings.for_device(dict(record.env))
        if found is not None and (found.source == "measured" or not folder.ceilings.exists()):
            write_json(folder.ceilings, found.to_json())
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
