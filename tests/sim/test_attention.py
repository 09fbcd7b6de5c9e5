"""The Hopper kernels through their public function, on the simulator."""

from __future__ import annotations

import re

import pytest

from jfabench.sim import CASES, Case, simulate_attention
from jfabench.sim.launching import numbered
from jfabench.sim.targets import TargetError

# Small, but with several tiles and steps, sequences that end within a block, and every role waiting for every other.
SMALL = {
    "packed": Case(keys=(70, 20), head_dim=64),
    "causal": Case(keys=(100, 1), causal=True, head_dim=64),
    "shared queries": Case(keys=(90, 0, 40), queries=64),
    "whole queries": Case(keys=(140,), queries=128, head_dim=64),
}
CONFIGURATIONS = {"fwd": 3, "bwd": 3}
RUNS = [(direction, case, i) for direction, count in CONFIGURATIONS.items() for case in SMALL for i in range(count)]


INVALID = {
    "": "'' is neither a case (broadcast, packed, causal, window, grouped, empty) nor one of its fields",
    "sideways": "'sideways' is neither a case",
    "keys=9,": "'' is neither a case",
    "keys=9, D=64": "' D=64' is neither a case",
    "packed,D=64": "'packed' is neither a case",
    # fields that are not there, there twice, or have too many, too few or no numbers
    "queries=64": "'queries=64' lacks the keys of each sequence: add them, such as keys=100:37",
    "keys=9,keys=8": "'keys=8': this field stands twice in 'keys=9,keys=8'; give it once",
    "keys=9,D=64,head_dim=64": "'head_dim=64': this field stands twice",
    "keys=9,causal,causal": "'causal': this field stands twice",
    "keys=9,causal=1": "'causal=1': causal takes no value",
    "keys=9,causal=": "'causal=': causal takes no value",
    "keys=9,queries=3:4": "'queries=3:4': expected one number; only keys and window have several",
    "keys=9,heads=1:2": "'heads=1:2': expected one number",
    "keys=9,kv_heads=1:2": "'kv_heads=1:2': expected one number",
    "keys=9,D=64:128": "'D=64:128': expected one number",
    "keys=9,window=3": "'window=3': expected two numbers, to the left and to the right, such as window=3:5",
    "keys=9,window=3:4:5": "'window=3:4:5': expected two numbers",
    "keys": "'keys': expected numbers, such as keys=100:37",
    "keys=": "'keys=': expected numbers",
    "keys=9:": "'keys=9:': expected numbers",
    "keys=x": "'keys=x': expected numbers",
    "keys=1.5": "'keys=1.5': expected numbers",
    "keys=--5": "'keys=--5': expected numbers",
    "keys=²": "'keys=²': expected numbers",
    "keys=9,window=1:-": "'window=1:-': expected numbers",
    "keys=" + 5000 * "9": "expected numbers",
    # numbers that no problem has
    "keys=-5:10": "keys=-5:10: expected numbers of at least 0",
    "keys=0": "keys=0: expected a key at least, for without any no kernel is launched",
    "keys=0:0,queries=64": "keys=0:0: expected a key at least",
    "keys=9,queries=0": "queries=0: expected at least 1",
    "keys=9,queries=-3": "queries=-3: expected at least 1",
    "keys=9,heads=0": "heads=0: expected at least 1",
    "keys=9,kv_heads=0": "kv_heads=0: expected at least 1",
    "keys=9,heads=3,kv_heads=2": "heads=3: expected a multiple of kv_heads=2",
    "keys=9,kv_heads=2": "heads=1: expected a multiple of kv_heads=2",
    "keys=9,D=0": "D=0: expected 64 or 128",
    "keys=9,D=96": "D=96: expected 64 or 128",
    "keys=9,window=-2:5": "window=-2:5: expected -1 (no bound) or more on each side",
    "keys=9,window=5:-7": "window=5:-7: expected -1 (no bound) or more on each side",
    # more than there is memory for
    "keys=999999999": "keys, queries, heads: 1,000,000,253,999,999,745 scores",
    "keys=1,queries=999999999": "keys, queries, heads: ",
    "keys=1,heads=999999999": "keys, queries, heads: ",
}


@pytest.mark.parametrize("text", INVALID, ids=lambda text: text[:30])
def test_what_is_no_case(text: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(INVALID[text])}") as raised:
        Case.parse(text)
    assert "\n" not in str(raised.value)


def test_a_case_has_what_its_text_says() -> None:
    text = "keys=100:0:37,queries=64,heads=4,kv_heads=2,D=64,causal,window=3:-1"
    assert Case.parse(text) == Case((100, 0, 37), 64, 4, 2, 64, causal=True, window=(3, -1))
    assert Case.parse("keys=9") == Case((9,))
    assert Case.parse("keys=9,window=0:0").window == (0, 0)
    assert all(Case.parse(name) is case for name, case in CASES.items())


@pytest.mark.parametrize("count", [1, 3])
def test_configurations_are_numbered_from_0(count: int) -> None:
    usable = "abc"[:count]
    assert [numbered(usable, number, "it") for number in range(count)] == list(usable)
    for number in (-1, count, count + 4):
        sentence = f"configuration {number}: it has those from 0 to {count - 1}"
        with pytest.raises(TargetError, match=sentence):
            numbered(usable, number, "it")


@pytest.mark.parametrize(("direction", "case", "configuration"), RUNS)
def test_twenty_seeds_and_three_policies(direction: str, case: str, configuration: int) -> None:
    """All configurations share the seeds: each gets its part of 20 for every case, and there are four cases."""
    count = CONFIGURATIONS[direction]
    seeds = range(configuration, 20, count)
    report = simulate_attention(SMALL[case], direction, "sm_90", seeds=seeds, configuration=configuration)
    report.require_ok()
    assert len(report.runs) >= 3 * len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("direction", "configuration"), [(d, i) for d, n in CONFIGURATIONS.items() for i in range(n)])
def test_larger_cases(direction: str, configuration: int, case: str) -> None:
    simulate_attention(CASES[case], direction, "sm_90", seeds=20, configuration=configuration).require_ok()


@pytest.mark.parametrize(("direction", "kernel", "seconds"), [("fwd", "forward_", 2), ("bwd", "backward_", 6)])
def test_speed(direction: str, kernel: str, seconds: float) -> None:
    """512 queries and keys of D = 128, detector on: seconds that a run may take, of which the best of three counts."""
    report = simulate_attention(Case(keys=(512,), queries=512), direction, "sm_90", seeds=3, policies=["random"])
    report.require_ok()
    assert min(run.seconds for run in report.runs if run.kernel.startswith(kernel)) < seconds
