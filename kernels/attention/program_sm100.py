"""What a program of the forward kernel for Blackwell is made of: its shape, shared memory, tensor memory (TLX)."""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import _aggregate as aggregate

from .fwd_sm90 import Task
from .pipeline_sm100 import Signal, Slots, make_group_signal, make_signal, make_slots
from .tiles import load_tile

ROWS = tl.constexpr(128)  # queries of a group: the lanes of tensor memory
COLUMNS = tl.constexpr(64)  # of O that are staged at a time: 128 bytes, a row of TMA's swizzle


@aggregate
class Shape:
    """Of a program: ``groups`` softmax groups in each of its CTAs, a step of ``block_n`` keys."""

    groups: tl.constexpr
    block_n: tl.constexpr
    head_dim: tl.constexpr
    ctas: tl.constexpr
    keep_q: tl.constexpr  # queries are the same for all sequences

    @triton.jit
    def rank(self):
        return tlx.cluster_cta_rank() if self.ctas == 2 else 0

    @triton.jit
    def row(self, task, group):
        """First query of a group of this CTA."""
        return task.first + (self.rank() * self.groups + group) * ROWS

    @triton.jit
    def keys(self, task, window):
        """The blocks of keys that a tile visits."""
        return task.keys(window, self.ctas * self.groups * ROWS, self.block_n)

    @triton.jit
    def task(self, schedule, pair):
        """A pair of tile and head, and where its rows start: ``task, q_start, k_start``. Any if it is negative."""
        tile, head = schedule.split(pair)
        block, q_start, q_len, k_start, k_len, out_start = load_tile(schedule.tiles, tile)
        return Task(head, block * (self.ctas * self.groups * ROWS), q_len, k_len, out_start), q_start, k_start

    @triton.jit
    def reuses_q(self, task, following):
        """Whether the next tile has the same queries, which then stay in shared memory."""
        return (task.head == following.head) & (task.first == following.first) & self.keep_q


@aggregate
class SharedMemory:
    """Of each CTA. K and V take turns in the same slots."""

    q: tlx.buffered_tensor  # [128, D] for each group and slot
    k: tlx.buffered_tensor  # [BLOCK_N / CTAS, D]
    v: tlx.buffered_tensor  # [BLOCK_N, D / CTAS]
    out: tlx.buffered_tensor  # [128, 64]
    q_slots: Slots
    kv_slots: Slots
    out_full: Signal
    out_free: Signal

    @triton.jit
    def k_tile(self, step):
        return self.k[2 * step % self.kv_slots.depth]

    @triton.jit
    def v_tile(self, step):
        return self.v[(2 * step + 1) % self.kv_slots.depth]


@aggregate
class TensorMemory:
    """Of each CTA, for each group: 128 lanes, one for each query, and so many columns."""

    scores: tlx.buffered_tensor  # [128, BLOCK_N] float32
    p: tlx.buffered_tensor  # [128, BLOCK_N / parts] in 16 bits, for each part, in the place of scores
    decay: tlx.buffered_tensor  # [128, 1] float32, likewise: the factor for the sums so far
    total: tlx.buffered_tensor  # likewise: of a whole tile, the sum of P
    peak: tlx.buffered_tensor  # likewise: the maximum that P is relative to, in base 2
    sums: tlx.buffered_tensor  # [128, D] float32: O
    scores_full: Signal
    scores_free: Signal
    ready: Signal
    rest: Signal  # parts of P beyond the first
    told: Signal  # decay
    finished: Signal  # total and peak
    sums_full: Signal
    parts: tl.constexpr


@triton.jit
def make_shared_memory(
    DTYPE: tl.constexpr, shape, Q_STAGES: tl.constexpr, KV_STAGES: tl.constexpr, OUT_STAGES: tl.constexpr
):
    CTAS: tl.constexpr = shape.ctas
    k = tlx.local_alloc((shape.block_n // CTAS, shape.head_dim), DTYPE, KV_STAGES)
    return SharedMemory(
        tlx.local_alloc((ROWS, shape.head_dim), DTYPE, shape.groups * Q_STAGES),
        k,
        tlx.local_alloc((shape.block_n, shape.head_dim // CTAS), DTYPE, KV_STAGES, reuse=k),
        tlx.local_alloc((ROWS, COLUMNS), DTYPE, OUT_STAGES),
        make_slots(Q_STAGES, CTAS),
        make_slots(KV_STAGES, CTAS),
        make_group_signal(OUT_STAGES, 1, 1),
        make_signal(OUT_STAGES),
    )


@triton.jit
def make_tensor_memory(DTYPE: tl.constexpr, shape, PARTS: tl.constexpr):
    """P and the statistics share the place of the scores; the sums have their own."""
    GROUPS: tl.constexpr = shape.groups
    place = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    scores = tlx.local_alloc((ROWS, shape.block_n), tl.float32, GROUPS, tlx.storage_kind.tmem, reuse=place)
    p = tlx.local_alloc((ROWS, shape.block_n // PARTS), DTYPE, GROUPS * PARTS, tlx.storage_kind.tmem, reuse=place)
    decay = tlx.local_alloc((ROWS, 1), tl.float32, GROUPS, tlx.storage_kind.tmem, reuse=place)
    total = tlx.local_alloc((ROWS, 1), tl.float32, GROUPS, tlx.storage_kind.tmem, reuse=place)
    peak = tlx.local_alloc((ROWS, 1), tl.float32, GROUPS, tlx.storage_kind.tmem, reuse=place)
    place.set_buffer_overlap(
        tlx.reuse_group(
            scores,
            tlx.reuse_group(
                tlx.reuse_group(p, group_size=PARTS), decay, total, peak, group_type=tlx.reuse_group_type.distinct
            ),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    return TensorMemory(
        scores,
        p,
        decay,
        total,
        peak,
        tlx.local_alloc((ROWS, shape.head_dim), tl.float32, GROUPS, tlx.storage_kind.tmem),
        make_signal(GROUPS),
        make_group_signal(GROUPS, 1, shape.ctas),
        make_group_signal(GROUPS, 2, shape.ctas),
        make_group_signal(GROUPS * PARTS, 1, shape.ctas),
        make_group_signal(GROUPS, 1, 1),
        make_group_signal(GROUPS, 1, 1),
        make_signal(GROUPS),
        PARTS,
    )
