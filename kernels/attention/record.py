"""Time stamps from inside the TLX kernels: when each tile began and ended where, and what its warp groups waited for.

A kernel whose argument ``record`` is None has no trace of this in its machine code. Otherwise each role of a program
(the loader, and each consumer) writes a row for each tile of its walk, int32 words:

    0     multiprocessor
    1     1 + index of the pair (tile, head) in the list of pairs; 0: there is no such tile
    2, 3  when the role began: nanoseconds of the GPU's timer, cycles of the multiprocessor's clock; first tile only
    4, 5  when it ended the tile
    6...  cycles that it waited at each of :data:`WAITS`

They are the low halves of what they stand for, so that differences are right below two seconds. A tile begins when the
one before has ended; the forward's loader waits for the slot of a tile's last V in the next tile. Waits are added up in
global memory by reductions, for whose end nobody waits: the consumers have no registers to spare for sums. A wait for
what is there already counts as the cycles between two readings of the clock.

Triton's Proton records scopes instead: two events for each wait in a buffer that holds the last of them. It has no sums
to a tile, and by default keeps the buffer in shared memory, which these kernels fill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.core import _aggregate as aggregate

from .tiles import TileList

ROLES = ("loader", "consumer 0", "consumer 1")
WAITS = ("q", "k", "v", "dout", "turn", "pair", "stores", "matmul")
"""What a role waits for. ``q``, ``k``, ``v``, ``dout``: a slot of this ring, the loader for a free one and a consumer
for a full one. ``turn``: to issue matmuls. ``pair``: the other consumer. ``stores``: its own stores to have left shared
memory. ``matmul``: its own matmuls."""

WAIT_Q, WAIT_K, WAIT_V, WAIT_DOUT = map(tl.constexpr, range(4))
WAIT_TURN, WAIT_PAIR, WAIT_STORES, WAIT_MATMUL = map(tl.constexpr, range(4, 8))
LOADER = tl.constexpr(0)  # its role; consumers follow
_ROLES = tl.constexpr(len(ROLES))
_FIRST_WAIT = tl.constexpr(6)
_WORDS = tl.constexpr(6 + len(WAITS))


# On the device -------------------------------------------------------------------------------------------------------


@triton.jit
def _special(NAME: tl.constexpr):
    """A special register, read here and now: what is pure may move, and be kept in a register that is missing then."""
    READ: tl.constexpr = "mov.u32 $0, %" + NAME + ";"
    return tl.inline_asm_elementwise(READ, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@aggregate
class Watch:
    """Notes for one role and the ``tile``-th tile of its program; does nothing where ``record`` is None."""

    record: tl.tensor | tl.constexpr
    role: tl.constexpr
    tile: tl.tensor | tl.constexpr

    @triton.jit
    def _row(self):
        return self.record + ((self.tile * tl.num_programs(0) + tl.program_id(0)) * _ROLES + self.role) * _WORDS

    @triton.jit
    def now(self):
        """What :meth:`waited` wants to know."""
        if self.record is None:
            return 0
        else:  # noqa: RET505  both would be compiled, were it not for the else
            return _special("clock")

    @triton.jit
    def waited(self, barrier: tl.constexpr, since):
        """The role waited at ``barrier`` from ``since`` until now."""
        if self.record is not None:
            tl.atomic_add(self._row() + _FIRST_WAIT + barrier, _special("clock") - since, sem="relaxed")

    @triton.jit
    def next(self, walk):
        """The tile is done: the watch for the next one."""
        if self.record is None:
            return self
        else:  # noqa: RET505
            row = self._row()
            tl.store(row, _special("smid"))
            tl.store(row + 1, walk.index(self.tile) + 1)
            tl.store(row + 4, _special("globaltimer_lo"))
            tl.store(row + 5, _special("clock"))
            return Watch(self.record, self.role, self.tile + 1)


@triton.jit
def start_watch(record, ROLE: tl.constexpr):
    """The watch for the first tile of a role, which begins now."""
    if record is None:
        return Watch(None, ROLE, None)
    else:  # noqa: RET505
        watch = Watch(record, ROLE, tl.cast(0, tl.int32))
        row = watch._row()
        tl.store(row + 2, _special("globaltimer_lo"))
        tl.store(row + 3, _special("clock"))
        return watch


# On the host ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """What a launch of the kernel of ``direction`` writes: ``words`` ``[tiles of a program, programs, roles, words]``.

    ``tiles`` is the list of tiles that it walks over, with ``heads`` for each.
    """

    direction: str
    words: Tensor
    tiles: TileList
    heads: int

    def rows(self) -> dict[str, np.ndarray[Any, Any]]:
        """See :func:`decode`. Waits for the device."""
        return decode(self.words.cpu().numpy(), self.tiles.entries.cpu().numpy(), self.heads)


_active: list[Recording] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Recording]]:
    """Launches of the TLX kernels inside, from any thread, are recorded; each appends to the list.

    Not to be nested, and not for a call that would choose among configurations: that would be recorded, too.
    """
    global _active
    if _active is not None:
        raise RuntimeError("launches are being recorded already")
    found: list[Recording] = []
    _active = found
    try:
        yield found
    finally:
        _active = None


def buffer(direction: str, programs: int, tiles: TileList, heads: int) -> Tensor | None:
    """The argument ``record`` of a launch; None unless launches are recorded."""
    if _active is None:
        return None
    # What comes after the last tile is noted, too, and left out by `decode`.
    rounds = triton.cdiv(tiles.most * heads, programs) + 1
    shape = (rounds, programs, len(ROLES), _WORDS.value)
    words = torch.zeros(shape, dtype=torch.int32, device=tiles.entries.device)
    _active.append(Recording(direction, words, tiles, heads))
    return words


def decode(words: np.ndarray[Any, Any], entries: np.ndarray[Any, Any], heads: int) -> dict[str, np.ndarray[Any, Any]]:
    """Columns with an element for each tile of each role of each program, in the order in which a role came to them.

    Args:
        words: int32 ``[tiles of a program, programs, roles, words]``, as a kernel left them.
        entries: the tile list, int32 ``[1 + tiles, 8]``.
        heads: of each tile, innermost in the walk.

    Returns:
        ``sm``, ``program``, ``role`` (index into :data:`ROLES`), ``step`` (the program's how many-eth tile), ``tile``
        (index in the list), ``head``; of the tile ``block``, ``q_len``, ``k_start``, ``k_len``, ``out_start``;
        ``begin`` and ``end`` in nanoseconds from the first begin of all, ``cycles`` between them, and for each of
        :data:`WAITS` ``wait_<name>`` in cycles.

    Raises:
        ValueError: nothing was recorded, or a program did not come to the end of its walk.
    """
    pairs = int(entries[0, 0]) * heads
    rows = words.transpose(1, 2, 0, 3)  # steps of a role next to each other
    exists = rows[..., 1] != 0
    counts = exists.sum((0, 2))
    if not counts.any() or not set(counts) <= {0, pairs}:
        found = ", ".join(f"{role} {count}" for role, count in zip(ROLES, counts, strict=True))
        raise ValueError(f"of {pairs} tiles were recorded: {found}; the kernel did not run, or not to its end")
    ends = rows[..., 4:6]
    begins = np.concatenate([rows[..., :1, 2:4], ends[..., :-1, :]], axis=2)
    times = np.stack([begins[..., 0], ends[..., 0]]) - rows[0, 0, 0, 2]  # int32 wraps around, as it should
    begin, end = times[:, exists].astype(np.int64)
    program, role, step = np.nonzero(exists)
    tile, head = np.divmod(rows[exists][:, 1].astype(np.int64) - 1, heads)
    waits = rows[exists][:, _FIRST_WAIT.value :].view(np.uint32).astype(np.int64)
    entry = entries[1 + tile].astype(np.int64)
    return {
        "sm": rows[exists][:, 0].astype(np.int64),
        "program": program,
        "role": role,
        "step": step,
        "tile": tile,
        "head": head,
        "block": entry[:, 0],
        "q_len": entry[:, 2],
        "k_start": entry[:, 3],
        "k_len": entry[:, 4],
        "out_start": entry[:, 5],
        "begin": begin - begin.min(),
        "end": end - begin.min(),
        "cycles": (ends[exists] - begins[exists])[:, 1].view(np.uint32).astype(np.int64),
        **{f"wait_{name}": waits[:, i] for i, name in enumerate(WAITS)},
    }
