"""The operator: attention over packed sequences of unequal length. Its parameters, its work, its face to the harness.

For sequence `b` and head `h`: `S = sm_scale * Q_b K_b^T + mask`, `P = softmax(S)`, `O_b = P V_b`. Sequences lie back to
back without padding; with `broadcast_q` one dense block of `q_len` queries is shared by every sequence, and its
gradient is the sum over the batch. Nothing here imports torch until tensors are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jfabench.operators.lengths import MAX_ROWS, Lengths, LengthsSpec, draw, lengths_hash
from jfabench.records import Direction, TensorCheck, Work

if TYPE_CHECKING:
    from jfabench.operators.jagged_oracle import Expected
    from jfabench.operators.jagged_tensors import JaggedInputs

ELEMENT_BYTES = 2
"""bf16 and fp16."""
LSE_BYTES = 4
FORWARD_MATMUL_FLOPS = 4
"""Two products of D multiply-adds for each visible (query, key) pair and head: Q K^T and P V."""
BACKWARD_FACTOR = 2.5
"""Five products instead of two: the scores again, dP, dV, dQ and dK."""


class JaggedAttentionParams(BaseModel):
    """Shapes and mask of one case. Lengths are drawn from `lengths` (keys) and `q_lengths` with the case's seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # A default of 0 stands for "not given": validation replaces it, so that no valid instance has it.
    batch: int = Field(0, ge=1, le=2**24, description="sequences; may be left out where `lengths` lists them")
    heads: int = Field(ge=1, le=1024, description="query heads")
    kv_heads: int = Field(0, ge=1, description="key/value heads; default: as many as query heads")
    head_dim: Literal[64, 128]
    dtype: Literal["bf16", "fp16"] = "bf16"
    broadcast_q: bool = Field(False, description="one dense block of `q_len` queries, shared by every sequence")
    q_len: int | None = Field(None, ge=1, le=MAX_ROWS, description="M, with `broadcast_q` only")
    lengths: LengthsSpec = Field(description="keys and values of each sequence")
    q_lengths: LengthsSpec | None = Field(None, description="queries of each sequence; default: as many as its keys")
    causal: bool = Field(False, description="bottom-right aligned")
    window: tuple[int, int] = Field(
        (-1, -1), description="(left, right), inclusive, bottom-right aligned; -1: unbounded"
    )
    sm_scale: float | None = Field(None, gt=0, allow_inf_nan=False, description="default: head_dim ** -0.5")
    deterministic: bool = Field(False, description="gradients bitwise equal from run to run")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if not (value is None and name in ("batch", "kv_heads"))}
        if "kv_heads" not in data and "heads" in data:
            data["kv_heads"] = data["heads"]
        return data

    @model_validator(mode="after")
    def _consistent(self) -> JaggedAttentionParams:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.broadcast_q and self.q_len is None:
            raise ValueError("q_len is required with broadcast_q: the number of shared queries (M)")
        if self.broadcast_q and self.q_lengths is not None:
            raise ValueError("q_lengths does not go with broadcast_q: every sequence has the same q_len queries")
        if not self.broadcast_q and self.q_len is not None:
            raise ValueError("q_len goes with broadcast_q only; jagged queries take q_lengths")
        if min(self.window) < -1:
            raise ValueError(f"window {list(self.window)}: expected two numbers of keys, or -1 for unbounded")
        self._settle_batch()
        if self.broadcast_q and self.batch * (self.q_len or 0) > MAX_ROWS:
            raise ValueError(
                f"batch * q_len ({self.batch} * {self.q_len}) exceeds the {MAX_ROWS} rows of int32 offsets"
            )
        if self.sm_scale == self.head_dim**-0.5:
            object.__setattr__(self, "sm_scale", None)  # one case, one key
        return self

    def _settle_batch(self) -> None:
        """Listed lengths fix the batch; what is given beside them must agree."""
        for name, spec in (("lengths", self.lengths), ("q_lengths", self.q_lengths)):
            count = spec.count if spec is not None else None
            if count is None:
                continue
            if not self.batch:
                object.__setattr__(self, "batch", count)
            elif self.batch != count:
                raise ValueError(f"batch is {self.batch}, but {name} holds {count} lengths")
        if not self.batch:
            raise ValueError("batch is required: the number of sequences (only listed lengths imply it)")

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def bounds(self) -> tuple[int, int]:
        """The mask as one window: `causal` is a right bound of 0."""
        left, right = self.window
        return left, 0 if self.causal else right

    @property
    def may_be_empty(self) -> bool:
        """Whether some sequence may have no keys or no queries."""
        return self.lengths.may_be_empty or (self.q_lengths is not None and self.q_lengths.may_be_empty)

    def draw_lengths(self, seed: int) -> tuple[Lengths, Lengths]:
        """`(query lengths, key lengths)`, both `[B]`. Raises `ValueError` where int32 offsets cannot hold the sum."""
        keys = draw(self.lengths, self.batch, seed)
        if self.broadcast_q:
            queries = np.full(self.batch, self.q_len, np.int64)
        elif self.q_lengths is not None:
            queries = draw(self.q_lengths, self.batch, seed, stream=1)
        else:
            queries = keys
        for name, lengths in (("queries", queries), ("keys", keys)):
            if lengths.sum() > MAX_ROWS:
                raise ValueError(f"{lengths.sum()} {name} in all exceed the {MAX_ROWS} rows of int32 offsets")
        return queries, keys


