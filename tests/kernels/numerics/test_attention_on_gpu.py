"""What only a GPU can show: memory, 64-bit addresses, graph capture, streams, and that nothing waits for the device."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from attention_oracle import offsets
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import tune

HEADS, DIM, M, BATCH, KEYS = 4, 128, 256, 96, 512


@pytest.fixture(autouse=True)
def _needs_gpu(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a GPU")


def tensor(rows: int, heads: int = HEADS, dim: int = DIM) -> Tensor:
    return torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)


def inputs(broadcast: bool, lengths: list[int]) -> tuple[list[Tensor], dict[str, object]]:
    rows = M if broadcast else sum(lengths)
    leaves = [tensor(n).requires_grad_() for n in (rows, sum(lengths), sum(lengths))]
    return leaves, {"k_offsets": offsets(lengths, "cuda"), "broadcast_q": broadcast}


def forward_and_backward(leaves: list[Tensor], options: dict[str, object], dout: Tensor) -> list[Tensor]:
    out = jagged_flash_attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("broadcast", [True, False])
def test_memory_beyond_inputs_and_outputs(broadcast: bool) -> None:
    """lse, delta and lists of tiles; one float32 dQ, which is small for broadcast queries."""
    lengths = [KEYS] * (BATCH - 1) + [4 * KEYS]  # padding to the longest would quadruple everything
    leaves, options = inputs(broadcast, lengths)
    rows = BATCH * M if broadcast else sum(lengths)
    dout = tensor(rows)
    forward_and_backward(leaves, options, dout)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = forward_and_backward(leaves, options, dout)
    torch.cuda.synchronize()
    outputs = sum(result.numel() * 2 for result in results)
    statistics = 3 * 4 * HEADS * rows  # lse, lse in base 2, delta
    dq = 4 * leaves[0].numel()
    slack = 10 * 2**20
    extra = torch.cuda.max_memory_allocated() - held - outputs
    assert extra <= statistics + dq + slack, f"{extra / 2**20:.0f} MiB"


def test_addresses_beyond_32_bits() -> None:
    """The last sequence lies beyond 2^31 elements of K and V, and has the same results as alone."""
    lengths = [4_300_000, 200]
    q, k, v = tensor(64), tensor(sum(lengths)), tensor(sum(lengths))
    assert k.numel() > 2**31
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = jagged_flash_attention(*leaves, offsets(lengths, "cuda"), broadcast_q=True)
    dout = torch.zeros_like(out)
    dout[64:] = torch.randn_like(out[64:])
    _, dk, dv = torch.autograd.grad(out, leaves, dout)
    tail = [q.detach(), k.detach()[lengths[0] :], v.detach()[lengths[0] :]]
    small = [x.clone().requires_grad_() for x in tail]
    right = jagged_flash_attention(*small, offsets(lengths[1:], "cuda"), broadcast_q=True)
    _, right_dk, right_dv = torch.autograd.grad(right, small, dout[64:])
    torch.testing.assert_close(out[64:], right)
    torch.testing.assert_close(dk[lengths[0] :], right_dk)
    torch.testing.assert_close(dv[lengths[0] :], right_dv)
    assert (dk[: lengths[0]] == 0).all()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("broadcast", [True, False])
def test_graph_capture_and_replay(broadcast: bool, deterministic: bool) -> None:
    """Twice: a sum that is not set to zero in the graph would grow."""
    lengths = [0, 70, 300, 129, 1]
    leaves, options = inputs(broadcast, lengths)
    options["deterministic"] = deterministic
    dout = tensor(len(lengths) * M if broadcast else sum(lengths))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = forward_and_backward(leaves, options, dout)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(leaves, options, dout)
    for _ in range(2):
        for result in captured:
            result.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        for replayed, right in zip(captured, eager, strict=True):
            if deterministic:
                assert torch.equal(replayed, right)
            torch.testing.assert_close(replayed, right)


@pytest.mark.parametrize("broadcast", [True, False])
def test_tuning_is_bounded_and_kept(broadcast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JFABENCH_TUNE")
    monkeypatch.setenv("JFABENCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "_chosen", {})
    lengths = [70, 300, 129, 1]
    leaves, options = inputs(broadcast, lengths)
    dout = tensor(len(lengths) * M if broadcast else sum(lengths))
    began = time.monotonic()
    forward_and_backward(leaves, options, dout)
    assert time.monotonic() - began < 2 * tune.BUDGET_SECONDS + 20  # two calls, and the last compilation of each
    assert list(tmp_path.glob("tuned/*/*.json"))
    chosen = dict(tune._chosen)
    tune._chosen.clear()
    monkeypatch.setattr(tune, "gpu_timer", lambda: pytest.fail("it was to read what was chosen"))
    forward_and_backward(leaves, options, dout)
    assert tune._chosen.items() <= chosen.items()  # a configuration that lost may have chosen for a part of its own


@pytest.mark.parametrize("broadcast", [True, False])
def test_no_call_waits_for_the_device(broadcast: bool) -> None:
    lengths = [70, 300, 129, 1]
    leaves, options = inputs(broadcast, lengths)
    dout = tensor(len(lengths) * M if broadcast else sum(lengths))
    forward_and_backward(leaves, options, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_and_backward(leaves, options, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
