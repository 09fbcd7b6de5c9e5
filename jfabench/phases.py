"""Where the time of a sweep goes: an account by case and phase, and what it says in a sentence.

Phases are those that a worker announces (see `jfabench.worker`), and `start`: from the end of the visit before, or of
the sweep's start-up, until a worker has taken the job. Clocks are `time.monotonic`, which all processes of a machine
share on Linux.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jfabench.records import Case, Record, cost


@dataclass
class Account:
    """Every second between two calls of `restart` goes to one phase of the cases of one visit, none is counted twice.

    What passes in a phase of one case is its own; what passes in a common phase is shared equally by the cases that
    have no record yet. What passes while no case is open is the `start` of the next visit. A case that is visited
    again goes on with its account.
    """

    until: float = field(default_factory=time.monotonic)
    """The moment up to which everything is accounted for."""
    spent: dict[Case, dict[str, float]] = field(default_factory=dict)
    _open: list[Case] = field(default_factory=list)
    _present: tuple[str, Case | None] = ("start", None)

    def restart(self) -> float:
        """Leaves what has passed out of the account, and returns how much that was, in seconds."""
        before, self.until = self.until, time.monotonic()
        return self.until - before

    def open(self, cases: Sequence[Case]) -> None:
        self._open, self._present = list(cases), ("start", None)

    def enter(self, phase: str, case: Case | None, at: float) -> None:
        """From the moment `at` on, `phase` goes on, of one case or (None) of all that are open."""
        self._advance(at)
        self._present = phase, case

    def finish(self, case: Case, at: float) -> dict[str, float]:
        """The case has its record: seconds of each of its phases."""
        self._advance(at)
        self._open = [other for other in self._open if other != case]
        return {phase: round(seconds, 6) for phase, seconds in self.spent.get(case, {}).items()}

    def _advance(self, at: float) -> None:
        phase, case = self._present
        sharers = [case] if case in self._open else self._open
        seconds = at - self.until
        if seconds <= 0 or not sharers:
            return
        self.until = at
        for one in sharers:
            if one is not None:
                own = self.spent.setdefault(one, {})
                own[phase] = own.get(phase, 0.0) + seconds / len(sharers)


def overhead_sentence(records: Iterable[Record], startup_seconds: float) -> str:
    """What the harness itself cost, for the end of a sweep; empty where no record tells."""
    spent = cost(records)
    if spent is None:
        return ""
    return (
        f"overhead of a case (all but first call, warm-up and measured calls): {spent.mean:.2f} s on average, "
        f"{spent.most:.2f} s at most, {spent.first:.2f} s in the first; first calls took {spent.first_calls:.1f} s in "
        f"all, start-up {startup_seconds:.1f} s"
    )
