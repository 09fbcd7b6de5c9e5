"""Attention as a kernel for bf16 and fp16 computes it, one sequence at a time, and with every fault one can think of.

It shares nothing with the operator's oracle. Without a fault it is right: scores and sums in float32, probabilities
not normalised when they are rounded, `dS` rounded before it is scaled, `delta` from the rounded `out`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OfLength = Callable[[int], float]


@dataclass(frozen=True)
class Fault:
    """What is wrong; lengths `n` are numbers of keys. The defaults are right."""

    scale: float = 1.0
    out: OfLength = lambda n: 1.0
    dv: OfLength = lambda n: 1.0
    ds: OfLength = lambda n: 1.0
    dq: OfLength = lambda n: 1.0
    window: tuple[int, int] | None = None
    delta: bool = True
    unseen: Callable[[int], int] = lambda n: 0
    """How many of the last keys the backward does not see."""
    forgotten: int = 0
    """The last key of every so many contributes to no gradient."""
    sum_every: int = 0
    """`out` is summed up in the input dtype, this many keys at a time."""
    lse: bool = True


RIGHT = Fault()


def kernel(inputs: Any, fault: Fault = RIGHT) -> dict[str, Tensor]:
    """`out`, `lse`, `dq`, `dk`, `dv` in their dtypes."""
    p, dtype = inputs.params, inputs.q.dtype
    parts: list[tuple[Tensor, ...]] = []
    q_row = k_row = 0
    for m, n in zip(inputs.q_lengths.tolist(), inputs.k_lengths.tolist(), strict=True):
        rows, keys = slice(q_row, q_row + m), slice(k_row, k_row + n)
        q = inputs.q if p.broadcast_q else inputs.q[rows]
        parts.append(_sequence(p, fault, q, inputs.k[keys], inputs.v[keys], inputs.dout[rows]))
        q_row, k_row = q_row + m, k_row + n
    out, lse, dq, dk, dv = zip(*parts, strict=True)
    results = {
        "out": torch.cat(out).to(dtype),
        "lse": torch.cat(lse, 1),
        "dq": (torch.stack(dq).sum(0) if p.broadcast_q else torch.cat(dq)).to(dtype),
        "dk": torch.cat(dk).to(dtype),
        "dv": torch.cat(dv).to(dtype),
    }
    return results if fault.lse else {name: x for name, x in results.items() if name != "lse"}


def _sequence(p: Any, fault: Fault, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Packed tensors of one sequence -> `out`, `lse`, `dq`, `dk`, `dv` in float32."""
    dtype, m, n, share = q.dtype, len(q), len(k), p.heads // p.kv_heads

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, k, v, dout = (x.float().transpose(0, 1) for x in (q, k, v, dout))  # [heads, rows, D]
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    left, right = fault.window if fault.window is not None else p.bounds
    place, key = torch.arange(m)[:, None] + n - m, torch.arange(n)
    hidden = torch.zeros(m, n, dtype=torch.bool)
    hidden |= (key > place + right) if right >= 0 else hidden
    hidden |= (key < place - left) if left >= 0 else hidden

    scores = (p.scale * fault.scale * (q @ k.mT)).masked_fill(hidden, -torch.inf)
    peak = scores.amax(-1, keepdim=True) if n else torch.full((p.heads, m, 1), -torch.inf)
    weights = (scores - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    lse = peak + total.log()
    if fault.sum_every:
        out = torch.zeros(dout.shape)
        for some in torch.arange(n).split(fault.sum_every):
            out = rounded(out + rounded(weights[..., some]) @ v[:, some])
    else:
        out = rounded(weights) @ v
    out = rounded(out / total.masked_fill(total == 0, 1.0)) * fault.out(n)

    probabilities = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    probabilities[..., n - fault.unseen(n) :] = 0.0
    if fault.forgotten:
        probabilities[..., fault.forgotten - 1 :: fault.forgotten] = 0.0
    delta = (dout * out).sum(-1, keepdim=True) if fault.delta else 0.0
    ds = rounded(probabilities * (dout @ v.mT - delta) * fault.ds(n))
    dq = p.scale * (ds @ k) * fault.dq(n)
    dk = p.scale * (ds.mT @ q)
    dv = rounded(probabilities).mT @ dout * fault.dv(n)
    dk, dv = (x.unflatten(0, (p.kv_heads, share)).sum(1).transpose(0, 1) for x in (dk, dv))
    return out.transpose(0, 1), lse.squeeze(-1), dq.transpose(0, 1), dk, dv
