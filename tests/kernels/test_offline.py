"""What is compiled without a GPU; the kernels themselves are compiled by test_compile.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jfabench.kernels.attention.estimate import step_cycles

# In a child process, where the interpreter is off. One warp-specialised kernel of each direction.
PROGRAM = """
import json
from jfabench import sass
from jfabench.kernels.attention import offline
found = {}
for direction in ("forward", "backward"):
    launch = next(l for l in offline.launches("sm90", direction, 90) if l.role)
    binary = offline.compile_launch(launch, 90)
    regions = [sass.Region(t.role, t.copies, t.file, t.first, t.last) for t in offline.tasks(launch)]
    found[direction] = sass.mixes(offline.disassembly(binary.cubin), regions)
plain = next(l for l in offline.launches("triton", "forward", 90) if l.role)
found["plain tasks"] = offline.tasks(plain)
print(json.dumps(found))
"""


def test_roles_of_the_kernels_for_hopper() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plain tasks"] == []
    for direction, consumer in (("forward", "attend"), ("backward", "consume")):
        mixes = {role: (copies, counts) for role, copies, counts in found[direction]}
        assert list(mixes) == ["all", "load", consumer, "rest"]
        copies, computed = mixes[consumer]
        _, loaded = mixes["load"]
        _, whole = mixes["all"]
        assert copies == 2
        assert loaded["tma_load"] == whole["tma_load"] > 0
        assert loaded["tensor"] == loaded["exp2"] == loaded["fp32"] == 0
        assert computed["exp2"] == whole["exp2"] > 0
        assert computed["tma_store"] == whole["tma_store"] > 0
        # A few may have been merged, and so have lost their line.
        assert computed["tensor"] >= 0.9 * whole["tensor"] > 0


def forward(**changes: int) -> dict[str, int]:
    return {"consumers": 2, "block_n": 128, **changes}


@pytest.mark.parametrize(
    ("kernel", "config", "head_dim", "expected"),
    [
        # 128 queries x 128 keys x 128 x 2 multiply-adds / 2048; 128 x 128 / 16; 2 x (64 + 2 x 128) + 2 x 128 rows.
        ("forward_sm90_kernel", forward(), 128, (2048, 1024, 1792, "tensor")),
        ("forward_sm90_kernel", forward(), 64, (1024, 1024, 896, "tensor")),
        ("forward_sm90_kernel", forward(consumers=1, block_n=64), 128, (512, 256, 640, "shared")),
        ("backward_sm90_kernel", {"add_dq": True, "stages": 2}, 128, (2560, 512, 2944, "shared")),
        ("backward_sm90_kernel", {"add_dq": False, "stages": 2}, 128, (2048, 512, 1792, "tensor")),
        ("backward_sm90_kernel", {"add_dq": False, "stages": 2}, 64, (2048, 1024, 1536, "tensor")),
        ("dkdv_kernel", {"block_m": 64, "block_n": 128}, 128, (2048, 512, None, "tensor")),
        ("forward_kernel", {"block_m": 128, "block_n": 64}, 64, (512, 512, None, "tensor")),
    ],
)
def test_the_estimate(
    kernel: str, config: dict[str, int], head_dim: int, expected: tuple[float, float, float | None, str]
) -> None:
    cycles = step_cycles(kernel, config, head_dim, 90)
    assert cycles is not None
    assert (cycles.tensor, cycles.exponential, cycles.shared, cycles.bound) == expected


@pytest.mark.parametrize(
    ("kernel", "config", "head_dim", "expected"),
    [
        ("forward_sm90_kernel", forward(), 128, 2 * 128 * 128 * 2),  # K and V
        (
            "backward_sm90_kernel",
            {"add_dq": False, "stages": 2},
            128,
            2 * 64 * 128 * 2 + 2 * 64 * 4,
        ),  # Q, dO, statistics
        (
            "backward_sm90_kernel",
            {"add_dq": True, "stages": 2},
            64,
            2 * 128 * 64 * 2 + 2 * 128 * 4 + 128 * 64 * 4,
        ),  # dQ
        ("dkdv_kernel", {"block_m": 64, "block_n": 128}, 128, 2 * 64 * 128 * 2 + 2 * 64 * 4),
        ("dq_kernel", {"block_m": 64, "block_n": 32}, 128, 2 * 32 * 128 * 2),
    ],
)
def test_the_bytes_that_a_step_moves(kernel: str, config: dict[str, int], head_dim: int, expected: int) -> None:
    cycles = step_cycles(kernel, config, head_dim, 90)
    assert cycles is not None
    assert cycles.global_bytes == expected
    assert cycles.memory == pytest.approx(expected * 132 * 1.98e9 / 4.8e12)  # a 132nd of 4.8 TB/s at 1.98 GHz


def test_blackwell_multiplies_twice_as_fast() -> None:
    plain = {"block_m": 128, "block_n": 128}
    on_90, on_100 = (step_cycles("forward_kernel", plain, 128, arch) for arch in (90, 100))
    assert on_90 is not None
    assert on_100 is not None
    # The published figure: 1024 cycles for a pair of 128 x 128 x 128, and as many for its exponentials.
    assert (on_100.tensor, on_100.exponential) == (1024, 1024)
    assert on_90.tensor == 2048
    assert on_100.memory < on_90.memory


def test_exponentials_on_other_units_do_not_count() -> None:
    config = {"groups": 2, "block_n": 128, "p_parts": 2, "polynomial": 16, "ctas": 2}
    cycles = step_cycles("forward_sm100_kernel", config, 128, 100)
    assert cycles is not None
    # Two groups of 128 x 128 pairs; a quarter of the columns elsewhere; each CTA loads half of K and V.
    assert (cycles.tensor, cycles.exponential, cycles.shared) == (2048, 2048 * 0.75, None)
    assert cycles.global_bytes == 2 * 128 * 128 * 2 // 2


def test_no_estimate_where_nothing_is_known() -> None:
    assert step_cycles("forward_kernel", {"block_m": 64, "block_n": 64}, 128, 80) is None
    assert step_cycles("tile_kernel", {}, 128, 90) is None
