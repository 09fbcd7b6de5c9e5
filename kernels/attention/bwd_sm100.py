"""Backward kernel for Blackwell (TLX): persistent, warp specialised, all three gradients in one pass.

Roles of a program, one CTA or a pair, which takes tile after tile of 128 keys a CTA, and with each every step of
``step`` queries that see some of them, for all query heads that share the keys:

- the *loader*, one warp, brings K, V, Q and dO into shared memory by TMA, and another warp the row statistics;
- the *multiplier*, one warp, issues the five matmuls of a step: ``S^T = K Q^T``, ``dP^T = V dO^T``, ``dV += P^T dO``,
  ``dK += dS^T Q`` and ``dQ = dS K``;
- two groups *differentiate*, each half of a step's queries, 128 threads with a key each: P^T from S^T, dS^T from dP^T;
- the *reducer*, 128 threads, adds each step's dQ to global memory, in slices of columns, which TMA adds asynchronously;
- the *storer*, 128 threads, is the epilogue: dK and dV of a tile, beside the first steps of the next;
- the *scheduler*, one warp, finds out which tile is next.

The formulas are those of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 2). The division of
labour, the places in tensor memory and pairs of CTAs are FlashAttention-4's (Zadouri et al., 2026,
https://arxiv.org/abs/2603.05451). P and dS come in halves of the queries, each with its own signal, so that dV and dK
begin with one while the other is computed.

Tensor memory, columns of 128 lanes, if D = 128 and a step is 128 queries (dQ has columns of its own if they suffice)::

    0        64       128      192      256              384              512
    | S^T             | dP^T            | dK             | dV              |
    | P^T 0  | P^T 1  | dS^T 0 | dS^T 1 |                                    each in the first half of its columns
                      | dQ              |                                    of a pair its first half

A half of P^T (dS^T) lies in columns from which the same threads read the scores that it is made of. Matmuls work in the
order in which they are issued, so that S^T may overwrite P^T once dV is issued, and dQ overwrites dS^T after dK.

A pair shares its matmuls. Each CTA has its own 128 keys as rows of K and V, half of the queries for S^T and dP^T, and
half of the columns of Q and dO for dV and dK. dQ sums over the keys of both: each CTA computes half of the queries, for
which it keeps that half of its own dS^T and is sent the peer's through distributed shared memory.

Who waits for whom
------------------
Steps are counted by n, tiles by r. ``filled`` and ``drained`` are about accumulators.

1. A slot of Q is loaded when dK of the step that used it is complete, dO when dV and dP^T are, K when the tile's last
   dQ is, V when its last dP^T is. Of a pair, S^T and dP^T release what they alone read.
2. ``S^T(n + 1)`` needs Q, and ``dV(n)`` issued. That waits until both halves of P^T(n) are written, so that S^T(n) was
   read.
3. ``dK(n)`` waits for both halves of dS^T(n); dQ(n) follows. It is drained before its columns are written again, by
   dP^T(n + 1), or else by dQ(n + 1). ``dV`` and ``dK`` of a tile's first step wait until the storer has drained those
   of the tile before.
4. dS^T(n + 1) is written to shared memory, by whichever CTA, when dP^T(n + 1) is complete, and so dQ(n), issued before.
5. Order of issue: S^T(n + 1), dK(n), dQ(n), dP^T(n + 1), dV(n + 1); the last two the other way around where dP^T
   overwrites dQ. Where the next tile's K has a slot, across tiles as well; else a tile's last dK and dQ come before the
   next tile's first S^T, whose K could not be loaded before.
6. No wait can deadlock: in that order each matmul waits for what the groups make of earlier ones, and the loader fills
   slots in the order in which they are waited for, each of which needs only what earlier steps release. All roles ask
   for the next tile equally often, and a tile has at least one step, be it masked whole.

No leak between neighbours
--------------------------
Blocks are loaded by ragged descriptors (:mod:`.ragged`): what a block has beyond its sequence is zeros, and is not
stored. A query that does not exist gets P = 0 through its statistics; keys that do not exist are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .key_tiles import KEYS, make_queue
from .packed import packed_fma
from .pipeline_sm100 import LEADER, Operand, Signal, make_group_signal, make_operand, make_signal
from .ragged import Rows

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))

TMEM_COLUMNS = tl.constexpr(512)
CHUNK = tl.constexpr(32)  # columns of tensor memory that a thread has in registers at a time
STATISTICS = tl.constexpr(2)  # steps whose row statistics are in shared memory
LISTENERS = tl.constexpr(19)  # warps that the scheduler tells which tile is next: all but its own

# What is filled: accumulators in tensor memory; of a pair the other half of dS, in this CTA, or in the leader's peer.
# The first three are drained by others than those who fill them.
DQ, DK, DV, S, DP, CAME, RELAYED = (tl.constexpr(i) for i in range(7))
# The first of two signals that a half is ready.
P, DS = (tl.constexpr(i) for i in (0, 2))


@aggregate
class Buffers:
    """Shared and tensor memory, and the signals between roles. A step is ``step`` queries."""

    k: Operand  # [128, D]
    v: Operand  # [128, D]
    q: Operand  # [step, D]; of a pair half of the rows
    dout: Operand  # likewise
    k_columns: Operand  # k; of a pair the keys of both, and half of the columns
    q_columns: Operand  # q; of a pair all rows, and half of the columns
    dout_columns: Operand  # likewise
    statistics: tlx.buffered_tensor  # [step / 2] float32: of each slot the halves of -lse2, then those of delta
    statistics_full: tlx.mbarrier
    statistics_empty: tlx.mbarrier
    s: tlx.buffered_tensor  # tensor memory [128, step] float32
    p: tlx.buffered_tensor  # in its place, [128, step / 2] 16-bit: halves 0 and 2 of 4
    dp: tlx.buffered_tensor  # tensor memory [128, step] float32
    ds: tlx.buffered_tensor  # in its place, [128, step / 2] 16-bit: halves 0 and 2 of 4
    dq: tlx.buffered_tensor  # tensor memory [step, D] float32; of a pair half of the rows
    dq_lanes: tlx.buffered_tensor  # the same, as it lies: of a pair [128, D / 2]
    dk: tlx.buffered_tensor  # tensor memory [128, D] float32
    dv: tlx.buffered_tensor  # likewise
    ds_shared: tlx.buffered_tensor  # [128, step] 16-bit; of a pair [256, step / 2]
    ds_pieces: tlx.buffered_tensor  # the same, of a pair [128, step / 2] of each CTA's keys
    dq_staging: tlx.buffered_tensor  # [step, columns] float32, columns of dq_lanes
    dkv_staging: tlx.buffered_tensor  # [128, columns] 16-bit
    filled: Signal
    drained: Signal
    ready: Signal  # halves of p, and of ds, in tensor and shared memory
    ctas: tl.constexpr
    step: tl.constexpr
    add_dq: tl.constexpr
    dq_over_dp: tl.constexpr  # dq lies in the place of dp
    across: tl.constexpr  # the next tile's first scores are computed before dK and dQ of a tile's last step

    @triton.jit
    def rank(self):
        return tlx.cluster_cta_rank() if self.ctas == 2 else 0


# loading -------------------------------------------------------------------------------------------------------------


@triton.jit
def _load(b, inputs, columns, queue, window, GROUP: tl.constexpr):
    """The loader. ``inputs`` are the descriptors of q, k, v, dout, and ``columns`` a pair's of q, k, dout."""
    q, k, v, dout = inputs
    D: tl.constexpr = b.k.tiles.shape[1]
    HALF: tl.constexpr = D // 2
    rank = b.rank()
    n = 0
    r = 0
    number = queue.first()
    while queue.has(number):
        tile = queue.tile(number)
        steps = tile.steps(window, b.step, b.ctas)
        key_column = tile.head * D
        b.k.load(r, k, tile.k, tile.key, key_column)
        for i in tl.range(0, GROUP * steps.count):
            member, first = steps.at(i, GROUP, b.step)
            column = (tile.head * GROUP + member) * D
            row = first + rank * (b.step // 2)
            b.q.load(n, q, tile.q, row, column)
            if i == 0:
                b.v.load(r, v, tile.k, tile.key, key_column)
            b.dout.load(n, dout, tile.out, row, column)
            if b.ctas == 2:
                b.dout_columns.load(n, columns[2], tile.out, first, column + rank * HALF)
                b.q_columns.load(n, columns[0], tile.q, first, column + rank * HALF)
                if i == 0 and b.add_dq:
                    b.k_columns.load(r, columns[1], tile.k, tile.program_key, key_column + rank * HALF)
            n += 1
        r += 1
        number = queue.next(r)


@triton.jit
def _load_statistics(b, lse2, delta, rows, queue, window, GROUP: tl.constexpr):
    """Row statistics of each step, through registers: TMA would need aligned addresses. P of absent queries is 0."""
    HALF: tl.constexpr = b.step // 2
    n = 0
    r = 0
    number = queue.first()
    while queue.has(number):
        tile = queue.tile(number)
        steps = tile.steps(window, b.step, b.ctas)
        for i in tl.range(0, GROUP * steps.count):
            member, first = steps.at(i, GROUP, b.step)
            at = (tile.head * GROUP + member).to(tl.int64) * rows + tile.out.start
            slot = n % STATISTICS
            tlx.barrier_wait(b.statistics_empty[slot], ((n // STATISTICS) & 1) ^ 1)
            for half in tl.static_range(2):
                row = first + half * HALF + tl.arange(0, HALF)
                exists = row < tile.q.length
                tlx.local_store(b.statistics[4 * slot + half], -tl.load(lse2 + at + row, mask=exists, other=INF))
                tlx.local_store(b.statistics[4 * slot + 2 + half], tl.load(delta + at + row, mask=exists, other=0.0))
            tlx.barrier_arrive(b.statistics_full[slot], 1)
            n += 1
        r += 1
        number = queue.next(r)


# matmuls -------------------------------------------------------------------------------------------------------------


@triton.jit
def _start_pairs(b, keys, operand, n, accumulator, WHICH: tl.constexpr):
    """A value for each pair of a key, ``[128, D]``, and a query of the step. Of a pair of CTAs it releases those."""
    queries = tlx.local_trans(operand.tile(n))
    full = b.filled.barriers[WHICH]
    if b.ctas == 2:
        tlx.async_dot(keys, queries, accumulator, use_acc=False, mBarriers=[full, operand.released(n)], two_ctas=True)
    else:
        tlx.async_dot(keys, queries, accumulator, use_acc=False, mBarriers=[full])


@triton.jit
def _start_scores(b, r, n):
    """``S^T = K Q^T``, over P^T of the step before, which dV has been told to read."""
    b.q.wait(n)
    _start_pairs(b, b.k.tile(r), b.q, n, b.s[0], S)


@triton.jit
def _start_dp(b, r, n, opens):
    """``dP^T = V dO^T``, over dS^T of the step before, which dK has been told to read, and perhaps over its dQ."""
    if opens:
        b.v.wait(r)
    if b.dq_over_dp:
        b.drained.wait(DQ, n - 1)
    _start_pairs(b, b.v.tile(r), b.dout, n, b.dp[0], DP)


@triton.jit
def _start_dv(b, r, n, opens):
    """``dV += P^T dO``; a tile's first, ``opens``, when the tile before it is drained."""
    if opens:
        b.drained.wait(DV, r - 1)
    _add_halves(b, P, b.p, b.dout_columns, n, b.dv[0], opens)


@triton.jit
def _start_dp_and_dv(b, r, n, opens):
    """Both. Where dP may not overwrite a dQ yet dV comes first, beside the drain; P is ready before."""
    b.dout.wait(n)
    if not b.dq_over_dp:
        _start_dp(b, r, n, opens)
        _start_dv(b, r, n, opens)
    elif b.across:
        _start_dv(b, r, n, opens)
        _start_dp(b, r, n, opens)
    elif opens:  # no dQ is underway, and P is not there yet
        _start_dp(b, r, n, opens)
        _start_dv(b, r, n, opens)
    else:
        _start_dv(b, r, n, opens)
        _start_dp(b, r, n, opens)
    if b.ctas == 1:
        tlx.tcgen05_commit(b.dout.released(n))


@triton.jit
def _add_halves(b, WHICH: tl.constexpr, halves, operand, n, accumulator, fresh):
    """Add the product of ``halves`` ``[128, step]``, each when it is ready, and an operand ``[step, columns]``.

    Of a pair it releases the operand, which nothing else reads.
    """
    PAIR: tl.constexpr = b.ctas == 2
    HALF: tl.constexpr = b.step // 2
    COLUMNS: tl.constexpr = operand.tiles.shape[1]
    if PAIR:  # else it is what the scores, or dP, have waited for
        operand.wait(n)
    tile = operand.tile(n)
    b.ready.wait(WHICH, n)
    first = tlx.local_slice(tile, [0, 0], [HALF, COLUMNS])
    tlx.async_dot(halves[0], first, accumulator, use_acc=fresh == 0, force_async=True, two_ctas=PAIR)
    b.ready.wait(WHICH + 1, n)
    second = tlx.local_slice(tile, [HALF, 0], [HALF, COLUMNS])
    if PAIR:
        tlx.async_dot(halves[2], second, accumulator, use_acc=True, mBarriers=[operand.released(n)], two_ctas=True)
    else:
        tlx.async_dot(halves[2], second, accumulator, use_acc=True, force_async=True)


@triton.jit
def _start_dq(b, r, n):
    """``dQ = dS K``, which may lie over dS^T in tensor memory, once dK has been told to read that."""
    PAIR: tl.constexpr = b.ctas == 2
    if PAIR:
        b.k_columns.wait(r)
        tlx.barrier_expect_bytes(b.filled.barriers[CAME], KEYS * (b.step // 2) * tlx.size_of(b.ds_shared.dtype))
        b.filled.wait(CAME, n)
        tlx.fence("async_shared")
        b.filled.wait(RELAYED, n)
    if not b.dq_over_dp:
        b.drained.wait(DQ, n - 1)
    ds = tlx.local_trans(b.ds_shared[0])
    full = b.filled.barriers[DQ]
    tlx.async_dot(ds, b.k_columns.tile(r), b.dq[0], use_acc=False, mBarriers=[full], two_ctas=PAIR)


@triton.jit
def _finish_step(b, r, n, fresh, last):
    """What needs dS of step ``n``, a step of tile ``r``, perhaps its first (``fresh``) or ``last``."""
    PAIR: tl.constexpr = b.ctas == 2
    if fresh:
        b.drained.wait(DK, r - 1)
    _add_halves(b, DS, b.ds, b.q_columns, n, b.dk[0], fresh)
    if not PAIR:
        tlx.tcgen05_commit(b.q.released(n))
    if b.add_dq:
        _start_dq(b, r, n)
    if last:
        tlx.tcgen05_commit(b.filled.barriers[DK], two_ctas=PAIR)
        if b.add_dq or not PAIR:
            tlx.tcgen05_commit(b.k_columns.released(r), two_ctas=PAIR)


@triton.jit
def _multiply_tile(b, r, n, steps, fresh):
    """The matmuls of a tile, perhaps without those that need dS of its last step.

    ``fresh``: step ``n - 1`` was the first of its tile. Returns both for the next tile.
    """
    PAIR: tl.constexpr = b.ctas == 2
    b.k.wait(r)
    for i in tl.range(0, steps):
        _start_scores(b, r, n)
        if PAIR and i == steps - 1:
            tlx.tcgen05_commit(b.k.released(r), two_ctas=True)
        opens = i == 0
        if n > 0 if b.across else i > 0:
            _finish_step(b, tl.where(opens, r - 1, r), n - 1, fresh, opens)
        _start_dp_and_dv(b, r, n, opens)
        fresh = opens
        n += 1
    tlx.tcgen05_commit(b.filled.barriers[DV], two_ctas=PAIR)
    tlx.tcgen05_commit(b.v.released(r), two_ctas=PAIR)
    if not b.across:
        _finish_step(b, r, n - 1, fresh, True)
    return n, fresh


@triton.jit
def _multiply(b, queue, window, GROUP: tl.constexpr):
    """The multiplier. Of a pair the leader issues all matmuls, and the peer tells it when dS has come."""
    leads = b.rank() == LEADER
    fresh = tl.full([], 0, tl.int1)
    n = 0
    r = 0
    number = queue.first()
    while queue.has(number):
        steps = GROUP * queue.tile(number).steps(window, b.step, b.ctas).count
        if leads:
            n, fresh = _multiply_tile(b, r, n, steps, fresh)
        else:
            n = _relay(b, n, steps)
        r += 1
        number = queue.next(r)
    if b.across and leads and n > 0:
        _finish_step(b, r - 1, n - 1, fresh, True)


@triton.jit
def _relay(b, n, steps):
    if b.ctas == 2 and b.add_dq:
        for _ in tl.range(0, steps):
            tlx.barrier_expect_bytes(b.filled.barriers[CAME], KEYS * (b.step // 2) * tlx.size_of(b.ds_shared.dtype))
            b.filled.wait(CAME, n)
            tlx.fence("async_shared")
            tlx.barrier_arrive(b.filled.barriers[RELAYED], 1, remote_cta_rank=LEADER)
            n += 1
    return n


# dS ------------------------------------------------------------------------------------------------------------------


@triton.jit
def _probabilities(b, n, first, tile, scale_log2, window, C: tl.constexpr, EDGE: tl.constexpr):
    """P^T of half ``C`` of a step's queries, to tensor memory, and as blocks ``[128, CHUNK]`` float32."""
    HALF: tl.constexpr = b.step // 2
    statistics = b.statistics[4 * (n % STATISTICS) + C]
    tlx.barrier_wait(b.statistics_full[n % STATISTICS], (n // STATISTICS) & 1)
    b.filled.wait(S, n)
    p = ()
    for c in tl.static_range(HALF // CHUNK):
        scores = tlx.local_load(tlx.local_slice(b.s[0], [0, C * HALF + c * CHUNK], [KEYS, CHUNK]))
        minus_lse2 = tlx.local_load(tlx.local_slice(statistics, [c * CHUNK], [CHUNK]))
        exponent = packed_fma(scores, scale_log2, minus_lse2[None, :])
        if EDGE:
            exponent = tl.where(tile.seen(first + C * HALF + c * CHUNK, window, CHUNK), exponent, -INF)
        p += (tl.exp2(exponent),)  # type: ignore[assignment]
        tlx.local_store(tlx.local_slice(b.p[2 * C], [0, c * CHUNK], [KEYS, CHUNK]), p[c].to(b.p.dtype))
    b.ready.arrive(P + C)
    return p


@triton.jit
def _step(b, n, first, tile, scale_log2, window, C: tl.constexpr, EDGE: tl.constexpr):
    """P^T and dS^T of half ``C`` of a step's queries."""
    HALF: tl.constexpr = b.step // 2
    statistics = b.statistics[4 * (n % STATISTICS) + 2 + C]
    p = _probabilities(b, n, first, tile, scale_log2, window, C, EDGE)
    b.filled.wait(DP, n)
    for c in tl.static_range(HALF // CHUNK):
        dp = tlx.local_load(tlx.local_slice(b.dp[0], [0, C * HALF + c * CHUNK], [KEYS, CHUNK]))
        delta = tlx.local_load(tlx.local_slice(statistics, [c * CHUNK], [CHUNK]))
        ds = (p[c] * (dp - delta[None, :])).to(b.ds.dtype)
        tlx.local_store(tlx.local_slice(b.ds[2 * C], [0, c * CHUNK], [KEYS, CHUNK]), ds)
        if b.add_dq:
            _share_ds(b, ds, C, c)
    tlx.barrier_arrive(b.statistics_empty[n % STATISTICS], 1)
    if b.add_dq:
        tlx.fence("async_shared")
    b.ready.arrive(DS + C)


@triton.jit
def _share_ds(b, ds, C: tl.constexpr, c: tl.constexpr):
    """Store columns of dS^T. Of a pair, CTA ``C`` computes dQ of half ``C`` of the queries, from dS of all keys."""
    HALF: tl.constexpr = b.step // 2
    if b.ctas == 1:
        tlx.local_store(tlx.local_slice(b.ds_shared[0], [0, C * HALF + c * CHUNK], [KEYS, CHUNK]), ds)
    else:
        place = tlx.local_slice(b.ds_pieces[b.rank()], [0, c * CHUNK], [KEYS, CHUNK])
        if b.rank() == C:
            tlx.local_store(place, ds)
        else:
            tlx.async_remote_shmem_store(place, ds, C, b.filled.barriers[CAME])


@triton.jit
def _differentiate(b, queue, sm_scale, window, GROUP: tl.constexpr, C: tl.constexpr):
    """Half ``C`` of the queries of every step. A tile's steps that need no mask come first, in a loop without one."""
    scale_log2 = sm_scale * LOG2E
    n = 0
    r = 0
    number = queue.first()
    while queue.has(number):
        tile = queue.tile(number)
        steps = tile.steps(window, b.step, b.ctas)
        for _ in tl.range(0, GROUP):
            for _ in tl.range(0, steps.bulk):
                _step(b, n, 0, tile, scale_log2, window, C, False)
                n += 1
            for i in tl.range(steps.bulk, steps.count):
                _step(b, n, steps.first(i, b.step), tile, scale_log2, window, C, True)
                n += 1
        r += 1
        number = queue.next(r)


# results -------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_slice(b, s: tl.constexpr):
    """A slice of a step's dQ, from tensor memory."""
    COLUMNS: tl.constexpr = b.dq_staging.shape[1]
    return tlx.local_load(tlx.local_slice(b.dq_lanes[0], [0, s * COLUMNS], [b.dq_staging.shape[0], COLUMNS]))


@triton.jit
def _add_slice(b, dq, n, s: tl.constexpr, part, rows, first, column):
    """Add slice ``s`` of step ``n`` to global memory, asynchronously, with fewer in flight than there are buffers."""
    COLUMNS: tl.constexpr = b.dq_staging.shape[1]
    SLICES: tl.constexpr = b.dq_lanes.shape[1] // COLUMNS
    STAGES: tl.constexpr = b.dq_staging.type.num
    staging = b.dq_staging[(n * SLICES + s) % STAGES]
    tlx.async_descriptor_store_wait((STAGES - 1) * b.ctas)
    tlx.local_store(staging, part)
    tlx.fence("async_shared")
    if b.ctas == 2:
        HALF: tl.constexpr = b.step // 2
        WIDTH: tl.constexpr = b.dq_lanes.shape[1]
        for half in tl.static_range(2):  # of the columns, in lanes of their own
            piece = tlx.local_slice(staging, [half * HALF, 0], [HALF, COLUMNS])
            place = rows.at(first + b.rank() * HALF, column + half * WIDTH + s * COLUMNS)
            tlx.async_descriptor_store(dq, piece, place, store_reduce="add")
    else:
        tlx.async_descriptor_store(dq, staging, rows.at(first, column + s * COLUMNS), store_reduce="add")


@triton.jit
def _reduce_step(b, dq, n, rows, first, column, EARLY: tl.constexpr):
    """Add a step's dQ, in slices. The last ``EARLY`` wait in registers, so that the tensor memory is free earlier."""
    SLICES: tl.constexpr = b.dq_lanes.shape[1] // b.dq_staging.shape[1]
    b.filled.wait(DQ, n)
    for s in tl.static_range(SLICES - EARLY):
        _add_slice(b, dq, n, s, _load_slice(b, s), rows, first, column)
    kept = ()
    for s in tl.static_range(SLICES - EARLY, SLICES):
        kept += (_load_slice(b, s),)  # type: ignore[assignment]
    b.drained.arrive(DQ)
    for e in tl.static_range(EARLY):
        _add_slice(b, dq, n, SLICES - EARLY + e, kept[e], rows, first, column)


@triton.jit
def _reduce(b, dq, start, queue, window, GROUP: tl.constexpr, EARLY: tl.constexpr):
    """The reducer. It adds each step's dQ to that of other tiles, in the copy of the sums that starts at a row."""
    D: tl.constexpr = b.dk.shape[1]
    n = 0
    r = 0
    number = queue.first()
    while queue.has(number):
        if b.add_dq:
            tile = queue.tile(number)
            steps = tile.steps(window, b.step, b.ctas)
            sums = Rows(start + tile.q.start, tile.q.length)
            for i in tl.range(0, GROUP * steps.count):
                member, first = steps.at(i, GROUP, b.step)
                _reduce_step(b, dq, n, sums, first, (tile.head * GROUP + member) * D, EARLY)
                n += 1
        r += 1
        number = queue.next(r)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def _drain(b, WHICH: tl.constexpr, accumulator, r, descriptor, tile, scale):
    """Store a tile's dK or dV, in slices of columns, and give the accumulator back."""
    D: tl.constexpr = accumulator.shape[1]
    COLUMNS: tl.constexpr = b.dkv_staging.shape[1]
    b.filled.wait(WHICH, r)
    for s in tl.static_range(D // COLUMNS):
        tlx.async_descriptor_store_wait(0)
        for c in tl.static_range(COLUMNS // CHUNK):
            part = tlx.local_load(tlx.local_slice(accumulator[0], [0, s * COLUMNS + c * CHUNK], [KEYS, CHUNK]))
            place = tlx.local_slice(b.dkv_staging[0], [0, c * CHUNK], [KEYS, CHUNK])
            tlx.local_store(place, (part * scale).to(b.dkv_staging.dtype))
        if s == D // COLUMNS - 1:
            b.drained.arrive(WHICH)
        tlx.fence("async_shared")
        tlx.async_descriptor_store(descriptor, b.dkv_staging[0], tile.k.at(tile.key, tile.head * D + s * COLUMNS))


@triton.jit
def _store(b, dk, dv, queue, sm_scale):
    """The epilogue of a tile, beside the first steps of the next."""
    r = 0
    number = queue.first()
    while queue.has(number):
        tile = queue.tile(number)
        _drain(b, DV, b.dv, r, dv, tile, 1.0)
        _drain(b, DK, b.dk, r, dk, tile, sm_scale)
        r += 1
        number = queue.next(r)
    tlx.async_descriptor_store_wait(0)


# the kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _tensor_memory(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tlx.local_alloc((ROWS, COLUMNS), tl.float32, 1, tlx.storage_kind.tmem)


@triton.jit
def _allocate(
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    DQ_STAGING: tl.constexpr,
    DKV_COLUMNS: tl.constexpr,
    ADD_DQ: tl.constexpr,
    CTAS: tl.constexpr,
):
    """``STAGES`` are the slots of k, v, q, dout, and ``DQ_STAGING`` the columns and number of buffers."""
    HALF: tl.constexpr = STEP // 2
    ROWS: tl.constexpr = STEP // CTAS  # of q, dout and dq that a CTA has
    STAGING: tl.constexpr = DQ_STAGING[1]
    OVER: tl.constexpr = ADD_DQ and 2 * STEP + 3 * D > TMEM_COLUMNS
    s = _tensor_memory(KEYS, STEP)
    dp = _tensor_memory(KEYS, STEP)
    k = make_operand(DTYPE, KEYS, D, STAGES[0], CTAS)
    q = make_operand(DTYPE, ROWS, D, STAGES[2], CTAS)
    dout = make_operand(DTYPE, ROWS, D, STAGES[3], CTAS)
    if CTAS == 2:
        k_columns = make_operand(DTYPE, 2 * KEYS, D // 2, 1, CTAS)
        q_columns = make_operand(DTYPE, STEP, D // 2, 1, CTAS)
        dout_columns = make_operand(DTYPE, STEP, D // 2, 1, CTAS)
        ds_pieces = tlx.local_alloc((KEYS, HALF), DTYPE, 2)
        ds_shared = tlx.local_alloc((2 * KEYS, HALF), DTYPE, 1, reuse=ds_pieces)
        dq = tlx.local_alloc((ROWS, D), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
        dq_lanes = tlx.local_alloc((STEP, D // 2), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
    else:
        k_columns = k
        q_columns = q
        dout_columns = dout
        ds_shared = tlx.local_alloc((KEYS, STEP), DTYPE, 1)
        ds_pieces = ds_shared
        if OVER or not ADD_DQ:
            dq = tlx.local_alloc((STEP, D), tl.float32, 1, tlx.storage_kind.tmem, reuse=dp)
        else:
            dq = _tensor_memory(STEP, D)
        dq_lanes = dq
    return Buffers(
        k=k,
        v=make_operand(DTYPE, KEYS, D, STAGES[1], CTAS),
        q=q,
        dout=dout,
        k_columns=k_columns,
        q_columns=q_columns,
        dout_columns=dout_columns,
        statistics=tlx.local_alloc((HALF,), tl.float32, 4 * STATISTICS),
        statistics_full=tlx.alloc_warp_barrier(num_barriers=STATISTICS, num_warps=1),
        statistics_empty=tlx.alloc_warp_barrier(num_barriers=STATISTICS, num_warps=8),
        s=s,
        p=tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=s),
        dp=dp,
        ds=tlx.local_alloc((KEYS, HALF), DTYPE, 4, tlx.storage_kind.tmem, reuse=dp),
        dq=dq,
        dq_lanes=dq_lanes,
        dk=_tensor_memory(KEYS, D),
        dv=_tensor_memory(KEYS, D),
        ds_shared=ds_shared,
        ds_pieces=ds_pieces,
        dq_staging=tlx.local_alloc((STEP, DQ_STAGING[0]), tl.float32, STAGING),
        dkv_staging=tlx.local_alloc((KEYS, DKV_COLUMNS), DTYPE, 1),
        filled=make_signal(7),
        drained=make_group_signal(3, 1, CTAS),
        ready=make_group_signal(4, 1, CTAS),
        ctas=CTAS,
        step=STEP,
        add_dq=ADD_DQ,
        dq_over_dp=OVER,
        across=STAGES[0] > 1 or CTAS == 2,
    )


@triton.jit(do_not_specialize=["rows", "q_rows", "kv_heads", "left", "right"])
def backward_sm100_kernel(
    q,  # ragged descriptor of [total_q or M, H * D], blocks of [BLOCK_M, D]; of a pair half of the rows
    k,  # ragged descriptor of [total_k, H_kv * D], blocks of [128, D]
    v,  # likewise
    dout,  # ragged descriptor of [rows, H * D], blocks like those of q
    q_columns,  # of a pair, q again: blocks of [BLOCK_M, D / 2]; else None
    k_columns,  # of a pair, k again: blocks of [256, D / 2]; else None
    dout_columns,  # of a pair, dout again: blocks of [BLOCK_M, D / 2]; else None
    dq,  # ragged descriptor of [REPLICAS * q_rows, H * D] float32, zeros, blocks of the rows of q's and DQ_STAGING[0]
    # columns; None if not ADD_DQ
    dk,  # ragged descriptor of [total_k, H_kv * D], blocks of [128, DKV_COLUMNS]
    dv,  # likewise
    lse2,  # [H, rows] float32: log-sum-exp in base 2, +inf for a row without keys
    delta,  # [H, rows] float32: row sums of dout * out
    tiles,  # list of tiles of 128 keys for each CTA
    rows,
    q_rows,  # total_q or M
    kv_heads,
    sm_scale,
    left,
    right,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries of a step
    STAGES: tl.constexpr,  # slots of k, v, q, dout
    DQ_STAGING: tl.constexpr,  # columns of a slice of dq, and buffers for slices
    DKV_COLUMNS: tl.constexpr,  # of a slice of dk or dv
    EARLY: tl.constexpr,  # slices of dq that are kept in registers
    REPLICAS: tl.constexpr,  # of dq: a program adds to one of them
    CLC: tl.constexpr,  # tiles are handed out on demand (Cluster Launch Control), else dealt out in rounds
    ADD_DQ: tl.constexpr,  # compute dq; without it the result does not depend on scheduling
    REGISTERS: tl.constexpr,  # of a thread that computes dS, of the reducer, of the roles of one warp
    CTAS: tl.constexpr,
):
    """A persistent program. ``dk`` and ``dv`` are complete; ``dq`` lacks the factor ``sm_scale``."""
    b = _allocate(k.dtype, D, BLOCK_M, STAGES, DQ_STAGING, DKV_COLUMNS, ADD_DQ, CTAS)
    queue = make_queue(tiles, kv_heads, LISTENERS, CTAS)
    if CLC:
        answers = tlx.clc_create_context(num_consumers=CTAS)
    window = (left, right)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _store(b, dk, dv, queue, sm_scale)
        with tlx.async_task(num_warps=4, registers=REGISTERS[0], replicate=2):
            HALF: tl.constexpr = tlx.async_task_replica_id()
            _differentiate(b, queue, sm_scale, window, GROUP, HALF)
        with tlx.async_task(num_warps=4, registers=REGISTERS[1]):
            start = tl.program_id(0) // CTAS % REPLICAS * q_rows
            _reduce(b, dq, start, queue, window, GROUP, EARLY)
        with tlx.async_task(num_warps=1, registers=REGISTERS[2]):
            _multiply(b, queue, window, GROUP)
        with tlx.async_task(num_warps=1, registers=REGISTERS[2]):
            _load(b, (q, k, v, dout), (q_columns, k_columns, dout_columns), queue, window, GROUP)
        with tlx.async_task(num_warps=1, registers=REGISTERS[2]):
            _load_statistics(b, lse2, delta, rows, queue, window, GROUP)
        with tlx.async_task(num_warps=1, registers=REGISTERS[2]):
            # The scheduler; written out, since TLX cannot pass the buffer for answers to a function.
            r = 0
            asked = 0
            number = queue.first()
            while queue.has(number):
                if CLC:
                    number = queue.count
                    while number >= queue.count:  # programs beyond the end of the list are cancelled as well
                        tlx.clc_producer(answers, (asked & 1) ^ 1, multi_ctas=CTAS == 2)
                        # A shift, which leaves -1, the answer that nothing is left, what it is.
                        number = tlx.clc_consumer(answers, asked & 1, multi_ctas=CTAS == 2) >> (CTAS - 1)
                        asked += 1
                else:
                    number += tl.num_programs(0) // CTAS
                r += 1
                queue.publish(r, number)
