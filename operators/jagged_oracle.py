"""The right answers, by eager PyTorch and the formulas alone; no kernel's code is used. Imports torch.

Every sequence is computed by itself in float32 (float64 on a CPU), scores and probabilities written out in full.
Sequences of similar length share a batched matrix product: each keeps its own slot of the batch, shorter ones are
padded with zeros and the mask hides the padding, so nothing crosses from one sequence to another.

Beside the right answer stands the error that the same computation makes in the input dtype: probabilities and score
gradients rounded before the products they enter, products in the input dtype with float32 accumulation, results
rounded. Products of two inputs are exact in float32 either way, so scores and `dP` are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from jfabench.check import compare
from jfabench.operators.jagged_tensors import DTYPES, JaggedInputs
from jfabench.operators.lengths import Lengths
from jfabench.records import TensorCheck

ELEMENTS_PER_GROUP = {"cuda": 2**29, "cpu": 2**22}
"""Padded scores and tensor elements at a time: on a GPU 2 GiB in float32, and some five such tensors are alive."""

PADDING_ALLOWED = 1.25
"""Sequences share a group as long as their padded scores are at most this many times the true ones."""

LSE_FLOOR = 1e-3
"""Absolute. `lse` has no rounding to the input dtype; polynomial exponentials err by up to 1e-4, a lost key by 1/n."""

OUT_FLOOR = 1e-5
"""Absolute, for outputs whose rounded computation happens to be exact (every row sees one key)."""

FEW_ROWS = 16.0
"""Units in the last place, over the number of rows and heads: see `Expected`."""

GRADIENT_FLOOR = 1e-4
"""Absolute, over the fewest keys that a row sees. `dP - delta` cancels: a row with one key has gradient 0, and float32
noise of two sums of D terms of order 1 remains; with n keys the probability that multiplies it is of order 1/n."""


@dataclass(frozen=True, eq=False)
class Expected:
    """Right answers by name, each with the error of the same computation in the input dtype and an absolute floor.

    The largest error of a few rows says little about that of another right computation, which rounds the same rows
    otherwise: `delta` alone has one rounding error for a whole row. So the floor has one more term that allows for
    chance in tiny cases: `FEW_ROWS` units in the last place, of the largest value or of 1, over the number of query
    rows and heads. From a thousand rows on it is nothing.
    """

    tensors: Mapping[str, Tensor]
    baseline: Mapping[str, float]
    floor: Mapping[str, float]
    dtypes: Mapping[str, torch.dtype]

    def check(self, name: str, got: object) -> TensorCheck:
        return compare(
            name, got, self.tensors[name], dtype=self.dtypes[name], baseline=self.baseline[name], floor=self.floor[name]
        )


@dataclass(frozen=True)
class _Group:
    """Sequences computed in one batch, and where their rows lie: `packed[rows]` is `padded[slots]`."""

    queries: Lengths
    keys: Lengths
    q_rows: slice
    k_rows: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences, padded queries, padded keys)"""
        return len(self.queries), int(self.queries.max()), int(self.keys.max())


def oracle(inputs: JaggedInputs, gradients: bool) -> Expected:
    """Computes `out` and `lse`, and with `gradients` also `dq`, `dk` and `dv`, in float32 or on a CPU float64.

    Only host lengths steer it, so the host runs ahead of a GPU. Beside its results it holds some 12 GiB at most.
    """
    with torch.no_grad(), _exact_matmuls():
        run = _Oracle(inputs, gradients)
        for group in run.groups:
            run.visit(group)
        return run.finish()


