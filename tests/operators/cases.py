"""Small cases of every kind, and a hypothesis strategy over them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

UNEVEN = {"kind": "list", "values": [3, 0, 17, 1, 9]}
CASES: dict[str, dict[str, Any]] = {
    "broadcast": {"broadcast_q": True, "q_len": 7, "lengths": UNEVEN},
    "self": {"lengths": UNEVEN},
    "causal": {"lengths": UNEVEN, "causal": True},
    "window": {"lengths": UNEVEN, "window": [2, 1]},
    "broadcast-masked": {"broadcast_q": True, "q_len": 9, "lengths": UNEVEN, "causal": True, "window": [3, -1]},
    "cross-causal-mqa": {
        "kv_heads": 1,
        "lengths": UNEVEN,
        "q_lengths": {"kind": "list", "values": [4, 2, 0, 20, 5]},
        "causal": True,
    },
    "gqa": {"heads": 4, "kv_heads": 2, "lengths": UNEVEN},
    "fp16-128": {"dtype": "fp16", "head_dim": 128, "lengths": UNEVEN, "sm_scale": 0.3},
    "all-empty": {"batch": 3, "lengths": {"kind": "constant", "length": 0}},
    "all-empty-broadcast": {"batch": 3, "broadcast_q": True, "q_len": 2, "lengths": {"kind": "constant", "length": 0}},
    "one-key-each": {"batch": 30, "broadcast_q": True, "q_len": 4, "lengths": {"kind": "constant", "length": 1}},
    "single-sequence": {"lengths": {"kind": "list", "values": [33]}, "causal": True},
    "dense": {"batch": 3, "lengths": {"kind": "constant", "length": 16}},
    "dense-causal-mqa": {"batch": 3, "kv_heads": 1, "lengths": {"kind": "constant", "length": 16}, "causal": True},
    "dense-window": {"batch": 2, "broadcast_q": True, "q_len": 4, "lengths": {"kind": "constant", "length": 16}}
    | {"window": [2, 2]},
    "one-long-many-tiny": {
        "broadcast_q": True,
        "q_len": 3,
        "lengths": {"kind": "list", "values": [1, 0, 2, 1, 70, 1, 0, 1, 2]},
    },
}


def complete(params: dict[str, Any]) -> dict[str, Any]:
    return {"heads": 2, "head_dim": 64, **params}


@st.composite
def random_params(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination of shapes and masks, sequences of 0 to 12 rows."""
    batch = draw(st.integers(1, 5))
    lengths = st.lists(st.integers(0, 12), min_size=batch, max_size=batch)
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2)]))
    params: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 64,
        "dtype": draw(st.sampled_from(["bf16", "fp16"])),
        "lengths": {"kind": "list", "values": draw(lengths)},
        "causal": draw(st.booleans()),
        "window": [draw(st.integers(-1, 6)), draw(st.integers(-1, 6))],
    }
    queries = draw(st.sampled_from(["broadcast", "same", "own"]))
    if queries == "broadcast":
        params |= {"broadcast_q": True, "q_len": draw(st.integers(1, 9))}
    elif queries == "own":
        params |= {"q_lengths": {"kind": "list", "values": draw(lengths)}}
    return params
