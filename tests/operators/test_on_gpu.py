"""What only a GPU can show: the oracle's float32 path, the allocator's poison, and every provider that is installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CASES, complete

from jfabench import check
from jfabench.check import poisoned_allocations
from jfabench.operator import load_providers
from jfabench.operators import jagged_oracle
from jfabench.operators.jagged_attention import OPERATOR
from jfabench.records import DIRECTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROVIDERS = load_providers("jagged_attention").by_name
LARGER: dict[str, dict[str, Any]] = {
    "jagged": {"batch": 64, "heads": 4, "head_dim": 128, "broadcast_q": True, "q_len": 256}
    | {"lengths": {"kind": "fill", "max_len": 1024, "fill": 0.5}},
    "dense": {"batch": 16, "heads": 4, "head_dim": 128, "lengths": {"kind": "constant", "length": 512}},
    "causal-gqa": {"batch": 32, "heads": 8, "kv_heads": 2, "head_dim": 64, "causal": True}
    | {"lengths": {"kind": "fill", "max_len": 700, "fill": 0.5}},
    "window": {"batch": 32, "heads": 4, "head_dim": 64, "window": [100, 20]}
    | {"lengths": {"kind": "fill", "max_len": 700, "fill": 0.3}},
    "empties": {"batch": 64, "heads": 4, "head_dim": 128, "broadcast_q": True, "q_len": 64}
    | {"lengths": {"kind": "zipf", "exponent": 1.1, "max_len": 900, "empty": 0.3}},
}


def on_cpu(inputs: Any) -> Any:
    tensors = {name: getattr(inputs, name).cpu() for name in ("q", "k", "v", "dout", "q_offsets", "k_offsets")}
    return replace(inputs, **tensors)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("elements", [2**29, 6000, 60])
def test_oracle_agrees_with_float64(case: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jagged_oracle.ELEMENTS_PER_GROUP, "cuda", elements)
    torch.set_float32_matmul_precision("high")  # TF32 allowed, as a provider may leave it; the oracle must not use it
    try:
        inputs = OPERATOR.make_inputs(OPERATOR.parse(complete(CASES[case])), 0, "cuda")
        expected = OPERATOR.oracle(inputs, ["fwd_bwd"])
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setitem(jagged_oracle.ROWS_AT_A_TIME, "cpu", 2**31)
    right = OPERATOR.oracle(on_cpu(inputs), ["fwd_bwd"])
    for name, tensor in right.tensors.items():
        torch.testing.assert_close(expected.tensors[name].double().cpu(), tensor, atol=2e-5, rtol=2e-5, msg=name)
    for name, limits in right.limits.items():
        # The largest of a few dozen rounding errors depends on the order of sums, which the group size changes.
        baseline, on_gpu = (x[0].baseline if x else 0.0 for x in (limits, expected.limits[name]))
        assert baseline / 2 - 1e-5 <= on_gpu <= baseline * 2 + 1e-5


@pytest.mark.parametrize("elements", [1000, 300_000, 5_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_for_results_are_poisoned(elements: int, dtype: torch.dtype) -> None:
    """Whatever is free beside: the blocks of this size are taken before they are filled, or new ones are."""
    like = torch.ones(elements, device="cuda")  # kept, as the oracle's tensors are
    used = [torch.ones(elements, device="cuda", dtype=dtype) for _ in range(2)]
    del used
    check._poison_free_blocks([like])
    fresh = torch.empty(elements, device="cuda", dtype=dtype)
    assert fresh.isnan().all()


def test_poison_leaves_memory_to_the_provider() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    like = torch.empty(total // 16, device="cuda")  # a quarter of the memory; poison of 1/8, 1/8 and 1/4 of it
    check._poison_free_blocks([like, like, like])
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert unused < free - like.nbytes
    del like
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", LARGER)
def test_fingerprints_are_those_of_a_cpu(case: str) -> None:
    inputs = OPERATOR.make_inputs(OPERATOR.parse(LARGER[case]), 0, "cuda")
    assert OPERATOR.fingerprint(inputs) == OPERATOR.fingerprint(on_cpu(inputs))


@pytest.mark.parametrize("case", LARGER)
@pytest.mark.parametrize("name", sorted(set(PROVIDERS) - {"reference"}))
def test_every_provider_is_right(name: str, case: str) -> None:
    provider = PROVIDERS[name]
    if missing := provider.unavailable("cuda"):
        pytest.skip(str(missing))
    inputs = OPERATOR.make_inputs(OPERATOR.parse(LARGER[case]), 0, "cuda")
    expected = OPERATOR.oracle(inputs, DIRECTIONS)
    for direction in DIRECTIONS:
        if provider.unsupported(inputs.params, direction):
            continue
        call = provider.prepare(inputs, direction)
        for _ in range(2):
            with poisoned_allocations(list(expected.tensors.values())):
                results = call.results(call.run())
                torch.cuda.synchronize()
            checks = OPERATOR.check(results, expected, direction)
            assert checks
            assert all(c.passed for c in checks), [c for c in checks if not c.passed]
            for result in results.values():
                result.fill_(torch.nan)  # the second call must not return, nor read, what the first one did
