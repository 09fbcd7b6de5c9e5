"""A script that stands for a worker process: it prints, dies, hangs or reports as a test tells it to."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from jfabench.records import Case, Record


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.phases: list[tuple[str | None, str]] = []
        self.records: list[Record] = []

    def phase(self, case: Case | None, phase: str) -> None:
        self.phases.append((case.provider if case else None, phase))

    def record(self, record: Record) -> None:
        self.records.append(record)


def scripted(folder: Path, body: str, before: str = "") -> tuple[str, ...]:
    """The command of a worker that runs `before` while it is prepared, and `body` for each job.

    For both: `prepared`, what it was asked to prepare; `send(event=...)`; `importing(provider)`. For `body`: `turn`,
    the number of the job; `cases`; `key(i)` and `record(i, status)` of one of them; `done()`, fit for another job.
    """
    script = folder / "worker.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, signal, sys, time
            stream = os.fdopen(int(sys.argv[1]), "w")
            prepared = json.loads(sys.argv[2])
            def send(**event):
                stream.write(json.dumps({"at": time.monotonic(), **event}) + "\\n"); stream.flush()
            def importing(provider):
                send(event="import", provider=provider)
            def key(i):
                return json.dumps(cases[i], sort_keys=True, separators=(",", ":"))
            def record(i, status="ok"):
                send(event="record", record={"case": cases[i], "status": status, "when": "", "schema": 1})
            def done():
                send(event="done", again=True)
            """
        )
        + textwrap.dedent(before)
        + '\nsend(event="ready")\nfor turn, line in enumerate(sys.stdin):\n    cases = json.loads(line)["cases"]\n'
        + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return (sys.executable, str(script))
