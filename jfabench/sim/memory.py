"""Shared and tensor memory of a CTA: poisoned bytes, allocations that may overlap, and views of them.

Both memories are flat bytes. Tensor memory is ``[128 lanes, 512 columns of 4 bytes]``, a lane after the other, so that
its views are strided like any other. A view is the same in every CTA of a cluster: which CTA's memory it stands for is
a field, so that a peer's memory is the same view with another CTA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import triton.language as tl

from .clocks import RegionTable
from .numerics import POISON, numpy_type
from .runtime import KernelError

TMEM_LANES = 128
TMEM_COLUMNS = 512
# Bytes of a lane. On hardware a buffer of 64 rows takes half of its columns, in all lanes. Here it takes all of them,
# in half of the lanes, and so there must be room for twice the columns.
TMEM_PITCH = 2 * 4 * TMEM_COLUMNS
SMEM_BYTES = {90: 232448, 100: 232448, 103: 232448, 120: 101376}  # that one CTA may have; CUDA programming guide
SMEM_ALIGNMENT = 128


@dataclass(eq=False)
class Allocation:
    """What one ``local_alloc`` (or ``alloc_barriers``) asks for, and where it lies once that is decided.

    Sizes and offsets are bytes; in tensor memory, bytes of a lane. Consecutive buffers lie ``pitch`` apart, or, where
    ``group`` of them make one logical buffer, side by side within it.
    """

    space: str  # "smem" or "tmem"
    size: int  # of one buffer
    count: int
    where: Any
    name: str = ""
    base: int | None = None
    pitch: int = 0
    group: int = 1
    alias: Allocation | None = None  # begins where this one does
    spec: AliasSpec | None = None
    is_barrier: bool = False
    share: float = 1.0  # of the columns that it has here, what it has on hardware
    owner: Any = None  # CTA
    number: int = 0  # among its owner's; the same in every CTA of a cluster

    def __post_init__(self) -> None:
        self.pitch = self.pitch or self.size

    @property
    def root(self) -> Allocation:
        """The allocation that it begins with, be it itself."""
        return self if self.alias is None else self.alias.root

    def start(self, buffer: int) -> int:
        assert self.base is not None
        return self.base + buffer // self.group * self.pitch + buffer % self.group * self.size


@dataclass(eq=False)
class AliasSpec:
    """Memory that several allocations share; how, is said after they are declared."""

    space: str
    size: int | None
    members: list[Allocation] = field(default_factory=list)
    tree: Group | None = None


@dataclass(eq=False)
class Group:
    """A tree of allocations: "shared" elements lie in one place, "distinct" ones one after the other."""

    elements: list[Allocation | Group]
    kind: str
    size: int  # so many consecutive buffers count as one


def extent(node: Allocation | Group) -> int:
    """Bytes that one logical buffer of a tree takes: shared = the largest, distinct = the sum."""
    if isinstance(node, Allocation):
        return node.size
    extents = [extent(element) for element in node.elements]
    return node.size * (max(extents) if node.kind == "shared" else sum(extents))


def place_tree(node: Allocation | Group, base: int, pitch: int, group: int = 1) -> None:
    """Give the allocations of a tree their place, with one ``pitch`` between logical buffers for the whole tree."""
    if isinstance(node, Allocation):
        node.base, node.pitch, node.group = base, pitch, group
        return
    for element in node.elements:
        place_tree(element, base, pitch, group * node.size)
        if node.kind == "distinct":
            base += extent(element) * group * node.size


@dataclass(frozen=True, slots=True)
class View:
    """Strided elements of one buffer of an allocation in the memory of one CTA: the handle of a ``buffered_tensor``."""

    allocation: Allocation
    cta: Any
    dtype: tl.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    offset: int = 0  # bytes, in the buffer
    buffer: int | None = None  # None: all of them, not yet indexed

    @property
    def itemsize(self) -> int:
        return max(1, int(self.dtype.primitive_bitwidth) // 8)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """What a kernel sees. Two kinds of buffers in tensor memory have more dimensions here.

        Scales of a block-scaled matmul: ``[rows / 128, 4, 32, K / 4, 4]``. 64 rows of a pair of CTAs: ``[64, 2,
        N / 2]``; the right half of the columns lies in lanes 64 to 127.
        """
        if self.allocation.space == "tmem":
            if len(self.shape) == 5:
                return self.shape[0] * 128, self.shape[3] * self.shape[4]
            if len(self.shape) == 3:
                return self.shape[0], self.shape[1] * self.shape[2]
        return self.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def label(self) -> str:
        name = self.allocation.name or self.allocation.space
        return name if self.buffer is None or self.allocation.count == 1 else f"{name}[{self.buffer}]"

    def on(self, cta: Any) -> View:
        return self if cta is self.cta else replace(self, cta=cta)

    def index(self, i: int) -> View:
        """The ``i``-th buffer; of a buffer, the ``i``-th slice of its first dimension."""
        if self.buffer is None:
            return replace(self, buffer=i)
        if len(self.shape) == 1:
            return replace(self, shape=(1,), offset=self.offset + i * self.strides[0])
        return replace(self, shape=self.shape[1:], strides=self.strides[1:], offset=self.offset + i * self.strides[0])

    def slice(self, offsets: list[int], shape: list[int]) -> View:
        moved = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))
        return replace(self, shape=tuple(shape), offset=self.offset + moved)

    def columns(self, offset: int, count: int) -> View:
        """Some columns of a buffer in tensor memory."""
        if len(self.shape) == 2:
            return self.slice([0, offset], [self.shape[0], count])
        half = self.shape[-1]
        if len(self.shape) != 3 or offset // half != (offset + count - 1) // half:
            raise KernelError(
                f"columns {offset} to {offset + count} of a buffer of {list(self.logical_shape)} in tensor memory"
            )
        moved = self.offset + offset // half * self.strides[1] + offset % half * self.strides[2]
        return replace(self, shape=(self.shape[0], count), strides=(self.strides[0], self.strides[2]), offset=moved)

    def permute(self, dims: list[int]) -> View:
        return replace(self, shape=tuple(self.shape[d] for d in dims), strides=tuple(self.strides[d] for d in dims))

    def reinterpret(self, dtype: tl.dtype, shape: list[int]) -> View:
        """The same bytes as another type or shape; in tensor memory the lanes stay what they are."""
        size = max(1, dtype.primitive_bitwidth // 8)
        if self.allocation.space == "tmem":
            if len(self.shape) != 2:
                raise KernelError(f"a buffer of {list(self.logical_shape)} in tensor memory as another type")
            strides: tuple[int, ...] = (TMEM_PITCH, size)
        else:
            strides = contiguous_strides(shape, size)
        return replace(self, dtype=dtype, shape=tuple(shape), strides=strides)


def contiguous_strides(shape: Any, itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for extent_ in reversed(shape):
        strides.append(step)
        step *= extent_
    return tuple(reversed(strides))


def runs(start: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[np.ndarray, int]:
    """The bytes of a strided view: sorted starts of runs, and the width of a run."""
    width = itemsize
    outer: list[tuple[int, int]] = []
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count == 1:
            continue
        if not outer and stride == width:
            width *= count
        elif stride:
            outer.append((stride, count))
    starts = np.array([start], dtype=np.int64)
    for stride, count in reversed(outer):
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return np.sort(starts), width


class Space:
    """The bytes of one memory of one CTA, which of them were written, and the history of their regions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(size, POISON, dtype=np.uint8)
        self.written = np.zeros(size, dtype=np.bool_)
        self.regions = RegionTable()

    def array(self, view: View) -> np.ndarray:
        start = view.allocation.start(view.buffer or 0) + view.offset
        return np.ndarray(view.shape, numpy_type(view.dtype), self.bytes.data, start, view.strides)

    def written_mask(self, view: View) -> np.ndarray:
        """A bool for every first byte of an element."""
        start = view.allocation.start(view.buffer or 0) + view.offset
        return np.ndarray((*view.shape, view.itemsize), np.bool_, self.written.data, start, (*view.strides, 1))

    def region(self, view: View) -> Any:
        start = view.allocation.start(view.buffer or 0) + view.offset
        key = (start, view.shape, view.strides)
        found = self.regions.get(key)
        if found is None:
            starts, width = runs(start, view.shape, view.strides, view.itemsize)
            found = self.regions.add(key, starts, width, view.label)
        return found
