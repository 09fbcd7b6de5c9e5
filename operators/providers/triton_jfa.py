"""jfabench's own kernels, through their public function."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR, autograd_call
from jfabench.records import Direction


@dataclass(frozen=True)
class TritonJfa:
    name: str = "triton_jfa"
    operator: str = OPERATOR
    summary: str = (
        "jfabench.kernels.jagged_flash_attention: packed in, packed out, broadcast Q read in place and its gradient "
        "summed over the batch inside; `bwd` is torch.autograd.grad on a kept graph"
    )

    def unavailable(self, device: str) -> Unavailable | None:
        if importlib.util.find_spec("triton") is None:
            return Unavailable("Triton is not installed", "pip install fbtriton")
        # A worker on a CPU sets TRITON_INTERPRET=1 before anything imports Triton.
        return None

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        return None

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        from jfabench.kernels import jagged_flash_attention

        p = inputs.params

        def forward(q: Any, k: Any, v: Any) -> Any:
            return jagged_flash_attention(
                q,
                k,
                v,
                inputs.k_offsets,
                q_offsets=None if p.broadcast_q else inputs.q_offsets,
                broadcast_q=p.broadcast_q,
                causal=p.causal,
                window=p.window,
                sm_scale=inputs.sm_scale,
                deterministic=p.deterministic,
                return_lse=True,
            )

        return autograd_call(forward, inputs.q, inputs.k, inputs.v, inputs.dout, direction)


PROVIDERS = (TritonJfa(),)
