"""Forward kernel in plain Triton: one tile of queries against its sequence's keys, with an online softmax.

Scores stay in base 2 (``exp2`` is one instruction) with ``sm_scale * log2(e)`` folded into a single multiply-add. The loop
over keys is split so that only blocks that cross a sequence end or a window edge pay for a mask. The recurrence is that of
FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import clip_to_window, load_rows, store_rows, visible_span
from .tiles import load_tile, tile_count

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _online_softmax(scores, peak, scale_log2, MASKED: tl.constexpr):
    """``P, peak, decay``: unnormalised probabilities ``[M, N]``, the new row maximum, and the factor for older sums."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    anchor = new_peak
    if MASKED:
        # A row that has seen no key yet: -inf - -inf would be NaN.
        anchor = tl.where(new_peak == NEG_INF, 0.0, new_peak)
    return tl.exp2(scores * scale_log2 - anchor[:, None]), new_peak, tl.exp2(peak - anchor)


@triton.jit
def _attend(acc, peak, total, q, keys, first, facing, window, scale_log2, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Fold the keys ``[first, first + BLOCK_N)`` into ``acc`` ``[M, D]``, ``peak`` ``[M]`` and ``total`` ``[M]``."""
    k_base, v_base, k_len, stride = keys
    D: tl.constexpr = q.shape[1]
    k = load_rows(k_base, first, k_len, stride, BLOCK_N, D, MASKED)
    v = load_rows(v_base, first, k_len, stride, BLOCK_N, D, MASKED)
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        key = (first + tl.arange(0, BLOCK_N))[None, :]
        seen = clip_to_window(key < k_len, facing[:, None], key, window[0], window[1])
        scores = tl.where(seen, scores, NEG_INF)
    p, peak, decay = _online_softmax(scores, peak, scale_log2, MASKED)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return acc, peak, total


@triton.jit
def _finish(acc, peak, total):
    """``out [M, D], lse [M]`` from the running sums; rows without keys become 0 and -inf."""
    safe = tl.where(total == 0.0, 1.0, total)
    out = acc * (1.0 / safe)[:, None]
    return out, (peak + tl.log2(safe)) * LN2


@triton.jit
def forward_kernel(
    q,  # [total_q or M, H, D]
    k,  # [total_k, H_kv, D]
    v,  # [total_k, H_kv, D]
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
    """Programs ``(walker, head)``; each walks the list of query tiles of its head with the stride of the grid."""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    q_stride = heads * D
    k_stride = heads // GROUP * D
    for index in range(tl.program_id(0), tile_count(tiles), tl.num_programs(0)):
        block, q_start, q_len, k_start, k_len, out_start = load_tile(tiles, index)
        row = block * BLOCK_M
        tile_q = load_rows(q + q_start * q_stride + head * D, row, q_len, q_stride, BLOCK_M, D, True)
        kv_offset = k_start * k_stride + head // GROUP * D
        keys = (k + kv_offset, v + kv_offset, k_len, k_stride)
        window = (left, right)
        first_facing = row + k_len - q_len
        facing = first_facing + tl.arange(0, BLOCK_M)
        begin, bulk_begin, bulk_end, end = visible_span(first_facing, k_len, left, right, BLOCK_M, BLOCK_N)

        acc = tl.zeros([BLOCK_M, D], tl.float32)
        peak = tl.full([BLOCK_M], NEG_INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if left is not None:
            for n in tl.range(begin, tl.minimum(bulk_begin, end), BLOCK_N, num_stages=1):
                acc, peak, total = _attend(
                    acc, peak, total, tile_q, keys, n, facing, window, scale_log2, BLOCK_N, MASKED=True
                )
        for n in range(bulk_begin, bulk_end, BLOCK_N):
            acc, peak, total = _attend(
                acc, peak, total, tile_q, keys, n, facing, window, scale_log2, BLOCK_N, MASKED=False
            )
        for n in tl.range(bulk_end, end, BLOCK_N, num_stages=1):
            acc, peak, total = _attend(
                acc, peak, total, tile_q, keys, n, facing, window, scale_log2, BLOCK_N, MASKED=True
            )

        tile_out, tile_lse = _finish(acc, peak, total)
        store_rows(out + out_start * q_stride + head * D, row, q_len, q_stride, tile_out)
        r = row + tl.arange(0, BLOCK_M)
        tl.store(lse + head.to(tl.int64) * rows + out_start + r, tile_lse, mask=r < q_len)
