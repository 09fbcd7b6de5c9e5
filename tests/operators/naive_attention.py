"""An independent oracle for the tests: attention in float64, one sequence at a time, gradients by torch.autograd.

It shares nothing with the operator's oracle: no padding, no batching, no backward formula, and the mask is spelled out
pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def visible(i: int, j: int, m: int, n: int, causal: bool, window: Sequence[int]) -> bool:
    """Whether query `i` of `m` sees key `j` of `n`: flash-attention's convention, in its own words."""
    place = i + n - m
    left, right = window
    return (not causal or j <= place) and (left == -1 or j >= place - left) and (right == -1 or j <= place + right)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    *,
    scale: float,
    causal: bool,
    window: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Packed `[total, heads, D]` tensors of any dtype -> `out` and `lse`, both float64; `out` is differentiable."""
    outs, lses = [], []
    repeat = q.shape[1] // k.shape[1]
    blocks = zip(q.split(list(q_lengths)), k.split(list(k_lengths)), v.split(list(k_lengths)), strict=True)
    for q_b, k_b, v_b in blocks:
        m, n = len(q_b), len(k_b)
        mask = torch.tensor([[visible(i, j, m, n, causal, window) for j in range(n)] for i in range(m)], dtype=bool)
        mask = mask.reshape(m, n)
        alive = mask.any(1)
        keys, values = (x.double().repeat_interleave(repeat, 1) for x in (k_b, v_b))
        scores = scale * torch.einsum("ihd,jhd->hij", q_b.double()[alive], keys)
        scores = scores.masked_fill(~mask[alive], -torch.inf)
        out = torch.zeros(q_b.shape, dtype=torch.float64)
        lse = torch.full((q.shape[1], m), -torch.inf, dtype=torch.float64)
        if alive.any():
            out = out.index_put((alive,), torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
            lse[:, alive] = scores.detach().logsumexp(-1)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def naive_attention(inputs: Any) -> dict[str, Tensor]:
    """`out`, `lse`, `dq`, `dk`, `dv` of `JaggedInputs`, float64."""
    p = inputs.params
    q, k, v = leaves = tuple(x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    rows = torch.cat([q] * p.batch) if p.broadcast_q else q
    lengths = (inputs.q_lengths.tolist(), inputs.k_lengths.tolist())
    out, lse = packed_attention(rows, k, v, *lengths, scale=p.scale, causal=p.causal, window=p.window)
    gradients: tuple[Tensor | None, ...] = (None, None, None)
    if out.requires_grad:
        gradients = torch.autograd.grad(out, leaves, inputs.dout.double(), allow_unused=True)
    dq, dk, dv = (torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True))
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}
