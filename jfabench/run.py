"""Runs a sweep: shapes are visited by worker processes, records appended to the result folder as they come.

The parent process imports neither torch nor triton and never touches the GPU, so nothing that a provider does to its
process can take the sweep down: it is recorded against the case at hand, and a fresh worker goes on. Every shape has a
worker process of its own; where the sweep shares workers (`workers: shared`), one in which all went well takes the next
shape, too. The first failure of a provider counts only in a fresh worker: elsewhere it may come from an earlier shape,
and the case is repeated.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jfabench.folder import Manifest, ResultFolder, write_json
from jfabench.operator import case_facts, load_operator
from jfabench.records import Case, Record, read_records
from jfabench.sweep import Sweep
from jfabench.visit import Job
from jfabench.workers import Listener, SweepStoppedError, Workers

__all__ = ["FolderError", "Listener", "RecordLog", "SweepStoppedError", "Workers", "open_log", "run_sweep"]


class FolderError(SweepStoppedError):
    """The result folder cannot be used."""


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
                "the permission, then repeat the command (a sweep with --resume)"
            ) from None


@contextmanager
def open_log(folder: ResultFolder) -> Iterator[RecordLog]:
    """Opens the record log for this process alone. Raises `FolderError`, also where the records are packed already."""
    if folder.stored == folder.packed:
        raise FolderError(
            f"{folder.root}: holds packed results, which are never added to; choose another folder with --out"
        )
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
        if visits:
            workers.start(listener)
        while visits:
            cases = visits.popleft()
            alone: list[list[Case]] = []
            for record in workers.run(Job(tuple(cases), device, sweep.config.measure), listener, len(visits)):
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
        workers=sweep.config.workers,
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
        for name in ("operator", "device", "scale", "policy", "workers"):
            was, now = getattr(earlier, name), getattr(manifest, name)
            if was != now and was != "":  # an older version did not say how its workers were shared
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
