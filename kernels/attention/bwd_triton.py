"""Backward kernels in plain Triton: three passes, no atomics, so the result does not depend on scheduling.

1. ``delta_kernel``: per row, ``delta = sum(dO * O)`` and the log-sum-exp in base 2.
2. ``dkdv_kernel``: a program owns a block of keys and loops over the queries (of all heads that share it).
3. ``dq_kernel``: a program owns a block of queries and loops over the keys. With broadcast queries,
   ``broadcast_dq_kernel`` keeps one block of the shared ``dQ`` in registers over a share of the batch, and the shares'
   float32 partial sums are added afterwards. (One atomic add of ``[M, D]`` per block of keys would send gigabytes of
   reductions into half a megabyte of addresses.)

Recomputing ``P`` in both passes costs seven matmuls instead of five. The formulas are those of FlashAttention-2
(Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    clip_to_window,
    load_block,
    load_row_values,
    row_pointers,
    span_block,
    span_blocks,
    store_rows,
    visible_span,
)
from .tiles import load_tile, tile_count

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(out, dout, lse, delta, lse2, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Row sums ``delta`` of ``dout * out`` and log-sum-exp ``lse2`` in base 2, both ``[H, rows]`` float32.

    ``out`` and ``dout`` are ``[rows, H, D]``, ``lse`` is ``[H, rows]``. A row without keys gets ``lse2 = +inf``, so
    that ``exp2(score - lse2)`` is 0 for it without a mask.
    """
    head = tl.program_id(1)
    stride = tl.num_programs(1) * D
    first = tl.program_id(0) * BLOCK
    row = first + tl.arange(0, BLOCK)
    exists = (row < rows)[:, None]
    o = tl.load(row_pointers(out, first, head * D, stride, BLOCK, D), mask=exists, other=0.0).to(tl.float32)
    do = tl.load(row_pointers(dout, first, head * D, stride, BLOCK, D), mask=exists, other=0.0).to(tl.float32)
    at = head.to(tl.int64) * rows + row
    natural = tl.load(lse + at, mask=row < rows, other=0.0)
    tl.store(delta + at, tl.sum(o * do, 1), mask=row < rows)
    tl.store(lse2 + at, tl.where(natural == -INF, INF, natural * LOG2E), mask=row < rows)


