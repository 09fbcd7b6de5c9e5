"""Predicates, votes and branches in inline PTX, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from jfabench.sim import KernelError
from jfabench.sim.numerics import poisoned
from jfabench.sim.ptx import execute

NAN, INF = np.float32(np.nan), np.float32(np.inf)
A, B = (column.ravel() for column in np.meshgrid(*[np.array([-INF, -1, -0.0, 0, 1, 2, INF, NAN], np.float32)] * 2))
ONE, TWO = "0f3F800000", "0f40000000"
COMPARED = f"mov.b32 $0, 0f00000000; @p mov.b32 $0, {ONE};"


def run(asm: str, a: np.ndarray = A, b: np.ndarray = B, pack: int = 1) -> np.ndarray:
    """Float32 ``$0`` of ``a`` and ``b``, which are ``$1`` and ``$2``; with ``pack``, so many of each in turn."""
    values = [TensorHandle(array, tl.float32) for array in (a, b)]
    constraints = ",".join(["=f"] * pack + ["f"] * (2 * pack))
    return np.asarray(execute(asm, constraints, values, tl.float32, pack).get_result(0).data)


def floats(condition: np.ndarray) -> np.ndarray:
    return condition.astype(np.float32)


UNORDERED = np.array([x != x or y != y for x, y in zip(A.tolist(), B.tolist(), strict=True)])
ORDERED: dict[str, np.ndarray] = {"eq": A == B, "ne": A != B, "lt": A < B, "le": A <= B, "gt": A > B, "ge": A >= B}


@pytest.mark.parametrize("name", ORDERED)
def test_comparisons_are_false_for_nan_or_with_a_u_true(name: str) -> None:
    for suffix, expected in (("", ORDERED[name] & ~UNORDERED), ("u", ORDERED[name] | UNORDERED)):
        assert np.array_equal(run(f"setp.{name}{suffix}.f32 p, $1, $2; {COMPARED}"), floats(expected)), suffix


@pytest.mark.parametrize(("name", "expected"), [("num", ~UNORDERED), ("nan", UNORDERED)])
def test_both_operands_are_looked_at_for_nan(name: str, expected: np.ndarray) -> None:
    assert np.array_equal(run(f"setp.{name}.f32 p, $1, $2; {COMPARED}"), floats(expected))


@pytest.mark.parametrize(
    ("asm", "expected"),
    [
        ("setp.gt.and.f32 p, $2, 0f00000000, q;", (A < B) & (B > 0)),
        ("setp.gt.or.f32 p, $2, 0f00000000, q;", (A < B) | (B > 0)),
        ("setp.gt.xor.f32 p, $2, 0f00000000, q;", (A < B) ^ (B > 0)),
        ("setp.gt.and.f32 p, $2, 0f00000000, !q;", ~(A < B) & (B > 0)),
        ("setp.gt.f32 r, $2, 0f00000000; and.pred p, q, r;", (A < B) & (B > 0)),
        ("setp.gt.f32 r, $2, 0f00000000; or.pred p, !q, r;", ~(A < B) | (B > 0)),
        ("setp.gt.f32 r, $2, 0f00000000; xor.pred p, q, r;", (A < B) ^ (B > 0)),
        ("not.pred p, q;", ~(A < B)),
        ("not.pred p, q; not.pred p, p;", A < B),
    ],
)
def test_predicates_are_combined(asm: str, expected: np.ndarray) -> None:
    assert np.array_equal(run(f".reg .pred p, q, r; setp.lt.f32 q, $1, $2; {asm} {COMPARED}"), floats(expected))


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        ("@p add.f32 $0, $0, $2;", lambda a, b: np.where(a > b, a + b, a)),
        ("@!p add.f32 $0, $0, $2;", lambda a, b: np.where(a > b, a, a + b)),
        ("@p\tadd.f32 $0, $0, $2;\n@!p mul.f32 $0, $0, $2;", lambda a, b: np.where(a > b, a + b, a * b)),
        # The predicate may be the result of an instruction that it guards.
        ("@p setp.lt.f32 p, $2, 0f00000000;\n@p neg.f32 $0, $0;", lambda a, b: np.where((a > b) & (b < 0), -a, a)),
    ],
)
def test_guarded(guards: str, expected: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 4, 16), np.float32)
    found = run(f"{{\n.reg .pred p;\nsetp.gt.f32 p, $1, $2;\nmov.b32 $0, $1;\n{guards}\n}}", a, b)
    assert np.array_equal(found, expected(a, b))


def test_a_register_that_a_guard_left_alone_is_poison() -> None:
    found = run("setp.lt.f32 p, $1, $2; @p mov.b32 $0, $1;")
    less = A < B
    assert np.array_equal(found[less], A[less])
    assert poisoned(found[~less], tl.float32).all()


@pytest.mark.parametrize(("place", "factor"), [(None, 1.0), (0, 2.0), (63, 2.0)])
def test_a_vote_is_over_all(place: int | None, factor: float) -> None:
    a, b = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    if place is not None:
        b[place] = 1
    vote = "setp.ne.f32 p, $2, 0f00000000; vote.sync.any.pred p, p, 0xFFFFFFFF;"
    assert np.array_equal(run(f"{vote} mov.b32 $0, $1; @!p bra DONE; mul.f32 $0, $0, {TWO}; DONE:", a, b), a * factor)


def test_who_has_branched_away_does_not_vote() -> None:
    a, b = np.arange(8, dtype=np.float32), np.array([1, 0, 0, 0, 0, 0, 0, 0], np.float32)
    found = run(
        "setp.ne.f32 p, $2, 0f00000000; mov.b32 $0, $1; @p bra DONE;"
        f"vote.sync.any.pred q, p, -1; @q mul.f32 $0, $0, {TWO}; add.f32 $0, $0, {ONE}; DONE:",
        a,
        b,
    )
    assert np.array_equal(found, np.where(b != 0, a, a + 1))


@pytest.mark.parametrize("pack", [1, 4])
def test_a_branch_skips_what_comes_before_its_label(pack: int) -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 64), np.float32)
    products = [(f"${i}", f"${pack + i}", f"${2 * pack + i}") for i in range(pack)]
    lines = [
        f"setp.lt.f32 p, {products[0][1]}, 0f00000000;",
        "@p bra NEGATIVE;",
        *[f"add.f32 {result}, {left}, {right};" for result, left, right in products],
        "bra.uni DONE;",
        "NEGATIVE:",
        *[f"mul.f32 {result}, {left}, {right};" for result, left, right in products],
        "DONE: // and nothing",
    ]
    negative = np.repeat(a[::pack] < 0, pack)  # the first of an invocation's elements decides
    assert np.array_equal(run("\n".join(lines), a, b, pack), np.where(negative, a * b, a + b))


def test_two_branches_to_one_label() -> None:
    a, b = np.random.default_rng(2).standard_normal((2, 64), np.float32)
    found = run(
        f"mov.b32 $0, $1; setp.lt.f32 p, $1, 0f00000000; @p bra DONE; add.f32 $0, $0, {ONE};"
        f"setp.lt.f32 p, $2, 0f00000000; @p bra DONE; add.f32 $0, $0, {TWO}; DONE: mul.f32 $0, $0, {TWO};",
        a,
        b,
    )
    assert np.array_equal(found, np.where(a < 0, a, np.where(b < 0, a + 1, a + 1 + 2)) * 2)


SET = "setp.lt.f32 p, $1, $2; mov.b32 $0, $1;"


@pytest.mark.parametrize(
    ("asm", "message"),
    [
        (f"{SET} AGAIN: add.f32 $0, $0, {ONE}; @p bra AGAIN;", "labels further on can be simulated, not to AGAIN"),
        (f"{SET} @p bra NOWHERE;", "labels further on can be simulated, not to NOWHERE"),
        (f"{SET} setp.below.f32 p, $1, $2;", "instruction setp.below.f32 cannot be simulated"),
        (f"{SET} setp.lt.nand.f32 p, $1, $2, p;", "instruction setp.lt.nand.f32 cannot be simulated"),
        (f"{SET} setp.lt.ftz.f32 p, $1, $2;", "instruction setp.lt.ftz.f32 cannot be simulated"),
        (f"{SET} setp.lt.s32 p, $1, $2;", "instruction setp.lt.s32 cannot be simulated"),
        (f"{SET} setp.lt.and.f32 p, $1, $2;", "instruction setp.lt.and.f32 cannot be simulated"),
        (f"{SET} setp.f32 p, $1, $2;", "instruction setp.f32 cannot be simulated"),
        ("setp.lt.f32 p|q, $1, $2;", r"instruction setp.lt.f32 cannot be simulated with two targets, p\|q"),
        ("setp.lt.f32 p | q, $1, $2;", "instruction setp.lt.f32 cannot be simulated with two targets"),
        (f"{SET} @q mov.b32 $0, $2;", "q is not a predicate with a value"),
        (f"{SET} @!q mov.b32 $0, $2;", "q is not a predicate with a value"),
        (f"{SET} @$1 mov.b32 $0, $2;", r"\$1 is not a predicate with a value"),
        (f"{SET} setp.lt.or.f32 p, $1, $2, q;", "q is not a predicate with a value"),
        (f"{SET} and.pred p, p, q;", "q is not a predicate with a value"),
        (f"{SET} vote.sync.any.pred p, q, -1;", "q is not a predicate with a value"),
        (f"{SET} and.b32 $0, $1, p;", "p is a predicate, where bits are needed"),
        (f"{SET} add.f32 $0, $0, some;", "the operand some cannot be simulated"),
        ("setp.lt.f32 p, $1, $2;", r"the operand \$0 cannot be simulated"),
        (f"{SET} popc.pred p, p;", "instruction popc.pred cannot be simulated"),
        (f"{SET} vote.sync.all.pred p, p, -1;", "instruction vote.sync.all.pred cannot be simulated"),
        (f"{SET} vote.sync.any.pred p, p, 0xFFFF;", "cannot be simulated among some of a warp, 0xFFFF"),
        (f"{SET} mul.hi.u32 $0, $1, $2;", "instruction mul.hi.u32 cannot be simulated"),
        (f"{SET} add.f16x2 $0, $1, $2;", "instruction add.f16x2 cannot be simulated"),
        (f"{SET} shr.s32 $0, $1, 1;", "instruction shr.s32 cannot be simulated"),
        (f"{SET} selp.f32 $0, $1, $2, p;", "p is a predicate, where bits are needed"),
        (f"{SET} exit;", "instruction exit cannot be simulated"),
    ],
)
def test_refused(asm: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        run(asm)
