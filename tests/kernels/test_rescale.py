"""Products that are skipped where all factors are one: in the simulator, and what is made of them for sm_90."""

from __future__ import annotations

import os
import re

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from jfabench.kernels.attention.rescale import rescaled

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")


@triton.jit
def kernel(rows, factors, results, D: tl.constexpr):
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, D)[None, :]
    loaded = tl.load(rows + row * D + column)
    tl.store(results + row * D + column, rescaled(loaded, tl.load(factors + tl.arange(0, 64))))


ONES = torch.ones(64)
FACTORS = {
    "all one": ONES,
    "one row is not": ONES.index_fill(0, torch.tensor([13]), 0.5),
    "a row of the upper half is not": ONES.index_fill(0, torch.tensor([63]), 0.0),
    "none is": torch.linspace(0.0, 0.9, 64),
    "a row is lost": ONES.index_fill(0, torch.tensor([8]), torch.nan),
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
def test_the_products_are_those_of_all_rows(factors: Tensor, d: int) -> None:
    from jfabench.sim import launch

    rows, results = torch.randn(64, d, generator=torch.Generator().manual_seed(0)), torch.zeros(64, d)
    assert launch(kernel, (1,), rows, factors, results, d, arch="sm_90").ok
    assert torch.equal(results.nan_to_num(7.0), (rows * factors[:, None]).nan_to_num(7.0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thread_looks_at_every_factor_that_it_has(head_dim: int) -> None:
    """What is assumed of the layout of a matmul's result: elements 0 and 2 of a thread are of its two rows."""
    from jfabench.kernels.attention import offline

    launch = next(
        launch
        for launch in offline.launches("sm90", "forward", 90)
        if launch.config.get("lazy") and launch.case == offline.Case(head_dim, 1, "none", True)
    )
    ptx = offline.compile_launch(launch, 90).ptx
    blocks = re.findall(r"setp\.neu\.f32 some, (%\w+),.*?setp\.neu\.or\.f32 some, (%\w+),(.*?)DONE:", ptx, re.DOTALL)
    assert blocks
    for first, second, products in blocks:
        factors = re.findall(r"mul\.f32 %\w+, %\w+, (%\w+);", products)
        assert len(factors) == head_dim // 2
        assert first != second
        assert set(factors) == {first, second}
