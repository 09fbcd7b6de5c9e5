"""Backward kernel for Hopper (TLX): persistent, warp specialised, all three gradients in one pass.

Roles of a program, which walks over tiles of 128 keys of one head:

- the loader brings K and V of the tile, and one step of queries after the other (Q, dO, and their row statistics),
  into rings of shared memory by TMA, running ahead of what is computed;
- each of two consumers, a warp group, owns 64 of the keys, and keeps their dK and dV in registers.

``S^T = K Q^T`` and ``dP^T = V dO^T`` have keys as rows, so that ``P^T`` and ``dS^T`` are in registers what
``dV += P^T dO`` and ``dK += dS^T Q`` take as left operands. dQ sums over the keys of both consumers: they exchange
``dS^T`` through shared memory, and each computes one half of a step's dQ for all 128 keys, which TMA adds to global
memory, in float32. ``S^T`` of the next step, be it the next tile's, is computed beside the end of a step.

A step is 64 queries if D = 128, and 128 if D = 64: either way half of its dQ is a block of 64 x 64, half of the columns
or half of the queries. The formulas are those of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691,
algorithm 2); exchanging dS and adding dQ asynchronously is FlashAttention-3's scheme (Shah et al., 2024,
https://arxiv.org/abs/2407.08608).

Who waits for whom
------------------
1. A slot of Q or dO is loaded when both consumers have released it, as they do in every step, dO before Q.
2. K has two slots, released at the end of a tile. V has one, which is free when dO of the tile's last step is released.
3. ``PAIR``, a barrier of both consumers, is met once a step, when ``dS^T`` is in shared memory, and at the end of a
   tile. ``dS^T`` has two buffers: who writes one for step n + 2 has met ``PAIR`` of step n + 1, which the other
   consumer meets only when its matmuls of step n, which read the buffer, are complete.
4. dQ and dV are staged in one place, and dK in the consumer's own buffers of ``dS^T``, which nobody reads after the
   ``PAIR`` that ends a tile. Before it writes to any of these a consumer waits until its earlier stores have been read.
5. No wait can deadlock. Within a step a consumer waits for slots of this step and, with dO of this step released, for Q
   (and K) of the next. The loader fills slots in the order in which they are waited for, and each needs only what is
   released before: Q of step n that of n - 2, K of tile r that of r - 2, V of tile r the last dO of tile r - 1. Both
   consumers meet ``PAIR`` equally often, whatever a tile's number of steps, of which there is at least one.

No leak between neighbours
--------------------------
TMA knows nothing of sequences, so a block that crosses the end of its own holds rows of a neighbour, which may be NaN.
Where they are summed over the loader replaces them: Q and dO by zeros, with statistics that make P zero, and for dQ
also K and V by zeros. Rows of dK and dV that do not exist are not stored, and to those of dQ zeros are added.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .blocks import visible_span
from .pipeline import Ring, make_ring, wait_stores
from .record import LOADER as LOADER_ROLE
from .record import WAIT_DOUT, WAIT_K, WAIT_LANDING, WAIT_MATMUL, WAIT_PAIR, WAIT_Q, WAIT_V, start_watch
from .tiles import load_tile
from .walk import start_walk

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))

ROWS = tl.constexpr(64)  # keys of a consumer, queries of a block: the rows of one warp group's matmul
TILE = tl.constexpr(128)  # keys of a tile: ROWS for each consumer
K_STAGES = tl.constexpr(2)  # S of a tile's first step is computed beside the last step of the tile before

# Named barriers; Triton itself uses the first ones.
PAIR = tl.constexpr(9)  # of both consumers
PAIR_THREADS = tl.constexpr(256)
LOADER = tl.constexpr(10)


@aggregate
class Buffers:
    """Shared memory. A step is ``q.parts`` blocks of 64 queries."""

    k: Ring
    v: Ring
    q: Ring
    dout: Ring
    lse2: tlx.buffered_tensor  # [64] float32 for each block of the slots of dout, and filled with them
    delta: tlx.buffered_tensor  # likewise
    ds: tlx.buffered_tensor  # [64 keys, 64 queries]: two buffers of a step's blocks for each consumer
    dk: tlx.buffered_tensor  # [64, D], in the place of ds
    dq: tlx.buffered_tensor  # [64, 64] float32 for each consumer
    dv: tlx.buffered_tensor  # [64, D], in the place of dq
    landing: tlx.mbarrier  # for what the loader has to see itself


@aggregate
class Tile:
    """128 keys of one head, from ``key`` on in their sequence, and the queries of that sequence."""

    head: tl.tensor
    key: tl.tensor
    q_start: tl.tensor
    q_len: tl.tensor
    k_start: tl.tensor
    k_len: tl.tensor
    out_start: tl.tensor

    @triton.jit
    def facer(self):
        """The query that faces the tile's first key."""
        return self.key - (self.k_len - self.q_len)

    @triton.jit
    def steps(self, window, STEP: tl.constexpr):
        """First query, and number, of the steps of ``STEP`` queries that see some key of the tile.

        There is at least one step, be it masked whole, so that all tiles go the same way.
        """
        # Seen from the keys the window is mirrored: `right` reaches back to earlier queries, `left` to later ones.
        left, right = window
        begin, _, _, end = visible_span(self.facer(), self.q_len, right, left, TILE, STEP)
        begin = tl.minimum(begin, tl.maximum(self.q_len - 1, 0) // STEP * STEP)
        return begin, tl.maximum(end - begin + STEP - 1, STEP) // STEP


@triton.jit
def _tile(walk, i):
    index, head = walk.at(i)
    block, q_start, q_len, k_start, k_len, out_start = load_tile(walk.tiles, index)
    return Tile(head, block * TILE, q_start, q_len, k_start, k_len, out_start)


@triton.jit
def _fetch(ring, n, barrier, descriptor, row, column, EXTRA: tl.constexpr):
    """Start to load the parts of a slot. ``barrier`` will expect them and ``EXTRA`` bytes."""
    BYTES: tl.constexpr = ROWS * descriptor.block_shape[1] * tlx.size_of(descriptor.dtype)
    tlx.barrier_expect_bytes(barrier, ring.parts * BYTES + EXTRA)
    for part in tl.static_range(ring.parts):
        tlx.async_descriptor_load(descriptor, ring.tile(n, part), [row + part * ROWS, column], barrier)


@triton.jit
def _hand_over(ring, n, length):
    """Zero the rows from ``length`` on of a slot that the loader has seen land, and give it to the consumers."""
    PIECE: tl.constexpr = 8  # few rows at a time, since the loader has few registers
    for part in tl.static_range(ring.parts):
        for i in tl.static_range(ROWS // PIECE):
            tile = ring.tile(n, part)
            piece = tlx.local_slice(tile, [i * PIECE, 0], [PIECE, tile.type.shape[1]])
            rows = tlx.local_load(piece)
            exists = part * ROWS + i * PIECE + tl.arange(0, PIECE) < length
            rows = tl.where(exists[:, None], rows, tl.zeros_like(rows))
            # An ordinary store to a matmul's buffer makes the compiler put a fence before every matmul that reads it.
            # One through the cluster's window, to this program itself, does not, and the fence is below.
            tlx.remote_shmem_store(piece, rows, tlx.cluster_cta_rank())
    tlx.fence("async_shared")
    tlx.barrier_arrive(ring.full[n % ring.depth], 1)


@triton.jit
def _load_rows(buffers, ring, n, landed, descriptor, row, column, length, watch, BOUNDED: tl.constexpr):
    """Fill a slot. With ``BOUNDED`` its rows from ``length`` on become zeros. Returns the new count of ``landed``."""
    whole = True
    if BOUNDED:
        whole = length >= ring.parts * ROWS
    if whole:
        _fetch(ring, n, ring.full[n % ring.depth], descriptor, row, column, 0)
    else:
        _fetch(ring, n, buffers.landing[0], descriptor, row, column, 0)
        since = watch.now()
        tlx.barrier_wait(buffers.landing[0], landed & 1)
        watch.waited(WAIT_LANDING, since)
        _hand_over(ring, n, length)
        landed += 1
    return landed


@triton.jit
def _load_dout(buffers, n, inputs, row, head, at, length, landed, watch, BOUNDED: tl.constexpr):
    """Fill the slot of dO and its statistics, like :func:`_load_rows`.

    ``lse2`` and ``delta`` are descriptors, or with ``BOUNDED`` pointers: there a sequence may start at any row, and TMA
    faults at an address that is no multiple of 16 bytes.
    """
    _, dout, lse2, delta, _ = inputs
    parts: tl.constexpr = buffers.dout.parts
    column = head * dout.block_shape[1]
    slot = n % buffers.dout.depth
    full = buffers.dout.full[slot]
    if BOUNDED:
        for part in tl.static_range(parts):
            query = part * ROWS + tl.arange(0, ROWS)
            exists = query < length
            tlx.local_store(buffers.lse2[slot * parts + part], tl.load(lse2 + at + query, mask=exists, other=INF))
            tlx.local_store(buffers.delta[slot * parts + part], tl.load(delta + at + query, mask=exists, other=0.0))
        tlx.named_barrier_wait(LOADER, 128)  # before the one arrival that stands for all
        landed = _load_rows(buffers, buffers.dout, n, landed, dout, row, column, length, watch, True)
    else:
        _fetch(buffers.dout, n, full, dout, row, column, 2 * 4 * parts * ROWS)
        for part in tl.static_range(parts):
            tlx.async_descriptor_load(lse2, buffers.lse2[slot * parts + part], [at + part * ROWS], full)
            tlx.async_descriptor_load(delta, buffers.delta[slot * parts + part], [at + part * ROWS], full)
    return landed


@triton.jit
def _load(
    buffers,
    k,
    v,
    inputs,
    walk,
    window,
    record,
    GROUP: tl.constexpr,
    ADD_DQ: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """The loader. ``inputs`` is ``q, dout, lse2, delta, rows``. Keys are summed over for dQ alone."""
    q, _, _, _, rows = inputs
    D: tl.constexpr = k.block_shape[1]
    STEP: tl.constexpr = buffers.q.parts * ROWS
    n = 0
    landed = 0
    watch = start_watch(record, LOADER_ROLE)
    for r in tl.range(0, walk.count, disable_licm=True):
        tile = _tile(walk, r)
        begin, steps = tile.steps(window, STEP)
        row = tile.k_start + tile.key
        keys = tile.k_len - tile.key
        buffers.k.acquire(r, watch)
        landed = _load_rows(buffers, buffers.k, r, landed, k, row, tile.head * D, keys, watch, ADD_DQ)
        for member in tl.range(0, GROUP, disable_licm=True):
            head = tile.head * GROUP + member
            for i in tl.range(0, steps, disable_licm=True):
                first = begin + i * STEP
                queries = tile.q_len - first
                buffers.q.acquire(n, watch)
                q_row = tile.q_start + first
                landed = _load_rows(buffers, buffers.q, n, landed, q, q_row, head * D, queries, watch, BOUNDED)
                if member + i == 0:
                    if r > 0:
                        buffers.dout.acquire(n - 1 + buffers.dout.depth, watch)  # all uses until n - 1 are released
                    landed = _load_rows(buffers, buffers.v, r, landed, v, row, tile.head * D, keys, watch, ADD_DQ)
                out_row = tile.out_start + first
                buffers.dout.acquire(n, watch)
                at = head * rows + out_row
                if BOUNDED:
                    at = head.to(tl.int64) * rows + out_row
                landed = _load_dout(buffers, n, inputs, out_row, head, at, queries, landed, watch, BOUNDED)
                n += 1
        watch = watch.next(walk)


@aggregate
class Consumer:
    """Which of the two consumers this is, and what is left out for it at compile time."""

    index: tl.constexpr
    add_dq: tl.constexpr
    bounded: tl.constexpr  # some steps have queries that do not exist

    @triton.jit
    def meet(self, watch):
        """Wait for the other one."""
        since = watch.now()
        tlx.named_barrier_wait(PAIR, PAIR_THREADS)
        watch.waited(WAIT_PAIR, since)


@aggregate
class Step:
    """A step of queries, for a tile."""

    length: tl.tensor  # queries from the step's first to the end of the sequence
    facing: tl.tensor  # position that the first query faces, counted from the tile's first key
    row: tl.tensor  # of the first query in dq
    column: tl.tensor  # of the head in dq
    fresh: tl.tensor  # the tile's first step
    turns: tl.tensor  # its last: the next one belongs to the next tile
    more: tl.tensor  # there is a next one


@triton.jit
def _scores(buffers, r, n, block: tl.constexpr, me):
    """Start ``S^T`` ``[64 keys, 64 queries]`` of one block of the step."""
    return tlx.async_dot(buffers.k.tile(r, me.index), tlx.local_trans(buffers.q.tile(n, block)))


@triton.jit
def _minus_infinity_if_negative(x):
    """0.0 or -inf for int32 ``x``, by its bits. Comparisons would all be made early, and held in registers."""
    return ((x >> 31) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _probabilities(scores, row_lse2, facing, scale_log2, window, ABSENT_KEYS: tl.constexpr):
    """``P^T`` of ``S^T``; with ``ABSENT_KEYS`` finite also where a key is zeros."""
    exponent = scores * scale_log2 - row_lse2[None, :]
    if ABSENT_KEYS:
        # For a key that exists it is at most 0, but for rounding. For zeros it is -lse2, perhaps large, but their dS is
        # multiplied by zeros again, so that any value will do that leaves dS finite. NaN is to stay NaN.
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    left, right = window
    query = tl.arange(0, ROWS)[None, :]
    key = tl.arange(0, ROWS)[:, None]
    if left is not None:
        exponent += _minus_infinity_if_negative(key - (query + (facing - left)))
    if right is not None:
        exponent += _minus_infinity_if_negative(query + (facing + right) - key)
    return tl.exp2(exponent)


@triton.jit
def _half_dq(buffers, r, turn, me):
    """Start this consumer's ``[64 columns, 64 queries]`` of ``dQ^T = K^T dS^T`` over both halves of the tile's keys.

    Transposed, because a thread then holds neighbours of a column of dQ: written to shared memory they do not meet in
    a bank, as neighbours of a row would.
    """
    BLOCKS: tl.constexpr = buffers.q.parts
    half = tl.zeros([ROWS, ROWS], tl.float32)
    for source in tl.static_range(2):
        keys = buffers.k.tile(r, source)
        block = me.index  # of the queries
        if BLOCKS == 1:
            keys = tlx.local_slice(keys, [0, me.index * ROWS], [ROWS, ROWS])
            block = 0
        half = tlx.async_dot(tlx.local_trans(keys), buffers.ds[(2 * source + turn) * BLOCKS + block], half)
    return half


@triton.jit
def _add_dq(buffers, dq, half, step, me, watch):
    """Add ``half`` to its place in ``dq``, asynchronously. Rows of a neighbour get zeros."""
    row = 0
    column = me.index * ROWS
    if buffers.q.parts == 2:
        row, column = column, row
    if me.bounded:
        half = tl.where((row + tl.arange(0, ROWS) < step.length)[None, :], half, 0.0)
    wait_stores(watch)
    tlx.local_store(tlx.local_trans(buffers.dq[me.index]), half)
    tlx.async_descriptor_store(dq, buffers.dq[me.index], [step.row + row, step.column + column], store_reduce="add")


@triton.jit
def _step(state, buffers, r, n, dq, step, rules, me, watch):
    """Add step ``n`` of tile ``r`` to ``dk``, ``dv`` and ``dq``, given its first ``S^T``; returns that of the next.

    ``state`` is ``S^T [64 keys, 64 queries], dk [64, D], dv [64, D]``; ``rules`` are the scale of scores, the window.
    """
    scores, dk, dv = state
    scale_log2, window = rules
    C: tl.constexpr = me.index
    BLOCKS: tl.constexpr = buffers.q.parts
    buffers.dout.wait(n, watch)
    for block in tl.static_range(BLOCKS):
        q = buffers.q.tile(n, block)
        do = buffers.dout.tile(n, block)
        statistics = n % buffers.dout.depth * BLOCKS + block
        dp = tlx.async_dot(buffers.v.tile(r, C), tlx.local_trans(do))
        row_lse2 = tlx.local_load(buffers.lse2[statistics])
        if block > 0:
            since = watch.now()
            scores = tlx.async_dot_wait(1, scores)
            watch.waited(WAIT_MATMUL, since)
        p = _probabilities(scores, row_lse2, step.facing + (block - C) * ROWS, scale_log2, window, me.add_dq)
        dv = tlx.async_dot(p.to(q.type.element_ty), do, dv)
        since = watch.now()
        dp = tlx.async_dot_wait(1, dp)
        watch.waited(WAIT_MATMUL, since)
        ds = (p * (dp - tlx.local_load(buffers.delta[statistics])[None, :])).to(q.type.element_ty)
        if me.add_dq:
            if block == 0 and step.fresh:
                wait_stores(watch)  # dK of the tile before leaves from here
            tlx.local_store(buffers.ds[(2 * C + n % 2) * BLOCKS + block], ds)
            if block == BLOCKS - 1:
                tlx.fence("async_shared")
                me.meet(watch)
                half = _half_dq(buffers, r, n % 2, me)
        dk = tlx.async_dot(ds, q, dk)
        if block < BLOCKS - 1:
            scores = _scores(buffers, r, n, block + 1, me)
    if me.add_dq:
        since = watch.now()
        half = tlx.async_dot_wait(1, half)
        watch.waited(WAIT_MATMUL, since)
        buffers.dout.release(n)
        _add_dq(buffers, dq, half, step, me, watch)
    since = watch.now()
    dv = tlx.async_dot_wait(1, dv)
    watch.waited(WAIT_MATMUL, since)
    if not me.add_dq:
        buffers.dout.release(n)
    buffers.k.wait_if(step.turns & step.more, r + 1, watch)
    buffers.q.wait_if(step.more, n + 1, watch)
    # After the last step this reads old data, and is not used: cheaper than a branch around a matmul.
    scores = _scores(buffers, tl.where(step.turns, r + 1, r), n + 1, 0, me)
    since = watch.now()
    dk = tlx.async_dot_wait(1, dk)
    watch.waited(WAIT_MATMUL, since)
    buffers.q.release(n)
    since = watch.now()
    scores = tlx.async_dot_wait(0, scores)
    watch.waited(WAIT_MATMUL, since)
    return scores, dk, dv


@triton.jit
def _store_rows(staging, gradient, blocks, base, tile, first, stride):
    """Store ``gradient`` ``[64, D]`` of the keys from ``first`` on; asynchronously, if all of them exist."""
    D: tl.constexpr = staging.type.shape[1]
    column = tile.head * D
    tlx.local_store(staging, gradient.to(staging.type.element_ty))
    if first + ROWS <= tile.k_len:
        tlx.async_descriptor_store(blocks, staging, [tile.k_start + first, column])
    else:
        # Read back in a layout in which a thread holds neighbouring columns.
        key = first + tl.arange(0, ROWS)
        offsets = (tile.k_start + key).to(tl.int64) * stride + column
        pointers = base + (offsets[:, None] + tl.arange(0, D)[None, :])
        tl.store(pointers, tlx.local_load(staging), mask=(key < tile.k_len)[:, None])


@triton.jit
def _finish(buffers, r, dk, dv, outputs, tile, stride, me, watch):
    """Store ``dk`` and ``dv`` ``[64, D]`` of tile ``r``, and release its keys. The next tile hides the stores."""
    dk_blocks, dv_blocks, dk_base, dv_base = outputs
    C: tl.constexpr = me.index
    first = tile.key + C * ROWS
    wait_stores(watch)
    _store_rows(buffers.dv[C * (buffers.dv.type.num // 2)], dv, dv_blocks, dv_base, tile, first, stride)
    if me.add_dq:
        me.meet(watch)
    buffers.k.release(r)
    _store_rows(buffers.dk[C * (buffers.dk.type.num // 2)], dk, dk_blocks, dk_base, tile, first, stride)


@triton.jit
def _consume(buffers, walk, dq, outputs, sm_scale, window, GROUP: tl.constexpr, me, record):
    """A consumer. ``outputs`` is what :func:`_finish` writes to."""
    D: tl.constexpr = buffers.q.tiles.shape[1]
    STEP: tl.constexpr = buffers.q.parts * ROWS
    rules = (sm_scale * LOG2E, window)
    n = 0
    watch = start_watch(record, LOADER_ROLE + 1 + me.index)
    buffers.k.wait_if(walk.count > 0, 0, watch)
    buffers.q.wait_if(walk.count > 0, 0, watch)
    since = watch.now()
    scores = tlx.async_dot_wait(0, _scores(buffers, 0, 0, 0, me))
    watch.waited(WAIT_MATMUL, since)
    # Hoisted out of these loops, addresses would take registers that there are none of.
    for r in tl.range(0, walk.count, disable_licm=True):
        tile = _tile(walk, r)
        begin, steps = tile.steps(window, STEP)
        end = n + GROUP * steps
        buffers.v.wait(r, watch)
        dk = tl.zeros([ROWS, D], tl.float32)
        dv = tl.zeros([ROWS, D], tl.float32)
        for member in tl.range(0, GROUP, disable_licm=True):
            column = (tile.head * GROUP + member) * D
            first = begin
            for _ in tl.range(0, steps, disable_licm=True):
                step = Step(
                    length=tile.q_len - first,
                    facing=first - tile.facer(),
                    row=tile.q_start + first,
                    column=column,
                    fresh=(member == 0) & (first == begin),
                    turns=n + 1 == end,
                    more=(n + 1 < end) | (r + 1 < walk.count),
                )
                scores, dk, dv = _step((scores, dk, dv), buffers, r, n, dq, step, rules, me, watch)
                n += 1
                first += STEP
        # Asked again, rather than kept in registers during the steps.
        tile = _tile(walk, r)
        _finish(buffers, r, dk * sm_scale, dv, outputs, tile, walk.heads * D, me, watch)
        watch = watch.next(walk)
    wait_stores(watch)


@triton.jit
def _allocate(k, v, q, dout, D: tl.constexpr, STAGES: tl.constexpr):
    BLOCKS: tl.constexpr = 128 // D  # of 64 queries, in a step
    ds = tlx.local_alloc((ROWS, ROWS), k.dtype, 4 * BLOCKS)
    dq = tlx.local_alloc((ROWS, ROWS), tl.float32, 2)
    return Buffers(
        k=make_ring(k, WAIT_K, K_STAGES, 2, 2),
        v=make_ring(v, WAIT_V, 1, 2, 2),
        q=make_ring(q, WAIT_Q, STAGES, 2, BLOCKS, True),
        dout=make_ring(dout, WAIT_DOUT, STAGES, 2, BLOCKS, True),
        lse2=tlx.local_alloc((ROWS,), tl.float32, STAGES * BLOCKS),
        delta=tlx.local_alloc((ROWS,), tl.float32, STAGES * BLOCKS),
        ds=ds,
        dk=tlx.local_alloc((ROWS, D), k.dtype, 2 * BLOCKS * BLOCKS, reuse=ds),
        dq=dq,
        dv=tlx.local_alloc((ROWS, D), k.dtype, 2 * BLOCKS, reuse=dq),
        landing=tlx.alloc_barriers(num_barriers=1, arrive_count=1),
    )


@triton.jit(do_not_specialize=["rows", "kv_heads", "left", "right"])
def backward_sm90_kernel(
    q,  # descriptor of [total_q or M, H * D], blocks of [64, D]
    k,  # descriptor of [total_k, H_kv * D], blocks of [64, D]
    v,  # likewise
    dout,  # descriptor of [rows, H * D], blocks of [64, D]
    dq,  # descriptor of [total_q or M, H * D] float32, zeros, blocks of [64, 64]; None if not ADD_DQ
    dk,  # descriptor of [total_k, H_kv * D], blocks of [64, D]
    dv,  # likewise
    lse2,  # [H, rows] float32: log-sum-exp in base 2, +inf for a row without keys. With WHOLE_QUERIES a descriptor of
    # [H * rows], blocks of [64]
    delta,  # likewise: row sums of dout * out
    dk_base,  # what dk describes
    dv_base,
    tiles,  # list of tiles of 128 keys
    rows,
    kv_heads,
    sm_scale,
    left,
    right,
    record,  # see :mod:`.record`; None: nothing is recorded
    GROUP: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,  # steps of queries in shared memory, at least two
    ADD_DQ: tl.constexpr,  # compute dq; without it the result does not depend on scheduling
    WHOLE_QUERIES: tl.constexpr,  # every sequence's number of queries is a multiple of a step's, 8192 / D
):
    """A persistent program. ``dk`` and ``dv`` are complete; ``dq`` lacks the factor ``sm_scale``."""
    buffers = _allocate(k, v, q, dout, D, STAGES)
    walk = start_walk(tiles, kv_heads, True)
    inputs = (q, dout, lse2, delta, rows)
    outputs = (dk, dv, dk_base, dv_base)
    window = (left, right)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(buffers, k, v, inputs, walk, window, record, GROUP, ADD_DQ, not WHOLE_QUERIES)
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            # Asked for here: a function that both replicas call alike would be compiled once, with one answer.
            INDEX: tl.constexpr = tlx.async_task_replica_id()
            me = Consumer(INDEX, ADD_DQ, not WHOLE_QUERIES)
            _consume(buffers, walk, dq, outputs, sm_scale, window, GROUP, me, record)
