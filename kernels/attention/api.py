"""The public function, its argument checks, and its registration with torch (fake tensors, autograd, compile)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops import jagged_attention

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
OFFSET_DTYPES = (torch.int32, torch.int64)
MAX_ROWS = 2**31 - 1


def jagged_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_offsets: Tensor,
    *,
    q_offsets: Tensor | None = None,
    broadcast_q: bool = False,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sm_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over packed sequences: per sequence ``b``, ``softmax(sm_scale * Q_b K_b^T + mask) V_b``.

    Sequence ``b`` owns rows ``k_offsets[b]:k_offsets[b + 1]`` of ``k`` and ``v``. Any sequence may be empty. A query that
    sees no key gives a zero output row and ``lse = -inf``, and contributes nothing to any gradient. Differentiable in
    ``q``, ``k`` and ``v`` (any subset of them), usable under ``torch.compile`` and CUDA-graph capture, and free of host
    synchronisation unless ``validate`` is set.

    Args:
        q: ``[total_q, H, D]`` packed queries, or ``[M, H, D]`` with ``broadcast_q``. bfloat16 or float16, contiguous.
        k: ``[total_k, H_kv, D]`` packed keys, same dtype and device as ``q``. ``H % H_kv == 0``: query head ``h`` reads
            key/value head ``h // (H // H_kv)``. ``D`` is 64 or 128.
        v: ``[total_k, H_kv, D]`` packed values.
        k_offsets: ``[B + 1]`` int32 or int64 on the same device: 0, non-decreasing, last entry ``total_k``.
        q_offsets: ``[B + 1]`` row offsets of ``q``, like ``k_offsets``. Defaults to ``k_offsets`` (self-attention).
        broadcast_q: every sequence attends with the same ``M`` queries; ``dq`` is then the sum over the sequences,
            accumulated in float32 and rounded once.
        causal: query ``i`` of ``n_q`` sees key ``j`` of ``n_k`` only if ``j <= i + n_k - n_q`` (bottom-right aligned).
        window: ``(left, right)``, inclusive: key ``j`` is seen only if ``-left <= j - (i + n_k - n_q) <= right``; -1 is
            unbounded. ``causal`` sets ``right`` to 0.
        sm_scale: positive factor on the scores before the softmax; defaults to ``D ** -0.5``.
        deterministic: bitwise equal results from run to run, also across processes: a fixed kernel configuration
            instead of the one that was fastest when first tried. (Without it, results repeat within a process.)
        return_lse: also return the log-sum-exp of the scores.
        validate: check the values of the offsets. Synchronises with the device; for debugging.

    Returns:
        ``out``, ``[total_q, H, D]`` or ``[B * M, H, D]`` with ``broadcast_q``, in the dtype of ``q``; with ``return_lse``
        the pair ``(out, lse)``, where ``lse`` is ``[H, rows of out]`` float32, natural logarithm, not differentiable.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or value; the message names it.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is not enabled.

    The gradients are those of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691, section 3.1).
    """
    _check_data(q, k, v)
    if broadcast_q:
        _require(q_offsets is None, "q_offsets", "None with broadcast_q=True", "a tensor")
        _require(q.shape[0] > 0, "q", "at least one query row (M > 0) with broadcast_q=True", "M == 0")
    elif q_offsets is None:
        _require(q.shape[0] == k.shape[0], "q_offsets", "a tensor, unless q and k have the same rows", "None")
        q_offsets = k_offsets
    _check_offsets("k_offsets", k_offsets, k, validate)
    if q_offsets is not None:
        _check_offsets("q_offsets", q_offsets, q, validate)
        same = q_offsets.shape == k_offsets.shape
        _require(same, "q_offsets", f"the shape of k_offsets, {_show(k_offsets)}", _show(q_offsets))
    rows = q.shape[0] * (k_offsets.shape[0] - 1) if broadcast_q else q.shape[0]
    _require(rows <= MAX_ROWS, "q", f"at most {MAX_ROWS} output rows", rows)
    left, right = _check_window(window)
    if sm_scale is None:
        sm_scale = q.shape[2] ** -0.5
    _require(0 < sm_scale < math.inf, "sm_scale", "a positive finite number", sm_scale)

    right = 0 if causal else right
    out, lse = jagged_attention(q, k, v, k_offsets, q_offsets, sm_scale, left, right, deterministic)
    return (out, lse) if return_lse else out


def _require(condition: bool, argument: str, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{argument}: expected {expected}, got {got}.")


def _show(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_data(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor, shape in (("q", q, "[rows, H, D]"), ("k", k, "[total_k, H_kv, D]"), ("v", v, "[total_k, H_kv, D]")):
        _require(tensor.dim() == 3, name, f"shape {shape}", _show(tensor))
        _require(tensor.dtype in DTYPES, name, "dtype torch.bfloat16 or torch.float16", tensor.dtype)
        _require(tensor.dtype == q.dtype, name, f"the dtype of q, {q.dtype}", tensor.dtype)
        _require(tensor.device == q.device, name, f"the device of q, {q.device}", tensor.device)
        _require(tensor.is_contiguous(), name, "a contiguous tensor", f"strides {list(tensor.stride())}")
        _require(tensor.shape[0] <= MAX_ROWS, name, f"at most {MAX_ROWS} rows", tensor.shape[0])
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    _require(head_dim in HEAD_DIMS, "q", "head dimension D of 64 or 128", head_dim)
    _require(k.shape[2] == head_dim, "k", f"the head dimension of q, {head_dim}", k.shape[2])
    _require(v.shape == k.shape, "v", f"the shape of k, {_show(k)}", _show(v))
    _require(kv_heads > 0, "k", "at least one head", kv_heads)
    multiple = heads > 0 and heads % kv_heads == 0
    _require(multiple, "q", f"a number of heads that is a multiple of the {kv_heads} of k", heads)


def _check_offsets(name: str, offsets: Tensor, rows_of: Tensor, validate: bool) -> None:
    _require(offsets.dim() == 1 and offsets.shape[0] >= 2, name, "shape [B + 1] with B >= 1", _show(offsets))
    _require(offsets.dtype in OFFSET_DTYPES, name, "dtype torch.int32 or torch.int64", offsets.dtype)
    _require(offsets.device == rows_of.device, name, f"the device of q, {rows_of.device}", offsets.device)
    _require(offsets.is_contiguous(), name, "a contiguous tensor", f"strides {list(offsets.stride())}")
    if validate:
        values, total = offsets.tolist(), rows_of.shape[0]
        _require(values[0] == 0, name, "a first entry of 0", values[0])
        _require(values[-1] == total, name, f"a last entry of {total}, the rows of its tensor", values[-1])
        falls = [b for b in range(len(values) - 1) if values[b] > values[b + 1]]
        _require(not falls, name, "non-decreasing entries", f"a decrease after entry {falls[0] if falls else None}")


def _check_window(window: tuple[int, int]) -> tuple[int, int]:
    expected = "two ints (left, right), each -1 (unbounded) or at least 0"
    _require(isinstance(window, (tuple, list)) and len(window) == 2, "window", expected, window)
    left, right = window
    _require(isinstance(left, int) and isinstance(right, int) and min(left, right) >= -1, "window", expected, window)
    return left, right
