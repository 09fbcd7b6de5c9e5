"""The online softmax shared by the forward kernels.

Scores stay in base 2 (``exp2`` is one instruction) with ``sm_scale * log2(e)`` folded into a single multiply-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def online_softmax(scores, peak, scale_log2, GUARDED: tl.constexpr):
    """``P, peak, decay``: unnormalised probabilities ``[M, N]``, the new row maximum, and the factor for older sums.

    ``GUARDED`` allows for rows that have seen no key yet, where -inf - -inf would be NaN.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    anchor = tl.where(new_peak == NEG_INF, 0.0, new_peak) if GUARDED else new_peak
    return tl.exp2(scores * scale_log2 - anchor[:, None]), new_peak, tl.exp2(peak - anchor)
