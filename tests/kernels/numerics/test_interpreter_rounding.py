"""Under the interpreter, bfloat16 rounds as on hardware: to nearest, ties to even."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from jfabench.kernels.attention.interpret import bfloat16_bits, widen_bfloat16

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="about the interpreter only")


def test_conversions_agree_with_torch() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x80000001, 0xFF800000], dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, ties])
    expected = torch.from_numpy(values).bfloat16()
    got = torch.from_numpy(bfloat16_bits(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(got[kept], expected[kept])
    widened = torch.from_numpy(widen_bfloat16(got.view(torch.int16).numpy().view(np.uint16)))
    assert torch.equal(widened[kept], expected[kept].float())


def test_the_interpreter_is_left_as_it_was() -> None:
    from triton.runtime import interpreter

    from jfabench.kernels import jagged_flash_attention

    names = ("_convert_float", "_patch_lang")
    before = [getattr(interpreter, name) for name in names]
    threads = torch.get_num_threads()
    x = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    jagged_flash_attention(x, x, x, torch.tensor([0, 3]))
    assert before == [getattr(interpreter, name) for name in names]
    assert threads == torch.get_num_threads()
