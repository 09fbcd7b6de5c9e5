"""jfabench's own kernels, through their public function: one provider for each family of them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR, autograd_call
from jfabench.operators.providers._machine import needs_capability, needs_cuda
from jfabench.records import Direction

TIMED = (
    "packed in, packed out, broadcast Q read in place and its gradient summed over the batch inside; `bwd` is "
    "torch.autograd.grad on a kept graph"
)


def triton_folder() -> Path | None:
    """Where the installed Triton lies, found without importing it."""
    spec = importlib.util.find_spec("triton")
    return Path(spec.origin).parent if spec and spec.origin else None


@dataclass(frozen=True)
class JaggedFlashAttention:
    name: str
    kernels: str
    summary: str
    operator: str = OPERATOR

    def unavailable(self, device: str) -> Unavailable | None:
        triton = triton_folder()
        if triton is None:
            return Unavailable("Triton is not installed", "pip install fbtriton")
        if self.kernels == "triton":
            return None  # A worker on a CPU sets TRITON_INTERPRET=1 before anything imports Triton.
        if missing := needs_cuda(device):
            return missing
        if not (triton / "language/extra/tlx/__init__.py").is_file():
            return Unavailable(
                "the installed triton has no TLX, which fbtriton has", "python -m jfabench doctor --repair"
            )
        return needs_capability(9, 10)

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        return None

    def preload(self) -> None:
        from jfabench.kernels.attention import api, launch  # noqa: F401

        modules = launch.TLX_LAUNCHERS.values() if self.kernels == "tlx" else ("launch_triton",)
        for module in modules:
            importlib.import_module(f"jfabench.kernels.attention.{module}")

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
                kernels=self.kernels,
            )

        return autograd_call(forward, inputs.q, inputs.k, inputs.v, inputs.dout, direction)


PROVIDERS = (
    JaggedFlashAttention(
        "triton_jfa", "triton", f"jfabench.kernels.jagged_flash_attention, plain Triton kernels: {TIMED}"
    ),
    JaggedFlashAttention(
        "tlx_jfa",
        "tlx",
        f"jfabench.kernels.jagged_flash_attention, warp-specialised TLX kernels: {TIMED}",
    ),
)
