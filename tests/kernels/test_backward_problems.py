"""How gradients are judged: rounding of the result is allowed for, and nothing that is more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backward_problems import Answer, check, ulp
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16]


def spacing(value: Tensor) -> float:
    """By the numbers themselves: from one of a 16-bit dtype to the next."""
    if value.dtype == torch.float16:
        return float(np.spacing(np.float16(value.item())))
    following = (value.view(torch.int16) + 1).view(value.dtype)
    return (following.double() - value.double()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-3, 0.25, 0.99, 1.0, 1.01, 1.99, 2.0, 3.7, 1000.0])
def test_an_ulp_is_the_distance_to_the_next_number(magnitude: float, dtype: torch.dtype) -> None:
    value = torch.tensor(magnitude, dtype=dtype)
    assert ulp(value.item(), dtype) == spacing(value)


def test_nothing_has_no_ulp() -> None:
    assert ulp(0.0, torch.bfloat16) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [3.7, -3.7, 1.9, 0.3])
def test_a_gradient_may_be_rounded_the_other_way_where_the_yardstick_is_lucky(
    largest: float, dtype: torch.dtype
) -> None:
    values = torch.tensor([0.01, largest, -0.2], dtype=dtype)
    step = spacing(values[1].abs())
    lucky = Answer({"dk": values.double()}, torch.empty(0), {"dk": 0.1 * step})
    off = torch.tensor([0.0, step, 0.0])
    for found in (values, values + off, values - off):
        check({"dk": found.to(dtype)}, lucky)
    for found in (values + 2 * off, values - 2 * off, values + off.roll(1) * 1.5, values * torch.nan):
        with pytest.raises(AssertionError, match="dk"):
            check({"dk": found.to(dtype)}, lucky)
