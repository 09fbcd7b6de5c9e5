"""Exponentials without the special-function unit: the error that `packed` states, and the code on the simulator."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from jfabench.kernels.attention import packed

# What rounding each of the operations to float32 adds: a few units in the last place.
ROUNDING = 4e-7


def by_hand(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """``2 ** x`` in float32: the polynomial of what rounding leaves, times a power of two."""
    x = np.maximum(x.astype(np.float32), np.float32(-126))
    whole = np.rint(x)
    r = x - whole
    p = np.zeros_like(r)
    for c in reversed(coefficients):
        p = p * r + np.float32(c)
    return np.ldexp(p, whole.astype(np.int32))


def error(found: np.ndarray, x: np.ndarray) -> float:
    right = np.exp2(x.astype(np.float64))
    return float(np.abs(found.astype(np.float64) / right - 1).max())


@pytest.mark.parametrize(("coefficients", "stated"), [(packed.CUBIC, 7.5e-5), (packed.QUARTIC, 2.7e-6)])
def test_the_stated_error(coefficients: tuple[float, ...], stated: float) -> None:
    x = np.linspace(-126, 8, 2_000_001, dtype=np.float32)
    assert 0.9 * stated < error(by_hand(x, coefficients), x) < stated + ROUNDING


@pytest.mark.parametrize("coefficients", [packed.CUBIC, packed.QUARTIC])
def test_no_polynomial_of_the_degree_errs_less(coefficients: tuple[float, ...]) -> None:
    """The greatest error, but for rounded coefficients, alternates at one point more than there are coefficients."""
    r = np.linspace(-0.5, 0.5, 200_001)
    errors = np.polynomial.polynomial.polyval(r, coefficients) / np.exp2(r) - 1
    peaks = np.abs(errors) > 0.95 * np.abs(errors).max()
    signs = np.sign(errors[peaks])
    assert 1 + np.count_nonzero(np.diff(signs)) == len(coefficients) + 1


@triton.jit
def compute(x, found, EXACT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(found + at, packed.exp2_polynomial(tl.load(x + at), EXACT))


@triton.jit
def combine(a, b, c, found, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y, z = tl.load(a + at), tl.load(b + at), tl.load(c + at)
    tl.store(found + at, packed.packed_fma(x, y, z))
    tl.store(found + SIZE + at, packed.packed_mul(x, y))
    tl.store(found + 2 * SIZE + at, packed.packed_add(x, y))


simulated = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")


@simulated
@pytest.mark.parametrize(("exact", "coefficients"), [(False, packed.CUBIC), (True, packed.QUARTIC)])
def test_the_device_function(exact: bool, coefficients: tuple[float, ...]) -> None:
    from jfabench.sim import launch

    size = 4096
    x = torch.linspace(-126, 8, size)
    x[:4] = torch.tensor([-torch.inf, -1e30, -127.0, -126.0])
    found = torch.full_like(x, torch.nan)
    run = launch(compute, (1,), x, found, EXACT=exact, SIZE=size, arch="sm_100")
    assert run.ok, run
    assert (found[:4] < 1.2e-38).all()  # masked, or too small to matter
    # Fused multiply-adds round once where numpy rounds twice.
    np.testing.assert_allclose(found[4:].numpy(), by_hand(x[4:].numpy(), coefficients), rtol=ROUNDING)


@simulated
def test_packed_arithmetic_is_that_of_each_element() -> None:
    from jfabench.sim import launch

    size = 64
    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, size, generator=generator)
    found = torch.full((3, size), torch.nan)
    run = launch(combine, (1,), a, b, c, found, SIZE=size, arch="sm_100")
    assert run.ok, run
    expected = torch.stack([(a.double() * b.double() + c.double()).float(), a * b, a + b])
    assert torch.equal(found, expected)
