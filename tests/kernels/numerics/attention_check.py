"""The field's yardstick: the error against float64 may be at most twice that of plain PyTorch in the input dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_oracle import Problem, attention, gradients
from torch import Tensor

FLOOR = {torch.bfloat16: 2e-3, torch.float16: 2.5e-4}  # absolute; values and gradients here are of order one
LSE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """What is right, in float64, and the largest error of any element that `out`, `dq`, `dk` and `dv` may have."""

    values: dict[str, Tensor]
    lse: Tensor
    limits: dict[str, float]

    def check(self, got: dict[str, Tensor], lse: Tensor) -> None:
        """`got` may lack gradients that were not asked for."""
        for name, value in got.items():
            assert value.shape == self.values[name].shape, name
            assert value.isfinite().all(), name
            self.check_error(name, value, self.values[name])
        assert torch.equal(lse.isneginf(), self.lse.isneginf())
        torch.testing.assert_close(lse.double(), self.lse, rtol=1e-5, atol=LSE_TOLERANCE)
        assert (got["out"][lse.isneginf().T] == 0).all()

    def check_error(self, name: str, value: Tensor, right: Tensor) -> None:
        error, limit = largest(value.double() - right), self.limits[name]
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"


def answer(problem: Problem, dout: Tensor) -> Answer:
    """From two eager computations, in float64 and in the dtype of the problem; `dout` is the gradient of `out`."""
    right, lse = _eager(problem, dout, torch.float64)
    plain, _ = _eager(problem, dout, dout.dtype)
    limits = {name: 2 * largest(plain[name].double() - right[name]) + FLOOR[dout.dtype] for name in right}
    return Answer(right, lse.double(), limits)


def _eager(problem: Problem, dout: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = attention(problem, *leaves)
    grads = gradients(out, leaves, dout.to(dtype))
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}, lse.detach()


def largest(errors: Tensor) -> float:
    """Magnitude of the largest element; 0 for an empty tensor."""
    return errors.abs().max().item() if errors.numel() else 0.0
