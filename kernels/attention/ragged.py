"""Blocks of the rows of one sequence, moved by TMA, which knows where the sequence ends.

The descriptors are those of ``triton.tools.ragged_tma``: whatever a block has beyond the end of its sequence is read as
zeros, and is not written. So no kernel that uses them ever reads or writes a neighbour's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.core import _aggregate as aggregate
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

RAGGED_ROWS = 2**30  # that a ragged descriptor can have
ANCHOR = tl.constexpr(RAGGED_ROWS)  # first coordinate of any block


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