def visible_pairs(queries: Lengths, keys: Lengths, bounds: tuple[int, int]) -> Lengths:
    """`[B]` pairs (query i, key j) that the mask lets through: `i + n - m - left <= j <= i + n - m + right`.

    `m` and `n` are a sequence's query and key lengths, -1 is unbounded. Row `i` sees the keys below
    `i + n - m + right + 1` less those below `i + n - m - left`; both counts are clipped ramps in `i`, whose sums over
    the rows are closed forms.
    """
    m, n = np.asarray(queries, np.int64), np.asarray(keys, np.int64)
    left, right = bounds
    below_right: Lengths = m * n if right < 0 else _ramp_sum(m, n, n - m + right + 1)
    below_left: Lengths = np.zeros_like(m) if left < 0 else _ramp_sum(m, n, n - m - left)
    return below_right - below_left


def _ramp_sum(m: Lengths, n: Lengths, start: Lengths) -> Lengths:
    """`sum(clip(i + start, 0, n) for i in range(m))`, element by element."""

    def up_to(x: Lengths) -> Lengths:
        """`sum(clip(t, 0, n) for t < x)`: a triangle below n, then n a step."""
        inside: Lengths = np.clip(x, 0, n)
        beyond: Lengths = np.maximum(x - n, 0)
        return inside * (inside - 1) // 2 + beyond * n

    return up_to(start + m) - up_to(start)


