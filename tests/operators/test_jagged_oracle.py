"""The oracle against naive float64 attention with torch.autograd, over shapes, masks and ways to group sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, complete, random_params
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_attention import naive_attention, visible

from jfabench.operators import jagged_oracle
from jfabench.operators.jagged_attention import OPERATOR

ALL = ("out", "lse", "dq", "dk", "dv")


def inputs_of(params: dict[str, Any], seed: int = 0) -> Any:
    return OPERATOR.make_inputs(OPERATOR.parse(complete(params)), seed, "cpu")


def assert_right(inputs: Any) -> None:
    right, expected = naive_attention(inputs), OPERATOR.oracle(inputs, ["fwd", "bwd"])
    assert set(expected.tensors) == set(ALL)
    for name in ALL:
        torch.testing.assert_close(expected.tensors[name], right[name], atol=1e-11, rtol=1e-11, msg=name)


# All sequences in one group; a few a group; one a group, with a few rows at a time; row by row.
@pytest.mark.parametrize("elements", [2**22, 6000, 60, 1])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_case(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jagged_oracle.ELEMENTS_PER_GROUP, "cpu", elements)
    assert_right(inputs_of(CASES[name]))


@settings(deadline=None, max_examples=60)
@given(params=random_params(), seed=st.integers(0, 2**31), elements=st.sampled_from([1, 60, 6000, 2**22]))
def test_any_case(params: dict[str, Any], seed: int, elements: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(jagged_oracle.ELEMENTS_PER_GROUP, "cpu", elements)
        assert_right(inputs_of(params, seed))


def test_forward_alone_computes_no_gradients() -> None:
    inputs = inputs_of(CASES["self"])
    expected = OPERATOR.oracle(inputs, ["fwd"])
    assert set(expected.tensors) == {"out", "lse"}
    torch.testing.assert_close(expected.tensors["out"], naive_attention(inputs)["out"], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_crosses_between_sequences(poison: float) -> None:
    inputs = inputs_of(CASES["broadcast"])  # lengths 3, 0, 17, 1, 9
    clean = OPERATOR.oracle(inputs, ["bwd"])
    inputs.k[3:20] = poison
    inputs.v[3:20] = poison
    dirty = OPERATOR.oracle(inputs, ["bwd"])
    rows = [*range(14), *range(21, 35)]  # 7 queries a sequence; the third is the poisoned one
    keys = [*range(3), *range(20, 30)]
    assert dirty.tensors["out"][rows].equal(clean.tensors["out"][rows])
    assert dirty.tensors["dk"][keys].equal(clean.tensors["dk"][keys])
    assert dirty.tensors["dv"][keys].equal(clean.tensors["dv"][keys])
    assert not dirty.tensors["out"][14:21].isfinite().any()


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=40),
    budget=st.integers(1, 100_000),
)
def test_groups_hold_every_row_once(lengths: list[tuple[int, int]], budget: int) -> None:
    queries, keys = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    groups, order = jagged_oracle._make_groups(queries, keys, 2, 64, budget)
    assert sorted(order) == list(range(len(lengths)))
    assert np.concatenate([group.queries for group in groups]).tolist() == queries[order].tolist()
    assert np.concatenate([group.keys for group in groups]).tolist() == keys[order].tolist()
    rows = jagged_oracle._packed_rows(keys, order)
    assert sorted(rows.tolist()) == list(range(keys.sum()))
    slots = jagged_oracle._padded_slots(groups, "keys")
    end = 0
    for group in groups:
        g, m, n = group.shape
        assert g == 1 or 2 * g * (m * n + 64 * (m + n)) <= budget
        assert group.k_rows == slice(end, end + int(group.keys.sum()))
        end = group.k_rows.stop
        expected = [sequence * n + j for sequence in range(g) for j in range(group.keys[sequence])]
        assert slots[group.k_rows].tolist() == expected


def test_large_groups_are_not_mostly_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 1024, 768)
    queries = np.full(768, 256)
    groups, _ = jagged_oracle._make_groups(queries, lengths, 4, 128, 2**29)
    padded = sum(np.prod(group.shape) for group in groups)
    assert padded <= 1.3 * (queries * lengths).sum()
    assert len(groups) <= 24


def plain_errors(inputs: Any, right: Any) -> tuple[float, float]:
    """The errors of eager `out` and `dv` in the input dtype, written independently: P is rounded, then the product."""
    dtype, share = inputs.q.dtype, inputs.params.heads // inputs.params.kv_heads
    worst_out = worst_dv = 0.0
    q_row = k_row = 0
    for m, n in zip(inputs.q_lengths.tolist(), inputs.k_lengths.tolist(), strict=True):
        rows, keys = slice(q_row, q_row + m), slice(k_row, k_row + n)
        q, k, v, dout = inputs.q[rows], inputs.k[keys], inputs.v[keys], inputs.dout[rows]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * inputs.sm_scale
        rounded = scores.softmax(-1).to(dtype).float()
        out = torch.einsum("hij,jhd->ihd", rounded, v.float()).to(dtype)
        dv = torch.einsum("hij,ihd->jhd", rounded, dout.float()).unflatten(1, (-1, share)).sum(2).to(dtype)
        worst_out = max(worst_out, float((out.double() - right["out"][rows]).abs().max()))
        worst_dv = max(worst_dv, float((dv.double() - right["dv"][keys]).abs().max()))
        q_row, k_row = q_row + m, k_row + n
    return worst_out, worst_dv


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_baseline_is_the_error_of_the_input_dtype(
    dtype: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads are summed up before they are rounded, once."""
    monkeypatch.setitem(jagged_oracle.ROWS_AT_A_TIME, "cpu", 2**31)
    lengths = {"kind": "list", "values": [40, 64, 7]}
    inputs = inputs_of({"heads": 4, "kv_heads": kv_heads, "lengths": lengths, "dtype": dtype})
    expected = OPERATOR.oracle(inputs, ["fwd_bwd"])
    baseline = {name: limits[0].baseline for name, limits in expected.limits.items()}
    out, dv = plain_errors(inputs, expected.tensors)
    assert baseline["out"] == pytest.approx(out, rel=0.05)
    assert baseline["dv"] == pytest.approx(dv, rel=0.05)
    unit = {"bf16": 2**-8, "fp16": 2**-11}[dtype]  # half a unit in the last place, relative
    for name in ("out", "dq", "dk", "dv"):
        largest = float(expected.tensors[name].abs().max())
        assert unit * largest / 4 < baseline[name] < 4 * unit * largest, name


