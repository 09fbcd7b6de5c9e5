"""FlashAttention-3: an installed `flash_attn_interface` (built from source), else PyPI's forward-only `fa3-fwd`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR, autograd_call
from jfabench.operators.providers._machine import needs_capability, needs_cuda
from jfabench.records import Direction

BUILDS = (("flash_attn_interface", "flash_attn_config"), ("fa3_fwd_interface", "fa3_fwd_config"))
"""(module with the functions, module that says which features it was built with); the first one installed counts."""


def installed_build() -> tuple[str, dict[str, bool]] | None:
    """The interface's module name and its build flags (`FLASHATTENTION_DISABLE_...`); the extension is not imported."""
    for interface, config in BUILDS:
        if importlib.util.find_spec(interface) is not None:
            flags = importlib.import_module(config).CONFIG["build_flags"] if importlib.util.find_spec(config) else {}
            return interface, dict(flags)
    return None


def _library() -> Any:
    build = installed_build()
    if build is None:
        raise ModuleNotFoundError("FlashAttention-3 is not installed")
    return importlib.import_module(build[0])


@dataclass(frozen=True)
class FlashAttention3:
    name: str = "fa3"
    operator: str = OPERATOR
    summary: str = (
        "FlashAttention-3's flash_attn_varlen_func on packed tensors; a broadcast Q is expanded outside the timed "
        "call, its gradient summed over the batch (float32) inside; forward only with PyPI's fa3-fwd"
    )

    def unavailable(self, device: str) -> Unavailable | None:
        if missing := needs_cuda(device):
            return missing
        if installed_build() is None:
            return Unavailable("FlashAttention-3 is not installed", "pip install 'jfabench[fa3]' (forward only)")
        return needs_capability(9)

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        interface, flags = installed_build() or ("FlashAttention-3", {})

        def lacks(feature: str) -> bool:
            return flags.get(f"FLASHATTENTION_DISABLE_{feature}", False)

        if direction != "fwd" and lacks("BACKWARD"):
            return f"{interface} was built without a backward"
        if params.dtype == "fp16" and lacks("FP16"):
            return f"{interface} was built without fp16"
        if params.bounds not in ((-1, -1), (-1, 0)) and lacks("LOCAL"):
            return f"{interface} was built without windows"
        if lacks(f"HDIM{params.head_dim}"):
            return f"{interface} was built without head_dim {params.head_dim}"
        if lacks("VARLEN"):
            return f"{interface} was built without variable lengths"
        if direction != "fwd" and params.may_be_empty:
            return "FlashAttention-3's backward is known to hang on empty sequences (flash-attention #1254)"
        return None

    def preload(self) -> None:
        _library()

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        function = _library().flash_attn_varlen_func
        params = inputs.params
        # Older releases return the pair always, and have no argument for it.
        pair = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(function).parameters else {}

        def forward(q: Any, k: Any, v: Any) -> Any:
            return function(
                q,
                k,
                v,
                cu_seqlens_q=inputs.q_offsets,
                cu_seqlens_k=inputs.k_offsets,
                max_seqlen_q=inputs.max_q_len,
                max_seqlen_k=inputs.max_k_len,
                softmax_scale=inputs.sm_scale,
                causal=params.causal,
                window_size=params.window,
                deterministic=params.deterministic,
                **pair,
            )

        return autograd_call(
            forward, inputs.expanded_q(), inputs.k, inputs.v, inputs.dout, direction, timed_dq=inputs.batch_sum
        )


PROVIDERS = (FlashAttention3(),)
