"""Device functions shared by the attention kernels: moving rows, which blocks to visit, and the mask inside one.

Coordinates: query ``i`` of ``q_len`` faces key ``i + k_len - q_len`` (bottom-right alignment) and sees the keys up to
``left`` before and ``right`` after it. A bound that is None does not exist, at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_block(descriptor, start, first, length, column, BOUNDED: tl.constexpr):
    """``[ROWS, D]`` rows from ``first`` on of the sequence at row ``start``, through a tensor descriptor (TMA).

    The hardware computes the addresses, which frees the registers that decide whether a kernel spills. It knows nothing
    of sequences, so rows from ``length`` on are a neighbour's; ``BOUNDED`` replaces them with zeros, for where they
    would be summed over. As independent rows of a result that are never stored they do no harm.
    """
    rows = descriptor.load([start + first, column])
    if BOUNDED:
        offset = first + tl.arange(0, rows.shape[0])
        rows = tl.where((offset < length)[:, None], rows, 0.0)
    return rows


@triton.jit
def row_pointers(base, row, column, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Pointers ``[ROWS, D]`` from ``row`` on. The origin is 64-bit; within a block 32 bits do and are cheaper."""
    origin = base + tl.cast(row, tl.int64) * stride + column
    return origin + (tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def store_rows(base, start, first, length, column, stride, rows):
    """Store ``[ROWS, D]`` as the rows from ``first`` on of the sequence at row ``start``, up to its ``length``."""
    offset = first + tl.arange(0, rows.shape[0])
    pointers = row_pointers(base, tl.cast(start, tl.int64) + first, column, stride, rows.shape[0], rows.shape[1])
    tl.store(pointers, rows.to(base.dtype.element_ty), mask=(offset < length)[:, None])


@triton.jit
def load_row_values(base, first, length, absent, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """``[ROWS]`` per-row values from ``first`` on; with ``BOUNDED``, ``absent`` from ``length`` on."""
    offset = first + tl.arange(0, ROWS)
    return tl.load(base + offset, mask=offset < length, other=absent) if BOUNDED else tl.load(base + offset)


@triton.jit
def visible_span(first, length, before, after, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Where a block of ``ROWS`` rows has to look on the other side, of ``length`` rows that are read in ``STEP``s.

    ``first`` is the position that the block's first row faces; a row at position ``p`` sees ``p - before`` to
    ``p + after``. Returns ``begin, inner, tail, end``, of which the first three are multiples of ``STEP``: blocks in
    ``[inner, tail)`` exist in full and are seen whole by every row, those in ``[begin, inner)`` and ``[tail, end)``
    cross an edge of the window or the end of the sequence, and no row sees anything else.
    """
    begin = 0
    inner = 0
    tail = length // STEP * STEP
    end = length
    if after is not None:
        end = tl.minimum(end, tl.maximum(first + ROWS + after, 0))
        tail = tl.minimum(tail, tl.maximum(first + 1 + after, 0) // STEP * STEP)
    if before is not None:
        begin = tl.maximum(first - before, 0) // STEP * STEP
        tail = tl.maximum(begin, tail)
        inner = tl.minimum(tl.cdiv(tl.maximum(first + ROWS - 1 - before, 0), STEP) * STEP, tail)
    return begin, inner, tail, end


@triton.jit
def span_blocks(span, STEP: tl.constexpr, EDGE: tl.constexpr):
    """Number of blocks of a :func:`visible_span` that cross an edge (``EDGE``), or that do not."""
    begin, inner, tail, end = span
    return (inner - begin) // STEP + (end - tail + STEP - 1) // STEP if EDGE else (tail - inner) // STEP


@triton.jit
def span_block(span, index, STEP: tl.constexpr, EDGE: tl.constexpr):
    """First row of the ``index``-th of those blocks. Both edges share a loop: a third would not fit the registers."""
    begin, inner, tail, _ = span
    if EDGE:
        leading = (inner - begin) // STEP
        first = tl.where(index < leading, begin + index * STEP, tail + (index - leading) * STEP)
    else:
        first = inner + index * STEP
    return first


@triton.jit
def clip_to_window(seen, facing, key, left, right):
    """``seen``, less the pairs outside the window of a query that faces position ``facing``; all broadcast together."""
    if left is not None:
        seen = seen & (key >= facing - left)
    if right is not None:
        seen = seen & (key <= facing + right)
    return seen
