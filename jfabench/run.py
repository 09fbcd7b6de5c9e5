"""Runs a sweep: one worker process per shape, records appended to the result folder as they come.

The parent process imports neither torch nor triton and never touches the GPU, so nothing that a provider does to its
process can take the sweep down: it is recorded against the case at hand, and a fresh worker goes on.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jfabench.folder import Manifest, ResultFolder, write_json
from jfabench.operator import case_facts, load_operator
from jfabench.records import Case, Record, Status, read_records
from jfabench.sweep import Sweep
from jfabench.worker import EXIT_DEVICE_LOST, Job


class FolderError(RuntimeError):
    """The result folder cannot be used; the message says why and what to do."""


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
    """Opens the record log for this process alone, and cuts off a line that a killed run left torn."""
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
        except OSError:
            raise FolderError(
                f"{folder.root}: another sweep is writing here; wait for it or choose another --out"
            ) from None
        _cut_torn_tail(descriptor)
        yield RecordLog(folder.records, descriptor)
    finally:
        os.close(descriptor)


def _cut_torn_tail(descriptor: int) -> None:
    size = os.lseek(descriptor, 0, os.SEEK_END)
    end = size
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


# One worker ----------------------------------------------------------------------------------------------------------


@dataclass
class Visit:
    """What came of one worker: which case it was at when it ended, and how it ended."""

    done: bool = False
    ended: str = ""
    status: Status = "failed"
    current: Case | None = None
    phase: str = "start"
    recorded: set[Case] = field(default_factory=set)


def run_worker(
    job: Job,
    timeout: float,
    log: Path,
    listener: Listener,
    command: Sequence[str] = (sys.executable, "-m", "jfabench.worker"),
) -> Iterator[Record]:
    """Runs one worker to its end and yields its records, then one for the case that it died at, if it died.

    Args:
        timeout: seconds without any event after which the worker counts as hung and is killed.
        log: file that collects what providers print.
    """
    cases = {case.key: case for case in job.cases}
    visit = Visit()
    read_end, write_end = os.pipe()
    with log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            [*command, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[write_end],
            env=_worker_environment(job.device),
            start_new_session=True,
        )
    os.close(write_end)
    try:
        _send(process, job)
        for event in _events(read_end, process, timeout):
            if event is None:
                visit.status = "timeout"
                visit.ended = f"nothing was heard for {timeout:g} s"
                break
            if event["event"] == "phase":
                visit.current, visit.phase = cases.get(event["case"]), event["phase"]
                listener.phase(visit.current, visit.phase)
            elif event["event"] == "record":
                record = Record.from_json(event["record"])
                visit.recorded.add(record.case)
                yield record
            elif event["event"] == "done":
                visit.done = True
    finally:
        os.close(read_end)
        code = _end(process, wait=0.0 if visit.ended else 30.0)
    if visit.done:
        return
    if not visit.ended:
        visit.status, visit.ended = _explain_exit(code)
    blamed = [visit.current] if visit.current else list(job.cases)
    if visit.current in visit.recorded:
        return  # it gave up after its last record (the device was lost): the rest gets a fresh worker
    tail = _last_lines(log, log_start)
    for case in blamed:
        if case not in visit.recorded:
            reason = f"{visit.ended} during {visit.phase!r}{tail}"
            yield Record(case, visit.status, _now(), reason=reason)


def _worker_environment(device: str) -> dict[str, str]:
    values = dict(os.environ)
    if device == "cpu":
        # The plain Triton kernel runs under Triton's interpreter, chosen when triton is imported.
        values["TRITON_INTERPRET"] = "1"
        values["CUDA_VISIBLE_DEVICES"] = ""
    return values


def _send(process: subprocess.Popen[bytes], job: Job) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # if it died at once, its exit code tells
        process.stdin.write(json.dumps(job.to_json()).encode())
        process.stdin.close()


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
                yield json.loads(line)
            deadline = time.monotonic() + timeout
        elif dead:
            return
        elif time.monotonic() > deadline:
            yield None
            return


def _end(process: subprocess.Popen[bytes], wait: float) -> int:
    """Waits for the worker to end by itself, then kills whatever is left of it and of its children."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(wait)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _explain_exit(code: int) -> tuple[Status, str]:
    if code == EXIT_DEVICE_LOST:
        return "failed", "the device answered nothing but errors"
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
    timeout: float = 300.0,
    worker: Callable[..., Iterator[Record]] = run_worker,
) -> list[Record]:
    """Measures every case of `sweep` that the folder does not hold yet, and returns all records of the sweep.

    Raises:
        FolderError: the folder holds another run, is in use, or cannot be written. Nothing measured is lost.
    """
    with open_log(folder) as log:
        known = {record.case: record for record in read_records(folder.records).records}
        _start(sweep, folder, known, device, command_line, summaries, resume)
        finished = {case: r for case, r in known.items() if not (retry_failed and r.status != "ok")}
        result = {case: finished[case] for case in sweep.cases if case in finished}
        for record in result.values():
            listener.record(record)
        for _, group in itertools.groupby(sweep.cases, key=lambda case: case.shape_key):
            remaining = [case for case in group if case not in result]
            while remaining:
                job = Job(tuple(remaining), device, sweep.config.measure, time.time())
                for record in worker(job, timeout, folder.root / "worker.log", listener):
                    record = _completed(record, result, folder)
                    log.append(record)
                    result[record.case] = record
                    listener.record(record)
                left = [case for case in remaining if case not in result]
                if len(left) == len(remaining):
                    raise RuntimeError("a worker ended without a record; see worker.log in the result folder")
                remaining = left
        return list(result.values())


def _start(
    sweep: Sweep,
    folder: ResultFolder,
    known: Mapping[Case, Record],
    device: str,
    command_line: str,
    summaries: Mapping[str, str],
    resume: bool,
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
        cases=len(sweep.cases),
        started=_now(),
        command=command_line,
        version=__version__,
    )
    earlier = folder.read_manifest()
    if known and not resume:
        raise FolderError(
            f"{folder.root}: holds {len(known)} records already; add --resume to go on, or choose another --out"
        )
    if known and earlier is not None:
        for name in ("operator", "device", "scale", "policy"):
            was, now = getattr(earlier, name), getattr(manifest, name)
            if was != now:
                raise FolderError(
                    f"{folder.root}: was started with {name} {was!r}, this command asks for {now!r}; "
                    "choose another --out, or repeat the first command with --resume"
                )
        manifest = replace(manifest, started=earlier.started, providers={**earlier.providers, **manifest.providers})
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
    if record.env and not folder.ceilings.exists():
        from jfabench import ceilings

        found = ceilings.for_device(dict(record.env))
        if found is not None:
            write_json(folder.ceilings, found.to_json())
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