@triton.jit
def _dkdv_step(dk, dv, k, v, queries, member, first, window, scale_log2, BLOCK_M: tl.constexpr, EDGE: tl.constexpr):
    """Add queries ``[first, first + BLOCK_M)`` of one head to ``dk``, ``dv`` ``[N, D]``; the scores are ``[N, M]``.

    Rows past either end need no mask on the scores: absent queries have ``lse2 = +inf``, absent keys are never stored.
    But absent rows of ``q`` and ``dout`` are summed over, so they must be zeros.
    """
    q_blocks, do_blocks, lse2_base, delta_base, rows, first_head, q_start, out_start, q_len, first_facer = queries
    left, right = window
    D: tl.constexpr = k.shape[1]
    head = first_head + member
    statistics = tl.cast(head, tl.int64) * rows + out_start
    q = load_block(q_blocks, q_start, first, q_len, head * D, BOUNDED=EDGE)
    do = load_block(do_blocks, out_start, first, q_len, head * D, BOUNDED=EDGE)
    lse2 = load_row_values(lse2_base + statistics, first, q_len, INF, BLOCK_M, EDGE)
    delta = load_row_values(delta_base + statistics, first, q_len, 0.0, BLOCK_M, EDGE)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse2[None, :])
    if EDGE and (left is not None or right is not None):
        facing = (first - first_facer + tl.arange(0, BLOCK_M))[None, :]
        key = tl.arange(0, k.shape[0])[:, None]
        p = tl.where(clip_to_window(key >= 0, facing, key, left, right), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _dkdv_over_queries(
    dk,
    dv,
    k,
    v,
    queries,
    span,
    window,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Add the query blocks of all heads of the group: one loop over both, for one pipeline to fill and drain."""
    blocks = span_blocks(span, BLOCK_M, EDGE)
    for i in tl.range(0, GROUP * blocks, num_stages=1 if EDGE else None):
        member = i // blocks if GROUP > 1 else 0
        first = span_block(span, i - member * blocks, BLOCK_M, EDGE)
        dk, dv = _dkdv_step(dk, dv, k, v, queries, member, first, window, scale_log2, BLOCK_M, EDGE)
    return dk, dv


@triton.jit(do_not_specialize=["rows", "left", "right"])
def dkdv_kernel(
    q,  # descriptor of [total_q or M, H * D], blocks of [BLOCK_M, D]
    k,  # descriptor of [total_k, H_kv * D], blocks of [BLOCK_N, D]
    v,  # likewise
    dout,  # descriptor of [rows, H * D], blocks of [BLOCK_M, D]
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
    """Programs ``(tile, key head)``."""
    index = tl.program_id(0)
    k_head = tl.program_id(1)
    column = k_head * D
    stride = tl.num_programs(1) * D
    scale_log2 = sm_scale * LOG2E
    window = (left, right)
    if index < tile_count(tiles):
        block, q_start, q_len, k_start, k_len, out_start = load_tile(tiles, index)
        key = block * BLOCK_N
        tile_k = load_block(k, k_start, key, k_len, column, BOUNDED=False)
        tile_v = load_block(v, k_start, key, k_len, column, BOUNDED=False)
        facer = key - (k_len - q_len)  # the query that faces the first key of the tile
        queries = (q, dout, lse2, delta, rows, k_head * GROUP, q_start, out_start, q_len, facer)
        # Seen from the keys the window is mirrored: `right` reaches back to earlier queries, `left` to later ones.
        span = visible_span(facer, q_len, right, left, BLOCK_N, BLOCK_M)

        acc_k = tl.zeros([BLOCK_N, D], tl.float32)
        acc_v = tl.zeros([BLOCK_N, D], tl.float32)
        acc_k, acc_v = _dkdv_over_queries(
            acc_k, acc_v, tile_k, tile_v, queries, span, window, scale_log2, GROUP, BLOCK_M, EDGE=False
        )
        acc_k, acc_v = _dkdv_over_queries(
            acc_k, acc_v, tile_k, tile_v, queries, span, window, scale_log2, GROUP, BLOCK_M, EDGE=True
        )
        store_rows(dk, k_start, key, k_len, column, stride, acc_k * sm_scale)
        store_rows(dv, k_start, key, k_len, column, stride, acc_v)


@triton.jit
def _dq_step(dq, q, do, stats, keys, first, facing, window, scale_log2, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    """Add the keys ``[first, first + BLOCK_N)`` to ``dq`` ``[M, D]`` (without ``sm_scale``)."""
    lse2, delta = stats
    left, right = window
    k_blocks, v_blocks, k_start, k_len, column = keys
    k = load_block(k_blocks, k_start, first, k_len, column, BOUNDED=EDGE)
    v = load_block(v_blocks, k_start, first, k_len, column, BOUNDED=False)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse2[:, None])
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    if EDGE:
        # Masking dS, not P, also stops a neighbour's V.
        key = (first + tl.arange(0, BLOCK_N))[None, :]
        ds = tl.where(clip_to_window(key < k_len, facing[:, None], key, left, right), ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def _dq_over_keys(dq, q, do_rows, keys, row, window, scale_log2, BLOCK_N: tl.constexpr):
    """Add all keys of one sequence to ``dq``, the gradient of its queries ``[row, row + M)``."""
    do_blocks, lse2_base, delta_base, out_start, q_len, column = do_rows
    k_len = keys[3]
    BLOCK_M: tl.constexpr = q.shape[0]
    do = load_block(do_blocks, out_start, row, q_len, column, BOUNDED=False)
    stats = (
        load_row_values(lse2_base, row, q_len, INF, BLOCK_M, True),
        load_row_values(delta_base, row, q_len, 0.0, BLOCK_M, True),
    )
    first_facing = row + k_len - q_len
    facing = first_facing + tl.arange(0, BLOCK_M)
    span = visible_span(first_facing, k_len, window[0], window[1], BLOCK_M, BLOCK_N)
    for i in range(span_blocks(span, BLOCK_N, EDGE=False)):
        n = span_block(span, i, BLOCK_N, EDGE=False)
        dq = _dq_step(dq, q, do, stats, keys, n, facing, window, scale_log2, BLOCK_N, EDGE=False)
    for i in tl.range(0, span_blocks(span, BLOCK_N, EDGE=True), num_stages=1):
        n = span_block(span, i, BLOCK_N, EDGE=True)
        dq = _dq_step(dq, q, do, stats, keys, n, facing, window, scale_log2, BLOCK_N, EDGE=True)
    return dq


@triton.jit(do_not_specialize=["rows", "left", "right"])
def dq_kernel(
    q,  # descriptor of [total_q, H * D], blocks of [BLOCK_M, D]
    k,  # descriptor of [total_k, H_kv * D], blocks of [BLOCK_N, D]
    v,  # likewise
    dout,  # descriptor of [rows, H * D], blocks of [BLOCK_M, D]
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
    """Programs ``(tile, head)``."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    q_column = head * D
    k_column = head // GROUP * D
    if index < tile_count(tiles):
        block, q_start, q_len, k_start, k_len, out_start = load_tile(tiles, index)
        row = block * BLOCK_M
        row_offset = head.to(tl.int64) * rows + out_start
        do_rows = (dout, lse2 + row_offset, delta + row_offset, out_start, q_len, q_column)
        keys = (k, v, k_start, k_len, k_column)
        tile_q = load_block(q, q_start, row, q_len, q_column, BOUNDED=False)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        acc = _dq_over_keys(acc, tile_q, do_rows, keys, row, (left, right), sm_scale * LOG2E, BLOCK_N)
        store_rows(dq, q_start, row, q_len, q_column, heads * D, acc * sm_scale)


@triton.jit(do_not_specialize=["rows", "M", "left", "right"])
def broadcast_dq_kernel(
    q,  # descriptor of [M, H * D], blocks of [BLOCK_M, D]
    k,  # descriptor of [total_k, H_kv * D], blocks of [BLOCK_N, D]
    v,  # likewise
    dout,  # descriptor of [rows, H * D], blocks of [BLOCK_M, D]
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
    q_column = head * D
    k_column = head // GROUP * D
    tile_q = load_block(q, 0, row, M, q_column, BOUNDED=False)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for index in range(share, tile_count(sequences), tl.num_programs(2)):
        _, _, q_len, k_start, k_len, out_start = load_tile(sequences, index)
        row_offset = head.to(tl.int64) * rows + out_start
        do_rows = (dout, lse2 + row_offset, delta + row_offset, out_start, q_len, q_column)
        keys = (k, v, k_start, k_len, k_column)
        acc = _dq_over_keys(acc, tile_q, do_rows, keys, row, (left, right), sm_scale * LOG2E, BLOCK_N)
    store_rows(partial, share * M, row, M, q_column, heads * D, acc * sm_scale)
