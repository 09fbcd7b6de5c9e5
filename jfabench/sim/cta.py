"""A CTA and its cluster: memories, barriers, and where allocations lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from . import memory
from .barriers import Barrier, NamedBarriers, Rendezvous
from .memory import AliasSpec, Allocation, Space, View
from .places import Where

Find = Callable[[str, str, list[Where], str], None]
"""Reports a finding: kind, message, source lines, buffer."""


class AbandonedError(Exception):
    """The launch cannot go on; what is wrong has been reported."""


@dataclass(eq=False)
class Cluster:
    """CTAs that are started together, and reach into each other's shared memory."""

    ctas: list[Cta] = field(default_factory=list)
    meeting: Rendezvous | None = None
    running: int = 0  # of them


@dataclass(eq=False)
class Cta:
    """One cooperative thread array."""

    index: tuple[int, int, int]
    find: Find
    complain: Callable[[str, str], None]
    cluster: Cluster
    rank: int
    name: str
    smem: Space
    tmem: Space | None
    allocations: list[Allocation] = field(default_factory=list)
    barriers: dict[tuple[int, int], Barrier] = field(default_factory=dict)  # by allocation and buffer
    smem_end: int = 0
    tmem_end: int = 0  # bytes of a lane
    tmem_columns: float = 0.0  # on hardware
    placed: int = 0

    def __post_init__(self) -> None:
        self.named = NamedBarriers(self.complain)

    def space(self, view: View) -> Space:
        space = self.smem if view.allocation.space == "smem" else self.tmem
        assert space is not None
        return space

    def place_allocations(self) -> None:
        """Give every allocation its place, in the order of their declaration. They may overlap as declared."""
        while self.placed < len(self.allocations):
            allocation = self.allocations[self.placed]
            self.placed += 1
            if allocation.base is None:
                self._place(allocation)

    def _place(self, allocation: Allocation) -> None:
        spec, alias = allocation.spec, allocation.alias
        if alias is not None:
            allocation.base = alias.base
        elif spec is not None:
            self._place_spec(spec, allocation)
        else:  # the largest of those that begin here decides
            sharing = [other for other in self.allocations if other.root is allocation]
            allocation.base = self._reserve(allocation, max(other.count * other.size for other in sharing))

    def _place_spec(self, spec: AliasSpec, first: Allocation) -> None:
        if spec.tree is None:
            sizes = [member.count * member.size for member in spec.members]
            base = self._reserve(first, max(*sizes, spec.size or 0))
            for member in spec.members:
                member.base = base
            return
        memory.place_tree(spec.tree, 0, memory.extent(spec.tree))
        placed = [member for member in spec.members if member.base is not None]
        sizes = [member.count // member.group * member.pitch for member in placed]
        base = self._reserve(placed[sizes.index(max(sizes))], max(*sizes, spec.size or 0))
        for member in spec.members:
            member.base = base + (member.base or 0)

    def _reserve(self, allocation: Allocation, size: int) -> int:
        if allocation.space == "smem":
            alignment = 8 if allocation.is_barrier else memory.SMEM_ALIGNMENT
            start = -(-self.smem_end // alignment) * alignment
            self.smem_end = start + size
            used, limit, unit = self.smem_end, self.smem.size, "bytes of shared memory"
        else:
            start = -(-self.tmem_end // 4) * 4
            self.tmem_end = start + size
            self.tmem_columns += size / 4 * allocation.share
            used, limit, unit = int(self.tmem_columns), memory.TMEM_COLUMNS, "columns of tensor memory"
        if used > limit:
            self.find(
                "capacity",
                f"{used} {unit} with {allocation.name or 'this allocation'}; there are {limit}",
                [allocation.where],
                allocation.name,
            )
            raise AbandonedError
        return start

    def allocate(self, allocation: Allocation) -> Allocation:
        allocation.owner, allocation.number = self, len(self.allocations)
        self.allocations.append(allocation)
        return allocation

    def barrier(self, view: View) -> Barrier | None:
        """None before the CTA has initialised it."""
        return self.barriers.get((view.allocation.number, view.buffer or 0))
