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

from jfabench.check import CLASS_MARGIN, MARGIN, Limit, Rows, Tally, compare, compare_vectors, length_classes, limits
from jfabench.operators.jagged_tensors import DTYPES, JaggedInputs
from jfabench.operators.lengths import Lengths
from jfabench.records import TensorCheck

ELEMENTS_PER_GROUP = {"cuda": 2**29, "cpu": 2**22}
"""Padded scores and tensor elements at a time: on a GPU 2 GiB in float32, and some five such tensors are alive."""

ROWS_AT_A_TIME = {"cuda": 2**31, "cpu": 16}
"""Query rows after which the baseline rounds its sums over rows, dK and dV: torch's own attention for CPUs keeps them
in the input dtype from block to block. On a GPU that would be a fault."""

PADDING_ALLOWED = 1.25
"""Sequences share a group as long as their padded scores are at most this many times the true ones."""

LSE_FLOOR = 1e-4
"""Absolute: what an approximate exponential may cost (Blackwell kernels compute some of theirs by a polynomial)."""

LSE_RELATIVE = 2.0**-20
"""Of the largest finite `|lse|`: some units in the last place of float32."""

VANISHING = 2.0**-16
"""`dP - delta` cancels where a row sees one key: its gradient is 0 but for the float32 noise of two sums of D terms of
order 1. This is above what such noise leaves in dQ and dK, times `sm_scale * sqrt(D)` where the scale is larger."""

GRADIENT_FLOOR = 1e-4
"""The absolute error allowed where a gradient vanishes, times the same factor."""

FEW_ROWS, FEW_ENOUGH = 16.0, 8.0
"""`delta` has one rounding error for a whole row and head, so that of a handful of them tells little about another
right computation's. So dQ and dK may be off by some units in the last place, of the largest value or of 1: `FEW_ROWS`
over the number of rows and heads, and from `FEW_ENOUGH` of them on over its square. From hundreds on that is nothing.
"""

LEAST_WEIGHT = 1e-3
"""Of a vector to which no rounding of `delta` contributes. Every class must weigh something, to be judged at all."""

PEAKED = 1.5
"""`sm_scale * sqrt(D)` above which most of a row's weight may lie on one key. The errors of dQ and dK are then those of
`delta`, whatever the size of the gradient, and differ among right computations: only the whole tensor is judged."""


