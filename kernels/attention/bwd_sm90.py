"""Backward kernel for Hopper (TLX): persistent, warp specialised, all three gradients in one pass.

Roles of a program, which walks over tiles of 128 keys of one head:

- the loader brings K and V of the tile, and one step of queries after the other (Q, dO, and their row statistics),
  into rings of shared memory by TMA, running ahead of what is computed;
- each of two consumers, a warp group, owns 64 of the keys, and keeps their dK and dV in registers.

``S^T = K Q^T`` and ``dP^T = V dO^T`` have keys as rows, so that ``P^T`` and ``dS^T`` are in registers what
``dV += P^T dO`` and ``dK += dS^T Q`` take as left operands. dQ sums over the keys of both consumers: they exchange
``dS^T`` through shared memory, and each computes one half of a step's dQ for all 128 keys, which TMA adds to global
memory, in float32. With ``LATE_DQ`` it does so a step later, so that neither has to wait for the other. ``S^T`` of the
next step, be it the next tile's, is computed beside the end of a step.

A step is 64 queries if D = 128, and 128 if D = 64: either way half of its dQ is a block of 64 x 64, half of the columns
or half of the queries. The formulas are those of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691,
algorithm 2); exchanging dS and adding dQ asynchronously is FlashAttention-3's scheme (Shah et al., 2024,
https://arxiv.org/abs/2407.08608).

Who waits for whom
------------------
1. A slot of Q or dO is loaded when both consumers have released it, as they do in every step, dO before Q.
2. K has two slots. That of a tile is released behind the last dQ of the tile, with ``LATE_DQ`` in the next tile's first
   step (or at the end of the tile, without dQ). V has one, which is free when dO of the tile's last step is released.
3. ``dS^T`` of a consumer has two buffers. In step n it waits until the other has read that of step n - 2 (``read``),
   and says when that of step n is complete (``written``), for which the other waits in the same step, or with
   ``LATE_DQ`` in step n + 1. For the first step's sake both then begin with a step -1, whose ``dS^T`` is zeros and
   whose dQ lies beyond all rows.
4. dQ, dV and dK are staged in one place. Before it writes there a consumer waits until its earlier stores were read.
5. No wait can deadlock. Within a step a consumer waits for slots of this step; for dS of the other's step before or,
   without ``LATE_DQ``, of the same, before which the other waits for earlier steps only; and for Q, and at the end of a
   tile K, of the next. The loader fills slots in the order in which they are waited for, and each needs only what is
   released before: Q of step n that of n - 2, V of tile r the last dO of tile r - 1, and K of tile r that of r - 2,
   released at the latest in the first step of tile r - 1: before the next scores if it is the only one.

No leak between neighbours
--------------------------
All blocks are moved by ragged descriptors (:mod:`.ragged`): what a block has beyond the end of its sequence is read as
zeros, and is neither stored nor added. Absent queries also have statistics that make their P zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .blocks import visible_span
from .pipeline import Ring, make_ring, wait_stores
from .ragged import ANCHOR, Rows
from .record import LOADER as LOADER_ROLE
from .record import WAIT_DOUT, WAIT_K, WAIT_MATMUL, WAIT_PAIR, WAIT_Q, WAIT_V, start_watch
from .tiles import load_tile
from .walk import start_walk

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))

ROWS = tl.constexpr(64)  # keys of a consumer, queries of a block: the rows of one warp group's matmul
TILE = tl.constexpr(128)  # keys of a tile: ROWS for each consumer
K_STAGES = tl.constexpr(2)  # S of a tile's first step is computed beside the last step of the tile before

LOADER = tl.constexpr(10)  # a named barrier; Triton itself uses the first ones


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
    written: tlx.mbarrier  # of each consumer's two buffers of dS, by itself
    read: tlx.mbarrier  # by the other consumer
    dq: tlx.buffered_tensor  # [64, 64] float32 for each consumer
    gradients: tlx.buffered_tensor  # [64, D], in the place of dq: one for each consumer, two if D is 64


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
def _load_dout(buffers, n, inputs, tile, first, head, BOUNDED: tl.constexpr):
    """Start to fill the slot of dO, and the row statistics of its queries from ``first`` on.

    ``lse2`` and ``delta`` are descriptors, or with ``BOUNDED`` pointers: there a sequence may start at any row, and TMA
    faults at an address that is no multiple of 16 bytes.
    """
    _, dout, lse2, delta, rows = inputs
    parts: tl.constexpr = buffers.dout.parts
    slot = n % buffers.dout.depth
    column = head * buffers.dout.tiles.shape[1]
    outputs = Rows(tile.out_start, tile.q_len)
    if BOUNDED:
        at = head.to(tl.int64) * rows + tile.out_start + first
        for part in tl.static_range(parts):
            query = part * ROWS + tl.arange(0, ROWS)
            exists = first + query < tile.q_len
            tlx.local_store(buffers.lse2[slot * parts + part], tl.load(lse2 + at + query, mask=exists, other=INF))
            tlx.local_store(buffers.delta[slot * parts + part], tl.load(delta + at + query, mask=exists, other=0.0))
        tlx.named_barrier_wait(LOADER, 128)  # before the one arrival that stands for all
        buffers.dout.load(n, dout, first, column, outputs)
    else:
        buffers.dout.load(n, dout, first, column, outputs, 2 * 4 * parts * ROWS)
        full = buffers.dout.full[slot]
        at = head * rows + tile.out_start + first
        for part in tl.static_range(parts):
            tlx.async_descriptor_load(lse2, buffers.lse2[slot * parts + part], [at + part * ROWS], full)
            tlx.async_descriptor_load(delta, buffers.delta[slot * parts + part], [at + part * ROWS], full)


@triton.jit
def _load(buffers, k, v, inputs, walk, window, record, GROUP: tl.constexpr, BOUNDED: tl.constexpr):
    """The loader. ``inputs`` is ``q, dout, lse2, delta, rows``. ``BOUNDED``: some steps have absent queries."""
    D: tl.constexpr = buffers.k.tiles.shape[1]
    STEP: tl.constexpr = buffers.q.parts * ROWS
    n = 0
    watch = start_watch(record, LOADER_ROLE)
    for r in tl.range(0, walk.count, disable_licm=True):
        tile = _tile(walk, r)
        begin, steps = tile.steps(window, STEP)
        keys = Rows(tile.k_start, tile.k_len)
        queries = Rows(tile.q_start, tile.q_len)
        buffers.k.acquire(r, watch)
        buffers.k.load(r, k, tile.key, tile.head * D, keys)
        for member in tl.range(0, GROUP, disable_licm=True):
            head = tile.head * GROUP + member
            for i in tl.range(0, steps, disable_licm=True):
                first = begin + i * STEP
                buffers.q.acquire(n, watch)
                buffers.q.load(n, inputs[0], first, head * D, queries)
                if member + i == 0:
                    if r > 0:
                        buffers.dout.acquire(n - 1 + buffers.dout.depth, watch)  # all uses until n - 1 are released
                    buffers.v.load(r, v, tile.key, tile.head * D, keys)
                buffers.dout.acquire(n, watch)
                _load_dout(buffers, n, inputs, tile, first, head, BOUNDED)
                n += 1
        watch = watch.next(walk)


@aggregate
class Consumer:
    """Which of the two consumers this is, and what it does about dQ."""

    index: tl.constexpr
    add_dq: tl.constexpr
    late: tl.constexpr  # 1: dQ of a step comes one step later. 0: in the step itself

    @triton.jit
    def await_other(self, barriers, owner: tl.constexpr, count, watch):
        """Wait for the ``count``-th use of the ``owner``'s buffer of dS to be announced at ``barriers``."""
        since = watch.now()
        tlx.barrier_wait(barriers[2 * owner + (count & 1)], (count >> 1) & 1)
        watch.waited(WAIT_PAIR, since)

    @triton.jit
    def write_ds(self, buffers, block: tl.constexpr, count, ds):
        tlx.local_store(buffers.ds[(2 * self.index + (count & 1)) * buffers.q.parts + block], ds)

    @triton.jit
    def announce_ds(self, buffers, count):
        tlx.fence("async_shared")
        tlx.barrier_arrive(buffers.written[2 * self.index + (count & 1)], 1)


