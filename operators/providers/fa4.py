"""FlashAttention-4 (PyPI `flash-attn-4`, module `flash_attn.cute`), which has no broadcast Q.

Two providers share one adapter; both expand a broadcast Q outside the timed region. The operator's contract asks for
its gradient summed over the batch, which FA4 does not do: `fa4` includes that sum in what is timed, `fa4_kernel` leaves
it out, which is generous to FA4. Without a broadcast Q the two are the same.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from jfabench.env import FLASH_4_DISTRIBUTIONS, compute_capability, version
from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR, autograd_call
from jfabench.operators.providers._machine import needs_capability, needs_cuda
from jfabench.records import Direction


def _library() -> Any:
    """FA4, with its compiled kernels kept on disk, so that each process need not compile them.

    The files are named by a hash of FA4's sources and of the versions below it, written beside and renamed: safe to
    share. It reads the variable when it is imported.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return importlib.import_module("flash_attn.cute")


@dataclass(frozen=True)
class FlashAttention4:
    name: str
    summary: str
    timed_sum: bool
    operator: str = OPERATOR

    def unavailable(self, device: str) -> Unavailable | None:
        if missing := needs_cuda(device):
            return missing
        if version(*FLASH_4_DISTRIBUTIONS) is None:
            return Unavailable("flash-attn-4 is not installed", "pip install --pre 'jfabench[fa4]'")
        return needs_capability(8, 9, 10, 11, 12)

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        if direction == "fwd":
            return None
        major, _ = compute_capability() or (9, 0)
        if major == 8:
            return "FA4 has no backward for compute capability 8.x"
        if major == 12 and params.deterministic:
            return "FA4 has no deterministic backward for compute capability 12.x"
        return None

    def preload(self) -> None:
        _library()

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        function = _library().flash_attn_varlen_func
        params = inputs.params
        left, right = (None if bound < 0 else bound for bound in params.window)

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
                window_size=(left, right),
                deterministic=params.deterministic,
                return_lse=True,
            )

        where = "timed_dq" if self.timed_sum else "untimed_dq"
        return autograd_call(
            forward, inputs.expanded_q(), inputs.k, inputs.v, inputs.dout, direction, **{where: inputs.batch_sum}
        )


_COMMON = (
    "flash_attn.cute.flash_attn_varlen_func on packed tensors with its compile cache on; a broadcast Q is expanded "
    "outside the timed call, "
)
PROVIDERS = (
    FlashAttention4(
        "fa4_kernel", _COMMON + "its gradient left per sequence (the sum over the batch is not timed)", timed_sum=False
    ),
    FlashAttention4("fa4", _COMMON + "its gradient summed over the batch (float32) inside", timed_sum=True),
)
