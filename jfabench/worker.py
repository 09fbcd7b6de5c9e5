"""The process that visits shapes (see `jfabench.visit`), and what it says to the process that started it.

It reads jobs (one JSON object a line) from standard input and writes events (one JSON object a line) to the file
descriptor named on its command line; standard output and error stay free for whatever providers print. Events:

    {"event": "import", "provider": <name>}     before the job: it imports the library of this provider
    {"event": "ready"}                          it has imported everything, and waits for a job
    {"event": "phase", "case": <key or null>, "phase": <name>}
    {"event": "record", "record": {...}}
    {"event": "done", "again": <whether it is fit for another job>}

Each also says when it happened (`at`, by `time.monotonic`). Phases are `set-up` (the CUDA context), `inputs`, `oracle`,
then for each case `prepare`, `first call` (which may load, compile and tune), `check`, then in turns `warmup` and
`measure`, and `finish`.

A phase is announced before it begins, so whoever reads the events knows what a worker that dies or hangs was doing.
After `done` it waits for the next job, and ends when there is none.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from jfabench.operator import Preloading, Provider, load_providers
from jfabench.records import Case, Record
from jfabench.visit import (
    Job,
    Preparation,
    StartAfreshError,
    bytes_left_behind,
    describe_failure,
    restore_torch_settings,
    run_job,
    torch_settings,
)

EXIT_START_AFRESH = 75
"""The exit code of a worker that has recorded the case that spoilt it; a fresh one may go on with the rest."""

MOST_LEFT_BEHIND = 2**30
"""Bytes of device memory in use after a job beyond which a worker takes no other; libraries' workspaces take less."""


@dataclass(frozen=True)
class Emitter:
    """Writes events."""

    stream: TextIO

    def importing(self, provider: str) -> None:
        self._write({"event": "import", "provider": provider})

    def ready(self) -> None:
        self._write({"event": "ready"})

    def phase(self, case: Case | None, phase: str) -> None:
        self._write({"event": "phase", "case": case.key if case else None, "phase": phase})

    def record(self, record: Record) -> None:
        self._write({"event": "record", "record": record.to_json()})

    def done(self, again: bool) -> None:
        self._write({"event": "done", "again": again})

    def _write(self, event: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps({**event, "at": time.monotonic()}) + "\n")
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


def prepare(preparation: Preparation, emit: Emitter) -> dict[str, str]:
    """Does what takes long once in a process and needs neither a shape nor the GPU, which another worker may be using.

    Returns the providers whose library cannot be imported, and why.
    """
    import torch

    import jfabench.measure  # noqa: F401
    from jfabench import env
    from jfabench.check import poisoned_allocations

    # torch imports its compiler, a thousand modules, when a dispatch mode is first at work, as one is in every check.
    with poisoned_allocations():
        torch.empty(1)
    env.environment("cpu")  # what it finds out by other programs, it keeps
    providers = load_providers(preparation.operator).by_name if preparation.operator else {}
    chosen = [providers[name] for name in preparation.providers if name in providers]
    failed = {}
    for provider in chosen:
        if why := _import_library(provider, preparation.device.split(":")[0], emit):
            failed[provider.name] = why
    gc.collect()
    gc.freeze()  # a million objects that live as long as the process: no later collection need walk through them
    return failed


def _import_library(provider: Provider, kind: str, emit: Emitter) -> str:
    """Why the provider's library cannot be imported; empty if it can be, or if none is to be."""
    import torch

    if not isinstance(provider, Preloading) or not _is_available(provider, kind):
        return ""
    emit.importing(provider.name)
    cuda: Any = torch.cuda  # torch leaves it untyped
    settings, untouched = torch_settings(), not cuda.is_initialized()
    try:
        provider.preload()
    except (Exception, SystemExit) as error:
        _, reason = describe_failure(error)
        return reason
    finally:
        if left := restore_torch_settings(settings):
            print(f"importing the library of {provider.name} changed torch's {left}; changed back")
        if untouched and cuda.is_initialized():
            print(f"importing the library of {provider.name} created a CUDA context, perhaps beside a measurement")
    return ""


def _is_available(provider: Provider, kind: str) -> bool:
    """As far as it can be asked; where that fails, its cases will tell."""
    with suppress(Exception):
        return provider.unavailable(kind) is None
    return False


def _jobs() -> Iterator[Job]:
    """The jobs from standard input, which is taken away from everybody else: a provider might read it, too."""
    descriptor = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with os.fdopen(descriptor, encoding="utf-8") as lines:
        for line in lines:
            yield Job.from_json(json.loads(line))


def _serve(job: Job, emit: Emitter, unimportable: Mapping[str, str]) -> bool:
    """Does the job; returns whether this process is fit for another one. Does not return if it must end at once."""
    kind = job.device.split(":")[0]
    _limit_memory(kind)
    process = os.getpid()
    try:
        run_job(job, emit, unimportable)
    except StartAfreshError as error:
        print(f"a fresh worker is needed: {error}", file=sys.stderr)
        _end(EXIT_START_AFRESH)
    if os.getpid() != process:
        _end(0)  # a provider forked, and this is the child: it has nothing to say
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
    with os.fdopen(int(argv[0]), "w", encoding="utf-8") as stream:
        emit = Emitter(stream)
        unimportable = prepare(Preparation.from_json(json.loads(argv[1])), emit)
        emit.ready()
        for job in jobs:
            again = _serve(job, emit, unimportable)
            emit.done(again)
            if not again:
                break
        _end(0)


if __name__ == "__main__":
    main(sys.argv[1:])