def test_chance_is_allowed_for_only_where_rows_are_few() -> None:
    unit = 2**-7

    def margins(params: dict[str, Any]) -> dict[str, float]:
        expected = OPERATOR.oracle(inputs_of(params), ["fwd_bwd"])
        rounding = {name: unit / 4 * float(x.abs().max()) for name, x in expected.tensors.items()}
        limits = {name: whole[0] for name, whole in expected.limits.items()}
        return {name: limit.max_abs / max(limit.baseline, rounding[name]) for name, limit in limits.items()}

    tiny = margins({"heads": 1, "lengths": {"kind": "list", "values": [4]}, "broadcast_q": True, "q_len": 1})
    assert tiny["dq"] > 20
    assert tiny["dk"] > 20
    many = margins({"lengths": {"kind": "constant", "length": 40}, "batch": 50})
    assert many.keys() == {"out", "dq", "dk", "dv"}
    assert all(2 < value < 2.3 for value in many.values())


@given(params=random_params())
def test_rows_that_see_two_keys(params: dict[str, Any]) -> None:
    inputs = inputs_of(params)
    lengths = zip(inputs.q_lengths.tolist(), inputs.k_lengths.tolist(), strict=True)
    counted = [
        sum(visible(i, j, m, n, inputs.params.causal, inputs.params.window) for j in range(n)) >= 2
        for m, n in lengths
        for i in range(m)
    ]
    assert jagged_oracle._undecided_rows(inputs).tolist() == counted


def test_lse_has_an_absolute_limit() -> None:
    inputs = inputs_of(CASES["self"])
    right = OPERATOR.oracle(inputs, ["fwd"]).tensors["lse"].float()
    expected = OPERATOR.oracle(inputs, ["fwd"])
    assert expected.check("lse", right + 9e-5).passed
    assert not expected.check("lse", right + 1.2e-4).passed


def test_keys_that_no_query_sees_are_judged() -> None:
    """Sequences with keys and without queries have gradients of 0, and nothing else."""
    lengths = {"kind": "list", "values": [5, 300]}
    queries = {"kind": "list", "values": [40, 0]}
    expected = OPERATOR.oracle(inputs_of({"lengths": lengths, "q_lengths": queries}), ["bwd"])
    for name in ("dk", "dv"):
        result = expected.tensors[name].bfloat16()
        assert expected.check(name, result).passed
        result[20:] = 0.1
        assert not expected.check(name, result).passed


def test_matmul_settings_are_restored() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with jagged_oracle._exact_matmuls():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision("highest")
