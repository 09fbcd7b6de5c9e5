"""Global memory: the tensors that a kernel was given, bounds, and races between accesses that nothing orders.

Every element remembers its last plain write, plain read and atomic access. Two unordered accesses race if they touch
the same element, one of them writes, and not both are atomic; a reduction by TMA counts as atomic.
"""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from .clocks import Access, Actor, Clock


@dataclass(eq=False)
class Storage:
    """The bytes of one tensor's storage."""

    name: str
    start: int  # address
    size: int
    granule: int  # bytes that are tracked as one
    keep: Any  # what owns the memory

    def __post_init__(self) -> None:
        buffer = (ctypes.c_uint8 * self.size).from_address(self.start)
        self.bytes = np.ctypeslib.as_array(buffer)
        self._marks: dict[str, np.ndarray] = {}

    def marks(self, kind: str) -> np.ndarray:
        """Index of the last access of a kind to each granule; 0: none."""
        if kind not in self._marks:
            self._marks[kind] = np.zeros(-(-self.size // self.granule), dtype=np.int32)
        return self._marks[kind]

    def seen(self, kind: str) -> bool:
        return kind in self._marks

    def elements(self, addresses: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
        """Those at one-dimensional ``addresses``."""
        offsets = (addresses - np.uint64(self.start)).astype(np.int64)
        whole = self._as(kind, offsets)
        if whole is not None:
            found: np.ndarray = whole[offsets // kind.itemsize]
            return found
        return np.asarray(self.bytes[offsets[:, None] + np.arange(kind.itemsize)].view(kind)[:, 0])

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        offsets = (addresses - np.uint64(self.start)).astype(np.int64)
        whole = self._as(values.dtype, offsets)
        if whole is not None:
            whole[offsets // values.itemsize] = values
        else:
            index = offsets[:, None] + np.arange(values.itemsize)
            self.bytes[index] = np.ascontiguousarray(values)[:, None].view(np.uint8)

    def _as(self, kind: np.dtype[Any], offsets: np.ndarray) -> np.ndarray | None:
        """All of it as one array, if these offsets are aligned."""
        if self.start % kind.itemsize or (offsets % kind.itemsize).any():
            return None
        return np.asarray(self.bytes[: self.size // kind.itemsize * kind.itemsize].view(kind))


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor, clipped to it: what a TMA operation moves."""

    storage: Storage | None  # None: nothing of it lies within the tensor
    data: np.ndarray  # a view of the tensor's elements
    marks_offset: int
    marks_strides: tuple[int, ...]
    inside: tuple[slice, ...]  # where they lie in the block

    def marks(self, kind: str) -> np.ndarray:
        assert self.storage is not None
        array = self.storage.marks(kind)
        strides = tuple(stride * array.itemsize for stride in self.marks_strides)
        return np.ndarray(self.data.shape, array.dtype, array.data, self.marks_offset * array.itemsize, strides)


CONFLICTS = {"read": ("write", "atomic"), "write": ("write", "read", "atomic"), "atomic": ("write", "read")}


class GlobalMemory:
    def __init__(self) -> None:
        self._starts: list[int] = []
        self._storages: list[Storage] = []
        self._accesses: list[Access] = [Access(0, 0, "", None, "")]
        self._flags: dict[int, Clock] = {}  # what atomics at an address have released
        self.scratch: list[np.ndarray] = []

    def register(self, name: str, tensor: Any) -> None:
        """Make a torch tensor (its whole storage) accessible."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._add(Storage(name, storage.data_ptr(), storage.nbytes(), tensor.element_size(), storage))

    def new_scratch(self, size: int, alignment: int) -> int:
        array = np.zeros(size + alignment, dtype=np.uint8)
        start = -(-array.ctypes.data // alignment) * alignment
        self._add(Storage("scratch", start, size, 4, array))
        return start

    def _add(self, storage: Storage) -> None:
        place = bisect.bisect_left(self._starts, storage.start)
        if place < len(self._starts) and self._starts[place] == storage.start:
            known = self._storages[place]
            known.granule = min(known.granule, storage.granule)
            return
        self._starts.insert(place, storage.start)
        self._storages.insert(place, storage)

    def find(self, first: int, end: int) -> Storage | None:
        """The storage in which the addresses ``first`` to ``end`` lie."""
        place = bisect.bisect_right(self._starts, first) - 1
        if place < 0:
            return None
        storage = self._storages[place]
        return storage if end <= storage.start + storage.size else None

    def box(self, descriptor: Any, offsets: list[int], dtype: Any, block: tuple[int, ...]) -> Box | None:
        """The part of a descriptor's tensor that a block at ``offsets`` meets; None if that is not in memory."""
        itemsize = np.dtype(dtype).itemsize
        first = [max(0, offset) for offset in offsets]
        end = [min(size, offset + n) for size, offset, n in zip(descriptor.shape, offsets, block, strict=True)]
        inside = tuple(slice(f - o, max(f, e) - o) for f, e, o in zip(first, end, offsets, strict=True))
        counts = tuple(max(0, e - f) for f, e in zip(first, end, strict=True))
        if 0 in counts:
            empty = np.empty(counts, dtype)
            return Box(None, empty, 0, (0,) * len(counts), inside)
        # Addresses are computed modulo 2^64: a descriptor may bound its rows by strides that wrap around.
        origin = descriptor.base + itemsize * sum(f * s for f, s in zip(first, descriptor.strides, strict=True))
        address = origin % 2**64
        steps = [s if n > 1 else 0 for n, s in zip(counts, descriptor.strides, strict=True)]
        last = address + itemsize * (1 + sum((n - 1) * s for n, s in zip(counts, steps, strict=True)))
        storage = self.find(address, last)
        if storage is None:
            return None
        strides = tuple(s * itemsize for s in steps)
        data = np.ndarray(counts, dtype, storage.bytes.data, address - storage.start, strides)
        granule = storage.granule
        marks = tuple(s // granule for s in strides)
        return Box(storage, data, (address - storage.start) // granule, marks, inside)

    def mark_box(self, box: Box, kind: str, actor: Actor) -> list[Access]:
        if box.storage is None:
            return []
        found: list[Access] = []
        for other in CONFLICTS[kind]:
            if box.storage.seen(other):
                found += self._unordered(box.marks(other), actor)
        box.marks(kind)[...] = self._note(kind, actor)
        return found

    def mark_addresses(self, storage: Storage, addresses: np.ndarray, kind: str, actor: Actor) -> list[Access]:
        """``addresses`` is one-dimensional, of elements no larger than a granule."""
        index = (addresses - np.uint64(storage.start)) // np.uint64(storage.granule)
        found: list[Access] = []
        for other in CONFLICTS[kind]:
            if storage.seen(other):
                found += self._unordered(storage.marks(other)[index], actor)
        storage.marks(kind)[index] = self._note(kind, actor)
        return found

    def _note(self, kind: str, actor: Actor) -> int:
        tick = actor.clock.at(actor.lane)
        last = self._accesses[-1]
        if not (last.lane == actor.lane and last.tick == tick and last.where == actor.where and last.kind == kind):
            self._accesses.append(Access(actor.lane, tick, actor.name, actor.where, kind))
        return len(self._accesses) - 1

    def _unordered(self, marks: np.ndarray, actor: Actor) -> list[Access]:
        high = int(marks.max())
        if high == 0:
            return []
        found = []
        for number in [high] if int(marks.min()) == high else np.unique(marks).tolist():
            access = self._accesses[number]
            if number and access.lane != actor.lane and actor.clock.at(access.lane) < access.tick:
                found.append(access)
        return found

    def synchronise(self, address: int, clock: Clock, *, acquire: bool, release: bool) -> None:
        """An atomic access to a flag: what was released there before is known to who acquires it."""
        flag = self._flags.setdefault(address, Clock())
        before = flag.copy() if acquire else None
        if release:
            flag.join(clock)
        if before is not None:
            clock.join(before)