@aggregate
class Step:
    """A step of queries, for a tile."""

    facing: tl.tensor  # position that the first query faces, counted from the tile's first key
    fresh: tl.tensor  # the tile's first step
    turns: tl.tensor  # its last: the next one belongs to the next tile
    more: tl.tensor  # there is a next one


@triton.jit
def _scores(buffers, r, n, block: tl.constexpr, me):
    """Start ``S^T`` ``[64 keys, 64 queries]`` of one block of the step."""
    return tlx.async_dot(buffers.k.tile(r, me.index), tlx.local_trans(buffers.q.tile(n, block)))


@triton.jit
def _next_scores(buffers, r, n, step, me, watch):
    """Start the first ``S^T`` of step ``n + 1``.

    After the last step this reads old data, and is not used: cheaper than a branch around a matmul.
    """
    buffers.k.wait_if(step.turns & step.more, r + 1, watch)
    buffers.q.wait_if(step.more, n + 1, watch)
    return _scores(buffers, tl.where(step.turns, r + 1, r), n + 1, 0, me)


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
def _half_dq(buffers, r, count, me):
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
        half = tlx.async_dot(tlx.local_trans(keys), buffers.ds[(2 * source + (count & 1)) * BLOCKS + block], half)
    return half


@aggregate
class Place:
    """Coordinates of a ragged descriptor but for the first, :data:`.ragged.ANCHOR`; a row from there on is none."""

    end: tl.tensor
    row: tl.tensor
    column: tl.tensor


