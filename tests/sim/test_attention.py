"""The Hopper kernels through their public function, on the simulator."""

from __future__ import annotations

import pytest

from jfabench.sim import CASES, Case, simulate_attention

# Small, but with several tiles and steps, sequences that end within a block, and every role waiting for every other.
SMALL = {
    "packed": Case(keys=(70, 20), head_dim=64),
    "causal": Case(keys=(100, 1), causal=True, head_dim=64),
    "shared queries": Case(keys=(90, 0, 40), queries=64),
    "whole queries": Case(keys=(140,), queries=128, head_dim=64),
}
CONFIGURATIONS = {"fwd": 3, "bwd": 3}
RUNS = [(direction, case, i) for direction, count in CONFIGURATIONS.items() for case in SMALL for i in range(count)]


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
