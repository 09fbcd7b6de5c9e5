"""The tutorials of fbtriton, unmodified: right, and nothing found, except where they are at fault themselves."""

from __future__ import annotations

import pytest
from tutorials import TUTORIALS, Tutorial

from jfabench.sim import Run, simulated_gpu
from jfabench.sim.scheduler import POLICIES, Policy

# The last lines start a TMA store and end: nobody waits until it has read shared memory.
AT_FAULT = {"blackwell_gemm_pipelined": {"not-waited"}}


def run_tutorial(tutorial: Tutorial, seed: int, policy: Policy) -> tuple[float, list[Run]]:
    with simulated_gpu(tutorial.arch, seed, policy, multiprocessors=2, **dict(tutorial.options)) as gpu:
        error = tutorial.run()
    return error, gpu.runs


def check(tutorial: Tutorial, seed: int, policy: Policy) -> None:
    error, runs = run_tutorial(tutorial, seed, policy)
    findings = [finding for run in runs for finding in run.findings]
    unexpected = [f for f in findings if f.kind not in AT_FAULT.get(tutorial.name, set())]
    assert not unexpected, "\n".join(map(str, unexpected))
    assert error < tutorial.limit
    assert len(findings) == 0 or tutorial.name in AT_FAULT


@pytest.mark.parametrize(("number", "tutorial"), list(enumerate(TUTORIALS)), ids=[t.name for t in TUTORIALS])
def test_one_schedule(number: int, tutorial: Tutorial) -> None:
    check(tutorial, number, POLICIES[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=[t.name for t in TUTORIALS])
def test_all_schedules(tutorial: Tutorial, seed: int, policy: Policy) -> None:
    check(tutorial, seed, policy)


def test_the_fault_of_a_tutorial_is_found() -> None:
    (tutorial,) = [t for t in TUTORIALS if t.name == "blackwell_gemm_pipelined"]
    _, runs = run_tutorial(tutorial, 0, "late")
    (finding,) = [finding for run in runs for finding in run.findings]
    assert finding.kind == "not-waited"
    assert finding.places[0].code.startswith("tlx.async_descriptor_store(desc_c, c_smem")
