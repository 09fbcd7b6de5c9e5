"""Vector clocks: what happens before what, and the races between accesses that nothing orders.

A *lane* is a line of events in order: a task, or a chain of asynchronous operations of which each began after its
predecessor was known to be complete. A clock is an int64 array ``[2, lanes]``. Row 0 holds the last event of every lane
that happened before now. Row 1 holds the last event whose generic writes are visible to the asynchronous proxy, which
takes a fence: it advances to row 0 when a task executes one. Both rows travel together through barriers.

The scheme is that of FastTrack (Flanagan and Freund, 2009, https://doi.org/10.1145/1542476.1542490) with the lanes of
finished operations used again, so that clocks stay short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

ORDER, PROXY = 0, 1


class Clock:
    """A mutable vector clock."""

    __slots__ = ("rows",)

    def __init__(self, rows: np.ndarray | None = None) -> None:
        self.rows = np.zeros((2, 32), dtype=np.int64) if rows is None else rows

    def copy(self) -> Clock:
        return Clock(self.rows.copy())

    def join(self, other: Clock) -> None:
        """Everything that happened before ``other`` happened before this, too."""
        mine, theirs = self.rows, other.rows
        if mine.shape[1] < theirs.shape[1]:
            self._grow(theirs.shape[1])
            mine = self.rows
        if mine.shape[1] > theirs.shape[1]:
            mine = mine[:, : theirs.shape[1]]
        np.maximum(mine, theirs, out=mine)

    def at(self, lane: int) -> int:
        rows = self.rows
        return int(rows[ORDER, lane]) if lane < rows.shape[1] else 0

    def fenced(self, lane: int) -> int:
        rows = self.rows
        return int(rows[PROXY, lane]) if lane < rows.shape[1] else 0

    def set(self, lane: int, tick: int) -> None:
        if lane >= self.rows.shape[1]:
            self._grow(max(lane + 1, 2 * self.rows.shape[1]))
        self.rows[ORDER, lane] = tick

    def fence(self) -> None:
        """A fence between the proxies: all that happened before is now visible to asynchronous operations."""
        np.copyto(self.rows[PROXY], self.rows[ORDER])

    def _grow(self, lanes: int) -> None:
        rows = np.zeros((2, lanes), dtype=np.int64)
        rows[:, : self.rows.shape[1]] = self.rows
        self.rows = rows


@dataclass(slots=True)
class Lane:
    index: int
    tick: int = 0
    busy: bool = False


@dataclass
class Lanes:
    """Hands out lanes."""

    count: int = 0

    def new(self) -> Lane:
        self.count += 1
        return Lane(self.count - 1)

    def take(self, pool: list[Lane], clock: Clock) -> Lane:
        """A lane of ``pool`` whose events are all known to ``clock``, or a new one."""
        for lane in pool:
            if not lane.busy and clock.at(lane.index) >= lane.tick:
                break
        else:
            lane = self.new()
            pool.append(lane)
        lane.busy = True
        return lane


@dataclass(frozen=True, slots=True)
class Actor:
    """Who performs an access: its name for reports, its clock and its lane."""

    name: str
    clock: Clock
    lane: int
    where: Any  # see `places`
    is_async: bool = False  # by the asynchronous proxy
    stores_by: str = "store"  # what an ordinary write is: "store", or "remote" through the cluster's window

    def lacks_fence(self, write: Access) -> bool:
        """Whether this read of the asynchronous proxy may miss an ordinary ``write`` that happened before.

        The compiler puts a fence before a matmul, and before a TMA store, that reads what a ``local_store`` wrote, also
        another warp group's. It knows nothing of stores through the cluster's window. (fbtriton 3.7.4, from the PTX of
        kernels without explicit fences.)
        """
        return self.is_async and write.stored_by == "remote" and self.clock.fenced(write.lane) < write.tick


@dataclass(frozen=True, slots=True)
class Access:
    """One recorded access to memory."""

    lane: int
    tick: int
    name: str
    where: Any
    kind: str  # "read", "write", or "atomic"
    stored_by: str = ""  # how an ordinary write was made; "" if it was not one


@dataclass(slots=True, eq=False)
class Region:
    """Bytes of a memory that some view covers: sorted starts of runs of ``width`` bytes each, and who touched them."""

    starts: np.ndarray
    width: int
    begin: int
    end: int
    name: str
    overlapping: list[Region] = field(default_factory=list)  # itself among them
    covered: list[Region] = field(default_factory=list)  # regions that lie within it, itself among them
    writes: dict[int, Access] = field(default_factory=dict)  # the last of each lane
    reads: dict[int, Access] = field(default_factory=dict)
    complete: bool = False  # every byte has been written

    def overlaps(self, other: Region) -> bool:
        if self.begin >= other.end or other.begin >= self.end:
            return False
        few, many = (self, other) if len(self.starts) <= len(other.starts) else (other, self)
        # The last run of `many` that starts before a run of `few` ends is the one that may reach into it.
        last = np.searchsorted(many.starts, few.starts + few.width, side="left") - 1
        hits = last >= 0
        return bool(np.any(many.starts[last[hits]] + many.width > few.starts[hits]))

    def covers(self, other: Region) -> bool:
        if other.begin < self.begin or other.end > self.end:
            return False
        run = np.searchsorted(self.starts, other.starts, side="right") - 1
        return bool(np.all(run >= 0) and np.all(self.starts[run] + self.width >= other.starts + other.width))


class RegionTable:
    """The regions of one memory."""

    def __init__(self) -> None:
        self._regions: dict[Any, Region] = {}

    def __iter__(self) -> Any:
        return iter(self._regions.values())

    def get(self, key: Any) -> Region | None:
        return self._regions.get(key)

    def add(self, key: Any, starts: np.ndarray, width: int, name: str) -> Region:
        region = Region(starts, width, int(starts[0]), int(starts[-1]) + width, name)
        for other in self._regions.values():
            if region.overlaps(other):
                region.overlapping.append(other)
                other.overlapping.append(region)
                if region.covers(other):
                    region.covered.append(other)
                if other.covers(region):
                    other.covered.append(region)
        region.overlapping.append(region)
        region.covered.append(region)
        self._regions[key] = region
        return region


def conflicts(region: Region, actor: Actor, kind: str) -> tuple[list[tuple[Region, Access]], list[Access]]:
    """Record an access; returns earlier ones that race with it, and writes that lack a fence between the proxies."""
    clock = actor.clock
    racing: list[tuple[Region, Access]] = []
    unfenced: list[Access] = []
    for other in region.overlapping:
        for access in other.writes.values():
            if access.lane != actor.lane and clock.at(access.lane) < access.tick:
                racing.append((other, access))
            elif kind == "read" and actor.lacks_fence(access):
                unfenced.append(access)
        if kind == "write":
            for access in other.reads.values():
                if access.lane != actor.lane and clock.at(access.lane) < access.tick:
                    racing.append((other, access))
    tick = clock.at(actor.lane)
    if kind == "write":
        for other in region.covered:
            other.writes.clear()
            other.reads.clear()
        stored_by = "" if actor.is_async else actor.stores_by
        region.writes[actor.lane] = Access(actor.lane, tick, actor.name, actor.where, kind, stored_by)
    else:
        region.reads[actor.lane] = Access(actor.lane, tick, actor.name, actor.where, kind)
    return racing, unfenced
