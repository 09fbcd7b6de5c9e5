"""What all kernels of one call have in common, whichever family computes it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .kinds import Kind, power_of_two_below
from .tiles import Sequences


class Mask(NamedTuple):
    """Window bounds as kernels take them: None where unbounded."""

    left: int | None
    right: int | None

    @classmethod
    def from_window(cls, left: int, right: int, rows_q: int, rows_k: int) -> Mask:
        """Drop a bound that no pair can reach, so that it costs nothing."""
        return cls(
            left=None if left < 0 or left >= rows_k else left,
            right=None if right < 0 or right >= rows_q else right,
        )


@dataclass(frozen=True)
class Problem:
    """The inputs of a call, forward or backward, and when it began (seconds of ``time.monotonic``)."""

    q: Tensor  # [total_q or M, H, D]
    k: Tensor  # [total_k, H_kv, D]
    v: Tensor  # [total_k, H_kv, D]
    sequences: Sequences
    sm_scale: float
    mask: Mask
    deterministic: bool
    began: float = field(default_factory=time.monotonic)

    @property
    def is_empty(self) -> bool:
        """No query meets any key: known from the shapes, and nothing to describe to TMA."""
        return self.q.shape[0] == 0 or self.k.shape[0] == 0

    def new_outputs(self) -> tuple[Tensor, Tensor]:
        """Memory for ``out`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``."""
        rows = self.sequences.rows
        out = self.q.new_empty((rows, self.heads, self.head_dim))
        return out, self.q.new_empty((self.heads, rows), dtype=torch.float32)

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def kind(self, family: str, kernel: str) -> Kind:
        sequences, mask = self.sequences, self.mask
        return Kind(
            family,
            kernel,
            dtype=str(self.q.dtype).removeprefix("torch."),
            head_dim=self.head_dim,
            group=self.group,
            broadcast=sequences.broadcast,
            bounded_left=mask.left is not None,
            bounded_right=mask.right is not None,
            mean_q=power_of_two_below(sequences.rows // sequences.batch),
            mean_k=power_of_two_below(sequences.total_k // sequences.batch),
        )


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    q_offsets: Tensor | None,
    sm_scale: float,
    window: tuple[int, int],
    deterministic: bool,
) -> Problem:
    """Bundle checked arguments; ``q_offsets`` None means broadcast queries."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    sequences = Sequences(q_offsets, k_offsets, q.shape[0], k.shape[0])
    mask = Mask.from_window(*window, q.shape[0], k.shape[0])
    return Problem(q, k, v, sequences, sm_scale, mask, deterministic)


def aligned(tensor: Tensor) -> Tensor:
    """A copy if the data of a view starts where TMA cannot (16 bytes); the allocator never places it so."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def row_blocks(packed: Tensor, block: int, columns: int | None = None) -> TensorDescriptor:
    """Descriptor of ``packed`` ``[rows, heads, D]`` that reads ``block`` rows (or ``columns`` of them) of one head."""
    rows, heads, head_dim = packed.shape
    return TensorDescriptor(packed, [rows, heads * head_dim], [heads * head_dim, 1], [block, columns or head_dim])
