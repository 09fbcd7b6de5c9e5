"""Arithmetic on pairs of float32, one instruction on Blackwell, and exponentials without the special-function unit.

A multiprocessor computes 16 exponentials a cycle on that unit, which keeps it as busy in a forward pass as the matmuls
keep the tensor cores. :func:`exp2_polynomial` computes some of them on the multiply-add units instead: it splits off
the integer, which is added to the exponent's bits, as Cody and Waite do (Software Manual for the Elementary Functions,
1980). Its use in attention is FlashAttention-4's (Zadouri et al., 2026, https://arxiv.org/abs/2603.05451).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Of 2**r for |r| <= 1/2, lowest degree first, such that the greatest relative error is least: 7.5e-5 of the cubic,
# 2.7e-6 of the quartic. Rounding to bfloat16 errs by 2.0e-3, to float16 by 4.9e-4.
CUBIC = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105)
QUARTIC = (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570102207362652)

C0, C1, C2, C3 = (tl.constexpr(c) for c in CUBIC)
Q0, Q1, Q2, Q3, Q4 = (tl.constexpr(c) for c in QUARTIC)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, which is then in the lowest bits
LEAST = tl.constexpr(-126.0)  # of exponents: below are no normal numbers
FRACTION_BITS = tl.constexpr(23)


def _on_pairs(operation: str, operands: str) -> tl.constexpr:
    """Assembly of an operation on pairs, whose result is $0 and $1, and whose operands are the numbers after them."""
    loads = "".join(f"mov.b64 {name}, {{${2 * i + 2}, ${2 * i + 3}}}; " for i, name in enumerate(operands))
    names = ", ".join(operands)
    return tl.constexpr(f"{{ .reg .b64 {names}; {loads}{operation}.rn.f32x2 a, {names}; mov.b64 {{$0, $1}}, a; }}")


FMA, MUL, ADD = _on_pairs("fma", "abc"), _on_pairs("mul", "ab"), _on_pairs("add", "ab")


@triton.jit
def packed_fma(a, b, c):
    """``a * b + c``, of float32 blocks that broadcast together, two elements at a time."""
    return tl.inline_asm_elementwise(FMA, "=r,=r,r,r,r,r,r,r", [a, b, c], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def packed_mul(a, b):
    """``a * b``, likewise."""
    return tl.inline_asm_elementwise(MUL, "=r,=r,r,r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def packed_add(a, b):
    """``a + b``, likewise."""
    return tl.inline_asm_elementwise(ADD, "=r,=r,r,r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def exp2_polynomial(x, EXACT: tl.constexpr):
    """``2 ** x`` of float32 ``x``, at most 127 and not NaN; below -126 it is ``2 ** -126``.

    By the quartic if ``EXACT``, else by the cubic.
    """
    x = tl.maximum(x, LEAST)
    rounded = packed_add(x, ROUNDER)
    r = packed_fma(packed_add(rounded, -ROUNDER), -1.0, x)
    if EXACT:
        p = packed_fma(r, Q4, Q3)
        p = packed_fma(p, r, Q2)
        p = packed_fma(p, r, Q1)
        p = packed_fma(p, r, Q0)
    else:
        p = packed_fma(r, C3, C2)
        p = packed_fma(p, r, C1)
        p = packed_fma(p, r, C0)
    power = rounded.to(tl.int32, bitcast=True) << FRACTION_BITS
    return (p.to(tl.int32, bitcast=True) + power).to(tl.float32, bitcast=True)
