"""The public function, its argument checks, and its registration with torch (fake tensors, autograd, compile)."""

from __future__ import annotations

import itertools
import math
from typing import NoReturn

import torch
from torch import Tensor

from .ops import jagged_attention

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
OFFSET_DTYPES = (torch.int32, torch.int64)
MAX_ROWS = 2**31 - 1
KERNELS = ("auto", "tlx", "triton")


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
    kernels: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over packed sequences: per sequence ``b``, ``softmax(sm_scale * Q_b K_b^T + mask) V_b``.

    Sequence ``b`` owns rows ``k_offsets[b]:k_offsets[b + 1]`` of ``k`` and ``v``. Any sequence may be empty. A query
    that sees no key gives a zero output row and ``lse = -inf``, and contributes nothing to any gradient. Differentiable
    in ``q``, ``k`` and ``v`` (any subset of them), usable under ``torch.compile`` and CUDA-graph capture. Does not wait
    for the device, except with ``validate``, and to time a few configurations on the first call of a new kind, for 20
    seconds at most. The choice is kept on disk for other processes, in ``JFABENCH_CACHE_DIR`` or ``~/.cache/jfabench``;
    ``JFABENCH_TUNE=0`` takes fixed configurations instead.

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
            instead of the one that was fastest when first tried, and no sums whose order depends on scheduling.
        return_lse: also return the log-sum-exp of the scores.
        validate: check the values of the offsets. Synchronises with the device; for debugging.
        kernels: ``"tlx"`` (warp-specialised, for Hopper and Blackwell), ``"triton"`` (plain Triton, everywhere), or
            ``"auto"``: TLX where it can run, else plain Triton, which a line in the log says once.

    Returns:
        ``out``, ``[total_q, H, D]`` or ``[B * M, H, D]`` with ``broadcast_q``, in the dtype of ``q``; with
        ``return_lse`` the pair ``(out, lse)``, where ``lse`` is ``[H, rows of out]`` float32, natural logarithm, not
        differentiable.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or value; the message names it.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is not enabled, or ``kernels="tlx"`` cannot
            run here; the message has the reason and the remedy.

    The gradients are those of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691, section 3.1).
    """
    _check_data(q, k, v)
    if broadcast_q and q_offsets is not None:
        _reject("q_offsets", "None with broadcast_q=True", "a tensor")
    if broadcast_q and q.shape[0] == 0:
        _reject("q", "at least one query row with broadcast_q=True", "M == 0")
    if not broadcast_q and q_offsets is None:
        if q.shape[0] != k.shape[0]:
            _reject("q_offsets", "a tensor, since q and k have different numbers of rows", None)
        q_offsets = k_offsets
    _check_offsets("k_offsets", k_offsets, k, validate)
    if q_offsets is not None:
        _check_offsets("q_offsets", q_offsets, q, validate)
        if q_offsets.shape != k_offsets.shape:
            _reject("q_offsets", f"the shape of k_offsets, {list(k_offsets.shape)}", list(q_offsets.shape))
    rows = q.shape[0] * (k_offsets.shape[0] - 1) if broadcast_q else q.shape[0]
    if rows > MAX_ROWS:
        _reject("q", f"at most {MAX_ROWS} output rows", rows)
    left, right = _check_window(window)
    if sm_scale is None:
        sm_scale = q.shape[2] ** -0.5
    if not 0 < sm_scale < math.inf:
        _reject("sm_scale", "a positive finite number", sm_scale)

    if kernels not in KERNELS:
        _reject("kernels", f"one of {', '.join(map(repr, KERNELS))}", repr(kernels))

    right = 0 if causal else right
    out, lse = jagged_attention(q, k, v, k_offsets, q_offsets, sm_scale, left, right, deterministic, kernels)
    return (out, lse) if return_lse else out


def _reject(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}.")


def _check_data(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            _reject(name, "shape [rows, heads, D]", list(tensor.shape))
        if tensor.dtype not in DTYPES:
            _reject(name, "dtype torch.bfloat16 or torch.float16", tensor.dtype)
        if tensor.dtype != q.dtype:
            _reject(name, f"the dtype of q, {q.dtype}", tensor.dtype)
        if tensor.device != q.device:
            _reject(name, f"the device of q, {q.device}", tensor.device)
        if not tensor.is_contiguous():
            _reject(name, "a contiguous tensor", f"strides {list(tensor.stride())}")
        if tensor.shape[0] > MAX_ROWS:
            _reject(name, f"at most {MAX_ROWS} rows", tensor.shape[0])
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if head_dim not in HEAD_DIMS:
        _reject("q", "head dimension D of 64 or 128", head_dim)
    if k.shape[2] != head_dim:
        _reject("k", f"the head dimension of q, {head_dim}", k.shape[2])
    if v.shape != k.shape:
        _reject("v", f"the shape of k, {list(k.shape)}", list(v.shape))
    if kv_heads == 0:
        _reject("k", "at least one head", kv_heads)
    if heads == 0 or heads % kv_heads != 0:
        _reject("q", f"a positive multiple of the {kv_heads} heads of k", f"{heads} heads")


def _check_offsets(name: str, offsets: Tensor, packed: Tensor, validate: bool) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 2:
        _reject(name, "shape [B + 1] with B >= 1", list(offsets.shape))
    if offsets.dtype not in OFFSET_DTYPES:
        _reject(name, "dtype torch.int32 or torch.int64", offsets.dtype)
    if offsets.device != packed.device:
        _reject(name, f"the device of q, {packed.device}", offsets.device)
    if not offsets.is_contiguous():
        _reject(name, "a contiguous tensor", f"strides {list(offsets.stride())}")
    if validate:
        values = offsets.tolist()
        if values[0] != 0:
            _reject(name, "a first entry of 0", values[0])
        if values[-1] != packed.shape[0]:
            _reject(name, f"a last entry of {packed.shape[0]}, the number of packed rows", values[-1])
        for b, (start, end) in enumerate(itertools.pairwise(values)):
            if start > end:
                _reject(name, "non-decreasing entries", f"{start} and then {end} for sequence {b}")


def _check_window(window: tuple[int, int]) -> tuple[int, int]:
    expected = "two ints (left, right), each -1 (unbounded) or at least 0"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        _reject("window", expected, window)
    left, right = window
    if not isinstance(left, int) or not isinstance(right, int) or left < -1 or right < -1:
        _reject("window", expected, window)
    return left, right
