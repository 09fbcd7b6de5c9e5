"""Forward kernel in plain Triton: one tile of queries against its sequence's keys, with an online softmax.

The loop over keys is split so that only blocks that cross a sequence end or a window edge pay for a mask. The
recurrence is that of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import clip_to_window, load_block, span_block, span_blocks, store_rows, visible_span
from .softmax import LN2, NEG_INF, online_softmax
from .tiles import load_tile, tile_count


@triton.jit
def _attend(acc, peak, total, q, keys, first, facing, window, scale_log2, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    """Fold the keys ``[first, first + BLOCK_N)`` into ``acc`` ``[M, D]``, ``peak`` ``[M]`` and ``total`` ``[M]``."""
    k_blocks, v_blocks, k_start, k_len, column = keys
    left, right = window
    k = load_block(k_blocks, k_start, first, k_len, column, BOUNDED=False)
    # Absent keys get p = 0 whatever they are, but 0 * NaN would leak through a neighbour's values.
    v = load_block(v_blocks, k_start, first, k_len, column, BOUNDED=EDGE)
    scores = tl.dot(q, tl.trans(k))
    if EDGE:
        key = (first + tl.arange(0, BLOCK_N))[None, :]
        scores = tl.where(clip_to_window(key < k_len, facing[:, None], key, left, right), scores, NEG_INF)
    p, peak, decay = online_softmax(scores, peak, scale_log2, GUARDED=EDGE)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return acc, peak, total


@triton.jit
def _finish(acc, peak, total):
    """``out [M, D], lse [M]`` from the running sums; rows without keys become 0 and -inf."""
    safe = tl.where(total == 0.0, 1.0, total)
    out = acc * (1.0 / safe)[:, None]
    return out, (peak + tl.log2(safe)) * LN2


@triton.jit(do_not_specialize=["rows", "left", "right"])
def forward_kernel(
    q,  # descriptor of [total_q or M, H * D], blocks of [BLOCK_M, D]
    k,  # descriptor of [total_k, H_kv * D], blocks of [BLOCK_N, D]
    v,  # likewise
    out,  # [rows, H, D]
    lse,  # [H, rows] float32
    tiles,
    rows,
    scale_log2,
    left,
    right,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs ``(tile, head)``."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    q_column = head * D
    # One tile a program: a loop over tiles around this body costs some forty registers and spills.
    if index < tile_count(tiles):
        block, q_start, q_len, k_start, k_len, out_start = load_tile(tiles, index)
        row = block * BLOCK_M
        tile_q = load_block(q, q_start, row, q_len, q_column, BOUNDED=False)
        keys = (k, v, k_start, k_len, head // GROUP * D)
        window = (left, right)
        first_facing = row + k_len - q_len
        facing = first_facing + tl.arange(0, BLOCK_M)
        span = visible_span(first_facing, k_len, left, right, BLOCK_M, BLOCK_N)

        acc = tl.zeros([BLOCK_M, D], tl.float32)
        peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for i in range(span_blocks(span, BLOCK_N, EDGE=False)):
            n = span_block(span, i, BLOCK_N, EDGE=False)
            acc, peak, total = _attend(
                acc, peak, total, tile_q, keys, n, facing, window, scale_log2, BLOCK_N, EDGE=False
            )
        for i in tl.range(0, span_blocks(span, BLOCK_N, EDGE=True), num_stages=1):
            n = span_block(span, i, BLOCK_N, EDGE=True)
            acc, peak, total = _attend(
                acc, peak, total, tile_q, keys, n, facing, window, scale_log2, BLOCK_N, EDGE=True
            )

        tile_out, tile_lse = _finish(acc, peak, total)
        store_rows(out, out_start, row, q_len, q_column, heads * D, tile_out)
        r = row + tl.arange(0, BLOCK_M)
        tl.store(lse + head.to(tl.int64) * rows + out_start + r, tile_lse, mask=r < q_len)
