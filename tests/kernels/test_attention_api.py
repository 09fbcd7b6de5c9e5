"""What the public function refuses and how it says so, and what importing it costs. No kernel runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from jfabench.kernels import jagged_flash_attention


def arguments(**changes: Any) -> dict[str, Any]:
    valid = {
        "q": torch.zeros(7, 4, 64, dtype=torch.bfloat16),
        "k": torch.zeros(9, 2, 64, dtype=torch.bfloat16),
        "v": torch.zeros(9, 2, 64, dtype=torch.bfloat16),
        "k_offsets": torch.tensor([0, 4, 9]),
        "q_offsets": torch.tensor([0, 7, 7]),
    }
    return {**valid, **changes}


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


REFUSED = [
    ({"q": bf16(7, 64)}, r"q: expected shape \[rows, heads, D\], got \[7, 64\]"),
    ({"q": torch.zeros(7, 4, 64)}, "q: expected dtype torch.bfloat16 or torch.float16, got torch.float32"),
    ({"v": torch.zeros(9, 2, 64).half()}, "v: expected the dtype of q, torch.bfloat16, got torch.float16"),
    ({"k": bf16(9, 2, 64).to("meta")}, "k: expected the device of q, cpu, got meta"),
    ({"k": bf16(2, 9, 64).transpose(0, 1)}, r"k: expected a contiguous tensor, got strides \[64, 576, 1\]"),
    ({"q": bf16(7, 4, 128)[..., :64]}, "q: expected a contiguous tensor"),
    ({"q": bf16(7, 4, 96)}, "q: expected head dimension D of 64 or 128, got 96"),
    ({"k": bf16(9, 2, 128)}, "k: expected the head dimension of q, 64, got 128"),
    ({"v": bf16(8, 2, 64)}, r"v: expected the shape of k, \[9, 2, 64\], got \[8, 2, 64\]"),
    ({"k": bf16(9, 0, 64), "v": bf16(9, 0, 64)}, "k: expected at least one head, got 0"),
    ({"q": bf16(7, 3, 64)}, "q: expected a positive multiple of the 2 heads of k, got 3 heads"),
    ({"k_offsets": torch.zeros(1, 3).long()}, r"k_offsets: expected shape \[B \+ 1\] with B >= 1, got \[1, 3\]"),
    ({"k_offsets": torch.tensor([0])}, r"k_offsets: expected shape \[B \+ 1\] with B >= 1, got \[1\]"),
    (
        {"k_offsets": torch.tensor([0.0, 4, 9])},
        "k_offsets: expected dtype torch.int32 or torch.int64, got torch.float",
    ),
    ({"q_offsets": torch.tensor([0, 7, 7], device="meta")}, "q_offsets: expected the device of q, cpu, got meta"),
    ({"k_offsets": torch.tensor([0, 1, 4, 4, 9])[::2]}, "k_offsets: expected a contiguous tensor"),
    ({"q_offsets": torch.tensor([0, 7])}, r"q_offsets: expected the shape of k_offsets, \[3\], got \[2\]"),
    ({"q_offsets": None}, "q_offsets: expected a tensor, since q and k have different numbers of rows, got None"),
    ({"broadcast_q": True}, "q_offsets: expected None with broadcast_q=True"),
    (
        {"q": bf16(0, 4, 64), "q_offsets": None, "broadcast_q": True},
        "q: expected at least one query row .*, got M == 0",
    ),
    ({"window": (1, 2, 3)}, r"window: expected two ints .*, got \(1, 2, 3\)"),
    ({"window": (-2, 0)}, r"window: expected two ints .*, got \(-2, 0\)"),
    ({"window": (1.0, 0)}, r"window: expected two ints .*, got \(1.0, 0\)"),
    ({"sm_scale": 0.0}, "sm_scale: expected a positive finite number, got 0.0"),
    ({"kernels": "cuda"}, "kernels: expected one of 'auto', 'tlx', 'triton', got 'cuda'"),
    ({"kernels": None}, "kernels: expected one of 'auto', 'tlx', 'triton', got None"),
    ({"sm_scale": float("nan")}, "sm_scale: expected a positive finite number, got nan"),
    ({"k_offsets": torch.tensor([1, 4, 9]), "validate": True}, "k_offsets: expected a first entry of 0, got 1"),
    ({"k_offsets": torch.tensor([0, 4, 8]), "validate": True}, "k_offsets: expected a last entry of 9, .*, got 8"),
    (
        {"q_offsets": torch.tensor([0, 8, 7]), "validate": True},
        "q_offsets: expected non-decreasing entries, got 8 and then 7 for sequence 1",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_refusals_name_the_argument_and_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jagged_flash_attention(**arguments(**changes))


def test_more_rows_than_32_bits_count_are_refused() -> None:
    q = torch.empty(2**16, 1, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(8, 1, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(2**15 + 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="q: expected at most 2147483647 output rows, got 2147483648"):
        jagged_flash_attention(q, k, k, ends, broadcast_q=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_cpu_tensors_without_the_interpreter_get_one_clear_sentence() -> None:
    with pytest.raises(
        RuntimeError, match=r"^jagged_flash_attention runs on CUDA tensors, got cpu: .*TRITON_INTERPRET=1"
    ):
        jagged_flash_attention(**arguments())


@pytest.mark.parametrize("kernels", ["auto", "tlx", "triton"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_shapes_under_fake_tensors(broadcast: bool, kernels: str) -> None:
    """What torch.compile and meta-device models see; needs neither a GPU nor Triton."""
    with FakeTensorMode():
        given = arguments(q_offsets=None, broadcast_q=True) if broadcast else arguments()
        given["kernels"] = kernels
        for name in "qkv":
            given[name].requires_grad_()
        out, lse = jagged_flash_attention(**given, return_lse=True)
        rows = 14 if broadcast else 7
        assert out.shape == (rows, 4, 64)
        assert out.dtype == torch.bfloat16
        assert lse.shape == (4, rows)
        assert lse.dtype == torch.float32
        out.sum().backward()
        assert given["q"].grad.shape == given["q"].shape
        assert given["k"].grad.shape == given["k"].shape


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import jfabench.kernels", {"torch", "triton"}),
        ("from jfabench.kernels import jagged_flash_attention", {"triton"}),
    ],
)
def test_importing_is_cheap(code: str, absent: set[str]) -> None:
    probe = f"import sys; {code}; print(*sorted({absent!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split()
    assert not loaded


def test_the_package_lists_and_guards_its_names() -> None:
    import jfabench.kernels

    assert "jagged_flash_attention" in dir(jfabench.kernels)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = jfabench.kernels.nonsense
