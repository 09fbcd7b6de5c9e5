"""Forward kernel for Hopper (TLX): persistent, warp specialised, an online softmax between two asynchronous matmuls.

Roles of a program, which walks over tiles of ``CONSUMERS`` x 64 queries of one head:

- the loader brings Q, K and V into rings of shared memory by TMA, running ahead of the tile that is computed, K of a
  step before V of the step before it. Queries that all sequences share stay where they are (``RESIDENT``), if the slots
  have room for all of them;
- each consumer, a warp group, owns 64 queries. ``S = Q K^T`` of the next block of keys runs on the tensor cores beside
  ``O += P V`` of the present one and the softmax between them. Two consumers take turns (``PINGPONG``), so that one
  computes exponentials while the other multiplies. ``O`` leaves through shared memory by an asynchronous TMA store,
  which the next tile hides.

A tile visits the blocks of keys that cross an edge first, from the end of the sequence backwards, then those that every
query sees whole and that need no mask. TMA knows where a sequence ends, by :mod:`.ragged`: rows of K and V beyond are
zeros (0 * NaN is NaN), and rows of ``O`` beyond are not stored. Q comes by a plain descriptor, and may have a
neighbour's rows there: what they come to is not stored.

The recurrence is that of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691, algorithm 1); taking turns and
overlapping the matmuls with the softmax is FlashAttention-3's scheme (Shah et al., 2024,
https://arxiv.org/abs/2407.08608, section 3); maxima that are raised only where they grow a lot (``LAZY``) are
FlashAttention-4's (Zadouri et al., 2026, https://arxiv.org/abs/2603.05451).
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate
from triton.language.extra import libdevice

from .blocks import clip_to_window, visible_span
from .pipeline import Ring, make_ring, wait_stores
from .ragged import Rows
from .record import LOADER, WAIT_K, WAIT_MATMUL, WAIT_Q, WAIT_TURN, WAIT_V, start_watch
from .rescale import rescaled
from .softmax import LN2, NEG_INF, online_softmax
from .tiles import load_tile
from .walk import start_walk

ROWS = tl.constexpr(64)  # queries of a consumer: the rows of one warp group's matmul

TURN = tl.constexpr(9)  # named barrier, and 10: whose turn it is to issue matmuls. Triton itself uses the first ones.
BOTH = tl.constexpr(256)  # threads of two consumers


@aggregate
class Buffers:
    """Shared memory. A slot of Q holds a block of 64 queries for each consumer."""

    q: Ring
    k: Ring
    v: Ring
    out: tlx.buffered_tensor  # [64, D] for each consumer
    resident: tl.constexpr  # all queries of the program's only head stay in the slots of Q, tile after tile

    @triton.jit
    def queries(self, i, task):
        """The use of the ring of Q that has those of ``task``, which is the ``i``-th of the walk."""
        if self.resident:
            i = task.first // (self.q.parts * ROWS)
        return i

    @triton.jit
    def release_queries(self, i):
        if not self.resident:
            self.q.release(i)


@aggregate
class Consumer:
    """Which of the consumers this is, of how many, whether they take turns, and whether their maxima are lazy."""

    index: tl.constexpr
    count: tl.constexpr
    alternate: tl.constexpr
    lazy: tl.constexpr

    @triton.jit
    def wait_turn(self, watch):
        if self.alternate:
            since = watch.now()
            tlx.named_barrier_wait(TURN + self.index, BOTH)
            watch.waited(WAIT_TURN, since)

    @triton.jit
    def pass_turn(self):
        if self.alternate:
            tlx.named_barrier_arrive(TURN + 1 - self.index, BOTH)


@aggregate
class Task:
    """One tile: some queries of one head against the keys of one sequence."""

    head: tl.tensor
    first: tl.tensor  # first query, in its sequence
    q_len: tl.tensor
    k_len: tl.tensor
    out_start: tl.tensor

    @triton.jit
    def keys(self, window, BLOCK_M: tl.constexpr, STEP: tl.constexpr):
        """The blocks of ``STEP`` keys that some of its ``BLOCK_M`` queries see."""
        first = self.first + self.k_len - self.q_len
        begin, inner, tail, end = visible_span(first, self.k_len, window[0], window[1], BLOCK_M, STEP)
        return Blocks(begin, inner, tail, end, STEP)


@aggregate
class Blocks:
    """A :func:`visible_span` in the order in which it is visited: edges first."""

    begin: tl.tensor
    inner: tl.tensor
    tail: tl.tensor
    end: tl.tensor
    STEP: tl.constexpr

    @triton.jit
    def trailing(self):
        return (self.end - self.tail + self.STEP - 1) // self.STEP

    @triton.jit
    def edges(self):
        """Number of those that cross an edge of the window or of the sequence."""
        return self.trailing() + (self.inner - self.begin) // self.STEP

    @triton.jit
    def count(self):
        """Number of all; at least one, which is then masked whole."""
        return tl.maximum(self.edges() + (self.tail - self.inner) // self.STEP, 1)

    @triton.jit
    def key(self, index):
        """First key of the ``index``-th: edges from the end backwards, then from the begin on, then the rest."""
        trailing, edges = self.trailing(), self.edges()
        edge = tl.where(
            index < trailing,
            self.tail + (trailing - 1 - index) * self.STEP,
            self.begin + (index - trailing) * self.STEP,
        )
        return tl.where(index < edges, edge, self.inner + (index - edges) * self.STEP)


@triton.jit
def _task(walk, i, BLOCK_M: tl.constexpr):
    """The ``i``-th tile of the walk, and where its rows start: ``task, q_start, k_start``."""
    tile, head = walk.at(i)
    block, q_start, q_len, k_start, k_len, out_start = load_tile(walk.tiles, tile)
    return Task(head, block * BLOCK_M, q_len, k_len, out_start), q_start, k_start


@aggregate
class Values:
    """Where a block of V begins, and the rows of its sequence."""

    key: tl.tensor
    column: tl.tensor
    start: tl.tensor
    length: tl.tensor


@triton.jit
def _load_values(buffers, v, step, values, watch):
    if step >= 0:
        buffers.v.acquire(step, watch)
        buffers.v.load(step, v, values.key, values.column, Rows(values.start, values.length))


@triton.jit
def _load(buffers, q, k, v, walk, window, record, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr):
    BLOCK_N: tl.constexpr = buffers.k.tiles.shape[0]
    steps = 0
    watch = start_watch(record, LOADER)
    task, q_start, k_start = _task(walk, 0, BLOCK_M)
    values = Values(task.first, task.head, k_start, task.k_len)  # of no step yet
    if buffers.resident and walk.count > 0:
        for block in tl.static_range(buffers.q.depth):
            buffers.q.load(block, q, block * BLOCK_M, task.head * D)
    for i in range(walk.count):
        # A tile ahead, so that what the list says is there when it is needed.
        next_task, next_q_start, next_k_start = _task(walk, i + 1, BLOCK_M)
        column = task.head // GROUP * D
        if not buffers.resident:
            buffers.q.acquire(i, watch)
            buffers.q.load(i, q, q_start + task.first, task.head * D)
        keys = task.keys(window, BLOCK_M, BLOCK_N)
        for j in range(keys.count()):
            key = keys.key(j)
            buffers.k.acquire(steps, watch)
            buffers.k.load(steps, k, key, column, Rows(k_start, task.k_len))
            # V of the step before: its slot is free later than that of K, which is needed earlier.
            _load_values(buffers, v, steps - 1, values, watch)
            values = Values(key, column, k_start, task.k_len)
            steps += 1
        task, q_start, k_start = next_task, next_q_start, next_k_start
        watch = watch.next(walk)
    _load_values(buffers, v, steps - 1, values, watch)


@triton.jit
def _scores(buffers, use, step, me):
    """Start ``Q K^T`` ``[64, BLOCK_N]``, of the ``use``-th use of the ring of Q."""
    return tlx.async_dot(buffers.q.tile(use, me.index), tlx.local_trans(buffers.k.tile(step, 0)))


@triton.jit
def _partial_sums(p):
    """Sums ``[M, 8]`` of every eighth column of ``p`` ``[M, N]``: one thread holds what is added, so nothing moves."""
    return tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@triton.jit
def _mask(scores, task, row, first, window):
    key = (first + tl.arange(0, scores.shape[1]))[None, :]
    facing = (row + task.k_len - task.q_len + tl.arange(0, scores.shape[0]))[:, None]
    return tl.where(clip_to_window(key < task.k_len, facing, key, window[0], window[1]), scores, NEG_INF)


@triton.jit
def _overlapped_step(state, buffers, use, step, place, rules, me, watch, EDGE: tl.constexpr):
    """``S`` of block ``step`` beside ``O += P V`` of the one before, then the softmax of ``S``.

    ``state`` is ``acc [64, D], p [64, BLOCK_N], peak [64], total [64, 8]``, ``place`` the task, the consumer's first
    query and the block's first key.
    """
    acc, p, peak, total = state
    window, scale_log2 = rules
    v = buffers.v.tile(step - 1, 0)
    buffers.k.wait(step, watch)
    me.wait_turn(watch)
    scores = _scores(buffers, use, step, me)
    buffers.v.wait(step - 1, watch)
    acc = tlx.async_dot(p.to(v.type.element_ty), v, acc)
    me.pass_turn()
    since = watch.now()
    scores = tlx.async_dot_wait(1, scores)
    watch.waited(WAIT_MATMUL, since)
    buffers.k.release(step)
    if EDGE:
        scores = _mask(scores, place[0], place[1], place[2], window)
    probabilities, peak, decay = online_softmax(scores, peak, scale_log2, GUARDED=EDGE, LAZY=me.lazy)
    total = total * decay[:, None] + _partial_sums(probabilities)
    since = watch.now()
    acc = tlx.async_dot_wait(0, acc)
    watch.waited(WAIT_MATMUL, since)
    buffers.v.release(step - 1)
    acc = rescaled(acc, decay) if me.lazy else acc * decay[:, None]
    return acc, probabilities.to(p.dtype), peak, total


@triton.jit
def _attend(
    buffers,
    walk,
    outputs,
    rules,
    me,
    record,
    D: tl.constexpr,
    LATE: tl.constexpr,
    PEEL: tl.constexpr,
):
    """A consumer. ``outputs`` is what :func:`_finish` writes to, ``rules`` are the window and the scale of scores."""
    BLOCK_M: tl.constexpr = me.count * ROWS
    BLOCK_N: tl.constexpr = buffers.k.tiles.shape[0]
    window, scale_log2 = rules
    watch = start_watch(record, LOADER + 1 + me.index)
    if me.index == 1:
        me.pass_turn()  # the first turn is consumer 0's
    steps = 0
    task, _, _ = _task(walk, 0, BLOCK_M)
    some = walk.count > 0
    if buffers.resident:
        for block in tl.static_range(buffers.q.depth):
            buffers.q.wait_if(some, block, watch)
    else:
        buffers.q.wait_if(some, 0, watch)
    buffers.k.wait_if(some, 0, watch)
    me.wait_turn(watch)
    use = buffers.queries(0, task)
    scores = _scores(buffers, use, 0, me)
    me.pass_turn()
    since = watch.now()
    scores = tlx.async_dot_wait(0, scores)
    watch.waited(WAIT_MATMUL, since)
    # Hoisted out of these loops, addresses would take registers that there are none of.
    for i in tl.range(0, walk.count, disable_licm=True):
        buffers.k.release(steps)
        next_task = _task(walk, i + 1, BLOCK_M)[0]
        keys = task.keys(window, BLOCK_M, BLOCK_N)
        count = keys.count()
        row = task.first + me.index * ROWS
        scores = _mask(scores, task, row, keys.key(0), window)
        peak = tl.full([ROWS], NEG_INF, tl.float32)
        p, peak = online_softmax(scores, peak, scale_log2, GUARDED=True)[0:2]
        total = _partial_sums(p)
        if not LATE:
            p = p.to(buffers.v.tiles.type.element_ty)
        acc = tl.zeros([ROWS, D], tl.float32)

        bulk = 1
        if window[0] is not None or window[1] is not None:
            for j in tl.range(1, keys.edges(), disable_licm=True):
                place = (task, row, keys.key(j))
                state = (acc, p, peak, total)
                acc, p, peak, total = _overlapped_step(
                    state, buffers, use, steps + j, place, rules, me, watch, EDGE=True
                )
            bulk = tl.maximum(keys.edges(), 1)
        for j in tl.range(bulk, count, disable_licm=True):
            place = (task, row, keys.key(j))
            state = (acc, p, peak, total)
            acc, p, peak, total = _overlapped_step(
                state, buffers, use, steps + j, place, rules, me, watch, EDGE=not PEEL
            )
        buffers.release_queries(i)
        steps += count

        # The next tile's first scores are computed while this one is finished. After the last tile there is nothing
        # to wait for, and what is computed from old data is not used: cheaper than a branch around a matmul.
        more = i + 1 < walk.count
        v = buffers.v.tile(steps - 1, 0)
        buffers.v.wait(steps - 1, watch)
        if not buffers.resident:
            buffers.q.wait_if(more, i + 1, watch)
        buffers.k.wait_if(more, steps, watch)
        me.wait_turn(watch)
        use = buffers.queries(i + 1, next_task)
        acc = tlx.async_dot(p.to(v.type.element_ty), v, acc)
        scores = _scores(buffers, use, steps, me)
        me.pass_turn()
        since = watch.now()
        acc = tlx.async_dot_wait(1, acc)
        watch.waited(WAIT_MATMUL, since)
        buffers.v.release(steps - 1)
        _finish(acc, peak, total, task, row, buffers.out[me.index], outputs, watch)
        since = watch.now()
        scores = tlx.async_dot_wait(0, scores)
        watch.waited(WAIT_MATMUL, since)
        task = next_task
        watch = watch.next(walk)
    wait_stores(watch)
    if me.index == 0:
        me.wait_turn(watch)  # every pass is waited for


@triton.jit
def _finish(acc, peak, total, task, row, staging, outputs, watch):
    """Write ``out`` and ``lse`` of a tile; rows without keys become 0 and -inf. The store is asynchronous."""
    out, lse, rows = outputs
    total = tl.sum(total, 1)
    safe = tl.where(total == 0.0, 1.0, total)
    query = row + tl.arange(0, ROWS)
    pointers = lse + task.head.to(tl.int64) * rows + task.out_start + query
    # tl.log2 takes 66 instructions more, for the last bit.
    tl.store(pointers, (peak + libdevice.fast_log2f(safe)) * LN2, mask=query < task.q_len)
    result = (acc * (1.0 / safe)[:, None]).to(staging.type.element_ty)
    wait_stores(watch)
    tlx.local_store(staging, result)
    tlx.fence("async_shared")
    place = Rows(task.out_start, task.q_len).at(row, task.head * acc.shape[1])
    tlx.async_descriptor_store(out, staging, place)


@triton.jit(do_not_specialize=["rows", "left", "right"])
def forward_sm90_kernel(
    q,  # descriptor of [total_q or M, H * D], blocks of [64, D]
    k,  # ragged descriptor of [total_k, H_kv * D], blocks of [BLOCK_N, D]
    v,  # likewise
    out,  # ragged descriptor of [rows, H * D], blocks of [64, D]
    lse,  # [H, rows] float32
    tiles,  # list of tiles of CONSUMERS * 64 queries
    rows,
    scale_log2,
    left,
    right,
    record,  # see :mod:`.record`; None: nothing is recorded
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    CONSUMERS: tl.constexpr,
    Q_STAGES: tl.constexpr,
    KV_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    PINGPONG: tl.constexpr,
    ZIGZAG: tl.constexpr,
    LATE: tl.constexpr,
    LAZY: tl.constexpr,
    PEEL: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """Programs: as many as are resident at once.

    ``RESIDENT``: the queries are the same for all sequences, the slots of Q hold all of them, and all tiles of a
    program are of the same head, so that Q is loaded once.
    ``LATE``: P stays in float32 until the next scores have started. ``LAZY``: maxima are raised, and O rescaled, only
    where they grow a lot. Both only if there is no window. ``PEEL``: blocks that every query sees whole are not masked.
    """
    buffers = Buffers(
        make_ring(q, WAIT_Q, Q_STAGES, CONSUMERS, CONSUMERS, True),
        make_ring(k, WAIT_K, KV_STAGES, CONSUMERS, 1, True),
        make_ring(v, WAIT_V, KV_STAGES, CONSUMERS, 1, True),
        tlx.local_alloc((ROWS, D), q.dtype, CONSUMERS),
        RESIDENT,
    )
    walk = start_walk(tiles, HEADS, ZIGZAG, RESIDENT)
    outputs = (out, lse, rows)
    rules = ((left, right), scale_log2)
    # Beside a window there are no registers for what is late or lazy.
    BARE: tl.constexpr = left is None and right is None
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _load(buffers, q, k, v, walk, rules[0], record, GROUP, D, CONSUMERS * ROWS)
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=CONSUMERS):
            # Asked for here: a function that both replicas call alike would be compiled once, with one answer.
            INDEX: tl.constexpr = tlx.async_task_replica_id()
            me = Consumer(INDEX, CONSUMERS, PINGPONG, LAZY and BARE)
            _attend(buffers, walk, outputs, rules, me, record, D, LATE and BARE, PEEL)
