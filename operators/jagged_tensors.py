"""The tensors of one case. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jfabench.operators.jagged_attention import JaggedAttentionParams
from jfabench.operators.lengths import Lengths

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class JaggedInputs:
    """What a provider gets. Nothing here requires grad, and nobody may write to it.

    `q_offsets` are the row offsets of `out`: with `broadcast_q` every sequence has `M` rows there, although `q` has
    `M` in all. `q_lengths` and `k_lengths` are the same lengths on the host, so that no provider must synchronise.
    """

    params: JaggedAttentionParams
    q: Tensor
    """`[total_q, H, D]`, or `[M, H, D]` with `broadcast_q`."""
    k: Tensor
    """`[total_k, H_kv, D]`"""
    v: Tensor
    """`[total_k, H_kv, D]`"""
    dout: Tensor
    """`[total_q, H, D]`, or `[B * M, H, D]` with `broadcast_q`."""
    q_offsets: Tensor
    """`[B + 1]` int32"""
    k_offsets: Tensor
    """`[B + 1]` int32"""
    q_lengths: Lengths
    k_lengths: Lengths

    @property
    def sm_scale(self) -> float:
        return self.params.scale

    @property
    def max_q_len(self) -> int:
        return int(self.q_lengths.max())

    @property
    def max_k_len(self) -> int:
        return int(self.k_lengths.max())

    def expanded_q(self) -> Tensor:
        """`[rows of out, H, D]`: `q` itself, or a copy of the broadcast queries for every sequence."""
        if not self.params.broadcast_q:
            return self.q
        return self.q.expand(self.params.batch, *self.q.shape).flatten(0, 1).contiguous()

    def batch_sum(self, dq: Tensor) -> Tensor:
        """`[M, H, D]` from the gradients of expanded queries: summed in float32, rounded once. Jagged: `dq` itself."""
        if not self.params.broadcast_q:
            return dq
        return dq.view(self.params.batch, *self.q.shape).sum(0, dtype=torch.float32).to(dq.dtype)


def make_inputs(params: JaggedAttentionParams, seed: int, device: str) -> JaggedInputs:
    """Standard-normal q, k, v and dout, different for every seed; the same on every run on one kind of device."""
    queries, keys = params.draw_lengths(seed)
    rows, total_k = int(queries.sum()), int(keys.sum())
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, heads: int) -> Tensor:
        shape = (rows, heads, params.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[params.dtype])

    return JaggedInputs(
        params=params,
        q=normal(params.q_len or rows, params.heads),
        k=normal(total_k, params.kv_heads),
        v=normal(total_k, params.kv_heads),
        dout=normal(rows, params.heads),
        q_offsets=_offsets(queries, device),
        k_offsets=_offsets(keys, device),
        q_lengths=queries,
        k_lengths=keys,
    )


def fingerprint(inputs: JaggedInputs) -> dict[str, int]:
    """A 128-bit checksum of the bits of each input tensor: any single change alters it, and so do swapped rows.

    Columns of 8 bytes are summed over the rows, and rows over the columns, in int64 without intermediate copies; both
    sums are then weighted by odd numbers that grow with the position. Reads each tensor twice; waits for the device.
    """
    names = ("q", "k", "v", "dout", "q_offsets", "k_offsets")
    sums = torch.stack([_position_sums(getattr(inputs, name)) for name in names]).tolist()
    return {name: (columns % 2**64) << 64 | rows % 2**64 for name, (columns, rows) in zip(names, sums, strict=True)}


def _position_sums(x: Tensor) -> Tensor:
    """`[2]` int64: sums over columns and rows of a contiguous tensor, weighted by position, modulo 2**64."""
    words = x.flatten(1).view(torch.int64) if x.is_floating_point() else x.to(torch.int64).unsqueeze(1)

    def weighted(values: Tensor) -> Tensor:
        return (values * (2 * torch.arange(len(values), device=x.device) + 1)).sum()

    return torch.stack([weighted(words.sum(0)), weighted(words.sum(1))])


def _offsets(lengths: Lengths, device: str) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
