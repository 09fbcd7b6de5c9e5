"""The registered operators: what torch's dispatcher, autograd and compiler know about the kernels.

``q_offsets`` is None for broadcast queries; ``kernels`` is the family, as :func:`.launch.launcher` takes it. Arguments
have been checked by :mod:`.api`. The kernels are imported when first run, so that fake tensors need neither a GPU nor
Triton.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("jfabench::jagged_attention", mutates_args=())
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    q_offsets: Tensor | None,
    sm_scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``out`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``."""
    from .launch import launcher
    from .problem import make_problem

    family = launcher(kernels, q.device)
    window = (window_left, window_right)
    return family.forward(make_problem(q, k, v, k_offsets, q_offsets, sm_scale, window, deterministic))


@jagged_attention.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, k_offsets, q_offsets, sm_scale, window_left, window_right, deterministic, kernels="auto"
):
    total, heads, head_dim = q.shape
    rows = total if q_offsets is not None else total * (k_offsets.shape[0] - 1)
    return q.new_empty((rows, heads, head_dim)), q.new_empty((heads, rows), dtype=torch.float32)


@torch.library.custom_op("jfabench::jagged_attention_backward", mutates_args=())
def jagged_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_offsets: Tensor,
    q_offsets: Tensor | None,
    sm_scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    kernels: str,
    need_dq: bool,
    need_dkdv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq``, ``dk``, ``dv``, shaped like ``q``, ``k``, ``v``; those not needed are empty."""
    from .launch import launcher
    from .problem import make_problem

    family = launcher(kernels, q.device)
    window = (window_left, window_right)
    problem = make_problem(q, k, v, k_offsets, q_offsets, sm_scale, window, deterministic)
    # Autograd may hand over an expanded or transposed gradient; the kernels read packed rows.
    grads = family.backward(problem, out, lse, dout.contiguous(), need_dq=need_dq, need_dkdv=need_dkdv)
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv


@jagged_attention_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    dout,
    q,
    k,
    v,
    out,
    lse,
    k_offsets,
    q_offsets,
    sm_scale,
    window_left,
    window_right,
    deterministic,
    kernels,
    need_dq,
    need_dkdv,
):
    dq = torch.empty_like(q) if need_dq else q.new_empty(0)
    dk, dv = (torch.empty_like(k), torch.empty_like(v)) if need_dkdv else (k.new_empty(0), v.new_empty(0))
    return dq, dk, dv


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, k_offsets, q_offsets, *ctx.settings = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, k_offsets, q_offsets)
    ctx.mark_non_differentiable(lse)


def _gradients(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    need_q, need_k, need_v = ctx.needs_input_grad[:3]
    dq, dk, dv = jagged_attention_backward(dout, *ctx.saved_tensors, *ctx.settings, need_q, need_k or need_v)
    return (dq if need_q else None, dk if need_k else None, dv if need_v else None, *[None] * 7)


jagged_attention.register_autograd(_gradients, setup_context=_save_for_backward)