@triton.jit
def _place_of_dq(tile, first, column, BLOCKS: tl.constexpr, me):
    """Of this consumer's half of the dQ of a step that begins with query ``first``, of the head at ``column``."""
    if BLOCKS == 2:
        first += me.index * ROWS
    else:
        column += me.index * ROWS
    _, end, row, column = Rows(tile.q_start, tile.q_len).at(first, column)
    return Place(end, row, column)


@triton.jit
def _add_dq(buffers, dq, half, place, me, watch):
    """Add ``half`` to its ``place`` in ``dq``, asynchronously."""
    wait_stores(watch)
    tlx.local_store(tlx.local_trans(buffers.dq[me.index]), half)
    coordinates = [ANCHOR, place.end, place.row, place.column]
    tlx.async_descriptor_store(dq, buffers.dq[me.index], coordinates, store_reduce="add")


@triton.jit
def _step(state, buffers, r, n, dq, place, step, rules, me, watch, AHEAD: tl.constexpr):
    """Add step ``n`` of tile ``r`` to ``dk`` and ``dv``, and it or the step before to ``dq``, at ``place``.

    ``state`` is ``S^T [64 keys, 64 queries], dk [64, D], dv [64, D]``, and returned with the next step's first ``S^T``;
    ``rules`` are the scale of scores and the window. ``AHEAD``: the next ``S^T`` is started before dQ is complete.
    """
    scores, dk, dv = state
    scale_log2, window = rules
    C: tl.constexpr = me.index
    OTHER: tl.constexpr = 1 - me.index
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
            if block == 0:
                me.await_other(buffers.read, C, n + me.late - 2, watch)
            me.write_ds(buffers, block, n + me.late, ds)
            if block == BLOCKS - 1:
                me.announce_ds(buffers, n + me.late)
                since = watch.now()
                dv = tlx.async_dot_wait(0, dv)
                watch.waited(WAIT_MATMUL, since)
                buffers.dout.release(n)
                me.await_other(buffers.written, OTHER, n, watch)
        dk = tlx.async_dot(ds, q, dk)
        if block < BLOCKS - 1:
            scores = _scores(buffers, r, n, block + 1, me)
    if me.add_dq:
        whose = r  # the tile that dQ is of
        if me.late:
            whose = tl.where(step.fresh, tl.maximum(r - 1, 0), r)
        half = _half_dq(buffers, whose, n, me)
    else:
        since = watch.now()
        dv = tlx.async_dot_wait(1, dv)
        watch.waited(WAIT_MATMUL, since)
        buffers.dout.release(n)
    if AHEAD:
        scores = _next_scores(buffers, r, n, step, me, watch)
    since = watch.now()
    # dQ is two matmuls, of which this waits for the first, too.
    dk = tlx.async_dot_wait(2 if AHEAD and me.add_dq else 1, dk)
    watch.waited(WAIT_MATMUL, since)
    buffers.q.release(n)
    if me.add_dq:
        since = watch.now()
        half = tlx.async_dot_wait(1 if AHEAD else 0, half)
        watch.waited(WAIT_MATMUL, since)
        tlx.barrier_arrive(buffers.read[2 * OTHER + (n & 1)], 1)
        if (step.fresh & (r > 0)) if me.late else step.turns:
            buffers.k.release(whose)
        if not AHEAD:
            scores = _next_scores(buffers, r, n, step, me, watch)
        _add_dq(buffers, dq, half, place, me, watch)
    since = watch.now()
    scores = tlx.async_dot_wait(0, scores)
    watch.waited(WAIT_MATMUL, since)
    return scores, dk, dv