@dataclass(frozen=True, eq=False)
class Expected:
    """Right answers by name; for `lse` one absolute limit, for the others the limits of each class of their vectors."""

    tensors: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    rows: Mapping[str, Rows]
    limits: Mapping[str, tuple[Limit, ...]]
    lse_limit: float

    def check(self, name: str, got: object) -> TensorCheck:
        right, dtype = self.tensors[name], self.dtypes[name]
        if name == "lse":
            return compare(name, got, right, dtype=dtype, baseline=0.0, floor=self.lse_limit)
        return compare_vectors(name, got, right, dtype=dtype, rows=self.rows[name], limits=self.limits[name])


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
    rows: dict[str, Rows] = field(init=False)
    tallies: dict[str, Tally] = field(init=False)

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
        self.rows = _rows(x)
        self.tallies = {name: Tally(self.device) for name in shapes if name != "lse"}
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

        out, rounded_out, dq, rounded_dq = (torch.zeros_like(dout) for _ in range(4))
        lse = torch.full(dout.shape[:-1], float("-inf"), dtype=self.dtype, device=self.device)
        dk, dv, rounded_dk, rounded_dv = (torch.zeros_like(k.squeeze(2)) for _ in range(4))
        step = max(1, min(self.budget // (g * p.heads * n), ROWS_AT_A_TIME[self.device.type]))
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
            rounded_out_block = self._matmul(rounded_p, v)
            rounded_out[..., block, :] = rounded_out_block
            if not self.gradients:
                continue

            dv += _stack_heads(p_block).mT @ _stack_heads(dout_block)
            rounded_dv = self._add_product(rounded_dv, rounded_p, dout_block, whole=step >= m)
            del rounded_p
            scaled_dout = p.scale * dout_block  # so that sm_scale enters dS here, and once
            ds_block = scaled_dout @ v.mT  # dP, then in place dS
            rounded_ds = self._round((ds_block - _row_dot(scaled_dout, rounded_out_block)).mul_(p_block))
            ds_block.sub_(_row_dot(scaled_dout, out_block)).mul_(p_block)
            dq[..., block, :] = ds_block @ k
            rounded_dq[..., block, :] = self._matmul(rounded_ds, k)
            dk += _stack_heads(ds_block).mT @ _stack_heads(q_block)
            rounded_dk = self._add_product(rounded_dk, rounded_ds, q_block, whole=step >= m)
            del p_block, ds_block, rounded_ds

        self._keep("out", out.flatten(1, 2), rounded_out.flatten(1, 2), self.q_index[:, group.q_rows])
        flat_lse = lse.flatten(1, 2).transpose(0, 1).flatten(1)
        rows, slots = self.q_index[:, group.q_rows]
        self.results["lse"].index_copy_(1, rows, flat_lse.index_select(1, slots))
        if not self.gradients:
            return
        for name, right, inexact in (("dk", dk, rounded_dk), ("dv", dv, rounded_dv)):
            self._keep(name, right, self._round(inexact), self.k_index[:, group.k_rows])
        if p.broadcast_q:
            self.results["dq"] += dq.flatten(1, 2).sum(0).transpose(0, 1)
            self.rounded_dq += rounded_dq.flatten(1, 2).sum(0).transpose(0, 1)
        else:
            self._keep("dq", dq.flatten(1, 2), rounded_dq.flatten(1, 2), self.q_index[:, group.q_rows])

    def finish(self) -> Expected:
        x = self.inputs
        dtype = DTYPES[x.params.dtype]
        if self.gradients and x.params.broadcast_q:
            self._tally("dq", self.rounded_dq, self.results["dq"], self.rows["dq"])
        lse = self.results["lse"]
        largest = float(lse.masked_fill(lse.isinf(), 0.0).abs().amax()) if lse.numel() else 0.0
        return Expected(
            tensors=self.results,
            dtypes={name: torch.float32 if name == "lse" else dtype for name in self.results},
            rows=self.rows,
            limits={name: self._limits(name, dtype) for name in self.tallies},
            lse_limit=LSE_FLOOR + LSE_RELATIVE * largest,
        )

    def _limits(self, name: str, dtype: torch.dtype) -> tuple[Limit, ...]:
        counted = self.tallies[name].host()
        # Kernels that write dK and dV for every query head, and then sum up groups of them, round more often. Under a
        # mask the largest errors of dQ and dK are those of the few rows that see few keys.
        p = self.inputs.params
        grouped = name in ("dk", "dv") and p.heads > p.kv_heads
        masked = name in ("dq", "dk") and max(p.bounds) >= 0
        margin = CLASS_MARGIN if grouped or masked else MARGIN
        if name in ("out", "dv"):
            return limits(counted, dtype, margin)
        factor = _scale_factor(self.inputs)
        rows = max(1, p.heads * int(_undecided_rows(self.inputs).sum()))
        units = torch.finfo(dtype).eps * max(1.0, float(counted["value"].max()))
        few = FEW_ROWS * units / rows * min(1.0, FEW_ENOUGH / rows)
        return limits(
            counted,
            dtype,
            margin,
            floor=few * factor,
            vanishing_floor=GRADIENT_FLOOR * factor,
            cancelling=True,
            by_class=factor < PEAKED,
        )

    def _pad(self, packed: Tensor, index: Tensor, g: int, length: int) -> Tensor:
        """`[rows, heads, D]` -> `[g, heads, length, D]` in the oracle's dtype, zero where a sequence has no row."""
        padded = torch.zeros((g * length, *packed.shape[1:]), dtype=self.dtype, device=self.device)
        padded.index_copy_(0, index[1], packed.index_select(0, index[0]).to(self.dtype))
        return padded.view(g, length, *packed.shape[1:]).transpose(1, 2).contiguous()

    def _keep(self, name: str, right: Tensor, inexact: Tensor, index: Tensor) -> None:
        """Puts `[g, heads, length, D]` of right values into the rows of a packed result, and counts the errors."""
        packed, plain = (x.transpose(1, 2).flatten(0, 1).index_select(0, index[1]) for x in (right, inexact))
        self.results[name].index_copy_(0, index[0], packed)
        self._tally(name, plain, packed, self.rows[name].at(index[0]))

    def _tally(self, name: str, inexact: Tensor, right: Tensor, rows: Rows) -> None:
        if right.numel():
            self.tallies[name].add(self._round(inexact), right, rows)

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

    def _add_product(self, total: Tensor, a: Tensor, b: Tensor, *, whole: bool) -> Tensor:
        """`total` plus `a^T b`, summed over the rows of a block and the heads of a group.

        On a GPU it is rounded once, at the end: blocks exist only where memory asks for them, and sum up in float32.
        """
        a, b = _stack_heads(a), _stack_heads(b)
        if whole or self.device.type == "cpu":
            return self._round(total + self._matmul(a.mT, b))
        return total + a.mT.to(self.dtype) @ b

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` of rounded `a` and an input `b`, accumulated in float32 and rounded; in the oracle's dtype."""
        return self._round(a @ b.to(a.dtype)).to(self.dtype)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`[..., D]`, `[..., D]` -> `[..., 1]`"""
    return (a * b).sum(-1, keepdim=True)


def _split(x: Tensor, dim: int, outer: int) -> Tensor:
    """Views dimension `dim` as two, the first of size `outer`."""
    return x.view(*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])


def _stack_heads(x: Tensor) -> Tensor:
    """`[g, H_kv, R, m, n]` -> `[g, H_kv, R * m, n]`: a product then sums over query heads as over rows."""
    return x.flatten(2, 3)


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


def _rows(x: JaggedInputs) -> dict[str, Rows]:
    """What the rows of each result have to do with sequences.

    Every query row and head that sees two keys or more has a rounding error of its own in `delta`, shared by all that
    the row contributes to. A key/value vector is one of `n` that share those of a sequence; a broadcast query collects
    those of every sequence, or under a mask perhaps of one.
    """
    p, device = x.params, x.k.device
    queries, keys = x.q_lengths, x.k_lengths
    undecided, classes = _undecided_rows(x), length_classes(keys)
    of_sequence = np.add.reduceat(np.append(undecided, 0), np.cumsum(queries) - queries) * (queries > 0)

    def on_device(values: Lengths, lengths: Lengths) -> Tensor:
        return torch.from_numpy(np.repeat(values, lengths)).to(device)

    def weights(of_sequence: Lengths) -> Tensor:
        """Of key/value vectors: the rows and heads of their sequence, shared out among them."""
        share = of_sequence * (p.heads // p.kv_heads) / np.maximum(1, keys)
        return on_device(share.clip(LEAST_WEIGHT, 1.0).astype(np.float32), keys)

    of_query, of_key = on_device(classes, queries), on_device(classes, keys)
    row_weights = torch.from_numpy(undecided.clip(LEAST_WEIGHT).astype(np.float32)).to(device)
    vanishing = VANISHING * _scale_factor(x)
    sequences = 1.0 if max(p.bounds) >= 0 else max(1.0, float((keys > 1).sum()))
    return {
        "out": Rows(of_query),
        "dq": Rows(None, sequences, vanishing) if p.broadcast_q else Rows(of_query, row_weights, vanishing),
        "dk": Rows(of_key, weights(of_sequence), vanishing),
        "dv": Rows(of_key, weights(np.maximum(1, queries))),
    }


def _undecided_rows(x: JaggedInputs) -> Lengths:
    """`[rows of out]`: 1 for a query row that sees two keys or more, else 0; its softmax has something to decide."""
    queries, keys = x.q_lengths, x.k_lengths
    n = np.repeat(keys, queries)
    left, right = x.params.bounds
    if left < 0 and right < 0:
        return (n > 1).astype(np.int64)
    place = _ranges(keys - queries, queries)
    first = np.maximum(0, place - left) if left >= 0 else 0
    last = np.minimum(n - 1, place + right) if right >= 0 else n - 1
    return (last > first).astype(np.int64)


def _scale_factor(x: JaggedInputs) -> float:
    return max(1.0, float(x.params.scale * x.params.head_dim**0.5))


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
