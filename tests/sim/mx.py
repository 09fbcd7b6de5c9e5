"""What the MXFP8 tutorial needs of torchao, which is not installed: quantisation to 8-bit floats with E8M0 scales.

Blocks of 32 elements of a row share a scale, the smallest power of two that brings them into range (OCP MX
specification 1.0). Scales are stored as tensor cores read them: for 128 rows and 4 blocks, ``[32, 4, 4]`` with row =
32 * second + first.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 32
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass
class MXTensor:
    qdata: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def to_mx(cls, data: torch.Tensor, dtype: torch.dtype, **_: Any) -> MXTensor:
        """``data`` ``[rows, K]``, both multiples of 128; values are rounded to nearest, and scales swizzled."""
        blocks = data.float().reshape(*data.shape[:-1], -1, BLOCK)
        largest = blocks.abs().amax(-1)
        exponent = torch.ceil(torch.log2(largest / LARGEST[dtype])).clamp(-127, 127)
        exponent = torch.where(largest == 0, torch.zeros_like(exponent), exponent)
        scaled = (blocks / torch.exp2(exponent)[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
        return cls(scaled.reshape(data.shape).to(dtype), swizzled((exponent + 127).to(torch.uint8)))


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    rows, groups = scales.shape[0] // 128, scales.shape[1] // 4
    return scales.reshape(rows, 4, 32, groups, 4).permute(0, 3, 2, 1, 4).contiguous()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """``torchao.prototype.mx_formats.mx_tensor`` can be imported inside."""
    names = ["torchao", "torchao.prototype", "torchao.prototype.mx_formats", "torchao.prototype.mx_formats.mx_tensor"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].MXTensor = MXTensor  # type: ignore[attr-defined]
    modules[names[-1]].ScaleCalculationMode = types.SimpleNamespace(RCEIL="rceil")  # type: ignore[attr-defined]
    sys.modules.update(modules)  # and no copy of all of them: others may be imported inside
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
