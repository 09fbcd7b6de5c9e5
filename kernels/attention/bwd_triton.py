"""Backward kernels in plain Triton: three passes, no atomics, so the result does not depend on scheduling.

1. ``delta_kernel``: per row, ``delta = sum(dO * O)`` and the log-sum-exp in base 2.
2. ``dkdv_kernel``: a program owns a block of keys and loops over the queries (of all heads that share it).
3. ``dq_kernel``: a program owns a block of queries and loops over the keys. With broadcast queries,
   ``broadcast_dq_kernel`` keeps one block of the shared ``dQ`` in registers over a share of the batch, and the shares'
   float32 partial sums are added afterwards: the alternative, one atomic add of ``[M, D]`` per block of keys, would move as
   many bytes into half a megabyte of addresses as the matmuls take time.

Recomputing ``P`` in both passes costs seven matmuls instead of five. The formulas are those of FlashAttention-2
(Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import clip_to_window, load_row_values, load_rows, store_rows, visible_span
from .tiles import load_tile, tile_count

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def delta_kernel(out, dout, lse, delta, lse2, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """``delta`` and ``lse2``, both ``[H, rows]`` float32, from ``out``, ``dout`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``.

    A row without keys gets ``lse2 = +inf``, so that ``exp2(score - lse2)`` is 0 for it without a mask.
    """
    head = tl.program_id(1)
    stride = tl.num_programs(1) * D
    first = tl.program_id(0) * BLOCK
    o = load_rows(out + head * D, first, rows, stride, BLOCK, D, True).to(tl.float32)
    do = load_rows(dout + head * D, first, rows, stride, BLOCK, D, True).to(tl.float32)
    row = first + tl.arange(0, BLOCK)
    at = head.to(tl.int64) * rows + row
    natural = tl.load(lse + at, mask=row < rows, other=0.0)
    tl.store(delta + at, tl.sum(o * do, 1), mask=row < rows)
    tl.store(lse2 + at, tl.where(natural == -INF, INF, natural * LOG2E), mask=row < rows)


@triton.jit
def _dkdv_step(
    dk, dv, k, v, queries, first, keys_at, window, scale_log2, BLOCK_M: tl.constexpr, MASKED: tl.constexpr
):
    """Add the queries ``[first, first + BLOCK_M)`` to ``dk`` and ``dv`` ``[N, D]``; everything is transposed, ``[N, M]``.

    Rows past either end need no mask on the scores: absent queries have ``lse2 = +inf``, absent keys are never stored.
    """
    q_base, do_base, lse2_base, delta_base, q_len, stride, shift = queries
    D: tl.constexpr = k.shape[1]
    q = load_rows(q_base, first, q_len, stride, BLOCK_M, D, MASKED)
    do = load_rows(do_base, first, q_len, stride, BLOCK_M, D, MASKED)
    lse2 = load_row_values(lse2_base, first, q_len, INF, BLOCK_M, MASKED)
    delta = load_row_values(delta_base, first, q_len, 0.0, BLOCK_M, MASKED)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse2[None, :])
    if MASKED and (window[0] is not None or window[1] is not None):
        facing = (first + shift + tl.arange(0, BLOCK_M))[None, :]
        key = keys_at[:, None]
        p = tl.where(clip_to_window(key >= 0, facing, key, window[0], window[1]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q,  # [total_q or M, H, D]
    k,  # [total_k, H_kv, D]
    v,  # [total_k, H_kv, D]
    dout,  # [rows, H, D]
    lse2,  # [H, rows] float32
    delta,  # [H, rows] float32
    dk,  # [total_k, H_kv, D]
    dv,  # [total_k, H_kv, D]
    tiles,
    rows,
    sm_scale,
    left,
    right,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs ``(walker, key head)``; each walks the list of key tiles of its head with the stride of the grid."""
    k_head = tl.program_id(1)
    k_stride = tl.num_programs(1) * D
    q_stride = k_stride * GROUP
    scale_log2 = sm_scale * LOG2E
    window = (left, right)
    for index in range(tl.program_id(0), tile_count(tiles), tl.num_programs(0)):
        block, q_start, q_len, k_start, k_len, out_start = load_tile(tiles, index)
        key = block * BLOCK_N
        kv_offset = k_start * k_stride + k_head * D
        tile_k = load_rows(k + kv_offset, key, k_len, k_stride, BLOCK_N, D, True)
        tile_v = load_rows(v + kv_offset, key, k_len, k_stride, BLOCK_N, D, True)
        keys_at = key + tl.arange(0, BLOCK_N)
        shift = k_len - q_len
        # Seen from the keys the window is mirrored: `right` reaches back to earlier queries, `left` ahead to later ones.
        begin, bulk_begin, bulk_end, end = visible_span(key - shift, q_len, right, left, BLOCK_N, BLOCK_M)

        acc_k = tl.zeros([BLOCK_N, D], tl.float32)
        acc_v = tl.zeros([BLOCK_N, D], tl.float32)
        for member in range(GROUP):
            head = k_head * GROUP + member
            row_offset = head.to(tl.int64) * rows + out_start
            queries = (
                q + q_start * q_stride + head * D,
                dout + out_start * q_stride + head * D,
                lse2 + row_offset,
                delta + row_offset,
                q_len,
                q_stride,
                shift,
            )
            if right is not None:
                for m in tl.range(begin, tl.minimum(bulk_begin, end), BLOCK_M, num_stages=1):
                    acc_k, acc_v = _dkdv_step(
                        acc_k, acc_v, tile_k, tile_v, queries, m, keys_at, window, scale_log2, BLOCK_M, MASKED=True
                    )
            for m in range(bulk_begin, bulk_end, BLOCK_M):
                acc_k, acc_v = _dkdv_step(
                    acc_k, acc_v, tile_k, tile_v, queries, m, keys_at, window, scale_log2, BLOCK_M, MASKED=False
                )
            for m in tl.range(bulk_end, end, BLOCK_M, num_stages=1):
                acc_k, acc_v = _dkdv_step(
                    acc_k, acc_v, tile_k, tile_v, queries, m, keys_at, window, scale_log2, BLOCK_M, MASKED=True
                )
        store_rows(dk + kv_offset, key, k_len, k_stride, acc_k * sm_scale)
        store_rows(dv + kv_offset, key, k_len, k_stride, acc_v)


@triton.jit
def _dq_step(dq, q, do, stats, keys, first, facing, window, scale_log2, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Add the keys ``[first, first + BLOCK_N)`` to ``dq`` ``[M, D]`` (without ``sm_scale``)."""
    lse2, delta = stats
    k_base, v_base, k_len, stride = keys
    D: tl.constexpr = q.shape[1]
    k = load_rows(k_base, first, k_len, stride, BLOCK_N, D, MASKED)
    v = load_rows(v_base, first, k_len, stride, BLOCK_N, D, MASKED)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse2[:, None])
    if MASKED:
        key = (first + tl.arange(0, BLOCK_N))[None, :]
        p = tl.where(clip_to_window(key < k_len, facing[:, None], key, window[0], window[1]), p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _dq_over_keys(dq, q, do_rows, keys, row, lengths, window, scale_log2, BLOCK_N: tl.constexpr):
    """Add all keys of one sequence to ``dq``, the gradient of its queries ``[row, row + M)``."""
    do_base, lse2_base, delta_base, stride = do_rows
    q_len, k_len = lengths
    left, right = window
    BLOCK_M: tl.constexpr = q.shape[0]
    D: tl.constexpr = q.shape[1]
    do = load_rows(do_base, row, q_len, stride, BLOCK_M, D, True)
    stats = (
        load_row_values(lse2_base, row, q_len, INF, BLOCK_M, True),
        load_row_values(delta_base, row, q_len, 0.0, BLOCK_M, True),
    )
    first_facing = row + k_len - q_len
    facing = first_facing + tl.arange(0, BLOCK_M)
    begin, bulk_begin, bulk_end, end = visible_span(first_facing, k_len, left, right, BLOCK_M, BLOCK_N)
    if left is not None:
        for n in tl.range(begin, tl.minimum(bulk_begin, end), BLOCK_N, num_stages=1):
            dq = _dq_step(dq, q, do, stats, keys, n, facing, window, scale_log2, BLOCK_N, MASKED=True)
    for n in range(bulk_begin, bulk_end, BLOCK_N):
        dq = _dq_step(dq, q, do, stats, keys, n, facing, window, scale_log2, BLOCK_N, MASKED=False)
    for n in tl.range(bulk_end, end, BLOCK_N, num_stages=1):
        dq = _dq_step(dq, q, do, stats, keys, n, facing, window, scale_log2, BLOCK_N, MASKED=True)
    return dq


@triton.jit
def dq_kernel(
    q,  # [total_q, H, D]
    k,  # [total_k, H_kv, D]
    v,  # [total_k, H_kv, D]
    dout,  # [rows, H, D]
    lse2,  # [H, rows] float32
    delta,  # [H, rows] float32
    dq,  # [total_q, H, D]
    tiles,
    rows,
    sm_scale,
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
        q_offset = q_start * q_stride + head * D
        kv_offset = k_start * k_stride + head // GROUP * D
        row_offset = head.to(tl.int64) * rows + out_start
        do_rows = (dout + out_start * q_stride + head * D, lse2 + row_offset, delta + row_offset, q_stride)
        keys = (k + kv_offset, v + kv_offset, k_len, k_stride)
        tile_q = load_rows(q + q_offset, row, q_len, q_stride, BLOCK_M, D, True)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        acc = _dq_over_keys(
            acc, tile_q, do_rows, keys, row, (q_len, k_len), (left, right), sm_scale * LOG2E, BLOCK_N
        )
        store_rows(dq + q_offset, row, q_len, q_stride, acc * sm_scale)


@triton.jit
def broadcast_dq_kernel(
    q,  # [M, H, D]
    k,  # [total_k, H_kv, D]
    v,  # [total_k, H_kv, D]
    dout,  # [rows, H, D]
    lse2,  # [H, rows] float32
    delta,  # [H, rows] float32
    partial,  # [shares, M, H, D] float32
    sequences,  # tile list with one tile a sequence
    rows,
    M,
    sm_scale,
    left,
    right,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs ``(query block, head, share)``: the gradient of a query block over every ``shares``-th sequence.

    The sequences are sorted by length, so that dealing them out in turn gives all shares about the same work.
    """
    row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    share = tl.program_id(2)
    heads = tl.num_programs(1)
    q_stride = heads * D
    k_stride = heads // GROUP * D
    tile_q = load_rows(q + head * D, row, M, q_stride, BLOCK_M, D, True)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for index in range(share, tile_count(sequences), tl.num_programs(2)):
        _, _, q_len, k_start, k_len, out_start = load_tile(sequences, index)
        kv_offset = k_start * k_stride + head // GROUP * D
        row_offset = head.to(tl.int64) * rows + out_start
        do_rows = (dout + out_start * q_stride + head * D, lse2 + row_offset, delta + row_offset, q_stride)
        keys = (k + kv_offset, v + kv_offset, k_len, k_stride)
        acc = _dq_over_keys(
            acc, tile_q, do_rows, keys, row, (q_len, k_len), (left, right), sm_scale * LOG2E, BLOCK_N
        )
    share_base = partial + share.to(tl.int64) * M * q_stride + head * D
    store_rows(share_base, row, M, q_stride, acc * sm_scale)