@triton.jit
def _steps(state, buffers, tile, r, n, start, stop, span, column, dq, walk, rules, me, watch, AHEAD: tl.constexpr):
    """The steps ``start`` to ``stop`` of one head, of which number 0 is step ``n``.

    ``span`` is the first query, first step and step behind the last of the tile, ``column`` that of the head in ``dq``,
    ``state`` that of :func:`_step` and the place of the dQ that is still to be added.
    """
    scores, dk, dv, place = state
    begin, fresh, end = span
    for i in tl.range(start, stop, disable_licm=True):
        first = begin + i * (buffers.q.parts * ROWS)
        step = Step(
            facing=first - tile.facer(),
            fresh=n + i == fresh,
            turns=n + i + 1 == end,
            more=(n + i + 1 < end) | (r + 1 < walk.count),
        )
        if me.add_dq and not me.late:
            place = _place_of_dq(tile, first, column, buffers.q.parts, me)
        scores, dk, dv = _step((scores, dk, dv), buffers, r, n + i, dq, place, step, rules, me, watch, AHEAD)
        if me.add_dq and me.late:
            place = _place_of_dq(tile, first, column, buffers.q.parts, me)
    return scores, dk, dv, place


@triton.jit
def _store(staging, gradient, blocks, place):
    tlx.local_store(staging, gradient.to(staging.type.element_ty))
    tlx.async_descriptor_store(blocks, staging, place)


@triton.jit
def _finish(buffers, r, dk, dv, outputs, tile, me, watch):
    """Store ``dk`` and ``dv`` ``[64, D]`` of tile ``r``. The next tile hides the stores."""
    dk_blocks, dv_blocks = outputs
    EACH: tl.constexpr = buffers.gradients.type.num // 2
    D: tl.constexpr = buffers.k.tiles.shape[1]
    place = Rows(tile.k_start, tile.k_len).at(tile.key + me.index * ROWS, tile.head * D)
    wait_stores(watch)
    _store(buffers.gradients[me.index * EACH], dv, dv_blocks, place)
    if EACH == 1:
        wait_stores(watch)
    _store(buffers.gradients[me.index * EACH + EACH - 1], dk, dk_blocks, place)
    if not me.add_dq:
        buffers.k.release(r)


@triton.jit
def _consume(buffers, walk, dq, outputs, sm_scale, window, GROUP: tl.constexpr, me, record):
    """A consumer. ``outputs`` is what :func:`_finish` writes to."""
    D: tl.constexpr = buffers.q.tiles.shape[1]
    STEP: tl.constexpr = buffers.q.parts * ROWS
    rules = (sm_scale * LOG2E, window)
    n = 0
    watch = start_watch(record, LOADER_ROLE + 1 + me.index)
    place = Place(tl.cast(0, tl.int32), tl.cast(ANCHOR, tl.int32), tl.cast(0, tl.int32))
    if me.add_dq and me.late:
        zeros = tl.zeros([ROWS, ROWS], buffers.ds.dtype)
        for block in tl.static_range(buffers.q.parts):
            me.write_ds(buffers, block, 0, zeros)
        me.announce_ds(buffers, 0)
    buffers.k.wait_if(walk.count > 0, 0, watch)
    buffers.q.wait_if(walk.count > 0, 0, watch)
    since = watch.now()
    scores = tlx.async_dot_wait(0, _scores(buffers, 0, 0, 0, me))
    watch.waited(WAIT_MATMUL, since)
    # Hoisted out of these loops, addresses would take registers that there are none of.
    for r in tl.range(0, walk.count, disable_licm=True):
        tile = _tile(walk, r)
        begin, steps = tile.steps(window, STEP)
        buffers.v.wait(r, watch)
        dk = tl.zeros([ROWS, D], tl.float32)
        dv = tl.zeros([ROWS, D], tl.float32)
        span = (begin, n, n + GROUP * steps)
        for member in tl.range(0, GROUP, disable_licm=True):
            state = (scores, dk, dv, place)
            column = (tile.head * GROUP + member) * D
            if me.add_dq and (window[0] is not None or window[1] is not None):
                # There are no registers left for two accumulators more beside the limits of a window.
                state = _steps(state, buffers, tile, r, n, 0, steps, span, column, dq, walk, rules, me, watch, False)
            else:
                ahead = steps
                if me.add_dq and me.late and GROUP == 1:
                    # The only step of a tile has to release the keys of the tile before, until which those of the next
                    # have no room.
                    ahead = tl.where(steps == 1, 0, steps)
                state = _steps(state, buffers, tile, r, n, 0, ahead, span, column, dq, walk, rules, me, watch, True)
                if me.add_dq and me.late and GROUP == 1:
                    state = _steps(
                        state, buffers, tile, r, n, ahead, steps, span, column, dq, walk, rules, me, watch, False
                    )
            scores, dk, dv, place = state
            n += steps
        # Asked again, rather than kept in registers during the steps.
        tile = _tile(walk, r)
        _finish(buffers, r, dk * sm_scale, dv, outputs, tile, me, watch)
        watch = watch.next(walk)
    if me.add_dq and me.late:
        me.await_other(buffers.written, 1 - me.index, n, watch)
        half = tlx.async_dot_wait(0, _half_dq(buffers, tl.maximum(walk.count - 1, 0), n, me))
        _add_dq(buffers, dq, half, place, me, watch)
    wait_stores(watch)


