"""Comparing with the oracle: what passes, what fails, what is said; and that unwritten memory shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jfabench import check
from jfabench.check import compare, poisoned_allocations
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
