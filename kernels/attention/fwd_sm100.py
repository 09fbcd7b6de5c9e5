"""Forward kernel for Blackwell (TLX): persistent, warp specialised, scores and sums in tensor memory.

Roles of a program, which walks over tiles of ``GROUPS`` x 128 queries of one head:

- the *loader*, one warp, brings Q, K and V into shared memory by TMA;
- the *multiplier*, one warp, issues all matmuls: for each group of 128 queries ``S = Q K^T`` of the next block of keys
  right behind ``O += P V`` of the present one, while the other group is at its softmax;
- two *softmax* groups of 128 threads, one query a thread: S from tensor memory, P back into it;
- the *corrector*, 128 threads, rescales O where the row maximum has grown, and brings the finished O to shared memory;
- the *storer*, one warp, stores it by TMA, which the next tile hides;
- the *scheduler*, one warp, asks the hardware for the next tile, if tiles are not dealt out in advance.

A pair of CTAs (``CTAS == 2``) shares K and V: each loads half of a block, and the leader's matmuls read both halves,
for the queries of both. A tile then has twice as many queries.

A tile visits the blocks of keys that cross an edge first, from the end of the sequence backwards, then those that every
query sees whole and that need no mask. TMA knows where a sequence ends, by :mod:`.ragged`: beyond it are zeros, and
nothing is stored there. So nothing of a neighbour is ever read or written. The division of labour is FlashAttention-4's
(Zadouri et al., 2026, https://arxiv.org/abs/2603.05451), as is rescaling only where it matters and computing part of
the exponentials on the multiply-add units.

Who waits for whom
------------------
For every group, steps and tiles are counted; ``S(n)``, ``P(n)`` belong to step ``n``.

1. ``S(n + 1)`` overwrites ``P(n)`` and the row's statistics. It is issued after ``O += P(n) V``, in whose order the
   tensor cores work, and that waits until P is written (so S was read) and O corrected (so ``decay`` was read). Only at
   the end of a tile there is more to read, ``total`` and ``peak``: ``scores_free``. For the same reasons ``told`` of
   step n + 1 and ``finished`` of the next tile come after the corrector has seen the one before.
2. ``O += P(n) V`` waits for ``ready``: twice a step, by the softmax group (its first part of P is written) and by the
   corrector (O may be added to: rescaled, or, in a tile's first step, read by the end of the tile before).
3. The corrector rescales O in step n when told so by the softmax, which has seen ``S(n)``: then O of step n - 1 is
   complete.
4. A tile's final O is complete with ``sums_full``. A slot of ``out`` is free when the storer's TMA has read it.
5. No wait can deadlock: in the order of steps each needs only what is of an earlier step, or of the same step and
   before it in the order K, Q, S, P, decay, V, O; the slots of K and V are filled and freed in the order of their use.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from .packed import packed_fma, packed_mul
from .program_sm100 import COLUMNS, ROWS, Shape, make_shared_memory, make_tensor_memory
from .ragged import Rows
from .schedule_sm100 import make_schedule
from .softmax import LN2, NEG_INF
from .softmax_sm100 import Exponentials, exponentials, mask_scores, split

SLICE = tl.constexpr(32)  # columns of O that the corrector has in registers at a time
OTHERS = tl.constexpr(4)  # roles beside the softmax groups that follow the schedule


# loader --------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_q(shared, shape, uses, q, rows, task):
    SIZE: tl.constexpr = shape.groups * ROWS * shape.head_dim * tlx.size_of(shared.q.dtype)
    shared.q_slots.acquire(uses)
    shared.q_slots.expect(uses, SIZE)
    for group in tl.static_range(shape.groups):
        tile = shared.q[uses % shared.q_slots.depth * shape.groups + group]
        shared.q_slots.fetch(uses, q, tile, rows.at(shape.row(task, group), task.head * shape.head_dim))


@triton.jit
def _load_keys(shared, shape, step, operands, rows, key, column):
    """K and V of a step; of a pair of CTAs each loads half of the rows of K, and half of the columns of V."""
    k, v = operands
    SIZE: tl.constexpr = shape.block_n * shape.head_dim // shape.ctas * tlx.size_of(shared.k.dtype)
    slots = shared.kv_slots
    k_place = rows.at(key + shape.rank() * (shape.block_n // shape.ctas), column)
    slots.acquire(2 * step)
    slots.expect(2 * step, SIZE)
    slots.fetch(2 * step, k, shared.k_tile(step), k_place)
    v_place = rows.at(key, column + shape.rank() * (shape.head_dim // shape.ctas))
    slots.acquire(2 * step + 1)
    slots.expect(2 * step + 1, SIZE)
    slots.fetch(2 * step + 1, v, shared.v_tile(step), v_place)


@triton.jit
def _load(shared, q, k, v, schedule, window, shape, GROUP: tl.constexpr):
    turn, step, q_uses = 0, 0, 0
    pair = schedule.first()
    task, q_start, k_start = shape.task(schedule, pair)
    same_q = False
    while pair >= 0:
        if not same_q:
            _load_q(shared, shape, q_uses, q, Rows(q_start, task.q_len), task)
            q_uses += 1
        keys = shape.keys(task, window)
        rows = Rows(k_start, task.k_len)
        column = task.head // GROUP * shape.head_dim
        _load_keys(shared, shape, step, (k, v), rows, keys.key(0), column)
        # While these are on their way, so that what the list says is there when it is needed.
        pair = schedule.next(turn)
        following, next_q_start, next_k_start = shape.task(schedule, pair)
        for j in tl.range(1, keys.count(), disable_licm=True):
            _load_keys(shared, shape, step + j, (k, v), rows, keys.key(j), column)
        step += keys.count()
        same_q = shape.reuses_q(task, following)
        task, q_start, k_start = following, next_q_start, next_k_start
        turn += 1


# multiplier ----------------------------------------------------------------------------------------------------------


@triton.jit
def _start_scores(shared, tensor, step, q_slot, shape, GROUP: tl.constexpr):
    """``S = Q K^T`` ``[128, BLOCK_N]`` of a group."""
    if GROUP == 0:
        shared.kv_slots.wait(2 * step)
    done = [tensor.scores_full.barriers[GROUP]]
    if shape.groups == GROUP + 1:
        done = [tensor.scores_full.barriers[GROUP], shared.kv_slots.empty[2 * step % shared.kv_slots.depth]]
    tlx.async_dot(
        shared.q[q_slot * shape.groups + GROUP],
        tlx.local_trans(shared.k_tile(step)),
        tensor.scores[GROUP],
        use_acc=False,
        mBarriers=done,
        two_ctas=shape.ctas == 2,
    )


@triton.jit
def _add_values(shared, tensor, step, add, shape, GROUP: tl.constexpr, FINAL: tl.constexpr):
    """``O += P V`` of a group, or ``O = P V`` unless ``add``. ``FINAL``: it is a tile's last."""
    KEYS: tl.constexpr = shape.block_n // tensor.parts
    if GROUP == 0:
        shared.kv_slots.wait(2 * step + 1)
    for part in tl.static_range(tensor.parts):
        if part == 0:
            tensor.ready.wait(GROUP, step)
        else:
            tensor.rest.wait(GROUP * tensor.parts + part, step)
        tlx.async_dot(
            tensor.p[GROUP * tensor.parts + part],
            tlx.local_slice(shared.v_tile(step), [part * KEYS, 0], [KEYS, shape.head_dim // shape.ctas]),
            tensor.sums[GROUP],
            use_acc=add if part == 0 else True,
            two_ctas=shape.ctas == 2,
            force_async=True,
        )
    if FINAL:
        tlx.tcgen05_commit(tensor.sums_full.barriers[GROUP], two_ctas=shape.ctas == 2)
    if shape.groups == GROUP + 1:
        tlx.tcgen05_commit(shared.kv_slots.empty[(2 * step + 1) % shared.kv_slots.depth], two_ctas=shape.ctas == 2)


@triton.jit
def _multiply_tiles(shared, tensor, schedule, window, shape):
    """``S`` of the next step, be it the next tile's, follows ``O += P V`` of this step, group by group."""
    turn, step, q_uses = 0, 0, 0
    pair = schedule.first()
    task, _, _ = shape.task(schedule, pair)
    if pair >= 0:
        shared.q_slots.wait(0)
        for group in tl.static_range(shape.groups):
            _start_scores(shared, tensor, 0, 0, shape, group)
    while pair >= 0:
        pair = schedule.next(turn)
        following, _, _ = shape.task(schedule, pair)
        count = shape.keys(task, window).count()
        q_slot = q_uses % shared.q_slots.depth
        for j in range(1, count):
            for group in tl.static_range(shape.groups):
                _add_values(shared, tensor, step, j > 1, shape, group, False)
                _start_scores(shared, tensor, step + 1, q_slot, shape, group)
            step += 1
        if not shape.reuses_q(task, following):
            tlx.tcgen05_commit(shared.q_slots.empty[q_slot], two_ctas=shape.ctas == 2)
            q_uses += 1
        q_slot = q_uses % shared.q_slots.depth
        for group in tl.static_range(shape.groups):
            _add_values(shared, tensor, step, count > 1, shape, group, True)
            if pair >= 0:
                if group == 0:
                    shared.q_slots.wait(q_uses)
                tensor.scores_free.wait(group, turn)
                _start_scores(shared, tensor, step + 1, q_slot, shape, group)
        step += 1
        task = following
        turn += 1


@triton.jit
def _multiply(shared, tensor, schedule, window, shape):
    """The leader of a pair of CTAs multiplies for both, and the other one just keeps up with the schedule."""
    if shape.rank() == 0:
        _multiply_tiles(shared, tensor, schedule, window, shape)
    else:
        turn = 0
        pair = schedule.first()
        while pair >= 0:
            pair = schedule.next(turn)
            turn += 1


# softmax -------------------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_step(tensor, step, first, place, state, rules, how, GROUP: tl.constexpr, EDGE: tl.constexpr):
    """P of a step, and what the corrector has to know unless the step is a tile's ``first``.

    ``place`` is the task, the group's first query and the block's first key, ``state`` is ``peak, total``, ``[128]``.
    """
    window, scale_log2 = rules
    peak, total = state
    tensor.scores_full.wait(GROUP, step)
    scores = tlx.local_load(tensor.scores[GROUP])
    if EDGE:
        scores = mask_scores(scores, place[0], place[1], place[2], window)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    if how.growth > 0:
        new_peak = tl.where(new_peak - peak > how.growth, new_peak, peak)
    anchor = tl.where(new_peak == NEG_INF, 0.0, new_peak) if EDGE else new_peak
    decay = tl.exp2(peak - anchor)
    tlx.local_store(tensor.decay[GROUP], decay[:, None])
    tensor.told.arrive_if(step != first, GROUP)
    total *= decay
    parts = split(packed_fma(scores, scale_log2, -anchor[:, None]), tensor.parts)
    for part in tl.static_range(tensor.parts):
        p, sums = exponentials(parts[part], tensor.p.type.element_ty, 0 if EDGE else how.polynomial, how.exact)
        tlx.local_store(tensor.p[GROUP * tensor.parts + part], p)
        if part == 0:
            tensor.ready.arrive(GROUP)
        else:
            tensor.rest.arrive(GROUP * tensor.parts + part)
        total += sums
    return new_peak, total


@triton.jit
def _softmax(tensor, schedule, rules, shape, how, GROUP: tl.constexpr, PEEL: tl.constexpr):
    """A softmax group. Blocks of keys beyond those that cross an edge are not masked, if ``PEEL``."""
    turn, step = 0, 0
    pair = schedule.first()
    task, _, _ = shape.task(schedule, pair)
    while pair >= 0:
        pair = schedule.next(turn)
        following, _, _ = shape.task(schedule, pair)
        keys = shape.keys(task, rules[0])
        count = keys.count()
        row = shape.row(task, GROUP)
        first = step
        state = tl.full([ROWS], NEG_INF, tl.float32), tl.zeros([ROWS], tl.float32)
        bulk = count - (keys.tail - keys.inner) // keys.STEP
        for j in tl.range(0, bulk, disable_licm=True):
            place = (task, row, keys.key(j))
            state = _softmax_step(tensor, first + j, first, place, state, rules, how, GROUP, EDGE=True)
        for j in tl.range(bulk, count, disable_licm=True):
            place = (task, row, keys.key(j))
            state = _softmax_step(tensor, first + j, first, place, state, rules, how, GROUP, EDGE=not PEEL)
        step += count
        peak, total = state
        tlx.local_store(tensor.total[GROUP], total[:, None])
        tlx.local_store(tensor.peak[GROUP], peak[:, None])
        tensor.finished.arrive(GROUP)
        task = following
        turn += 1


# corrector, storer ---------------------------------------------------------------------------------------------------


@triton.jit
def _column(tile):
    """The values ``[128]`` of a block ``[128, 1]`` of tensor memory."""
    return tl.reshape(tlx.local_load(tile), [ROWS])


@triton.jit
def _rescale(tensor, LAZY: tl.constexpr, GROUP: tl.constexpr):
    """Multiply the sums of a group by its decay; if ``LAZY``, only if that of some row is not 1, which is rare."""
    decay = _column(tensor.decay[GROUP])
    some = True
    if LAZY:
        some = tl.min(decay, 0) < 1.0
    if some:
        D: tl.constexpr = tensor.sums.shape[1]
        for i in tl.static_range(D // SLICE):
            part = tlx.subslice(tensor.sums[GROUP], i * SLICE, SLICE)
            tlx.local_store(part, packed_mul(tlx.local_load(part), decay[:, None]))


@triton.jit
def _correct(shared, tensor, schedule, window, outputs, shape, LAZY: tl.constexpr):
    lse, rows = outputs
    turn, told, staged = 0, 0, 0
    pair = schedule.first()
    task, _, _ = shape.task(schedule, pair)
    for group in tl.static_range(shape.groups):
        tensor.ready.arrive(group)  # the first tile's sums have no predecessor
    while pair >= 0:
        count = shape.keys(task, window).count()
        for _ in tl.range(1, count, disable_licm=True):
            for group in tl.static_range(shape.groups):
                tensor.told.wait(group, told)
                _rescale(tensor, LAZY, group)
                tensor.ready.arrive(group)
            told += 1
        # Once. What is hoisted out of the walk, addresses first of all, would spill; out of this loop it is not.
        for _ in tl.range(0, tl.minimum(count, 1), disable_licm=True):
            for group in tl.static_range(shape.groups):
                tensor.finished.wait(group, turn)
                total, peak = _column(tensor.total[group]), _column(tensor.peak[group])
                tensor.scores_free.arrive(group)
                safe = tl.where(total == 0.0, 1.0, total)
                query = shape.row(task, group) + tl.arange(0, ROWS)
                pointers = lse + task.head.to(tl.int64) * rows + task.out_start + query
                tl.store(pointers, (peak + tl.log2(safe)) * LN2, mask=query < task.q_len)
                tensor.sums_full.wait(group, turn)
                staged = _finish(shared, tensor, 1.0 / safe, staged, group)
        pair = schedule.next(turn)
        task, _, _ = shape.task(schedule, pair)
        turn += 1


@triton.jit
def _finish(shared, tensor, scale, staged, GROUP: tl.constexpr):
    """Bring ``O * scale`` of a group to shared memory; ``staged`` counts its blocks. Tensor memory is free early."""
    SLOTS: tl.constexpr = shared.out.type.num
    DTYPE: tl.constexpr = shared.out.type.element_ty
    SLICES: tl.constexpr = tensor.sums.shape[1] // SLICE
    EACH: tl.constexpr = COLUMNS // SLICE
    for i in tl.static_range(SLICES):
        slot = staged % SLOTS
        if i % EACH == 0:
            shared.out_free.wait(slot, staged // SLOTS - 1)
        sums = tlx.local_load(tlx.subslice(tensor.sums[GROUP], i * SLICE, SLICE))
        if i == SLICES - 1:
            tensor.ready.arrive(GROUP)  # the next tile's sums may begin
        part = tlx.local_slice(shared.out[slot], [0, i % EACH * SLICE], [ROWS, SLICE])
        tlx.local_store(part, packed_mul(sums, scale[:, None]).to(DTYPE))
        if i % EACH == EACH - 1:
            tlx.fence("async_shared")
            shared.out_full.arrive(slot)
            staged += 1
    return staged


@triton.jit
def _store(shared, out, schedule, shape):
    """Store O of a tile, [128, 64] at a time."""
    SLOTS: tl.constexpr = shared.out.type.num
    BLOCKS: tl.constexpr = shape.head_dim // COLUMNS
    turn, staged = 0, 0
    pair = schedule.first()
    task, _, _ = shape.task(schedule, pair)
    while pair >= 0:
        rows = Rows(task.out_start, task.q_len)
        for i in tl.range(0, shape.groups * BLOCKS, disable_licm=True):
            slot = staged % SLOTS
            place = rows.at(shape.row(task, i // BLOCKS), task.head * shape.head_dim + i % BLOCKS * COLUMNS)
            shared.out_full.wait(slot, staged // SLOTS)
            tlx.async_descriptor_store(out, shared.out[slot], place)
            tlx.async_descriptor_store_wait(0)  # until it has been read
            tlx.barrier_arrive(shared.out_free.barriers[slot], 1)
            staged += 1
        pair = schedule.next(turn)
        task, _, _ = shape.task(schedule, pair)
        turn += 1


@triton.jit(do_not_specialize=["rows", "heads", "left", "right"])
def forward_sm100_kernel(
    q,  # ragged descriptor of [total_q or M, H * D], blocks of [128, D]
    k,  # ragged descriptor of [total_k, H_kv * D], blocks of [BLOCK_N / CTAS, D]
    v,  # likewise, blocks of [BLOCK_N, D / CTAS]
    out,  # ragged descriptor of [rows, H * D], blocks of [128, 64]
    lse,  # [H, rows] float32
    tiles,  # list of tiles of CTAS * GROUPS * 128 queries
    rows,
    heads,
    scale_log2,
    left,
    right,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_STAGES: tl.constexpr,
    KV_STAGES: tl.constexpr,
    OUT_STAGES: tl.constexpr,
    P_PARTS: tl.constexpr,
    CTAS: tl.constexpr,
    ORDER: tl.constexpr,
    SOFTMAX_REGISTERS: tl.constexpr,
    SINGLE_REGISTERS: tl.constexpr,
    GROWTH: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    EXACT: tl.constexpr,
    KEEP_Q: tl.constexpr,
    PEEL: tl.constexpr,
):
    """Programs: as many as are resident at once, or with ``ORDER == "clc"`` as many as there may be pairs.

    The fields of :class:`.config_sm100.ForwardConfig` say what the constants mean. ``GROUP`` is the number of query
    heads per key/value head. ``KEEP_Q``: all sequences have the same queries.
    """
    shape = Shape(GROUPS, BLOCK_N, D, CTAS, KEEP_Q)
    shared = make_shared_memory(q.dtype, shape, Q_STAGES, KV_STAGES, OUT_STAGES)
    tensor = make_tensor_memory(q.dtype, shape, P_PARTS)
    schedule = make_schedule(tiles, heads, ORDER, KEEP_Q, GROUPS + OTHERS, CTAS)
    window = (left, right)
    how = Exponentials(GROWTH, POLYNOMIAL, EXACT)
    if ORDER == "clc":
        answers = tlx.clc_create_context(CTAS)  # here, since TLX does not let it pass through a function
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _correct(shared, tensor, schedule, window, (lse, rows), shape, GROWTH > 0)
        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGISTERS, replicate=GROUPS):
            # Asked for here: a function that both replicas call alike would be compiled once, with one answer.
            INDEX: tl.constexpr = tlx.async_task_replica_id()
            _softmax(tensor, schedule, (window, scale_log2), shape, how, INDEX, PEEL)
        with tlx.async_task(num_warps=1, registers=SINGLE_REGISTERS):
            _multiply(shared, tensor, schedule, window, shape)
        with tlx.async_task(num_warps=1, registers=SINGLE_REGISTERS):
            _load(shared, q, k, v, schedule, window, shape, GROUP)
        with tlx.async_task(num_warps=1, registers=SINGLE_REGISTERS):
            _store(shared, out, schedule, shape)
        if ORDER == "clc":
            with tlx.async_task(num_warps=1, registers=SINGLE_REGISTERS):
                turn = 0
                program = tl.program_id(0)
                while program >= 0:  # also when the list has ended: what would start only to find nothing to do
                    some = schedule.pair_of(program) >= 0
                    if some:
                        schedule.await_readers(turn)
                    tlx.clc_producer(answers, (turn & 1) ^ 1, multi_ctas=CTAS == 2)
                    program = tlx.clc_consumer(answers, turn & 1, multi_ctas=CTAS == 2)
                    if some:
                        schedule.tell(turn, schedule.pair_of(program))
                    turn += 1
