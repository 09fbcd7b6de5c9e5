"""What must hold beyond the numbers: isolation, determinism, completeness, layouts, and PyTorch's machinery."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Problem, offsets
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention.ops import jagged_attention

K_LENGTHS = [70, 0, 130, 33]
Q_LENGTHS = [40, 5, 129, 0]


def make(device: str, *, broadcast: bool, dim: int = 64, **options: object) -> Problem:
    def leaf(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, dim, device=device).to(torch.bfloat16).requires_grad_()

    rows = 50 if broadcast else sum(Q_LENGTHS)
    q, k, v = leaf(rows, 2), leaf(sum(K_LENGTHS), 1), leaf(sum(K_LENGTHS), 1)
    return Problem(q, k, v, K_LENGTHS, None if broadcast else Q_LENGTHS, **options)


def run(problem: Problem, **options: object) -> Tensor:
    return jagged_flash_attention(problem.q, problem.k, problem.v, problem.k_offsets, **problem.options, **options)


def gradients(problem: Problem, out: Tensor, dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, (problem.q, problem.k, problem.v), dout))


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sequence_spoils_no_neighbour(device: str, broadcast: bool, bad: float) -> None:
    problem = make(device, broadcast=broadcast)
    dout = torch.randn_like(run(problem))
    clean = [run(problem), *gradients(problem, run(problem), dout)]
    keys = slice(0, K_LENGTHS[0])  # the sequence before the others, and so at the start of what their last block reads
    with torch.no_grad():
        problem.k[keys], problem.v[keys] = bad, bad
    spoilt = [run(problem), *gradients(problem, run(problem), dout)]
    mine = K_LENGTHS[0]
    rows = problem.q.shape[0] if broadcast else Q_LENGTHS[0]
    assert torch.equal(clean[0][rows:], spoilt[0][rows:])
    assert spoilt[0][:rows].isnan().any()
    for before, after in zip(clean[2:], spoilt[2:], strict=True):
        assert torch.equal(before[mine:], after[mine:])
    if not broadcast:
        assert torch.equal(clean[1][rows:], spoilt[1][rows:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sequence_spoils_no_predecessor(device: str, bad: float) -> None:
    """The last block of a sequence reads into the next one; so do its queries and its upstream gradient."""
    problem = make(device, broadcast=False)
    dout = torch.randn_like(run(problem))
    clean = [run(problem), *gradients(problem, run(problem), dout)]
    keys, rows = sum(K_LENGTHS[:2]), sum(Q_LENGTHS[:2])
    with torch.no_grad():
        for tensor, first in ((problem.q, rows), (problem.k, keys), (problem.v, keys), (dout, rows)):
            tensor[first:] = bad
    spoilt = [run(problem), *gradients(problem, run(problem), dout)]
    for before, after, first in zip(clean, spoilt, (rows, rows, keys, keys), strict=True):
        assert torch.equal(before[:first], after[:first])


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("options", [{"deterministic": True}, {"kernels": "triton"}], ids=str)
def test_gradients_repeat_bitwise(device: str, broadcast: bool, options: dict[str, object]) -> None:
    """On demand, and always from the plain Triton kernels, which use no atomics."""
    problem = make(device, broadcast=broadcast)
    dout = torch.randn_like(run(problem))
    first, second = (gradients(problem, run(problem, **options), dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_every_row_is_written(device: str, broadcast: bool, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is poisoned, so a row that no program writes shows as NaN."""

    def poisoned(make: object) -> object:
        def allocate(*args: object, **kwargs: object) -> Tensor:
            tensor = make(*args, **kwargs)  # type: ignore[operator]
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate

    problem = make(device, broadcast=broadcast, causal=causal)
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
    out, lse = run(problem, return_lse=True)
    grads = gradients(problem, out, torch.ones_like(out))
    assert out.isfinite().all()
    assert not lse.isnan().any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_any_subset_of_the_inputs_may_require_grad(device: str, wanted: str) -> None:
    problem = make(device, broadcast=True)
    out = run(problem, deterministic=True)
    full = dict(zip("qkv", gradients(problem, out, torch.ones_like(out)), strict=True))
    for name in "qkv":
        getattr(problem, name).requires_grad_(name in wanted)
    run(problem, deterministic=True).sum().backward()
    for name in "qkv":
        grad = getattr(problem, name).grad
        assert (grad is not None) == (name in wanted)
        assert grad is None or torch.equal(grad, full[name])


def test_the_upstream_gradient_may_have_any_layout(device: str) -> None:
    problem = make(device, broadcast=False)
    dout = torch.randn_like(run(problem))
    transposed = dout.transpose(0, 1).contiguous().transpose(0, 1)
    assert not transposed.is_contiguous()
    for a, b in zip(gradients(problem, run(problem), dout), gradients(problem, run(problem), transposed), strict=True):
        assert torch.equal(a, b)


def test_a_view_may_start_anywhere_in_memory(device: str) -> None:
    """TMA wants 16-byte alignment, which a view need not have."""
    problem = make(device, broadcast=True)
    expected = run(problem)

    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.detach().flatten()])[1:].view(tensor.shape)

    views = [shifted(x) for x in (problem.q, problem.k, problem.v)]
    assert any(view.data_ptr() % 16 for view in views)
    assert torch.equal(expected, jagged_flash_attention(*views, problem.k_offsets, **problem.options))


def test_offsets_of_either_width_agree(device: str) -> None:
    problem = make(device, broadcast=False)
    narrow = {**problem.options, "q_offsets": problem.q_offsets.int()}
    out = jagged_flash_attention(problem.q, problem.k, problem.v, problem.k_offsets.int(), **narrow)
    assert torch.equal(out, run(problem))


def test_q_offsets_default_to_self_attention(device: str) -> None:
    x = torch.randn(sum(K_LENGTHS), 2, 64, device=device).half()
    ends = offsets(K_LENGTHS, device)
    assert torch.equal(jagged_flash_attention(x, x, x, ends), jagged_flash_attention(x, x, x, ends, q_offsets=ends))


def test_lse_is_not_differentiable(device: str) -> None:
    _, lse = run(make(device, broadcast=True), return_lse=True)
    assert not lse.requires_grad


@pytest.mark.parametrize("broadcast", [True, False])
def test_operator_registration(device: str, broadcast: bool) -> None:
    problem = make(device, broadcast=broadcast)
    arguments = (problem.q, problem.k, problem.v, problem.k_offsets, problem.q_offsets, 0.125, -1, 0, False)
    torch.library.opcheck(jagged_attention, arguments)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiles_as_a_full_graph(device: str, dynamic: bool) -> None:
    problem = make(device, broadcast=False, causal=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, k_offsets: Tensor, q_offsets: Tensor) -> Tensor:
        out = jagged_flash_attention(q, k, v, k_offsets, q_offsets=q_offsets, causal=True)
        return (out.float() ** 2).sum()

    arguments = (problem.q, problem.k, problem.v, problem.k_offsets, problem.q_offsets)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = torch.autograd.grad(loss(*arguments), arguments[:3])
    got = torch.autograd.grad(compiled(*arguments), arguments[:3])
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
