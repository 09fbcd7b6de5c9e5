"""What one writes without a jagged kernel: pad to the longest sequence, `scaled_dot_product_attention`, unpad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jfabench.operator import Call, Unavailable
from jfabench.operators.providers._autograd import OPERATOR
from jfabench.records import Direction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SdpaPadded:
    name: str = "sdpa_padded"
    operator: str = OPERATOR
    summary: str = (
        "pad to the longest sequence, torch's scaled_dot_product_attention, unpad: all three are timed (equal lengths "
        "need neither padding nor, unless windowed, a mask argument); row indices and the boolean mask are built "
        "outside; a broadcast Q is an expanded view; its work is counted without the padding"
    )

    def unavailable(self, device: str) -> Unavailable | None:
        return None

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        if params.deterministic and direction != "fwd":
            return "scaled_dot_product_attention chooses among backends whose backward is not deterministic"
        return None

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        import torch

        attention = _PaddedAttention(inputs)

        def forward() -> Tensor:
            with torch.no_grad():
                return attention.unpad_out(attention.forward(*attention.padded_inputs()))

        def gradients(out: Tensor, leaves: tuple[Tensor, ...], keep: bool) -> tuple[Tensor, ...]:
            padded = torch.autograd.grad(out, leaves, attention.padded_dout(), retain_graph=keep)
            return attention.unpad_gradients(*padded)

        def both() -> tuple[Tensor, ...]:
            leaves = attention.leaves()
            out = attention.forward(*leaves)
            return attention.unpad_out(out.detach()), *gradients(out, leaves, keep=False)

        if direction == "fwd":
            return Call(forward, lambda raw: {"out": raw})
        if direction == "fwd_bwd":
            return Call(both, lambda raw: _named(raw, "out", "dq", "dk", "dv"))
        kept_leaves = attention.leaves()
        kept = attention.forward(*kept_leaves)
        return Call(lambda: gradients(kept, kept_leaves, keep=True), lambda raw: _named(raw, "dq", "dk", "dv"))


def _named(raw: tuple[Tensor, ...], *names: str) -> Mapping[str, Tensor]:
    return dict(zip(names, raw, strict=True))


class _PaddedAttention:
    """The steps, on `[B, length, heads, D]`. Host lengths decide which are needed; indices and mask are built once."""

    def __init__(self, inputs: Any) -> None:
        import numpy as np

        self.inputs = inputs
        params, queries, keys = inputs.params, inputs.q_lengths, inputs.k_lengths
        # Where everything is empty, one padded row keeps the shapes legal.
        self.m, self.n = max(1, inputs.max_q_len), max(1, inputs.max_k_len)
        equal_q, equal_k = bool((queries == self.m).all()), bool((keys == self.n).all())

        alive = self._rows_with_keys()
        inside = np.arange(self.m) < queries[:, None]
        self.k_slots = None if equal_k else self._index(np.flatnonzero(np.arange(self.n) < keys[:, None]))
        # Rows without keys hold zeros wherever they are padded or unpadded: attention may do with them what it likes.
        self.q_rows = None if alive[inside].all() else self._index(np.flatnonzero(alive[inside]))
        self.q_slots = None if equal_q and self.q_rows is None else self._index(np.flatnonzero(alive))

        # Where queries and keys are equally many, the plain causal mask also hides the padding, which lies at the end.
        self.is_causal = params.bounds == (-1, 0) and bool((queries == keys).all())
        unmasked = self.is_causal or (params.bounds == (-1, -1) and equal_k)
        self.mask = None if unmasked else self._mask(alive)

    def _index(self, rows: Any) -> Tensor:
        import torch

        index: Tensor = torch.from_numpy(rows).to(self.inputs.k.device)
        return index

    def _rows_with_keys(self) -> Any:
        """`[B, m]` bool: padded query rows that are no padding and see at least one key."""
        import numpy as np

        queries, keys = self.inputs.q_lengths[:, None], self.inputs.k_lengths[:, None]
        left, right = self.inputs.params.bounds
        row = np.arange(self.m)
        shift = row + keys - queries
        first = np.maximum(0, shift - left) if left >= 0 else 0
        last = np.minimum(keys - 1, shift + right) if right >= 0 else keys - 1
        return (row < queries) & (first <= last)

    def _mask(self, alive: Any) -> Tensor:
        """`[B, 1, m, n]`, with 1 for B or m where they do not matter. True: visible. Rows that see no key see all."""
        import torch

        queries, keys = self.inputs.q_lengths, self.inputs.k_lengths
        left, right = self.inputs.params.bounds
        if (queries == queries[0]).all() and (keys == keys[0]).all():
            queries, keys, alive = queries[:1], keys[:1], alive[:1]
        q_len, k_len = (self._index(x).view(-1, 1, 1, 1) for x in (queries, keys))
        column = torch.arange(self.n, device=k_len.device)
        visible: Tensor = column < k_len
        if left < 0 and right < 0:
            return visible | (k_len == 0)
        place = torch.arange(self.m, device=k_len.device).view(-1, 1) + k_len - q_len
        if left >= 0:
            visible = visible & (column >= place - left)
        if right >= 0:
            visible = visible & (column <= place + right)
        return visible | ~self._index(alive)[:, None, :, None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Padded `[B, m, H, D]` (or broadcast `[m, H, D]`), twice `[B, n, H_kv, D]` -> `[B, H, m, D]`."""
        from torch.nn.functional import scaled_dot_product_attention

        params = self.inputs.params
        q = q.expand(params.batch, *q.shape[-3:]).transpose(1, 2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        repeat = params.heads // params.kv_heads
        if repeat > 1 and self.mask is not None:  # no fused backend takes enable_gqa beside a mask
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.mask,
            is_causal=self.is_causal,
            scale=self.inputs.sm_scale,
            enable_gqa=repeat > 1 and self.mask is None,
        )

    def padded_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        x = self.inputs
        q = x.q if x.params.broadcast_q else self._pad(x.q, self.q_rows, self.q_slots, self.m)
        return q, self._pad(x.k, None, self.k_slots, self.n), self._pad(x.v, None, self.k_slots, self.n)

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(x.detach().requires_grad_() for x in self.padded_inputs())

    def padded_dout(self) -> Tensor:
        return self._pad(self.inputs.dout, self.q_rows, self.q_slots, self.m).transpose(1, 2)

    def unpad_out(self, out: Tensor) -> Tensor:
        return self._unpad(out.transpose(1, 2), self.q_rows, self.q_slots, self.inputs.dout.shape[0])

    def unpad_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        x = self.inputs
        if not x.params.broadcast_q:
            dq = self._unpad(dq, self.q_rows, self.q_slots, x.q.shape[0])
        dk, dv = (self._unpad(grad, None, self.k_slots, x.k.shape[0]) for grad in (dk, dv))
        return dq, dk, dv

    def _pad(self, packed: Tensor, rows: Tensor | None, slots: Tensor | None, length: int) -> Tensor:
        """`[total, heads, D]` -> `[B, length, heads, D]`: rows (None: all) go to their slots, zeros elsewhere."""
        shape = (self.inputs.params.batch, length, *packed.shape[1:])
        if slots is None:
            return packed.view(shape)
        taken = _wide(packed) if rows is None else _wide(packed).index_select(0, rows)
        padded = taken.new_zeros((shape[0] * length, taken.shape[1])).index_copy_(0, slots, taken)
        return padded.view(packed.dtype).view(shape)

    def _unpad(self, padded: Tensor, rows: Tensor | None, slots: Tensor | None, total: int) -> Tensor:
        """`[B, length, heads, D]` -> `[total, heads, D]`: the slots to the given rows (None: all), zeros elsewhere."""
        packed = padded.reshape(-1, *padded.shape[2:])
        if slots is None:
            return packed
        taken = _wide(packed).index_select(0, slots)
        if rows is not None:
            taken = taken.new_zeros((total, taken.shape[1])).index_copy_(0, rows, taken)
        return taken.view(padded.dtype).view(total, *padded.shape[2:])


def _wide(x: Tensor) -> Tensor:
    """`[rows, heads, D]` -> `[rows, heads * D / 8]` of 16-byte elements, which index kernels move at full bandwidth."""
    import torch

    return x.flatten(1).view(torch.complex128)


PROVIDERS = (SdpaPadded(),)
