"""Right computations pass, whatever the case and however they round; faults of a few percent, of few rows, do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from cases import complete, random_params
from faulty_kernels import Fault, kernel
from hypothesis import given, settings
from hypothesis import strategies as st

from jfabench.operators.jagged_attention import OPERATOR
from jfabench.records import DIRECTIONS, TensorCheck

SHARED = {"batch": 64, "heads": 1, "broadcast_q": True, "q_len": 64}
BATCHES: dict[str, dict[str, Any]] = {
    "lognormal": {**SHARED, "lengths": {"kind": "lognormal", "median": 60, "sigma": 1.0, "max_len": 600}},
    "zipf": {**SHARED, "lengths": {"kind": "zipf", "exponent": 1.1, "max_len": 600}},
    "fill": {**SHARED, "lengths": {"kind": "fill", "max_len": 600, "fill": 0.5}},
    "jagged": {"batch": 16, "heads": 1, "lengths": {"kind": "lognormal", "median": 60, "sigma": 1.0, "max_len": 400}},
    "causal": {"batch": 4, "heads": 1, "lengths": {"kind": "constant", "length": 512}, "causal": True},
    "causal uneven": {
        "batch": 16,
        "heads": 1,
        "lengths": {"kind": "lognormal", "median": 100, "sigma": 1.0, "max_len": 500},
        "causal": True,
    },
    "window": {"batch": 8, "heads": 1, "lengths": {"kind": "constant", "length": 200}, "window": [20, 4]},
    "gqa": {**SHARED, "batch": 24, "heads": 4, "kv_heads": 1, "lengths": {"kind": "fill", "max_len": 300, "fill": 0.5}},
}
UNEVEN = ("lognormal", "zipf", "fill")
LONG = 200


@functools.cache
def batch(name: str) -> tuple[Any, Any]:
    inputs = OPERATOR.make_inputs(OPERATOR.parse(complete(BATCHES[name])), 3, "cpu")
    return inputs, OPERATOR.oracle(inputs, DIRECTIONS)


def failures(name: str, fault: Fault) -> dict[str, TensorCheck]:
    inputs, expected = batch(name)
    checks = OPERATOR.check(kernel(inputs, fault), expected, "fwd_bwd")
    return {check.tensor: check for check in checks if not check.passed}


def longest(name: str, part: float) -> int:
    """The length that this part of the sequences reaches or exceeds."""
    lengths = sorted(batch(name)[0].k_lengths.tolist(), reverse=True)
    return int(lengths[max(1, int(part * len(lengths))) - 1])


@pytest.mark.parametrize("name", BATCHES)
def test_a_right_kernel_passes(name: str) -> None:
    assert failures(name, Fault()) == {}


@settings(max_examples=150)
@given(params=random_params(), seed=st.integers(0, 2**31))
def test_a_right_kernel_passes_any_case(params: dict[str, Any], seed: int) -> None:
    inputs = OPERATOR.make_inputs(OPERATOR.parse(params), seed, "cpu")
    checks = OPERATOR.check(kernel(inputs), OPERATOR.oracle(inputs, DIRECTIONS), "fwd_bwd")
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("factor", [1.2, 1.05])
def test_dv_of_long_sequences(name: str, factor: float) -> None:
    assert failures(name, Fault(dv=lambda n: factor if n > LONG else 1.0)).keys() == {"dv"}


@pytest.mark.parametrize("name", [*UNEVEN, "jagged"])
def test_ds_of_long_sequences(name: str) -> None:
    assert "dk" in failures(name, Fault(ds=lambda n: 1.1 if n > LONG else 1.0))


@pytest.mark.parametrize("name", UNEVEN)
def test_out_of_long_sequences(name: str) -> None:
    assert "out" in failures(name, Fault(out=lambda n: 1.01 if n > LONG else 1.0))


@pytest.mark.parametrize("name", [*UNEVEN, "jagged", "causal uneven"])
@pytest.mark.parametrize("lost", [8, 1])
def test_the_last_keys_of_the_longest_sequences(name: str, lost: int) -> None:
    """The one key of the one longest sequence that a single row sees, under the causal mask, shows in dV alone."""
    long = longest(name, 0.1)
    found = failures(name, Fault(unseen=lambda n: lost if n >= long else 0)).keys()
    assert "dv" in found
    assert "dk" in found or (name == "causal uneven" and lost == 1)


@pytest.mark.parametrize("name", ["causal", "causal uneven"])
def test_the_last_key_under_a_causal_mask(name: str) -> None:
    assert {"dk", "dv"} <= failures(name, Fault(unseen=lambda n: 1)).keys()


@pytest.mark.parametrize(
    ("name", "keys"), [("fill", 64), ("causal", 64), ("jagged", 64), ("lognormal", 16), ("zipf", 16)]
)
def test_out_summed_up_in_the_input_dtype(name: str, keys: int) -> None:
    assert "out" in failures(name, Fault(sum_every=keys))


@pytest.mark.parametrize("name", BATCHES)
def test_dq_is_half_a_percent_too_large(name: str) -> None:
    assert failures(name, Fault(dq=lambda n: 1.005)).keys() == {"dq"}


@pytest.mark.parametrize("name", [*UNEVEN, "jagged", "causal", "causal uneven"])
def test_the_scale_without_lse(name: str) -> None:
    assert "out" in failures(name, Fault(scale=1.003, lse=False))


@pytest.mark.parametrize("name", BATCHES)
def test_lse_tells_a_scale_that_is_a_tenth_of_a_percent_off(name: str) -> None:
    assert "lse" in failures(name, Fault(scale=1.001))


@pytest.mark.parametrize("window", [(-1, -1), (20, 5), (20, 3), (19, 4), (21, 4)])
def test_windows(window: tuple[int, int]) -> None:
    assert failures("window", Fault(window=window)).keys() == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("name", BATCHES)
def test_no_delta(name: str) -> None:
    assert failures(name, Fault(delta=False)).keys() == {"dq", "dk"}


@pytest.mark.parametrize("name", BATCHES)
def test_the_last_key_of_every_block(name: str) -> None:
    assert {"dk", "dv"} <= failures(name, Fault(forgotten=64)).keys()


@pytest.mark.parametrize("name", [*UNEVEN, "jagged", "causal uneven"])
def test_dq_without_the_longest_sequence(name: str) -> None:
    long = longest(name, 0.0)
    assert failures(name, Fault(dq=lambda n: 0.0 if n == long else 1.0)).keys() == {"dq"}


def test_the_class_is_named() -> None:
    detail = failures("fill", Fault(dv=lambda n: 1.05 if n > 256 else 1.0))["dv"].detail
    assert detail.startswith("keys 257..")
    assert ": relative norm 0.0" in detail
    assert " exceeds 0.00" in detail
