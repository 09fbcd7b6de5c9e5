"""Rounding and formats, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.language.extra.cuda.inline_ptx_lib import _fma_f32x2, _mul_f32x2, _sub_f32x2, tanh_approx_fp32
from triton.language.extra.tlx.mxfp8_utils import _cvt_e4m3x4_f32, _fused_amax_to_e8m0

from jfabench.sim import launch
from jfabench.sim.numerics import bfloat16_bits, fp8_bits, narrow, poison_like, poisoned, truncate_to_tf32, widen
from jfabench.sim.ptx import e8m0_bits

BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)
FP8 = {"fp8e4nv": (torch.float8_e4m3fn, 448.0), "fp8e5": (torch.float8_e5m2, 57344.0)}


def floats(bits: list[int]) -> np.ndarray:
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    return values[~np.isnan(values)]


@given(BITS)
def test_bfloat16_rounds_to_nearest_even(bits: list[int]) -> None:
    values = floats(bits)
    expected = torch.from_numpy(values.copy()).bfloat16()
    assert np.array_equal(bfloat16_bits(values), expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(widen(bfloat16_bits(values), tl.bfloat16), expected.float().numpy())


@pytest.mark.parametrize("name", FP8)
@given(bits=BITS)
def test_eight_bits_round_to_nearest_even_and_saturate(name: str, bits: list[int]) -> None:
    values = floats(bits)
    dtype, largest = FP8[name]
    expected = torch.from_numpy(values.copy()).clamp(-largest, largest).to(dtype)
    assert np.array_equal(fp8_bits(values, name), expected.view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16, tl.float8e4nv, tl.float8e5], ids=str)
def test_poison_stays_poison(dtype: tl.dtype) -> None:
    poison = poison_like(np.zeros(4, np.float32))
    assert poisoned(poison * np.float32(2) + np.float32(1), tl.float32).all()
    assert poisoned(narrow(poison, dtype), dtype).all()
    others = narrow(np.array([0.0, -1.0, np.inf, np.nan, -np.nan], np.float32), dtype)
    assert not poisoned(others, dtype).any()


@given(BITS)
def test_tf32_drops_the_low_bits(bits: list[int]) -> None:
    values = floats(bits)
    truncated = truncate_to_tf32(values)
    assert ((truncated.view(np.uint32) & 0x1FFF) == 0).all()
    finite = np.isfinite(values) & (np.abs(values) >= np.finfo(np.float32).tiny)
    assert (np.abs(truncated[finite] - values[finite]) < np.abs(values[finite]) * 2.0**-10).all()


@given(st.lists(st.floats(2.0**-120, 2.0**120, width=32), min_size=1, max_size=32))
def test_e8m0_rounds_up_to_a_power_of_two(values: list[float]) -> None:
    array = np.array(values, np.float32)
    powers = np.exp2(e8m0_bits(array).astype(np.float64) - 127)
    assert (powers >= array).all()
    assert (powers / 2 < array).all()


@triton.jit
def ptx_kernel(x, y, out, HOW: tl.constexpr):
    i = tl.arange(0, 64)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if HOW == "mul":
        c = _mul_f32x2(a, b)
    elif HOW == "sub":
        c = _sub_f32x2(a, b)
    elif HOW == "fma":
        c = _fma_f32x2(a, b, a)
    elif HOW == "tanh":
        c = tanh_approx_fp32(a)
    elif HOW == "e4m3":
        c = _cvt_e4m3x4_f32(a).to(tl.float32)
    else:
        _, c = _fused_amax_to_e8m0(tl.abs(a) + 1.0, 1.0 / 448.0)
    tl.store(out + i, c)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mul", lambda a, b: a * b),
        ("sub", lambda a, b: a - b),
        ("fma", lambda a, b: torch.addcmul(a.double(), a.double(), b.double()).float()),
        ("tanh", lambda a, _: torch.tanh(a)),
        ("e4m3", lambda a, _: a.to(torch.float8_e4m3fn).float()),
        ("e8m0", lambda a, _: torch.exp2(-torch.ceil(torch.log2((a.abs() + 1) * (1.0 / 448))))),
    ],
)
def test_inline_ptx(how: str, expected: object) -> None:
    a, b, out = torch.randn(64), torch.randn(64), torch.zeros(64)
    assert launch(ptx_kernel, (1,), a, b, out, how, arch="sm_100").ok
    torch.testing.assert_close(out, expected(a, b), atol=0, rtol=1e-6)  # type: ignore[operator]
