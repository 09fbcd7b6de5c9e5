"""Eager attention, one sequence at a time: the right answer in float64, the field's yardstick in the input dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention call; `q_lengths` is None for broadcast queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_lengths: list[int]
    q_lengths: list[int] | None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sm_scale: float | None = None

    @property
    def k_offsets(self) -> Tensor:
        return offsets(self.k_lengths, self.k.device)

    @property
    def q_offsets(self) -> Tensor | None:
        return None if self.q_lengths is None else offsets(self.q_lengths, self.q.device)

    @property
    def options(self) -> dict[str, object]:
        """Keyword arguments of the function under test."""
        return {
            "q_offsets": self.q_offsets,
            "broadcast_q": self.q_lengths is None,
            "causal": self.causal,
            "window": self.window,
            "sm_scale": self.sm_scale,
        }


def offsets(lengths: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` `[rows, H, D]` and `lse` `[H, rows]`, computed in the dtype of `q`, `k` and `v`."""
    queries = [q] * len(problem.k_lengths) if problem.q_lengths is None else q.split(problem.q_lengths)
    parts = [
        _one_sequence(problem, *triple)
        for triple in zip(queries, k.split(problem.k_lengths), v.split(problem.k_lengths), strict=True)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def _one_sequence(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if problem.sm_scale is None else problem.sm_scale
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    visible = _visible(problem, q.shape[0], k.shape[0]).to(q.device)
    sees_any = visible.any(dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
    scores = scores.masked_fill(~visible & sees_any[:, None], float("-inf"))
    if k.shape[0] == 0:
        return q * 0, torch.full((q.shape[1], q.shape[0]), float("-inf"), device=q.device)
    lse = scores.float().logsumexp(-1) if q.dtype != torch.float64 else scores.logsumexp(-1)
    p = scores.softmax(-1).masked_fill(~sees_any[:, None], 0)
    return torch.einsum("hmn,nhd->mhd", p, v), lse.masked_fill(~sees_any, float("-inf"))


def _visible(problem: Problem, rows: int, keys: int) -> Tensor:
    """Bottom-right aligned, inclusive on both sides; -1 is unbounded."""
    left, right = problem.window
    distance = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + keys - rows)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if problem.causal:
        visible &= distance <= 0
    elif right >= 0:
        visible &= distance <= right
    return visible


def gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Gradients of `inputs`; zeros where the output does not depend on one (every sequence empty)."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(out, inputs, dout, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
