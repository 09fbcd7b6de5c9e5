"""The progress bar of a sweep: the present case, what is done to it, and the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jfabench.records import NEUTRAL_STATUSES, Case, Record


class SweepProgress:
    """Shows a bar on a terminal; elsewhere (a log of CI) one line for each case that did not go well."""

    def __init__(self, bar: Progress, cases: int) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=cases)
        self.label = ""

    def phase(self, case: Case | None, phase: str) -> None:
        who = f"{case.provider} {case.direction} " if case else ""
        self.bar.update(self.task, description=f"{self.label} {who}[dim]{phase}[/dim]")

    def record(self, record: Record) -> None:
        self.label = str(record.inputs.get("label", ""))
        self.bar.advance(self.task)
        if record.status not in NEUTRAL_STATUSES:
            name = f"{record.case.provider} {record.case.direction} {self.label}"
            self.bar.console.print(
                f"{record.status}: {name}: {record.reason}", markup=False, highlight=False, soft_wrap=True
            )


@contextmanager
def progress_listener(cases: int) -> Iterator[SweepProgress]:
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    # Without a terminal there is no bar, and no empty line where it ended.
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        yield SweepProgress(bar, cases)
