"""The tile list: which blocks of rows exist, heaviest first, built on the device without a host synchronisation.

A grid of ``max_len / BLOCK x B`` programs would be mostly empty for uneven lengths, and sizing it needs a maximum that
only the device knows. Instead one small kernel writes the list of existing tiles, and program ``i`` of an attention
kernel handles tile ``i``. Longest-processing-time-first order keeps the last wave short. An entry carries everything
that a program needs to start, so that it is one load away from its data, and the kernels never look at offsets:

    block, q_start, q_len, k_start, k_len, out_start

``block`` counts along queries or keys, whichever side was tiled. ``out_start`` is the first row of the sequence in
``out`` (and ``dout``, ``lse``): ``q_start`` for packed queries, ``b * M`` for broadcast ones, whose ``q_start`` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .interpret import run_kernel

CHUNK = tl.constexpr(1024)  # sequences compared at a time: each chunk costs the latency of a load
WRITE = tl.constexpr(16)  # entries of one sequence written at a time
ENTRY = tl.constexpr(8)  # int32 words per entry: six used, padded so that an entry is one aligned 32-byte sector


@triton.jit
def tile_count(tiles):
    """Number of tiles in the list; it sits in the entry before the first tile."""
    return tl.load(tiles)


@triton.jit
def load_tile(tiles, index):
    """``block, q_start, q_len, k_start, k_len, out_start`` of one tile, int32."""
    entry = tiles + tl.cast(index + 1, tl.int64) * ENTRY
    block = tl.load(entry)
    q_start = tl.load(entry + 1)
    q_len = tl.load(entry + 2)
    k_start = tl.load(entry + 3)
    k_len = tl.load(entry + 4)
    out_start = tl.load(entry + 5)
    return block, q_start, q_len, k_start, k_len, out_start


@triton.jit
def _extents(offsets, ids, B):
    """``(start, length)`` of the sequences ``ids``; 0 and 0 from ``B`` on."""
    start = tl.load(offsets + ids, mask=ids < B, other=0).to(tl.int32)
    end = tl.load(offsets + ids + 1, mask=ids < B, other=0).to(tl.int32)
    return start, end - start


@triton.jit
def _query_extents(q_offsets, ids, B, M):
    """Like ``_extents``, for queries that are packed or, with ``q_offsets`` None, one block of ``M`` shared by all."""
    if q_offsets is None:
        start = tl.zeros_like(ids)
        length = tl.where(ids < B, M, 0)
    else:
        start, length = _extents(q_offsets, ids, B)
    return start, length


@triton.jit
def _weight_and_count(q_offsets, k_offsets, ids, B, M, block, OVER_KEYS: tl.constexpr):
    """Cost of one tile of each sequence (the length of the side it loops over), and the number of its tiles."""
    _, q_len = _query_extents(q_offsets, ids, B, M)
    _, k_len = _extents(k_offsets, ids, B)
    if OVER_KEYS:
        weight, tiled = q_len, k_len
    else:
        weight, tiled = k_len, q_len
    return weight, (tiled + block - 1) // block


@triton.jit(do_not_specialize=["B", "M", "block"])
def tile_kernel(tiles, q_offsets, k_offsets, B, M, block, OVER_KEYS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Rank ``SEQUENCES`` sequences by counting the tiles that come before theirs, then write their entries.

    Counting is quadratic in ``B`` but has no dependence between programs: 0.6 M comparisons at B = 768.
    """
    mine = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    weight, count = _weight_and_count(q_offsets, k_offsets, mine, B, M, block, OVER_KEYS)
    first = tl.zeros([SEQUENCES], tl.int32)
    total = tl.zeros([CHUNK], tl.int32)
    for chunk in range(0, B, CHUNK):
        ids = chunk + tl.arange(0, CHUNK)
        other_weight, other_count = _weight_and_count(q_offsets, k_offsets, ids, B, M, block, OVER_KEYS)
        heavier = other_weight[None, :] > weight[:, None]
        tie = (other_weight[None, :] == weight[:, None]) & (ids[None, :] < mine[:, None])
        first += tl.sum(tl.where(heavier | tie, other_count[None, :], 0), 1)
        total += other_count
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.sum(total, 0))

    q_start, q_len = _query_extents(q_offsets, mine, B, M)
    k_start, k_len = _extents(k_offsets, mine, B)
    out_start = mine * M if q_offsets is None else q_start
    for begin in range(0, tl.max(count, 0), WRITE):
        i = begin + tl.arange(0, WRITE)[None, :]
        # Under a causal mask the last block of queries and the first block of keys have the most work: start there.
        number = i if OVER_KEYS else count[:, None] - 1 - i
        entry = tiles + (first[:, None] + i + 1).to(tl.int64) * ENTRY
        exists = i < count[:, None]
        tl.store(entry, number, mask=exists)
        tl.store(entry + 1, q_start[:, None] + 0 * i, mask=exists)
        tl.store(entry + 2, q_len[:, None] + 0 * i, mask=exists)
        tl.store(entry + 3, k_start[:, None] + 0 * i, mask=exists)
        tl.store(entry + 4, k_len[:, None] + 0 * i, mask=exists)
        tl.store(entry + 5, out_start[:, None] + 0 * i, mask=exists)


@dataclass(frozen=True)
class Sequences:
    """The batch as the host knows it: offsets on the device, totals from the shapes.

    ``q_offsets`` is None for broadcast queries, of which ``M`` rows are shared by all ``batch`` sequences.
    """

    q_offsets: Tensor | None
    k_offsets: Tensor
    M: int  # rows of q
    total_k: int

    @property
    def batch(self) -> int:
        return self.k_offsets.shape[0] - 1

    @property
    def broadcast(self) -> bool:
        return self.q_offsets is None

    @property
    def rows(self) -> int:
        """Rows of ``out``."""
        return self.batch * self.M if self.broadcast else self.M


@dataclass(frozen=True)
class TileList:
    """``entries`` is int32 ``[1 + most, ENTRY]`` on the device; how many are filled, up to ``most``, only it knows."""

    entries: Tensor
    most: int


def build_tiles(sequences: Sequences, block: int, *, over_keys: bool = False) -> TileList:
    """List the tiles of ``block`` query rows (or key rows) of every sequence, heaviest first."""
    batch, rows = sequences.batch, sequences.total_k if over_keys else sequences.rows
    if sequences.broadcast and not over_keys:
        most = batch * triton.cdiv(sequences.M, block)
    else:
        # Bounds sum_b ceil(len_b / block) whatever the lengths are, and exceeds it by less than one tile a sequence.
        most = min(rows, (rows + batch * (block - 1)) // block)
    entries = torch.empty((1 + most, ENTRY.value), dtype=torch.int32, device=sequences.k_offsets.device)
    per_program = 8
    run_kernel(
        tile_kernel,
        (triton.cdiv(batch, per_program),),
        entries,
        sequences.q_offsets,
        sequences.k_offsets,
        batch,
        sequences.M,
        block,
        OVER_KEYS=over_keys,
        SEQUENCES=per_program,
        num_warps=4,
    )
    return TileList(entries, most)
