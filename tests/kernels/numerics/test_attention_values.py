"""Output, log-sum-exp and gradients against the oracle, over drawn problems."""

from __future__ import annotations

import pytest
import torch
from attention_check import answer
from attention_oracle import Problem, gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jfabench.kernels import jagged_flash_attention


@st.composite
def problems(draw: st.DrawFn, device: str) -> Problem:
    lengths = st.one_of(st.just(0), st.integers(1, 9), st.sampled_from([63, 64, 65, 127, 128, 129, 200, 300]))
    k_lengths = draw(st.lists(lengths, min_size=1, max_size=4))
    batch = len(k_lengths)
    broadcast = draw(st.booleans())
    q_lengths = None if broadcast else draw(st.lists(lengths, min_size=batch, max_size=batch))
    rows = draw(st.sampled_from([1, 17, 64, 130])) if q_lengths is None else sum(q_lengths)
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2)]))
    dim = draw(st.sampled_from([64, 128]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    bound = st.sampled_from([-1, -1, 0, 3, 64, 150])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(device, dtype)

    return Problem(
        normal(rows, heads),
        normal(sum(k_lengths), kv_heads),
        normal(sum(k_lengths), kv_heads),
        k_lengths,
        q_lengths,
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        sm_scale=draw(st.sampled_from([None, 0.3])),
    )


def check(problem: Problem) -> None:
    inputs = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = jagged_flash_attention(*inputs, problem.k_offsets, **problem.options, return_lse=True, validate=True)
    dout = torch.randn(out.shape, device=out.device).to(out.dtype)
    grads = dict(zip(("dq", "dk", "dv"), gradients(out, inputs, dout), strict=True))
    answer(problem, dout).check({"out": out, **grads}, lse)


@given(data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_drawn_problems(data: st.DataObject, device: str) -> None:
    check(data.draw(problems(device)))


def normal(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("dim", [64, 128])
def test_maxima_that_grow(device: str, dim: int) -> None:
    """From block to block, in some rows by a lot, in others by little, and in the rest never."""
    k_lengths = [700, 129]
    q, k, v = normal(device, 130, 2, dim), normal(device, 829, 2, dim), normal(device, 829, 2, dim)
    # Some kernels visit the last block first.
    growing = torch.cat([torch.linspace(1.0, 9.0, 640), torch.full([60], 0.1), torch.full([128], 9.0), torch.ones(1)])
    q *= torch.linspace(0.0, 2.0, 130, device=device)[:, None, None]
    k *= growing.to(device)[:, None, None]
    check(Problem(q, k, v, k_lengths, None))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("k_lengths", "q_lengths", "rows"),
    [
        ([0, 0, 0], None, 5),  # nothing at all
        ([0, 7, 0], None, 130),
        ([500], None, 40),  # one sequence
        ([700, *[2] * 40], None, 16),  # one long and many tiny
        ([128, 128], [128, 128], 256),  # dense
        ([5, 0, 9], [0, 4, 300], 304),  # queries without keys, keys without queries
        ([3, 4], [0, 0], 0),  # no queries
    ],
)
def test_shapes_of_note(device: str, dim: int, k_lengths: list[int], q_lengths: list[int] | None, rows: int) -> None:
    total = sum(k_lengths)
    q, k, v = normal(device, rows, 2, dim), normal(device, total, 1, dim), normal(device, total, 1, dim)
    check(Problem(q, k, v, k_lengths, q_lengths))


@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (0, 0)), (False, (40, -1)), (False, (-1, 7)), (True, (64, 9))]
)
@pytest.mark.parametrize("k_length", [50, 128, 333])
def test_masks(device: str, causal: bool, window: tuple[int, int], k_length: int) -> None:
    """Fewer keys than queries leaves rows that see nothing; more leaves a diagonal that starts off a block's edge."""
    q_length = 200
    q, k, v = (normal(device, n, 1, 64) for n in (q_length, k_length, k_length))
    check(Problem(q, k, v, [k_length], [q_length], causal, window))
