"""Rows times factors that are almost always one: skipped where all of a warp's are.

Triton's control flow is that of a whole block, and a warp asks the others only through shared memory. In PTX a warp
votes and branches for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _multiply(count: int) -> str:
    """PTX: ``count`` results, as many operands in the same registers, and as many factors, all float32."""
    products = [(f"${i}", f"${count + i}", f"${2 * count + i}") for i in range(count)]
    factors = [factor for _, _, factor in products]
    lines = [
        *(f"mov.b32 {result}, {operand};" for result, operand, _ in products),  # for the simulator: nothing, compiled
        # A thread has two rows of a matmul's result: two elements of one, two of the other, and so on.
        f"setp.neu.f32 some, {factors[0]}, 0f3F800000;",
        f"setp.neu.or.f32 some, {factors[2]}, 0f3F800000, some;",
        "vote.sync.any.pred some, some, 0xFFFFFFFF;",
        "@!some bra DONE;",
        *(f"mul.f32 {result}, {result}, {factor};" for result, _, factor in products),
        "DONE:",
    ]
    return "{\n.reg .pred some;\n" + "\n".join(lines) + "\n}"


def _constraints(count: int) -> str:
    # Operands share the results' registers: a result is written before all factors are read.
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


# Elements of a thread, of 64 rows of a warp group.
MULTIPLY_32 = tl.constexpr(_multiply(32))
MULTIPLY_64 = tl.constexpr(_multiply(64))
CONSTRAINTS_32 = tl.constexpr(_constraints(32))
CONSTRAINTS_64 = tl.constexpr(_constraints(64))


@triton.jit
def rescaled(rows, factor):
    """``rows * factor[:, None]`` of a warp group: a matmul's result ``[64, 64 or 128]``, and ``[64]``, both float32.

    In one piece of PTX, which the assembler schedules better than the vote and the products apart (4% of the kernel).
    """
    factors = tl.broadcast_to(factor[:, None], rows.shape)
    if rows.shape[1] == 64:
        result = tl.inline_asm_elementwise(
            MULTIPLY_32, CONSTRAINTS_32, [rows, factors], dtype=tl.float32, is_pure=True, pack=32
        )
    else:
        result = tl.inline_asm_elementwise(
            MULTIPLY_64, CONSTRAINTS_64, [rows, factors], dtype=tl.float32, is_pure=True, pack=64
        )
    return result
