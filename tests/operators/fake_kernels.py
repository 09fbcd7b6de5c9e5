"""Stand-ins for kernel libraries: their signatures and conventions, computed by the naive attention on a CPU.

Each notes the arguments of its last call in `seen`, and insists on what the real library insists on.
"""

from __future__ import annotations

from typing import Any

import torch
from naive_attention import packed_attention
from torch import Tensor

seen: dict[str, Any] = {}


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    assert offsets.dtype == torch.int32
    lengths = offsets.diff().tolist()
    assert longest == max(lengths)
    return lengths


def _compute(
    q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], **mask: Any
) -> tuple[Tensor, Tensor]:
    out, lse = packed_attention(q, k, v, queries, keys, **mask)
    return out.to(q.dtype), lse.float()


def flash4_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    deterministic: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`flash_attn.cute.flash_attn_varlen_func` of 4.0.0b36: None is unbounded, and -1 beside a bound is not."""
    seen.update(locals())
    assert all(bound is None or bound >= 0 for bound in window_size)
    queries, keys = _lengths(cu_seqlens_q, max_seqlen_q), _lengths(cu_seqlens_k, max_seqlen_k)
    window = [-1 if bound is None else bound for bound in window_size]
    return _compute(q, k, v, queries, keys, scale=softmax_scale or 1.0, causal=causal, window=window)


def flash3_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_interface.flash_attn_varlen_func`, which returns `lse` only on request."""
    seen.update(locals())
    queries, keys = _lengths(cu_seqlens_q, max_seqlen_q), _lengths(cu_seqlens_k, max_seqlen_k)
    pair = _compute(q, k, v, queries, keys, scale=softmax_scale or 1.0, causal=causal, window=window_size)
    return pair if return_attn_probs else pair[0]


def old_flash3_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Any:
    """An older release: always the pair."""
    return flash3_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        deterministic=deterministic,
        return_attn_probs=True,
    )


def torch_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` of 2.13: no `causal`, and `lse` is +inf for a row without keys."""
    seen.update(locals())
    assert isinstance(window_size, tuple)  # it is compared with (-1, 0)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    queries, keys = _lengths(cu_seq_q, max_q), _lengths(cu_seq_k, max_k)
    out, lse = _compute(query, key, value, queries, keys, scale=scale or 1.0, causal=False, window=window_size)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def old_torch_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
    scale: float | None = None,
) -> Any:
    """The first release: `is_causal` instead of a window."""
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k)
    window = (-1, 0) if is_causal else (-1, -1)
    return torch_varlen(query, key, value, *lengths, return_aux=return_aux, scale=scale, window_size=window)
