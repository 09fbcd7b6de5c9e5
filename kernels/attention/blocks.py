"""Device functions shared by the attention kernels: moving rows, which blocks to visit, and the mask inside one.

Coordinates: query ``i`` of ``q_len`` faces key ``i + k_len - q_len`` (bottom-right alignment) and sees the keys up to
``left`` before and ``right`` after it. A bound that is None does not exist, at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, first, length, stride, ROWS: tl.constexpr, D: tl.constexpr, BOUNDED: tl.constexpr):
    """``[ROWS, D]`` rows from ``first`` on. ``BOUNDED`` reads rows from ``length`` on as zero, never as a neighbour's."""
    offset = tl.arange(0, ROWS)
    # The block's origin is 64-bit; within a block 32 bits are enough and keep the per-thread address arithmetic cheap.
    pointers = base + tl.cast(first, tl.int64) * stride + (offset[:, None] * stride + tl.arange(0, D)[None, :])
    if BOUNDED:
        rows = tl.load(pointers, mask=(first + offset < length)[:, None], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def store_rows(base, first, length, stride, rows):
    """Store ``rows`` ``[ROWS, D]`` from row ``first`` on, except those from ``length`` on."""
    offset = tl.arange(0, rows.shape[0])
    column = tl.arange(0, rows.shape[1])
    pointers = base + tl.cast(first, tl.int64) * stride + (offset[:, None] * stride + column[None, :])
    tl.store(pointers, rows.to(base.dtype.element_ty), mask=(first + offset < length)[:, None])


@triton.jit
def load_row_values(base, first, length, absent, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """``[ROWS]`` per-row values from ``first`` on; with ``BOUNDED``, ``absent`` from ``length`` on."""
    offset = first + tl.arange(0, ROWS)
    if BOUNDED:
        values = tl.load(base + offset, mask=offset < length, other=absent)
    else:
        values = tl.load(base + offset)
    return values


@triton.jit
def visible_span(first, length, before, after, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Where a block of ``ROWS`` rows has to look on the other side, which has ``length`` rows and is read in ``STEP``s.

    ``first`` is the position that the block's first row faces. A row at position ``p`` sees ``p - before`` to ``p + after``.
    Returns ``begin, bulk_begin, bulk_end, end``: blocks in ``[bulk_begin, bulk_end)`` are seen whole by every row; those in
    ``[begin, bulk_begin)`` and ``[bulk_end, end)`` need a mask; nothing else is seen by any row.
    """
    begin = 0
    bulk_begin = 0
    bulk_end = length // STEP * STEP
    end = length
    if before is not None:
        begin = tl.maximum(first - before, 0) // STEP * STEP
        bulk_begin = tl.cdiv(tl.maximum(first + ROWS - 1 - before, 0), STEP) * STEP
    if after is not None:
        end = tl.minimum(end, tl.maximum(first + ROWS + after, 0))
        bulk_end = tl.minimum(bulk_end, tl.maximum(first + 1 + after, 0) // STEP * STEP)
    bulk_end = tl.maximum(bulk_begin, bulk_end)
    return begin, bulk_begin, bulk_end, end


@triton.jit
def clip_to_window(seen, facing, key, left, right):
    """``seen``, less the pairs outside the window of a query that faces position ``facing``; all broadcast together."""
    if left is not None:
        seen = seen & (key >= facing - left)
    if right is not None:
        seen = seen & (key <= facing + right)
    return seen
