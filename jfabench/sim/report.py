"""What a simulation found, for people and as JSON."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = {
    "race": "two accesses to the same bytes, at least one of them a write, that nothing orders",
    "deadlock": "every task waits",
    "poison": "bytes that were never written are read, or a result is used before it was waited for",
    "over-arrival": "more arrivals at a barrier than its phase takes",
    "phase": "a phase of a barrier passed before a task that waited for it looked",
    "expect": "bytes were expected that never came, or came unexpected",
    "not-waited": "a warp group ends while a store still reads its shared memory, or a matmul of it still runs",
    "endless": "the launch does not end",
    "proxy-fence": "an asynchronous operation reads what an ordinary store wrote, without a fence between them",
    "capacity": "more shared or tensor memory than there is",
    "out-of-bounds": "an access outside of a buffer or tensor",
    "wrong-result": "the results are not what they should be",
    "misuse": "an operation is used as the hardware does not allow",
}


@dataclass(frozen=True)
class Place:
    """A line of source, and the lines from which it was called, innermost first."""

    frames: tuple[tuple[str, int, str], ...]  # file, line, function

    def __str__(self) -> str:
        if not self.frames:
            return "unknown line"
        shown = [f"{Path(file).name}:{line} in {function}" for file, line, function in self.frames]
        return " <- ".join(shown)

    @property
    def line(self) -> str:
        """Innermost ``file:line``."""
        return f"{Path(self.frames[0][0]).name}:{self.frames[0][1]}" if self.frames else "?"

    @property
    def code(self) -> str:
        return linecache.getline(self.frames[0][0], self.frames[0][1]).strip() if self.frames else ""


@dataclass(frozen=True)
class Finding:
    """Something wrong. ``kind`` is one of :data:`KINDS`; ``places`` are the source lines involved."""

    kind: str
    message: str
    places: tuple[Place, ...] = ()
    buffer: str = ""
    count: int = 1
    seed: int = 0
    policy: str = ""

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        lines = [f"{self.kind}: {self.message}{times}"]
        for place in self.places:
            lines.append(f"    at {place}")
            if place.code:
                lines.append(f"       {place.code}")
        return "\n".join(lines)


@dataclass
class BarrierUse:
    """How a barrier was used in a run, summed over CTAs."""

    name: str
    arrive_count: int
    phases: int = 0
    waits: int = 0
    blocked: int = 0  # waits that had to wait


@dataclass
class Run:
    """One simulated launch."""

    kernel: str
    seed: int
    policy: str
    findings: list[Finding] = field(default_factory=list)
    barriers: list[BarrierUse] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    smem_bytes: int = 0  # allocated by a CTA
    tmem_columns: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.kernel}: seed {self.seed}, policy {self.policy}: "
        if self.ok:
            return head + f"nothing found in {self.steps} steps, {self.seconds:.2f} s"
        return head + f"{len(self.findings)} findings\n" + "\n".join(map(str, self.findings))


@dataclass
class Report:
    """Several runs of one launch (or of one function that launches), under different schedules."""

    kernel: str
    arch: str
    runs: list[Run] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)

    @property
    def findings(self) -> list[Finding]:
        """Each once, with the first seed and policy that showed it and the number of runs that did."""
        return merged(finding for run in self.runs for finding in run.findings)

    def __str__(self) -> str:
        seconds = sum(run.seconds for run in self.runs)
        head = f"{self.kernel} (simulated {self.arch}): {len(self.runs)} runs, {seconds:.1f} s"
        if self.ok:
            return f"{head}: nothing found"
        bad = next(run for run in self.runs if not run.ok)
        again = f"first seen with seed={bad.seed}, policy={bad.policy!r}"
        return "\n".join([f"{head}: {len(self.findings)} findings, {again}", *map(str, self.findings)])

    @property
    def barriers(self) -> list[BarrierUse]:
        """How each barrier was used, summed over the runs."""
        total: dict[str, BarrierUse] = {}
        for use in (use for run in self.runs for use in run.barriers):
            entry = total.setdefault(use.name, BarrierUse(use.name, use.arrive_count))
            entry.phases += use.phases
            entry.waits += use.waits
            entry.blocked += use.blocked
        return list(total.values())

    def barrier_table(self) -> str:
        """:attr:`barriers` as text. A wait that blocked had to wait, at the pace of the simulation."""
        rows = [("barrier", "arrivals", "phases", "waits", "blocked")]
        rows += [(u.name, str(u.arrive_count), str(u.phases), str(u.waits), str(u.blocked)) for u in self.barriers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *numbers in rows:
            aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *aligned]))
        return "\n".join(lines)

    def to_json(self) -> str:
        data: dict[str, Any] = {"kernel": self.kernel, "arch": self.arch, "simulated": True, "ok": self.ok}
        data["findings"] = [asdict(finding) for finding in self.findings]
        data["runs"] = [{**asdict(run), "findings": [finding.kind for finding in run.findings]} for run in self.runs]
        return json.dumps(data, indent=1)

    def require_ok(self) -> None:
        """Raise an :class:`AssertionError` with the whole report if anything was found."""
        if not self.ok:
            raise AssertionError(str(self))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of the same kind at the same lines become one with their number."""
    found: dict[Any, list[Any]] = {}
    for finding in findings:
        key = (finding.kind, tuple(place.frames[:1] for place in finding.places), finding.buffer.partition("[")[0])
        entry = found.setdefault(key, [finding, 0])
        entry[1] += finding.count
    return [
        Finding(first.kind, first.message, first.places, first.buffer, count, first.seed, first.policy)
        for first, count in found.values()
    ]
