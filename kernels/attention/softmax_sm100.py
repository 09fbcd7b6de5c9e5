"""Softmax of Blackwell kernels, one row a thread: columns are split and joined without moving anything."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from .packed import exp2_polynomial, packed_add
from .softmax import NEG_INF

PIECE = tl.constexpr(32)  # columns of P that are in float32 at a time


@aggregate
class Exponentials:
    """How probabilities are computed.

    O is rescaled where P would exceed 1 by more than ``growth``, in base 2; 0: wherever it would exceed 1. Of each part
    of P so many columns are ``polynomial``; ``exact``: by the quartic.
    """

    growth: tl.constexpr
    polynomial: tl.constexpr
    exact: tl.constexpr


@triton.jit
def mask_scores(scores, task, row, first, window):
    """Scores ``[128, N]`` of queries from ``row`` on with keys from ``first`` on, -inf where the key is not seen.

    In each row one span of columns is seen, so that an element takes a comparison with a constant or two.
    """
    left, right = window
    column = tl.arange(0, scores.shape[1])[None, :]
    facing = row + task.k_len - task.q_len - first + tl.arange(0, scores.shape[0])
    end = task.k_len - first
    if right is not None:
        end = tl.minimum(end, facing + right + 1)[:, None]
    seen = column < end
    if left is not None:
        seen = seen & (column >= (facing - left)[:, None])
    return tl.where(seen, scores, NEG_INF)


@triton.jit
def halves(x):
    """Left and right half ``[M, N / 2]`` of a block ``[M, N]``."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [M, 2, N // 2]), [0, 2, 1]))


@triton.jit
def row_sums(x):
    """Sums of the rows of a block ``[M, N]``, two elements at a time."""
    if x.shape[1] > 2:
        left, right = halves(x)
        sums = row_sums(packed_add(left, right))
    else:
        sums = tl.sum(x, 1)
    return sums


@triton.jit
def split(x, PARTS: tl.constexpr):
    """A block ``[M, N]`` as a tuple of ``PARTS`` blocks ``[M, N / PARTS]``."""
    if PARTS == 1:
        parts = (x,)
    else:
        left, right = halves(x)
        parts = split(left, PARTS // 2) + split(right, PARTS // 2)
    return parts


@triton.jit
def exponentials(exponents, DTYPE: tl.constexpr, POLYNOMIAL: tl.constexpr, EXACT: tl.constexpr):
    """``2 ** exponents`` of ``[M, N]`` in ``DTYPE``, and the sums of its rows before they are rounded, ``[M]``.

    The last ``POLYNOMIAL`` columns do without the special-function unit. A few columns at a time are there in float32.
    """
    N: tl.constexpr = exponents.shape[1]
    if N <= PIECE and (POLYNOMIAL == 0 or POLYNOMIAL == N):
        floats = exp2_polynomial(exponents, EXACT) if POLYNOMIAL == N else tl.exp2(exponents)
        p, sums = floats.to(DTYPE), row_sums(floats)
    else:
        left, right = halves(exponents)
        TO_THE_RIGHT: tl.constexpr = min(POLYNOMIAL, N // 2)
        left, left_sums = exponentials(left, DTYPE, POLYNOMIAL - TO_THE_RIGHT, EXACT)
        right, right_sums = exponentials(right, DTYPE, TO_THE_RIGHT, EXACT)
        p = tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [exponents.shape[0], N])
        sums = left_sums + right_sums
    return p, sums