@dataclass(frozen=True)
class JaggedAttention:
    """Implements `jfabench.operator.Operator`."""

    name: str = "jagged_attention"
    model: type[JaggedAttentionParams] = JaggedAttentionParams

    @property
    def tensors(self) -> Mapping[Direction, tuple[str, ...]]:
        return {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv"), "fwd_bwd": ("out", "lse", "dq", "dk", "dv")}

    def parse(self, params: Mapping[str, Any]) -> JaggedAttentionParams:
        return self.model.model_validate(dict(params))

    def dump(self, params: JaggedAttentionParams) -> dict[str, Any]:
        return params.model_dump(mode="json", exclude_none=True)

    def label(self, params: JaggedAttentionParams) -> str:
        """Lengths, queries, batch and heads; then whatever is not the usual."""
        p = params
        parts = [str(p.lengths)]
        parts += [f"M={p.q_len}"] if p.broadcast_q else []
        parts += [f"queries: {p.q_lengths}"] if p.q_lengths is not None else []
        parts += [f"B={p.batch}", f"H={p.heads}" if p.kv_heads == p.heads else f"H={p.heads}/{p.kv_heads}"]
        parts += [f"D={p.head_dim}"] if p.head_dim != 128 else []
        parts += [p.dtype] if p.dtype != "bf16" else []
        parts += ["causal"] if p.causal else []
        parts += [f"window={p.window[0]},{p.window[1]}"] if p.window != (-1, -1) else []
        parts += [f"scale={p.sm_scale:g}"] if p.sm_scale is not None else []
        parts += ["deterministic"] if p.deterministic else []
        return " ".join(parts)

    def work(self, params: JaggedAttentionParams, direction: Direction, seed: int) -> Work:
        """FLOP of the visible pairs alone, and bytes if each tensor moved once (offsets not counted).

        The forward reads q, k, v and writes out, lse; the backward reads q, k, v, out, dout, lse and writes dq, dk, dv;
        `fwd_bwd` does both. A broadcast q and its dq count once, not once a sequence.
        """
        queries, keys = params.draw_lengths(seed)
        pairs = int(visible_pairs(queries, keys, params.bounds).sum())
        flops_fwd = FORWARD_MATMUL_FLOPS * params.head_dim * params.heads * pairs
        size = _sizes(params, queries, keys)
        bytes_fwd = size["q"] + 2 * size["kv"] + size["out"] + size["lse"]
        bytes_bwd = 2 * size["q"] + 4 * size["kv"] + 2 * size["out"] + size["lse"]
        if direction == "fwd":
            return Work(flops_fwd, bytes_fwd)
        if direction == "bwd":
            return Work(BACKWARD_FACTOR * flops_fwd, bytes_bwd)
        return Work((1 + BACKWARD_FACTOR) * flops_fwd, bytes_fwd + bytes_bwd)

    def memory(self, params: JaggedAttentionParams, seed: int) -> int:
        """Bytes of q, k, v, dout, out, lse, dq, dk and dv together: what any provider must hold."""
        size = _sizes(params, *params.draw_lengths(seed))
        return 2 * size["q"] + 4 * size["kv"] + 2 * size["out"] + size["lse"]

    def facts(self, params: JaggedAttentionParams, seed: int) -> dict[str, Any]:
        """The key lengths' hash, sum and extremes, those of the queries where they are drawn, and the visible pairs."""
        queries, keys = params.draw_lengths(seed)
        facts = _length_facts(keys, "k")
        if params.q_lengths is not None:
            facts |= _length_facts(queries, "q")
        return {**facts, "pairs": int(visible_pairs(queries, keys, params.bounds).sum())}

    def make_inputs(self, params: JaggedAttentionParams, seed: int, device: str) -> JaggedInputs:
        from jfabench.operators.jagged_tensors import make_inputs

        return make_inputs(params, seed, device)

    def fingerprint(self, inputs: JaggedInputs) -> dict[str, int]:
        from jfabench.operators.jagged_tensors import fingerprint

        return fingerprint(inputs)

    def oracle(self, inputs: JaggedInputs, directions: Sequence[Direction]) -> Expected:
        from jfabench.operators.jagged_oracle import oracle

        return oracle(inputs, gradients=any(direction != "fwd" for direction in directions))

    def check(self, results: Mapping[str, Any], expected: Expected, direction: Direction) -> tuple[TensorCheck, ...]:
        return tuple(expected.check(name, results[name]) for name in self.tensors[direction] if name in results)


def _sizes(params: JaggedAttentionParams, queries: Lengths, keys: Lengths) -> dict[str, int]:
    """Bytes of one tensor of each shape: `q` (also dq), `kv` (k, v, dk, dv), `out` (also dout), `lse`."""
    rows = int(queries.sum())
    width = params.head_dim * ELEMENT_BYTES
    return {
        "q": (params.q_len or rows) * params.heads * width,
        "kv": int(keys.sum()) * params.kv_heads * width,
        "out": rows * params.heads * width,
        "lse": rows * params.heads * LSE_BYTES,
    }


def _length_facts(lengths: Lengths, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}_lengths_hash": lengths_hash(lengths),
        f"{prefix}_total": int(lengths.sum()),
        f"{prefix}_min": int(lengths.min()),
        f"{prefix}_max": int(lengths.max()),
        f"{prefix}_empty": int((lengths == 0).sum()),
    }


OPERATOR = JaggedAttention()
