"""Host code whose launches are simulated: what is refused, because nothing found would mean nothing."""

from __future__ import annotations

import functools

import faults
import pytest
import torch

from jfabench.sim import TargetError, simulate, simulate_calls


def launch(out: torch.Tensor) -> None:
    faults.global_kernel[(1,)](out, None, "stores")


def test_calls_that_launch_are_judged_by_their_results() -> None:
    def check() -> bool:
        out = torch.zeros(1)
        launch(out)
        return bool(out[0] == 1)  # and not the program's number, which is 0

    right, wrong = simulate_calls(functools.partial(launch, torch.zeros(1)), seeds=1), simulate_calls(check, seeds=1)
    assert right.ok
    assert [finding.kind for finding in wrong.findings] == ["wrong-result"]


def test_a_function_that_launches_nothing_is_not_right() -> None:
    def idle() -> None: ...

    line = idle.__code__.co_firstlineno
    with pytest.raises(TargetError, match=rf"test_host.py:{line}: idle launched no kernel under seed 4, policy 'late'"):
        simulate_calls(idle, seeds=[4], policies=["late"])
    with pytest.raises(TargetError, match=r"^our kernel launched no kernel under seed 0"):
        simulate_calls(idle, name="our kernel")


def test_a_grid_without_programs_is_no_launch() -> None:
    with pytest.raises(TargetError, match="launched no kernel"):
        simulate_calls(lambda: faults.global_kernel[(0,)](torch.zeros(1), None, "stores"))


def test_results_that_are_kept_are_seen_at_the_next_call() -> None:
    @functools.cache
    def once() -> None:
        launch(torch.zeros(1))

    with pytest.raises(TargetError, match=r"launched no kernel under seed 0, policy 'early'.*keep no results"):
        simulate_calls(once)


def test_wrong_without_a_launch_is_wrong() -> None:
    report = simulate_calls(lambda: False, seeds=1)
    assert [finding.kind for finding in report.findings] == ["wrong-result"]


@pytest.mark.parametrize("verdict", [torch.tensor(False), torch.tensor(True), 0, "", []])
def test_what_is_no_verdict_is_refused(verdict: object) -> None:
    def check() -> object:
        launch(torch.zeros(1))
        return verdict

    with pytest.raises(TargetError, match=f"check returned a value of type {type(verdict).__name__}: expected None"):
        simulate_calls(check, seeds=1)
    with pytest.raises(TargetError, match="returned a value of type"):
        simulate(faults.global_kernel, (1,), (torch.zeros(1), None, "stores"), check=lambda: verdict)