@triton.jit
def _allocate(k, v, q, dout, D: tl.constexpr, STAGES: tl.constexpr):
    BLOCKS: tl.constexpr = 128 // D  # of 64 queries, in a step
    dq = tlx.local_alloc((ROWS, ROWS), tl.float32, 2)
    return Buffers(
        k=make_ring(k, WAIT_K, K_STAGES, 2, 2),
        v=make_ring(v, WAIT_V, 1, 2, 2),
        q=make_ring(q, WAIT_Q, STAGES, 2, BLOCKS, True),
        dout=make_ring(dout, WAIT_DOUT, STAGES, 2, BLOCKS, True),
        lse2=tlx.local_alloc((ROWS,), tl.float32, STAGES * BLOCKS),
        delta=tlx.local_alloc((ROWS,), tl.float32, STAGES * BLOCKS),
        ds=tlx.local_alloc((ROWS, ROWS), k.dtype, 4 * BLOCKS),
        written=tlx.alloc_warp_barrier(num_barriers=4, num_warps=4, num_arrivals=1),
        read=tlx.alloc_warp_barrier(num_barriers=4, num_warps=4, num_arrivals=1),
        dq=dq,
        gradients=tlx.local_alloc((ROWS, D), k.dtype, 2 * BLOCKS, reuse=dq),
    )


@triton.jit(do_not_specialize=["rows", "left", "right"])
def backward_sm90_kernel(
    q,  # ragged descriptor of [total_q or M, H * D], blocks of [64, D]
    k,  # ragged descriptor of [total_k, H_kv * D], blocks of [64, D]
    v,  # likewise
    dout,  # ragged descriptor of [rows, H * D], blocks of [64, D]
    dq,  # ragged descriptor of [total_q or M, H * D] float32, zeros, blocks of [64, 64]; None if not ADD_DQ
    dk,  # ragged descriptor of [total_k, H_kv * D], blocks of [64, D]
    dv,  # likewise
    lse2,  # [H, rows] float32: log-sum-exp in base 2, +inf for a row without keys. With WHOLE_QUERIES a descriptor of
    # [H * rows], blocks of [64]
    delta,  # likewise: row sums of dout * out
    tiles,  # list of tiles of 128 keys
    rows,
    sm_scale,
    left,
    right,
    record,  # see :mod:`.record`; None: nothing is recorded
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,  # steps of queries in shared memory, at least two
    ADD_DQ: tl.constexpr,  # compute dq; without it the result does not depend on scheduling
    LATE_DQ: tl.constexpr,  # each step's a step later
    WHOLE_QUERIES: tl.constexpr,  # every sequence's number of queries is a multiple of a step's, 8192 / D
):
    """A persistent program. ``dk`` and ``dv`` are complete; ``dq`` lacks the factor ``sm_scale``."""
    buffers = _allocate(k, v, q, dout, D, STAGES)
    walk = start_walk(tiles, KV_HEADS, True)
    inputs = (q, dout, lse2, delta, rows)
    outputs = (dk, dv)
    window = (left, right)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(buffers, k, v, inputs, walk, window, record, GROUP, not WHOLE_QUERIES)
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            # Asked for here: a function that both replicas call alike would be compiled once, with one answer.
            INDEX: tl.constexpr = tlx.async_task_replica_id()
            me = Consumer(INDEX, ADD_DQ, 1 if LATE_DQ else 0)
            _consume(buffers, walk, dq, outputs, sm_scale, window, GROUP, me, record)
