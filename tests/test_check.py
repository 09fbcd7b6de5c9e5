"""Comparing with the oracle: what passes, what fails, what is said; and that unwritten memory shows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jfabench import check
from jfabench.check import Rows, Tally, compare, compare_vectors, poisoned_allocations
from jfabench.records import TensorCheck


def run(got: Any, expected: torch.Tensor, baseline: float = 0.01, floor: float = 1e-5) -> TensorCheck:
    return compare("out", got, expected, dtype=torch.bfloat16, baseline=baseline, floor=floor)


@pytest.fixture
def expected() -> torch.Tensor:
    return torch.randn(50, 3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[check.CHUNK, 30])  # in one piece, row by row
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHUNK", request.param)


@pytest.mark.usefixtures("_chunks")
def test_norms(expected: torch.Tensor) -> None:
    got = (expected + 0.01 * torch.randn_like(expected)).bfloat16()
    result = run(got, expected, baseline=1.0)
    error = got.double() - expected.double()
    assert result.passed
    assert result.max_abs == pytest.approx(float(error.abs().max()), rel=1e-5)
    assert result.rel_norm == pytest.approx(float(error.norm() / expected.double().norm()), rel=1e-5)
    assert result.detail == ""
    assert (result.limit, result.baseline) == (2.0 + 1e-5, 1.0)


@given(st.floats(0, 1), st.floats(1e-6, 1), st.floats(0, 4))
def test_the_limit_is_twice_the_baseline_and_the_floor(baseline: float, floor: float, error: float) -> None:
    right = torch.zeros(4, 2, dtype=torch.float64)
    got = right.float()
    got[2, 1] = error
    result = compare("dq", got, right, dtype=torch.float32, baseline=baseline, floor=floor)
    assert result.passed == (float(got.max()) <= 2 * baseline + floor)


@pytest.mark.usefixtures("_chunks")
def test_one_value_beyond_the_limit_is_named(expected: torch.Tensor) -> None:
    got = expected.bfloat16()
    got[41, 2, 5] += 1
    result = run(got, expected)
    assert not result.passed
    assert result.max_abs == pytest.approx(1, abs=0.02)
    assert "at [41, 2, 5]" in result.detail
    assert "exceeds 0.02" in result.detail


def test_a_limit_that_is_no_number_lets_nothing_pass(expected: torch.Tensor) -> None:
    assert not run(expected.bfloat16(), expected, baseline=math.nan).passed


def test_a_sign_flip_fails(expected: torch.Tensor) -> None:
    assert not run(-expected.bfloat16(), expected).passed


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(expected: torch.Tensor, value: float) -> None:
    got = expected.bfloat16()
    got[7, 1, 3] = value
    got[9, 0, 0] = value
    result = run(got, expected, baseline=1e9)
    assert not result.passed
    assert result.max_abs is None
    assert result.rel_norm is None
    assert "2 of 1200 values cannot be compared" in result.detail
    assert "the first at [7, 1, 3]" in result.detail
    assert ("2 are NaN" if math.isnan(value) else "0 are NaN") in result.detail
    assert "rows" not in result.detail


@pytest.mark.usefixtures("_chunks")
def test_unwritten_rows_are_counted(expected: torch.Tensor) -> None:
    got = expected.bfloat16()
    got[20:23] = math.nan
    result = run(got, expected)
    assert not result.passed
    assert "3 whole rows are NaN, the first is row 20: left unwritten?" in result.detail


@pytest.mark.usefixtures("_chunks")
def test_infinities_of_lse_must_match_exactly() -> None:
    right = torch.tensor([[1.0, -math.inf, 3.0], [-math.inf, 5.0, 6.0]])

    def lse(got: torch.Tensor) -> TensorCheck:
        return compare("lse", got, right, dtype=torch.float32, baseline=0, floor=1e-3)

    exact = lse(right.clone())
    assert exact.passed
    assert (exact.max_abs, exact.rel_norm) == (0, 0)
    close = lse(right + 5e-4)
    assert close.passed
    assert close.max_abs == pytest.approx(5e-4, rel=1e-2)
    for wrong in (0.0, math.inf, -1e30, math.nan):
        got = right.clone()
        got[1, 0] = wrong
        assert not lse(got).passed
    got = right.clone()
    got[0, 0] = -math.inf
    assert not lse(got).passed


def test_shape_dtype_and_kind(expected: torch.Tensor) -> None:
    assert run(expected.bfloat16()[:-1], expected).detail == "expected shape [50, 3, 8], got [49, 3, 8]"
    assert run(expected, expected).detail == "expected torch.bfloat16, got torch.float32"
    assert run(None, expected).detail == "expected a tensor, got NoneType"
    assert not run(expected.bfloat16()[:-1], expected).passed


def test_strided_results_and_gradients(expected: torch.Tensor) -> None:
    got = expected.bfloat16().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not got.is_contiguous()
    assert run(got, expected).passed


def test_nothing_to_compare_passes() -> None:
    result = run(torch.zeros(0, 3, 8, dtype=torch.bfloat16), torch.zeros(0, 3, 8))
    assert result.passed
    assert (result.max_abs, result.rel_norm) == (0, 0)


def test_no_relative_norm_of_zeros() -> None:
    right = torch.zeros(3, 2)
    assert run(right.bfloat16(), right).rel_norm == 0
    noisy = run(right.bfloat16() + 1e-6, right)
    assert noisy.passed
    assert noisy.rel_norm is None
    assert "all zeros" in noisy.detail


# By class -------------------------------------------------------------------------------------------------------------

LENGTHS = np.repeat([3, 50, 1000], [120, 100, 1000])


def rows() -> Rows:
    return Rows(torch.from_numpy(check.length_classes(LENGTHS)))


def vectors(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[1220, 4, 16]`, of a size that falls with the length of the sequence."""
    noise = torch.randn(len(LENGTHS), 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (noise / torch.from_numpy(LENGTHS)[:, None, None]).to(dtype)


def judge(got: torch.Tensor, right: torch.Tensor) -> TensorCheck:
    tally = Tally(right.device)
    tally.add(right.bfloat16(), right, rows())
    limits = check.limits(tally.host(), torch.bfloat16)
    return compare_vectors("dv", got, right, dtype=torch.bfloat16, rows=rows(), limits=limits)


@given(st.integers(1, 2**31))
def test_length_classes(n: int) -> None:
    (found,) = check.length_classes(np.array([n]))
    assert 2.0 ** (found - 1) < n <= 2.0**found or n == 1
    assert check.length_classes(np.array([0])) == 0


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tally_counts_errors_by_length_and_by_size(dtype: torch.dtype) -> None:
    right = vectors(dtype)
    right[127, 2] = 0
    got = right.bfloat16()
    weight = torch.linspace(0, 1, len(LENGTHS))
    tally = Tally(right.device)
    tally.add(got, right, Rows(rows().length_class, weight, vanishing=2.0**-16))
    found = tally.host()
    error = (got.double() - right.double()).abs()
    for column, length in ((2, 3), (6, 50), (10, 1000)):
        chosen = torch.from_numpy(length == LENGTHS)
        assert found["error"][column] == pytest.approx(float(error[chosen].max()))
        assert found["squared errors"][column] == pytest.approx(float(error[chosen].square().sum()))
        assert found["value"][column] == pytest.approx(float(right[chosen].abs().max()))
        assert found["weight"][column] == pytest.approx(4 * float(weight[chosen].sum()), rel=1e-5)
        assert found["vanishing"][column] == (16 if length == 50 else 0)
    size = right.abs().amax(-1)
    for power in range(-12, 2):
        chosen = (size >= 2.0 ** (power - 1)) & (size < 2.0**power)
        column = check.COLUMNS + power - check.LOWEST_SIZE
        assert found["values"][column] == 16 * int(chosen.sum())
        assert found["squared errors"][column] == pytest.approx(float(error[chosen].square().sum()))
    assert found["values"][check.COLUMNS] == 16  # the vector of zeros
    for half in (slice(check.COLUMNS), slice(check.COLUMNS, None)):
        assert found["values"][half].sum() == right.numel()


@pytest.mark.usefixtures("_chunks")
def test_what_is_right_in_the_input_dtype_passes() -> None:
    right = vectors()
    result = judge(right.bfloat16(), right)
    error = (right.bfloat16().double() - right.double()).abs()
    assert result.passed
    assert result.max_abs == pytest.approx(float(error.max()))
    assert result.baseline == result.max_abs
    assert 2 * result.baseline < result.limit < 2.8 * result.baseline
    assert result.rel_norm == pytest.approx(float((right.bfloat16() - right).norm() / right.norm()), rel=1e-4)
    assert result.detail == ""


@pytest.mark.usefixtures("_chunks")
def test_what_is_wrong_in_one_class_fails_and_is_named() -> None:
    right = vectors()
    long = torch.from_numpy(LENGTHS == 1000)
    got = right.clone()
    got[long] *= 1.02
    result = judge(got.bfloat16(), right)
    assert not result.passed
    assert result.detail.startswith("keys 513..1024: relative norm 0.02")
    assert result.max_abs is not None
    assert result.max_abs < result.limit  # as a whole it would pass


@pytest.mark.usefixtures("_chunks")
def test_one_lost_vector_of_many_fails() -> None:
    right = vectors()
    got = right.bfloat16()
    got[900, 3] = 0
    result = judge(got, right)
    assert not result.passed
    assert result.max_abs is not None
    assert result.max_abs < result.limit
    assert "exceeds" in result.detail


def test_vectors_that_are_no_numbers_or_of_another_kind() -> None:
    right = vectors()
    got = right.bfloat16()
    got[1000, 2, 5] = math.nan
    result = judge(got, right)
    assert not result.passed
    assert result.max_abs is None
    assert "the first at [1000, 2, 5]" in result.detail
    assert judge(right, right).detail == "expected torch.bfloat16, got torch.float32"
    assert judge(right.bfloat16()[:-1], right).detail == "expected shape [1220, 4, 16], got [1219, 4, 16]"


def test_light_classes_join_their_neighbours() -> None:
    weight = np.zeros(2 * check.COLUMNS)
    weight[[0, 1, 5, 7, 9]] = [3, 500, 300, 200, 100]
    weight[[check.COLUMNS + 3, check.COLUMNS + 4]] = [10, 20]
    assert check._judged(weight) == [[9, 7], [5], [1, 0], [check.COLUMNS + 3, check.COLUMNS + 4]]
    names = [check._class_name(columns) for columns in check._judged(weight)]
    assert names == ["keys 65..512", "keys 17..32", "keys 0..2", "vectors of size 6.1e-05..0.000244"]


@torch.library.custom_op("jfabench_tests::even_rows", mutates_args=())
def even_rows(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[::2] = 2 * x[::2]
    return out


@torch.library.custom_op("jfabench_tests::even_rows_backward", mutates_args=())
def even_rows_backward(grad: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype)
    out[::2] = 2 * grad[::2]
    return out


even_rows.register_autograd(lambda ctx, grad: even_rows_backward(grad), setup_context=lambda ctx, inputs, output: None)


class OddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        out[1::2] = x[1::2]
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty(grad.shape)
        out[1::2] = grad[1::2]
        return out


def stripes(x: torch.Tensor, written: int) -> bool:
    """Whether just the rows `written`, `written + 2`, ... hold numbers."""
    return bool(x[written::2].isfinite().all() and x[1 - written :: 2].isnan().all())


@pytest.mark.parametrize(("function", "written"), [(even_rows, 0), (OddRows.apply, 1)])
def test_unwritten_rows_are_nan_forward_and_backward(function: Any, written: int) -> None:
    x = torch.ones(8, 4, requires_grad=True)
    with poisoned_allocations():
        out = function(x)
        (grad,) = torch.autograd.grad(out, x, torch.ones(8, 4))
    assert stripes(out.detach(), written)
    assert stripes(grad, written)


def test_every_way_to_ask_for_memory_is_poisoned() -> None:
    x = torch.ones(3, 2, dtype=torch.bfloat16)
    with poisoned_allocations():
        made = [
            torch.empty(3),
            torch.empty(2, 2, dtype=torch.float16),
            torch.empty_like(x),
            x.new_empty(5),
            x.new_empty_strided((2, 2), (1, 2)),
            torch.empty_strided((2, 2), (1, 2)),
            torch.empty_permuted((2, 3), (1, 0)),
        ]
        whole = torch.empty(3, dtype=torch.int32)
        bytes_ = torch.empty(3, dtype=torch.uint8)
        assert torch.zeros(3).sum() == 0
        assert torch.full((3,), 7).sum() == 21
    assert all(bool(tensor.isnan().all()) for tensor in made)
    assert whole.tolist() == [-1, -1, -1]
    assert bytes_.tolist() == [255, 255, 255]


def test_poison_does_not_change_what_right_code_computes() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(1, 2, 9, 64, requires_grad=True)

    def compute() -> tuple[torch.Tensor, ...]:
        out = scaled_dot_product_attention(q, q, q, is_causal=True)
        return out, *torch.autograd.grad(out, q, torch.ones_like(out))

    plain = compute()
    with poisoned_allocations():
        poisoned = compute()
    assert all(a.equal(b) for a, b in zip(plain, poisoned, strict=True))


def test_poison_ends_with_the_block() -> None:
    with pytest.raises(RuntimeError), poisoned_allocations():
        raise RuntimeError
    made = [torch.empty(1000).fill_(1) for _ in range(3)]
    assert all(bool(tensor.isfinite().all()) for tensor in made)
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _get_current_dispatch_mode_stack() == []
