"""Every access to memory, checked: bounds, races, missing fences, bytes that were never written."""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import Access, Actor, Lane, Region, conflicts
from .cta import AbandonedError, Cta
from .globalmem import Box, GlobalMemory, Storage
from .memory import Space, View
from .numerics import combined, numpy_type, poisoned
from .scheduler import Operation, Scheduler

STORE_LANES = 64  # of a CTA


class CheckedMemory:
    """What a launch reads and writes."""

    scheduler: Scheduler

    def __init__(self, *, detect_races: bool) -> None:
        self.globals = GlobalMemory()
        self.detect_races = detect_races
        self._poison: dict[Any, str] = {}  # label of a buffer by the line that read it before it was written
        self._write_lanes: dict[Cta, list[Lane]] = {}

    def find(self, kind: str, message: str, wheres: list[Any], buffer: str = "") -> None:
        """A finding, with the source lines that it involves."""
        raise NotImplementedError

    def complain(self, kind: str, message: str) -> None:
        """A finding at the present line of the present task, or where the present operation was issued."""
        raise NotImplementedError

    # Shared and tensor memory --------------------------------------------------------------------------------------

    def read(self, view: View, actor: Actor) -> tuple[np.ndarray, bool]:
        """A copy of the elements, in their logical shape, and whether all of them were ever written."""
        space = self._enter(view)
        region = space.region(view)
        if self.detect_races:
            self._check(region, view, actor, "read")
        whole = bool(region.complete)
        if not whole:
            whole = region.complete = bool(space.written_mask(view).all())
        return space.array(view).copy().reshape(view.logical_shape), whole

    def write(self, view: View, values: np.ndarray, actor: Actor) -> None:
        """Poison among floating-point values leaves its bytes as if they had not been written."""
        space = self._enter(view)
        region = space.region(view)
        if self.detect_races:
            self._check(region, view, actor, "write")
        target = space.array(view)
        target[...] = values if values.shape == view.shape else values.reshape(view.shape)
        undefined = poisoned(target, view.dtype) if view.dtype.is_floating() else None
        if undefined is not None and undefined.any():
            space.written_mask(view)[...] = ~undefined[..., None]
            for other in region.overlapping:
                other.complete = False
        elif not region.complete:
            space.written_mask(view)[...] = True
            region.complete = True

    def note_poison(self, label: str, where: Any) -> None:
        """Bytes that were never written have been read. That matters if it shows in the results."""
        if len(self._poison) < 64:
            self._poison.setdefault(where, label)

    def refuse_poison(self, values: np.ndarray, dtype: Any, name: str, actor: Actor) -> None:
        if dtype.is_floating() and poisoned(values, dtype).any():
            sources = list(self._poison.items())[-3:]
            read = ", ".join(dict.fromkeys(label for _, label in sources)) or "shared or tensor memory"
            self.find(
                "poison",
                f"{actor.name} writes to global {name} what was computed from bytes of {read} that were never written",
                [actor.where, *[where for where, _ in sources]],
                name,
            )

    def _enter(self, view: View) -> Space:
        view.allocation.owner.place_allocations()  # the place is the same in every CTA of a cluster
        if not 0 <= (view.buffer or 0) < view.allocation.count:
            self.complain(
                "out-of-bounds", f"buffer {view.buffer} of {view.allocation.name}, which has {view.allocation.count}"
            )
            raise AbandonedError
        cta: Cta = view.cta
        return cta.space(view)

    def _check(self, region: Region, view: View, actor: Actor, kind: str) -> None:
        racing, unfenced = conflicts(region, actor, kind)
        for other, access in racing:
            self._race(actor, kind, view.label + view.cta.name, access, other.name)
        for access in unfenced:
            self.find(
                "proxy-fence",
                f"{actor.name} reads {view.label}{view.cta.name}, which {access.name} wrote through the cluster's "
                'window, without fence("async_shared") between them',
                [actor.where, access.where],
                view.label,
            )

    def _race(self, actor: Actor, kind: str, name: str, access: Access, other_name: str) -> None:
        both = f" as {other_name}" if other_name and other_name != name.split(" of ")[0] else ""
        self.find(
            "race",
            f"{kind} of {name} by {actor.name}, and {access.kind}{both} by {access.name}, in no order",
            [actor.where, access.where],
            name,
        )

    # Global memory -------------------------------------------------------------------------------------------------

    def box(self, desc: Any, offsets: list[int], dtype: Any) -> Box:
        """What a TMA operation on a block at ``offsets`` moves."""
        found = self.globals.box(desc, offsets, dtype, desc.block_shape)
        if found is None:
            shape = list(desc.shape)
            self.complain(
                "out-of-bounds", f"a TMA descriptor of shape {shape} reaches beyond the tensor that it describes"
            )
            raise AbandonedError
        return found

    def mark_box(self, box: Box, kind: str, actor: Actor, *, changes: bool = True) -> None:
        """Record an access; a write that ``changes`` nothing races with nobody."""
        if self.detect_races:
            for access in self.globals.mark_box(box, kind, actor):
                if changes and box.storage is not None:
                    self._race(actor, kind, f"global {box.storage.name}", access, "")

    def write_global(self, operation: Operation, desc: Any, offsets: list[int], block: np.ndarray, kind: Any) -> None:
        """The second half of an asynchronous store, of which no task learns before the launch ends.

        So its lane cannot be used again by the rule. Lanes take turns instead: two stores of one CTA that are far apart
        count as ordered.
        """
        lanes = self._write_lanes.setdefault(operation.issuer.cta, [])
        lane = lanes.pop(0) if len(lanes) == STORE_LANES else self.scheduler.lanes.new()
        lanes.append(lane)
        lane.tick += 1
        clock = operation.clock.copy()
        clock.set(lane.index, lane.tick)
        actor = Actor(operation.name, clock, lane.index, operation.where, is_async=True)
        self.put_block(actor, desc, offsets, block, kind)

    def put_block(self, actor: Actor, desc: Any, offsets: list[int], block: np.ndarray, kind: Any) -> None:
        """Write a block to a descriptor's tensor, or with ``kind`` combine the two; what lies outside is dropped."""
        box = self.box(desc, offsets, block.dtype)
        values = block[box.inside]
        if kind is not None:
            self.mark_box(box, "atomic", actor)
        else:
            self.mark_box(box, "write", actor, changes=not np.array_equal(box.data, values))
        if box.storage is not None:
            self.refuse_poison(values, desc.dtype, box.storage.name, actor)
        box.data[...] = values if kind is None else combined(kind, box.data, values, desc.dtype)

    def mark_addresses(
        self, storage: Storage, addresses: np.ndarray, kind: str, actor: Actor, *, changes: bool = True
    ) -> None:
        if self.detect_races:
            for access in self.globals.mark_addresses(storage, addresses, kind, actor):
                if changes:
                    self._race(actor, kind, f"global {storage.name}", access, "")

    def gather(self, ptrs: Any, mask: Any, other: Any, actor: Actor) -> np.ndarray:
        """The elements at these addresses, which are known to be good; ``other`` or zero where masked."""
        kind = np.dtype(numpy_type(ptrs.get_element_ty()))
        result = np.zeros(ptrs.data.shape, kind)
        if other is not None:
            result[...] = other.data
        chosen = np.broadcast_to(mask.data, ptrs.data.shape)
        addresses = ptrs.data[chosen]
        if addresses.size:
            storage = self.globals.find(int(addresses.min()), int(addresses.max()) + kind.itemsize)
            assert storage is not None
            self.mark_addresses(storage, addresses, "read", actor)
            result[chosen] = storage.elements(addresses, kind)
        return result

    def locate(self, addresses: np.ndarray, size: int) -> Storage | None:
        """The storage of all these addresses of elements of ``size`` bytes; reports what lies in none."""
        first, end = int(addresses.min()), int(addresses.max()) + size
        storage = self.globals.find(first, end)
        if storage is None:
            self.complain("out-of-bounds", "a global address outside of the tensors that the kernel was given")
        return storage
