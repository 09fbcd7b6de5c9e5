"""The operator's parameters, its counted work, its labels and its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cases import CASES, UNEVEN, complete, random_params
from hypothesis import given
from hypothesis import strategies as st
from naive_attention import visible
from pydantic import ValidationError

from jfabench.operator import load_operator
from jfabench.operators.jagged_attention import OPERATOR, JaggedAttentionParams, visible_pairs
from jfabench.operators.lengths import lengths_hash


def parse(**params: Any) -> JaggedAttentionParams:
    return OPERATOR.parse(complete(params))


def published(fill: float = 0.5, **params: Any) -> JaggedAttentionParams:
    """The published shape: B=768, H=4, D=128, M=256."""
    shape = {"batch": 768, "heads": 4, "head_dim": 128, "broadcast_q": True, "q_len": 256}
    return OPERATOR.parse({**shape, "lengths": {"kind": "fill", "max_len": 1024, "fill": fill}, **params})


@given(
    m=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
)
def test_pairs_are_those_that_the_mask_lets_through(m: list[int], seed: int, causal: bool, window: Any) -> None:
    n = np.random.default_rng(seed).integers(0, 10, len(m)).tolist()
    p = parse(
        lengths={"kind": "list", "values": n}, q_lengths={"kind": "list", "values": m}, causal=causal, window=window
    )
    counted = [
        sum(visible(i, j, m_b, n_b, causal, window) for i in range(m_b) for j in range(n_b))
        for m_b, n_b in zip(m, n, strict=True)
    ]
    assert visible_pairs(np.array(m), np.array(n), p.bounds).tolist() == counted
    assert OPERATOR.work(p, "fwd", 0).flops == 4 * 64 * 2 * sum(counted)


def test_the_published_check_value() -> None:
    lengths = np.full(768, 398_150 // 768)
    lengths[: 398_150 - lengths.sum()] += 1
    p = published(lengths={"kind": "list", "values": lengths.tolist()})
    fwd = OPERATOR.work(p, "fwd", 0).flops
    assert fwd == 4 * 128 * 4 * 256 * 398_150
    assert round(fwd / 1e9, 1) == 208.7
    assert OPERATOR.work(p, "bwd", 0).flops == 2.5 * fwd
    assert OPERATOR.work(p, "fwd_bwd", 0).flops == 3.5 * fwd


def test_dense_causal_is_a_triangle() -> None:
    p = parse(batch=3, lengths={"kind": "constant", "length": 100}, causal=True)
    assert OPERATOR.work(p, "fwd", 0).flops == 4 * 64 * 2 * 3 * (100 * 101 / 2)


def test_bytes_count_each_tensor_once() -> None:
    p = parse(broadcast_q=True, q_len=7, heads=4, kv_heads=2, lengths=UNEVEN)  # 5 sequences, 30 keys
    q, kv, out, lse = 7 * 4 * 64 * 2, 30 * 2 * 64 * 2, 35 * 4 * 64 * 2, 35 * 4 * 4
    fwd = q + 2 * kv + out + lse
    bwd = (q + 2 * kv + 2 * out + lse) + (q + 2 * kv)
    assert OPERATOR.work(p, "fwd", 0).bytes == fwd
    assert OPERATOR.work(p, "bwd", 0).bytes == bwd
    assert OPERATOR.work(p, "fwd_bwd", 0).bytes == fwd + bwd
    assert OPERATOR.memory(p, 0) == 2 * q + 4 * kv + 2 * out + lse


def test_memory_is_that_of_the_tensors() -> None:
    for params in CASES.values():
        x = OPERATOR.make_inputs(parse(**params), 0, "cpu")
        tensors = [x.q, x.k, x.v, x.dout]
        gradients_and_outputs = [x.q, x.k, x.v, x.dout]
        lse = x.dout.shape[0] * x.dout.shape[1] * 4
        size = sum(t.numel() * t.element_size() for t in tensors + gradients_and_outputs) + lse
        assert OPERATOR.memory(x.params, 0) == size


@given(random_params())
def test_dump_is_canonical(params: dict[str, Any]) -> None:
    p = OPERATOR.parse(params)
    dumped = OPERATOR.dump(p)
    assert OPERATOR.parse(json.loads(json.dumps(dumped))) == p
    assert OPERATOR.dump(OPERATOR.parse(dumped)) == dumped


def test_defaults_are_filled_in() -> None:
    p = parse(lengths=UNEVEN)
    assert (p.batch, p.kv_heads, p.q_len, p.q_lengths) == (5, 2, None, None)
    assert parse(lengths=UNEVEN, sm_scale=64**-0.5) == p
    assert parse(lengths=UNEVEN, kv_heads=None, batch=None, sm_scale=None, q_len=None) == p
    assert parse(lengths=UNEVEN, sm_scale=0.25).scale == 0.25
    assert p.scale == 0.125


def test_listed_query_lengths_imply_the_batch() -> None:
    p = parse(lengths={"kind": "constant", "length": 8}, q_lengths={"kind": "list", "values": [1, 2, 3]})
    assert p.batch == 3


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"lengths": UNEVEN, "batch": 4}, "batch is 4, but lengths holds 5 lengths"),
        ({"lengths": {"kind": "constant", "length": 3}}, "batch is required"),
        ({"lengths": UNEVEN, "heads": 6, "kv_heads": 4}, "heads (6) must be a multiple of kv_heads (4)"),
        ({"lengths": UNEVEN, "head_dim": 96}, "Input should be 64 or 128"),
        ({"lengths": UNEVEN, "dtype": "fp32"}, "'bf16' or 'fp16'"),
        ({"lengths": UNEVEN, "broadcast_q": True}, "q_len is required with broadcast_q"),
        ({"lengths": UNEVEN, "broadcast_q": True, "q_len": 0}, "greater than or equal to 1"),
        ({"lengths": UNEVEN, "q_len": 8}, "q_len goes with broadcast_q only"),
        ({"lengths": UNEVEN, "broadcast_q": True, "q_len": 8, "q_lengths": UNEVEN}, "q_lengths does not go with"),
        ({"lengths": UNEVEN, "window": [-2, 3]}, "window [-2, 3]"),
        ({"lengths": UNEVEN, "window": [1]}, "window"),
        ({"lengths": UNEVEN, "sm_scale": 0}, "greater than 0"),
        ({"lengths": UNEVEN, "sm_scale": float("inf")}, "finite"),
        ({"lengths": UNEVEN, "heads": 0}, "greater than or equal to 1"),
        ({"lengths": UNEVEN, "kv_heads": 0}, "greater than or equal to 1"),
        ({"lengths": UNEVEN, "batch": 0}, "greater than or equal to 1"),
        ({"lengths": UNEVEN, "sparsity": 0.5}, "sparsity"),
        ({"lengths": {"kind": "constant", "length": 1}, "batch": 2**21, "broadcast_q": True, "q_len": 1024}, "exceeds"),
    ],
)
def test_impossible_shapes_are_named(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse(**params)
    assert words in str(caught.value)


def test_too_many_rows_for_int32_offsets() -> None:
    p = parse(batch=3, lengths={"kind": "constant", "length": 2**30})
    with pytest.raises(ValueError, match="3221225472 queries in all exceed"):
        p.draw_lengths(0)


def test_labels() -> None:
    assert OPERATOR.label(published()) == "N=1024 fill=0.5 M=256 B=768 H=4"
    p = parse(lengths=UNEVEN, q_lengths=UNEVEN, causal=True, window=[4, -1], dtype="fp16", kv_heads=1, sm_scale=0.5)
    assert OPERATOR.label(p) == "list(5) N=17 queries: list(5) N=17 B=5 H=2/1 D=64 fp16 causal window=4,-1 scale=0.5"
    dense = {"kind": "lognormal", "median": 90, "sigma": 1, "max_len": 512, "empty": 0.1}
    assert OPERATOR.label(parse(batch=2, lengths=dense, deterministic=True)) == (
        "N=512 lognormal(median=90 sigma=1) empty=0.1 B=2 H=2 D=64 deterministic"
    )


def test_facts() -> None:
    facts = OPERATOR.facts(parse(lengths=UNEVEN, q_lengths={"kind": "list", "values": [1, 1, 1, 1, 0]}), 0)
    assert facts == {
        "k_lengths_hash": lengths_hash(np.array([3, 0, 17, 1, 9])),
        "k_total": 30,
        "k_min": 0,
        "k_max": 17,
        "k_empty": 1,
        "q_lengths_hash": lengths_hash(np.array([1, 1, 1, 1, 0])),
        "q_total": 4,
        "q_min": 0,
        "q_max": 1,
        "q_empty": 1,
        "pairs": 21,
    }


@pytest.mark.parametrize("name", CASES)
def test_inputs_have_the_contract_s_shapes(name: str) -> None:
    import torch

    p = parse(**CASES[name])
    x = OPERATOR.make_inputs(p, 5, "cpu")
    rows, total_k = int(x.q_lengths.sum()), int(x.k_lengths.sum())
    assert x.q.shape == (p.q_len if p.broadcast_q else rows, p.heads, p.head_dim)
    assert x.k.shape == x.v.shape == (total_k, p.kv_heads, p.head_dim)
    assert x.dout.shape == (rows, p.heads, p.head_dim)
    assert x.q_offsets.tolist() == [0, *np.cumsum(x.q_lengths)]
    assert x.k_offsets.tolist() == [0, *np.cumsum(x.k_lengths)]
    for tensor in (x.q, x.k, x.v, x.dout):
        assert tensor.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[p.dtype]
        assert tensor.is_contiguous()
    assert (x.max_q_len, x.max_k_len) == (x.q_lengths.max(), x.k_lengths.max())
    again, other = OPERATOR.make_inputs(p, 5, "cpu"), OPERATOR.make_inputs(p, 6, "cpu")
    assert x.q.equal(again.q)
    assert x.dout.equal(again.dout)
    assert not x.q.numel() or not x.q.equal(other.q)
    assert not x.k.numel() or (x.k.abs().max() > 0 and not x.k.equal(x.v))


def test_query_lengths_are_drawn_apart_from_the_keys() -> None:
    spec = {"kind": "fill", "max_len": 500, "fill": 0.5}
    queries, keys = parse(batch=50, lengths=spec, q_lengths=spec).draw_lengths(1)
    assert (queries != keys).any()
    queries, keys = parse(batch=50, lengths=spec).draw_lengths(1)
    assert (queries == keys).all()


def test_expanding_and_summing_a_broadcast() -> None:
    import torch

    x = OPERATOR.make_inputs(parse(broadcast_q=True, q_len=7, lengths=UNEVEN), 0, "cpu")
    expanded = x.expanded_q()
    assert expanded.shape == (35, 2, 64)
    assert all(expanded[7 * b : 7 * b + 7].equal(x.q) for b in range(5))
    dq = torch.randn_like(expanded)
    assert x.batch_sum(dq).equal(sum(dq.float()[7 * b : 7 * b + 7] for b in range(5)).to(dq.dtype))
    jagged = OPERATOR.make_inputs(parse(lengths=UNEVEN), 0, "cpu")
    assert jagged.expanded_q() is jagged.q
    assert jagged.batch_sum(jagged.dout) is jagged.dout


def test_the_harness_finds_it_without_torch() -> None:
    assert load_operator("jagged_attention") is OPERATOR
    code = "from jfabench.operator import load_operator as l, load_providers as p; import sys;"
    code += "l('jagged_attention'); assert not p('jagged_attention').broken; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Fingerprints ---------------------------------------------------------------------------------------------------------


def flip(x: Any, index: tuple[int, ...]) -> None:
    """Changes the lowest bit of one element."""
    import torch

    bits = x.view(torch.int16) if x.is_floating_point() else x
    bits[index] ^= 1


@given(name=st.sampled_from(["q", "k", "v", "dout", "q_offsets", "k_offsets"]), data=st.data())
def test_a_fingerprint_notices_any_bit(name: str, data: st.DataObject) -> None:
    inputs = OPERATOR.make_inputs(parse(lengths=UNEVEN), 1, "cpu")
    before = OPERATOR.fingerprint(inputs)
    assert before == OPERATOR.fingerprint(OPERATOR.make_inputs(parse(lengths=UNEVEN), 1, "cpu"))
    tensor = getattr(inputs, name)
    index = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    flip(tensor, index)
    after = OPERATOR.fingerprint(inputs)
    assert {key for key in before if after[key] != before[key]} == {name}
    flip(tensor, index)
    assert OPERATOR.fingerprint(inputs) == before


@given(order=st.permutations(range(30)))
def test_a_fingerprint_notices_moved_rows(order: list[int]) -> None:
    inputs = OPERATOR.make_inputs(parse(lengths=UNEVEN), 1, "cpu")
    before = OPERATOR.fingerprint(inputs)
    assert len(set(before.values())) == 5  # the two offsets are the same
    inputs.k[:] = inputs.k[order].clone()
    assert (OPERATOR.fingerprint(inputs)["k"] == before["k"]) == (list(order) == list(range(30)))


def test_a_fingerprint_notices_swapped_values_of_one_row() -> None:
    inputs = OPERATOR.make_inputs(parse(lengths=UNEVEN), 1, "cpu")
    before = OPERATOR.fingerprint(inputs)
    inputs.v[4, 1] = inputs.v[4, 1].roll(4).clone()  # whole words of 8 bytes: the sum of the row stays
    assert OPERATOR.fingerprint(inputs)["v"] != before["v"]


def test_fingerprints_of_nothing() -> None:
    inputs = OPERATOR.make_inputs(parse(batch=3, lengths={"kind": "constant", "length": 0}), 0, "cpu")
    assert OPERATOR.fingerprint(inputs) == dict.fromkeys(("q", "k", "v", "dout", "q_offsets", "k_offsets"), 0)
