"""What providers of the operator `jagged_attention` share: from one forward function to the call of a direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jfabench.operator import Call
from jfabench.records import Direction

if TYPE_CHECKING:
    from torch import Tensor

OPERATOR = "jagged_attention"

Forward: TypeAlias = "Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]"
"""q, k, v -> out and lse, or None where the implementation does not give it."""


def autograd_call(
    forward: Forward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    direction: Direction,
    *,
    timed_dq: Callable[[Tensor], Tensor] | None = None,
    untimed_dq: Callable[[Tensor], Tensor] | None = None,
) -> Call:
    """The call of one direction of a differentiable `forward`, on leaves that share the memory of `q`, `k`, `v`.

    `fwd` runs `forward` on tensors that need no gradient. `bwd` runs `torch.autograd.grad` on a graph kept from a
    forward outside the timed region. `fwd_bwd` runs both. `timed_dq` is applied to the gradient of `q` inside the
    timed call, `untimed_dq` outside: for implementations whose `q` is an expanded copy of the operator's.
    """
    import torch

    if direction == "fwd":
        return Call(lambda: forward(q, k, v), lambda raw: named(*raw))

    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))

    def backward(out: Tensor, keep: bool) -> tuple[Tensor, ...]:
        dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=keep)
        return (timed_dq(dq) if timed_dq else dq), dk, dv

    def gradients(dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, Tensor]:
        return {"dq": untimed_dq(dq) if untimed_dq else dq, "dk": dk, "dv": dv}

    if direction == "bwd":
        kept, _ = forward(*leaves)
        return Call(lambda: backward(kept, True), lambda raw: gradients(*raw))

    def both() -> Any:
        out, lse = forward(*leaves)
        return out, lse, backward(out, False)

    return Call(both, lambda raw: {**named(*raw[:2]), **gradients(*raw[2])})


def named(out: Tensor, lse: Tensor | None) -> Mapping[str, Any]:
    results = {"out": out.detach()}
    return results if lse is None else {**results, "lse": lse.detach()}
