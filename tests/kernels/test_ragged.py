"""Ragged descriptors of packed tensors: what TMA is told about them. How blocks move is in the kernels' tests."""

from __future__ import annotations

import pytest
import torch

from jfabench.kernels.attention.ragged import RAGGED_ROWS, ragged_blocks


def address(descriptor: object, start: int, length: int, row: int, column: int) -> int:
    """The byte that a block's coordinates lead to, in 64-bit arithmetic: those of `Rows.at`."""
    coordinates = (RAGGED_ROWS, start + length, RAGGED_ROWS - length + row, column)
    size = descriptor.base.element_size()  # type: ignore[attr-defined]
    return sum(c * s * size for c, s in zip(coordinates, descriptor.strides, strict=True)) % 2**64  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_coordinates_lead_to_rows_of_the_packed_tensor(dtype: torch.dtype) -> None:
    packed = torch.zeros(700, 3, 64, dtype=dtype)
    descriptor = ragged_blocks(packed, 128, 32)
    assert descriptor.block_shape == [1, 1, 128, 32]
    for start, length, row, column in ((0, 700, 0, 0), (5, 300, 256, 64), (699, 1, 0, 160)):
        expected = ((start + row) * 3 * 64 + column) * packed.element_size()
        assert address(descriptor, start, length, row, column) == expected
        past = RAGGED_ROWS - length + row + length - row  # where a sequence ends the described rows do
        assert past == descriptor.shape[2]


@pytest.mark.parametrize("strides", [(1, 64, 1), (1000, 64, 1)])
def test_the_stride_of_a_single_row_does_not_matter(strides: tuple[int, int, int]) -> None:
    """A contiguous tensor of one row may have any, also one that is no multiple of 16 bytes."""
    row = torch.zeros(128, dtype=torch.bfloat16).as_strided((1, 2, 64), strides)
    assert row.is_contiguous()
    assert (
        ragged_blocks(row, 128).strides == ragged_blocks(row.clone(memory_format=torch.contiguous_format), 128).strides
    )
