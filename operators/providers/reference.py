"""The operator's own oracle as a provider: what a right answer costs when nobody minds the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR
from jfabench.records import Direction


@dataclass(frozen=True)
class Reference:
    name: str = "reference"
    operator: str = OPERATOR
    summary: str = (
        "the eager float32 oracle (float64 on a CPU) with the error bookkeeping it does beside, rounded to the input "
        "dtype; slow; `bwd` includes the forward"
    )

    def unavailable(self, device: str) -> Unavailable | None:
        return None

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        return None

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        from jfabench.operators import jagged_attention
        from jfabench.operators.jagged_oracle import oracle

        names = jagged_attention.OPERATOR.tensors[direction]

        def run() -> dict[str, Any]:
            right = oracle(inputs, gradients=direction != "fwd")
            return {name: right.tensors[name].to(right.dtypes[name]) for name in names}

        return Call(run, lambda raw: raw)


PROVIDERS = (Reference(),)
