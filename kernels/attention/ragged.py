"""Blocks of the rows of one sequence, moved by TMA, which knows where the sequence ends.

The descriptors are those of ``triton.tools.ragged_tma``: whatever a block has beyond the end of its sequence is read as
zeros, and is not written. So no kernel that uses them ever reads or writes a neighbour's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor
from triton.language.core import _aggregate as aggregate
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from .pipeline_sm100 import LEADER

RAGGED_ROWS = 2**30  # that a ragged descriptor can have


def ragged_blocks(packed: Tensor, block: int, columns: int | None = None) -> TensorDescriptor:
    """Ragged descriptor of ``packed`` ``[rows, heads, D]``: ``block`` rows, or ``columns`` of them, of one head."""
    rows, heads, head_dim = packed.shape
    width = heads * head_dim
    # A contiguous tensor of one row may have any row stride, also one that TMA would refuse.
    flat = packed.as_strided((rows, width), (width, 1))
    return create_ragged_descriptor(flat, [block, columns or head_dim])


@aggregate
class Rows:
    """The rows of one sequence in a packed tensor ``[rows, columns]``."""

    start: tl.tensor
    length: tl.tensor

    @triton.jit
    def at(self, row, column):
        """Coordinates, for a ragged descriptor, of the block whose first row is ``row`` of the sequence."""
        anchor, end, place = to_ragged_indices(self.start, self.length, row)
        return anchor, end, place, column


@aggregate
class Operand:
    """A matmul's operand: ``depth`` slots of shared memory that TMA fills, in each CTA of a pair its own block.

    The leader is told when a slot is full in both CTAs. Both are told when the matmuls that read it are complete. Both
    sides count the uses, and the count gives the slot and the phase of its barriers.
    """

    tiles: tlx.buffered_tensor
    barriers: tlx.mbarrier  # of every slot that it is full, then of every slot that it is empty
    depth: tl.constexpr
    ctas: tl.constexpr

    @triton.jit
    def tile(self, count):
        return self.tiles[count % self.depth]

    @triton.jit
    def wait(self, count):
        """Until the ``count``-th use is there."""
        tlx.barrier_wait(self.barriers[count % self.depth], (count // self.depth) & 1)

    @triton.jit
    def released(self, count):
        """The barrier that the last matmul of the ``count``-th use completes."""
        return self.barriers[self.depth + count % self.depth]

    @triton.jit
    def load(self, count, descriptor, rows, row, column):
        """When the slot is free, start to load the block of ``rows`` from ``row`` on."""
        BYTES: tl.constexpr = self.tiles.shape[0] * self.tiles.shape[1] * tlx.size_of(self.tiles.dtype)
        full = self.barriers[count % self.depth]
        tlx.barrier_wait(self.released(count), ((count // self.depth) & 1) ^ 1)
        if self.ctas == 2:
            tlx.barrier_expect_bytes(full, 2 * BYTES, pred=tlx.cluster_cta_rank() == LEADER)
        else:
            tlx.barrier_expect_bytes(full, BYTES)
        place = rows.at(row, column)
        tlx.async_descriptor_load(descriptor, self.tile(count), place, full, two_ctas=self.ctas == 2)


@triton.jit
def make_operand(
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CTAS: tl.constexpr
):
    """``DEPTH`` slots of blocks ``[ROWS, COLUMNS]``."""
    tiles = tlx.local_alloc((ROWS, COLUMNS), DTYPE, DEPTH)
    return Operand(tiles, tlx.alloc_barriers(num_barriers=2 * DEPTH, arrive_count=1), DEPTH, CTAS)
