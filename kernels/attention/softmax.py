"""The online softmax shared by the forward kernels.

Scores stay in base 2 (``exp2`` is one instruction) with ``sm_scale * log2(e)`` folded into a single multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
SLACK = tl.constexpr(8.0)  # in base 2: probabilities up to 256, which any 16-bit type holds


@triton.jit
def online_softmax(scores, peak, scale_log2, GUARDED: tl.constexpr, LAZY: tl.constexpr = False):
    """``P, peak, decay``: unnormalised probabilities ``[M, N]``, the new row maximum, and the factor for older sums.

    ``GUARDED`` allows for rows that have seen no key yet, where -inf - -inf would be NaN. ``LAZY``: the maximum stays
    until it is exceeded by more than :data:`SLACK`, so that most factors are exactly 1; any reference will do from
    which no exponential overflows, and sums have the same relative precision (FlashAttention-4's
    idea, https://arxiv.org/abs/2603.05451).
    """
    top = tl.max(scores, 1) * scale_log2
    new_peak = tl.where(top > peak + SLACK, top, peak) if LAZY else tl.maximum(peak, top)
    anchor = tl.where(new_peak == NEG_INF, 0.0, new_peak) if GUARDED else new_peak
    return tl.exp2(scores * scale_log2 - anchor[:, None]), new_peak, tl.exp2(peak - anchor)
