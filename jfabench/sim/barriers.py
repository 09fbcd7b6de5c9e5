"""Barriers: in shared memory with phases, arrivals and expected bytes; and named ones of the hardware.

Semantics are those of PTX ``mbarrier`` (ISA 9.0, section "Parallel Synchronization and Communication Instructions"):
a phase is complete when no arrival is pending and the balance of bytes is zero; waiting for a parity returns at once if
the phase of that parity is the one before the present one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .clocks import Clock


@dataclass(eq=False)
class Barrier:
    """An mbarrier. ``complain(kind, message)`` reports a misuse."""

    label: Callable[[], str]
    arrive_count: int
    complain: Callable[[str, str], None]
    changed: Callable[[], None]
    where: Any = None  # its allocation's line
    pending: int = 0
    balance: int = 0  # expected bytes that have not come
    completed: int = 0  # phases
    clock: Clock = field(default_factory=Clock)  # of all arrivals
    released: Clock = field(default_factory=Clock)  # of those that completed a phase
    waits: int = 0
    blocked: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrive_count

    @property
    def name(self) -> str:
        return self.label()

    def passes(self, parity: int) -> bool:
        return (self.completed & 1) != parity

    def expect(self, size: int, clock: Clock) -> None:
        """One arrival, and ``size`` bytes that are to come in this phase."""
        self.balance += size
        self.arrive(1, clock)

    def bytes_came(self, size: int, clock: Clock) -> None:
        self.clock.join(clock)
        self.balance -= size
        self._complete_if_due()

    def arrive(self, count: int, clock: Clock) -> None:
        self.clock.join(clock)
        self.pending -= count
        if self.pending < 0:
            self.complain(
                "over-arrival",
                f"{count} arrivals at {self.name}, of whose {self.arrive_count} only {self.pending + count} were "
                f"pending in phase {self.completed}",
            )
            self.pending = 0
        self._complete_if_due()

    def _complete_if_due(self) -> None:
        if self.pending == 0 and self.balance == 0:
            self.completed += 1
            self.pending = self.arrive_count
            self.released = self.clock.copy()
            self.changed()

    def state(self) -> str:
        text = f"phase {self.completed}, {self.pending} of {self.arrive_count} arrivals pending"
        return text + (f", {self.balance} bytes to come" if self.balance else "")


@dataclass(eq=False)
class PhaseWait:
    """A task's wait for a phase of ``parity``. It sees only whether the parity has changed, as on hardware."""

    barrier: Barrier
    parity: int
    complain: Callable[[str], None]
    phase: int = 0  # the one that it waits for: the present one, or the one before
    missed: bool = False

    def __post_init__(self) -> None:
        completed = self.barrier.completed
        self.phase = completed - 1 if self.barrier.passes(self.parity) else completed

    def __call__(self) -> bool:
        if self.barrier.passes(self.parity):
            return True
        if self.barrier.completed > self.phase + 1 and not self.missed:
            self.missed = True
            late = f"before who waits for phase {self.phase} looked"
            self.complain(f"phase {self.phase + 1} of {self.barrier.name} completed {late}")
        return False

    def describe(self) -> str:
        return f"barrier {self.barrier.name}, parity {self.parity} ({self.barrier.state()})"


@dataclass(eq=False)
class Meeting:
    """One use of a named barrier: complete when ``expected`` threads have arrived."""

    number: int
    expected: int
    arrived: int = 0
    clock: Clock = field(default_factory=Clock)

    @property
    def complete(self) -> bool:
        return self.arrived >= self.expected

    def __call__(self) -> bool:
        return self.complete

    def describe(self) -> str:
        return f"named barrier {self.number} ({self.arrived} of {self.expected} threads arrived)"


class NamedBarriers:
    """Those of one CTA."""

    def __init__(self, complain: Callable[[str, str], None]) -> None:
        self._open: dict[int, Meeting] = {}
        self._complain = complain

    def arrive(self, number: int, threads: int, expected: int, clock: Clock) -> Meeting:
        meeting = self._open.get(number)
        if meeting is None or meeting.complete:
            meeting = self._open[number] = Meeting(number, expected)
        if meeting.expected != expected:
            self._complain(
                "misuse", f"named barrier {number} is used for {meeting.expected} and for {expected} threads at once"
            )
        meeting.arrived += threads
        if meeting.arrived > meeting.expected:
            self._complain(
                "over-arrival",
                f"{meeting.arrived} threads arrived at named barrier {number}, which takes {meeting.expected}",
            )
        meeting.clock.join(clock)
        return meeting


@dataclass(eq=False)
class Rendezvous:
    """A barrier that all CTAs of a cluster, or all warp groups of a CTA, meet at."""

    name: str
    expected: int
    arrived: int = 0
    clock: Clock = field(default_factory=Clock)
    next: Any = None

    def __call__(self) -> bool:
        return self.arrived >= self.expected

    def describe(self) -> str:
        return f"{self.name} ({self.arrived} of {self.expected} arrived)"