@dataclass
class _Oracle:
    inputs: JaggedInputs
    gradients: bool
    groups: list[_Group] = field(init=False)
    results: dict[str, Tensor] = field(init=False)
    errors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        x = self.inputs
        self.device = x.k.device
        self.dtype = torch.float64 if self.device.type == "cpu" else torch.float32
        self.budget = ELEMENTS_PER_GROUP[self.device.type]
        heads, kv_heads, width = x.params.heads, x.params.kv_heads, x.params.head_dim
        rows, total_k = x.dout.shape[0], x.k.shape[0]

        self.groups, order = _make_groups(x.q_lengths, x.k_lengths, heads, width, self.budget)
        q_index = np.stack([_packed_rows(x.q_lengths, order), _padded_slots(self.groups, "queries")])
        k_index = np.stack([_packed_rows(x.k_lengths, order), _padded_slots(self.groups, "keys")])
        self.q_index = torch.from_numpy(q_index).to(self.device)
        self.k_index = torch.from_numpy(k_index).to(self.device)

        shapes = {"out": (rows, heads, width), "lse": (heads, rows)}
        if self.gradients:
            shapes |= {"dq": tuple(x.q.shape), "dk": (total_k, kv_heads, width), "dv": (total_k, kv_heads, width)}
        self.results = {
            name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name, shape in shapes.items()
        }
        self.errors = {name: torch.zeros((), dtype=self.dtype, device=self.device) for name in shapes}
        if self.gradients and x.params.broadcast_q:
            self.rounded_dq = torch.zeros_like(self.results["dq"])

    def visit(self, group: _Group) -> None:
        """One group: `[g, H_kv, R, m, n]` scores, where R query heads share a key/value head; rows in blocks."""
        x, p = self.inputs, self.inputs.params
        g, m, n = group.shape
        if n == 0 or m == 0:
            self.results["lse"].index_fill_(1, self.q_index[0, group.q_rows], float("-inf"))
            return
        k, v = (self._pad(t, self.k_index[:, group.k_rows], g, n).unsqueeze(2) for t in (x.k, x.v))
        if p.broadcast_q:
            q = x.q.to(self.dtype).expand(g, m, p.heads, p.head_dim).transpose(1, 2)
        else:
            q = self._pad(x.q, self.q_index[:, group.q_rows], g, m)
        q = _split(q, 1, p.kv_heads)
        dout = _split(self._pad(x.dout, self.q_index[:, group.q_rows], g, m), 1, p.kv_heads)

        out, dq, rounded_dq = (torch.zeros(dout.shape, dtype=self.dtype, device=self.device) for _ in range(3))
        lse = torch.full(dout.shape[:-1], float("-inf"), dtype=self.dtype, device=self.device)
        dk, dv, rounded_dk, rounded_dv = (torch.zeros_like(k.squeeze(2)) for _ in range(4))
        step = max(1, self.budget // (g * p.heads * n))
        for start in range(0, m, step):
            block = slice(start, min(start + step, m))
            q_block, dout_block = q[..., block, :], dout[..., block, :]

            p_block = (p.scale * q_block) @ k.mT  # the scores S, then in place the probabilities P
            hidden = self._hidden(group, block)
            if hidden is not None:
                p_block.masked_fill_(hidden, float("-inf"))
            peak = p_block.amax(-1, keepdim=True)
            peak.masked_fill_(peak == float("-inf"), 0.0)  # a row without keys: exp(-inf - 0) is 0, not NaN
            total = p_block.sub_(peak).exp_().sum(-1, keepdim=True)
            lse[..., block] = (peak + total.log()).squeeze(-1)
            p_block.div_(total.masked_fill_(total == 0, 1.0))
            out_block = p_block @ v
            out[..., block, :] = out_block
            rounded_p = self._round(p_block)
            rounded_out = self._matmul(rounded_p, v)
            self._error("out", rounded_out, out_block)
            if not self.gradients:
                continue

            dv += _sum_heads(p_block.mT @ dout_block)
            rounded_dv += _sum_heads(self._matmul(rounded_p.mT, dout_block))
            del rounded_p
            scaled_dout = p.scale * dout_block  # so that sm_scale enters dS here, and once
            ds_block = scaled_dout @ v.mT  # dP, then in place dS
            rounded_ds = self._round((ds_block - _row_dot(scaled_dout, rounded_out)).mul_(p_block))
            ds_block.sub_(_row_dot(scaled_dout, out_block)).mul_(p_block)
            dq[..., block, :] = ds_block @ k
            rounded_dq[..., block, :] = self._matmul(rounded_ds, k)
            dk += _sum_heads(ds_block.mT @ q_block)
            rounded_dk += _sum_heads(self._matmul(rounded_ds.mT, q_block))
            del p_block, ds_block, rounded_ds

        self._unpad("out", out.flatten(1, 2), self.q_index[:, group.q_rows])
        flat_lse = lse.flatten(1, 2).transpose(0, 1).flatten(1)
        rows, slots = self.q_index[:, group.q_rows]
        self.results["lse"].index_copy_(1, rows, flat_lse.index_select(1, slots))
        if not self.gradients:
            return
        for name, right, inexact in (("dk", dk, rounded_dk), ("dv", dv, rounded_dv)):
            self._unpad(name, right, self.k_index[:, group.k_rows])
            self._error(name, self._round(inexact), right)
        if p.broadcast_q:
            self.results["dq"] += dq.flatten(1, 2).sum(0).transpose(0, 1)
            self.rounded_dq += rounded_dq.flatten(1, 2).sum(0).transpose(0, 1)
        else:
            self._unpad("dq", dq.flatten(1, 2), self.q_index[:, group.q_rows])
            self._error("dq", self._round(rounded_dq), dq)

    def finish(self) -> Expected:
        x = self.inputs
        input_dtype = DTYPES[x.params.dtype]
        gradient_floor = GRADIENT_FLOOR / _fewest_keys(x)
        floor = {"out": OUT_FLOOR, **dict.fromkeys(("dq", "dk", "dv"), gradient_floor)}
        if self.gradients and x.params.broadcast_q:
            self._error("dq", self._round(self.rounded_dq), self.results["dq"])
            floor["dq"] *= x.params.batch**0.5  # noise of independent sequences adds up as a random walk
        names = list(self.errors)
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        largest = [x.abs().amax() if name != "lse" and x.numel() else zero for name, x in self.results.items()]
        facts = torch.stack([*(self.errors[name] for name in names), *largest]).tolist()
        unit = torch.finfo(input_dtype).eps
        for name, value in zip(names, facts[len(names) :], strict=True):
            if name != "lse":
                floor[name] += FEW_ROWS * unit * max(1.0, value) / max(1, self.results["lse"].numel())
        return Expected(
            tensors=self.results,
            baseline=dict(zip(names, facts[: len(names)], strict=True)),
            floor={**floor, "lse": LSE_FLOOR},
            dtypes={name: torch.float32 if name == "lse" else input_dtype for name in names},
        )

    def _pad(self, packed: Tensor, index: Tensor, g: int, length: int) -> Tensor:
        """`[rows, heads, D]` -> `[g, heads, length, D]` in the oracle's dtype, zero where a sequence has no row."""
        padded = torch.zeros((g * length, *packed.shape[1:]), dtype=self.dtype, device=self.device)
        padded.index_copy_(0, index[1], packed.index_select(0, index[0]).to(self.dtype))
        return padded.view(g, length, *packed.shape[1:]).transpose(1, 2).contiguous()

    def _unpad(self, name: str, padded: Tensor, index: Tensor) -> None:
        """`[g, heads, length, D]` -> the rows of a packed result."""
        self.results[name].index_copy_(0, index[0], padded.transpose(1, 2).flatten(0, 1).index_select(0, index[1]))

    def _hidden(self, group: _Group, block: slice) -> Tensor | None:
        """`[g, 1, 1, rows of the block, n]`, True where the mask or the padding hides a key; None: nowhere."""
        _, m, n = group.shape
        left, right = self.inputs.params.bounds
        uneven = bool((group.keys < n).any() or (group.queries < m).any())
        if not uneven and left < 0 and right < 0:
            return None
        queries, keys = group.queries, group.keys
        if not uneven:
            queries, keys = queries[:1], keys[:1]  # one mask serves the whole group
        lengths = torch.from_numpy(np.stack([queries, keys])).to(self.device).view(2, -1, 1, 1, 1, 1)
        q_len, k_len = lengths
        i = torch.arange(block.start, block.stop, device=self.device).view(-1, 1)
        j = torch.arange(n, device=self.device)
        hidden: Tensor = (j >= k_len) | (i >= q_len)
        if right >= 0:
            hidden |= j > i + (k_len - q_len) + right
        if left >= 0:
            hidden |= j < i + (k_len - q_len) - left
        return hidden

    def _round(self, x: Tensor) -> Tensor:
        """`x` with the precision of the input dtype: in that dtype on a GPU, as float32 values on a CPU."""
        rounded = x.to(DTYPES[self.inputs.params.dtype])
        return rounded if self.device.type == "cuda" else rounded.float()

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` of rounded `a` and an input `b`, accumulated in float32 and rounded; in the oracle's dtype."""
        return self._round(a @ b.to(a.dtype)).to(self.dtype)

    def _error(self, name: str, inexact: Tensor, right: Tensor) -> None:
        worst = (inexact.to(self.dtype) - right).abs_().amax()
        self.errors[name] = torch.maximum(self.errors[name], worst)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`[..., D]`, `[..., D]` -> `[..., 1]`"""
    return (a * b).sum(-1, keepdim=True)


def _split(x: Tensor, dim: int, outer: int) -> Tensor:
    """Views dimension `dim` as two, the first of size `outer`."""
    return x.view(*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])


def _sum_heads(x: Tensor) -> Tensor:
    """`[g, H_kv, R, n, D]` -> `[g, H_kv, n, D]`: the query heads that share a key/value head."""
    return x.squeeze(2) if x.shape[2] == 1 else x.sum(2)


def _make_groups(queries: Lengths, keys: Lengths, heads: int, width: int, budget: int) -> tuple[list[_Group], Lengths]:
    """Cuts the sequences, sorted by length, where a batch would exceed the budget or pad too much.

    Returns the groups and the order: group after group, the sequences that they hold.
    """
    order: Lengths = np.lexsort((keys, queries)).astype(np.int64)
    cuts = [0]
    most_q = most_k = true = 0
    for position, (m, n) in enumerate(zip(queries[order].tolist(), keys[order].tolist(), strict=True)):
        most_q, most_k, true = max(most_q, m), max(most_k, n), true + m * n
        members = (position + 1 - cuts[-1]) * heads
        scores = members * most_q * most_k
        elements = scores + members * (most_q + most_k) * width
        too_padded = scores > PADDING_ALLOWED * heads * true and scores > budget // 64  # tiny groups may pad freely
        if position > cuts[-1] and (too_padded or elements > budget):
            cuts.append(position)
            most_q, most_k, true = m, n, m * n
    cuts.append(len(order))

    groups: list[_Group] = []
    q_row = k_row = 0
    for first, last in pairwise(cuts):
        member = order[first:last]
        q_end, k_end = q_row + int(queries[member].sum()), k_row + int(keys[member].sum())
        groups.append(_Group(queries[member], keys[member], slice(q_row, q_end), slice(k_row, k_end)))
        q_row, k_row = q_end, k_end
    return groups, order


def _packed_rows(lengths: Lengths, order: Lengths) -> Lengths:
    """The packed row numbers of the sequences, in the given order."""
    starts = np.cumsum(lengths) - lengths
    return _ranges(starts[order], lengths[order])


def _padded_slots(groups: list[_Group], axis: str) -> Lengths:
    """For each row of `_packed_rows`, its place in its group's padded block."""
    slots = []
    for group in groups:
        lengths: Lengths = getattr(group, axis)
        slots.append(_ranges(np.arange(len(lengths)) * lengths.max(), lengths))
    return np.concatenate(slots)


def _ranges(starts: Lengths, lengths: Lengths) -> Lengths:
    """`start, start + 1, ...` of each length, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _fewest_keys(inputs: JaggedInputs) -> int:
    """At most the number of keys that any query row sees, of those that see one; at least 1."""
    alive = inputs.k_lengths[(inputs.q_lengths > 0) & (inputs.k_lengths > 0)]
    masked = max(inputs.params.bounds) >= 0
    return 1 if masked or not alive.size else int(alive.min())


@contextmanager
def _exact_matmuls() -> Iterator[None]:
    """Float32 products without TF32, and half-precision ones accumulated in float32 throughout, whatever was set."""
    matmul = torch.backends.cuda.matmul
    before = (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]
        matmul.allow_fp16_reduced_precision_reduction = before[2]
