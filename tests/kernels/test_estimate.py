"""The estimates, against counts by hand of what the kernels' sources say a step does."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from jfabench.kernels.attention import config_bwd_sm100, config_sm100
from jfabench.kernels.attention.estimate import StepCycles, step_cycles

KB = 1024  # 8 cycles of shared memory
HOPPER_BACKWARD = {"add_dq": True, "stages": 2}


def estimated(kernel: str, config: dict[str, Any], head_dim: int, arch: int) -> StepCycles:
    found = step_cycles(kernel, config, head_dim, arch)
    assert found is not None
    return found


def forward(**changes: int) -> dict[str, int]:
    return {"consumers": 2, "block_n": 128, **changes}


@pytest.mark.parametrize(
    ("kernel", "config", "head_dim", "expected"),
    [
        # 128 queries x 128 keys x 128 x 2 multiply-adds / 2048; 128 x 128 / 16; 2 x (64 + 2 x 128) + 2 x 128 rows.
        ("forward_sm90_kernel", forward(), 128, (2048, 1024, 1792, "tensor")),
        ("forward_sm90_kernel", forward(), 64, (1024, 1024, 896, "tensor and exponential")),
        ("forward_sm90_kernel", forward(consumers=1, block_n=64), 128, (512, 256, 640, "shared")),
        ("backward_sm90_kernel", {**HOPPER_BACKWARD, "add_dq": False}, 128, (2048, 512, 1792, "tensor")),
        ("backward_sm90_kernel", {**HOPPER_BACKWARD, "add_dq": False}, 64, (2048, 1024, 1536, "tensor")),
        ("dkdv_kernel", {"block_m": 64, "block_n": 128}, 128, (2048, 512, None, "tensor")),
        ("forward_kernel", {"block_m": 128, "block_n": 64}, 64, (512, 512, None, "tensor and exponential")),
    ],
)
def test_the_estimate(
    kernel: str, config: dict[str, int], head_dim: int, expected: tuple[float, float, float | None, str]
) -> None:
    cycles = estimated(kernel, config, head_dim, 90)
    assert (cycles.tensor, cycles.exponential, cycles.shared, cycles.bound) == expected


@pytest.mark.parametrize(
    ("kernel", "config", "head_dim", "expected"),
    [
        ("forward_sm90_kernel", forward(), 128, 2 * 128 * 128 * 2),  # K and V
        # Q, dO and statistics
        ("backward_sm90_kernel", {**HOPPER_BACKWARD, "add_dq": False}, 128, 2 * 64 * 128 * 2 + 2 * 64 * 4),
        # and dQ
        ("backward_sm90_kernel", HOPPER_BACKWARD, 64, 2 * 128 * 64 * 2 + 2 * 128 * 4 + 128 * 64 * 4),
        ("dkdv_kernel", {"block_m": 64, "block_n": 128}, 128, 2 * 64 * 128 * 2 + 2 * 64 * 4),
        ("dq_kernel", {"block_m": 64, "block_n": 32}, 128, 2 * 32 * 128 * 2),
    ],
)
def test_the_bytes_that_a_step_moves(kernel: str, config: dict[str, int], head_dim: int, expected: int) -> None:
    cycles = estimated(kernel, config, head_dim, 90)
    assert cycles.global_bytes == expected
    assert cycles.memory == pytest.approx(expected * 132 * 1.98e9 / 4.8e12)  # a 132nd of 4.8 TB/s at 1.98 GHz


def test_the_backward_on_hopper_by_hand() -> None:
    """A step of 64 queries x 128 keys at D = 128. 64 x 128 is 16 KB, and each of two consumers reads its operands."""
    matmuls = {
        "S": 2 * (16 + 16),  # K and Q
        "dP": 2 * (16 + 16),  # V and dO
        "dV": 2 * 16,  # dO; P is in registers
        "dK": 2 * 16,  # Q; dS is in registers
        "dQ": 2 * (16 + 16),  # dS of all 128 keys, and half of the columns of K
    }
    ds_written = 2 * 8  # 64 x 64 of each consumer
    dq_staged = 32 + 32  # 64 x 128 in float32, written and read
    filled = 16 + 16  # Q and dO
    cycles = estimated("backward_sm90_kernel", HOPPER_BACKWARD, 128, 90)
    assert cycles.shared == (sum(matmuls.values()) + ds_written + dq_staged + filled) * KB / 128 == 2944
    assert cycles.tensor == 5 * 64 * 128 * 128 / 2048 == 2560
    assert cycles.exponential == 64 * 128 / 16 == 512
    assert cycles.bound == "shared"


def test_blackwell_multiplies_twice_as_fast() -> None:
    plain = {"block_m": 128, "block_n": 128}
    on_90, on_100 = (estimated("forward_kernel", plain, 128, arch) for arch in (90, 100))
    # The published figure: 1024 cycles for a pair of 128 x 128 x 128, and as many for its exponentials.
    assert (on_100.tensor, on_100.exponential) == (1024, 1024)
    assert on_90.tensor == 2048
    assert on_100.memory < on_90.memory


def test_the_forward_on_blackwell_by_hand() -> None:
    """Two groups of 128 queries x 128 keys at D = 128. An operand of 128 x 128 is 32 KB."""
    alone = estimated("forward_sm100_kernel", asdict(config_sm100.WIDE), 128, 100)
    scores, sums = 2 * (32 + 32), 2 * 32  # of both groups: Q and K; V, as P is in tensor memory
    filled = 32 + 32  # K and V
    assert alone.shared == (scores + sums + filled) * KB / 128 == 2048
    # A quarter of the exponentials is computed elsewhere.
    assert (alone.tensor, alone.exponential, alone.bound) == (2048, 2048 * 0.75, "tensor and shared")
    assert alone.global_bytes == 64 * KB

    pair = estimated("forward_sm100_kernel", asdict(config_sm100.PAIR), 128, 100)
    scores, sums, filled = 2 * (32 + 16), 2 * 16, 16 + 16  # half of K, half of V
    assert pair.shared == (scores + sums + filled) * KB / 128 == 1280
    assert (pair.tensor, pair.exponential, pair.bound) == (2048, 2048 * 0.75, "tensor")
    assert pair.global_bytes == 32 * KB


def test_a_forward_of_fewer_keys_is_bound_by_shared_memory() -> None:
    """One group of 128 queries x 64 keys at D = 128: a step reads all of Q for half of the pairs."""
    low = estimated("forward_sm100_kernel", asdict(config_sm100.LOW), 128, 100)
    assert low.shared == ((32 + 16) + 16 + (16 + 16)) * KB / 128 == 768
    assert (low.tensor, low.bound) == (512, "shared")


def test_the_backward_on_blackwell_by_hand() -> None:
    """A step of 128 queries x 128 keys at D = 128. An operand of 128 x 128 is 32 KB."""
    cycles = estimated("backward_sm100_kernel", asdict(config_bwd_sm100.LONG), 128, 100)
    matmuls = {
        "S": 32 + 32,  # K and Q
        "dP": 32 + 32,  # V and dO
        "dV": 32,  # dO; P is in tensor memory
        "dK": 32,  # Q; dS is in tensor memory
        "dQ": 32 + 32,  # dS and K
    }
    filled = 32 + 32  # Q and dO
    ds_written = 32
    dq_staged = 64 + 64  # in float32, written and read
    assert cycles.shared == (sum(matmuls.values()) + filled + ds_written + dq_staged) * KB / 128 == 3840
    assert cycles.tensor == 5 * 128 * 128 * 128 / 4096 == 2560
    assert cycles.exponential == 128 * 128 / 16 == 1024
    assert cycles.bound == "shared"
    # Q, dO, two statistics a query, dQ.
    assert cycles.global_bytes == 32 * KB + 32 * KB + 2 * 128 * 4 + 64 * KB


def test_a_pair_in_the_backward_by_hand() -> None:
    """What one CTA of the two does: its own 128 keys, and half of the operand of queries."""
    cycles = estimated("backward_sm100_kernel", asdict(config_bwd_sm100.PAIR), 128, 100)
    matmuls = {
        "S": 32 + 16,  # K of its keys, half of the rows of Q
        "dP": 32 + 16,  # V of its keys, half of the rows of dO
        "dV": 16,  # half of the columns of dO
        "dK": 16,  # half of the columns of Q
        "dQ": 32 + 32,  # dS of 64 queries x 256 keys, K of 256 keys x 64 columns
    }
    filled = 2 * (16 + 16)  # Q and dO: half of the rows, and half of the columns
    ds_written = 16 + 16  # its own and the peer's, of 64 queries x 128 keys each
    dq_staged = 32 + 32  # 64 x 128 in float32, written and read
    assert cycles.shared == (sum(matmuls.values()) + filled + ds_written + dq_staged) * KB / 128 == 2816
    assert (cycles.tensor, cycles.exponential, cycles.bound) == (2560, 1024, "shared")
    assert cycles.global_bytes == 64 * KB + 2 * 128 * 4 + 32 * KB


def test_a_short_step_in_the_backward_by_hand() -> None:
    """64 queries x 128 keys at D = 64: 8 KB of Q, 16 KB of K."""
    cycles = estimated("backward_sm100_kernel", asdict(config_bwd_sm100.SHORT), 64, 100)
    scores_and_dp, dv_and_dk = 2 * (16 + 8), 2 * 8
    dq = 16 + 16  # dS is 64 x 128, K is 128 x 64
    filled, ds_written, dq_staged = 8 + 8, 16, 16 + 16
    assert cycles.shared == (scores_and_dp + dv_and_dk + dq + filled + ds_written + dq_staged) * KB / 128 == 1280
    assert (cycles.tensor, cycles.exponential, cycles.bound) == (640, 512, "shared")


def test_without_dq_the_backward_shares_no_ds() -> None:
    config = replace(config_bwd_sm100.LONG, add_dq=False)
    cycles = estimated("backward_sm100_kernel", asdict(config), 128, 100)
    assert cycles.shared == (64 + 64 + 32 + 32 + 64) * KB / 128 == 2048  # S, dP, dV, dK; Q and dO
    assert (cycles.tensor, cycles.bound) == (4 * 128 * 128 * 128 / 4096, "tensor and shared")
    assert cycles.global_bytes == 64 * KB + 2 * 128 * 4


def test_no_estimate_where_nothing_is_known() -> None:
    assert step_cycles("forward_kernel", {"block_m": 64, "block_n": 64}, 128, 80) is None
    assert step_cycles("tile_kernel", {}, 128, 90) is None
