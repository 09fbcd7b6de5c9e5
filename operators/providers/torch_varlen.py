"""PyTorch's own attention over packed sequences: `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR, autograd_call
from jfabench.operators.providers._machine import needs_cuda
from jfabench.records import Direction


@functools.cache
def varlen_arguments() -> frozenset[str]:
    """The argument names of this torch's `varlen_attn`, read from its source; empty where torch has none."""
    spec = importlib.util.find_spec("torch")
    source = Path(spec.origin).parent / "nn/attention/varlen.py" if spec and spec.origin else None
    if source is None or not source.exists():
        return frozenset()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "varlen_attn":
            return frozenset(arg.arg for arg in (*node.args.args, *node.args.kwonlyargs))
    return frozenset()


@dataclass(frozen=True)
class TorchVarlen:
    name: str = "torch_varlen"
    operator: str = OPERATOR
    summary: str = (
        "torch.nn.attention.varlen.varlen_attn on packed tensors; a broadcast Q is expanded outside the timed call, "
        "its gradient summed over the batch (float32) inside; `bwd` is torch.autograd.grad on a kept graph"
    )

    def unavailable(self, device: str) -> Unavailable | None:
        if not varlen_arguments():
            return Unavailable("this torch has no torch.nn.attention.varlen", "install torch 2.10 or later")
        return needs_cuda(device)

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        known = varlen_arguments()
        if params.deterministic and direction != "fwd":
            return "varlen_attn has no deterministic backward"
        if params.kv_heads != params.heads and "enable_gqa" not in known:
            return "varlen_attn of this torch has no enable_gqa: it takes as many key/value heads as query heads"
        if params.bounds not in ((-1, -1), (-1, 0)) and "window_size" not in known:
            return "varlen_attn of this torch has no window_size"
        return None

    def preload(self) -> None:
        importlib.import_module("torch.nn.attention.varlen")

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        import torch
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        params = inputs.params
        known = varlen_arguments()
        options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": inputs.sm_scale}
        if "window_size" in known:
            options["window_size"] = params.bounds
        elif params.bounds == (-1, 0):
            options["is_causal"] = True
        if params.kv_heads != params.heads:
            options["enable_gqa"] = True
        lengths = (inputs.q_offsets, inputs.k_offsets, inputs.max_q_len, inputs.max_k_len)

        def forward(q: Any, k: Any, v: Any) -> Any:
            return varlen_attn(q, k, v, *lengths, **options)

        call = autograd_call(
            forward, inputs.expanded_q(), inputs.k, inputs.v, inputs.dout, direction, timed_dq=inputs.batch_sum
        )

        def results(raw: Any) -> Any:
            tensors = dict(call.results(raw))
            if "lse" in tensors:  # FlashAttention-2 says +inf for a row without keys, the operator -inf
                tensors["lse"] = tensors["lse"].masked_fill(tensors["lse"] == torch.inf, -torch.inf)
            return tensors

        return Call(call.run, results)


PROVIDERS = (TorchVarlen(),)
