"""Mutation scores of whole kernels. Slow: `-m slow`; the numbers of a run are in jfabench/sim/MUTATION.md."""

from __future__ import annotations

import pytest
from mutation_cases import SUBJECTS, Subject

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_faults_are_caught_and_survivors_are_known(subject: Subject) -> None:
    report = subject.mutate()
    caught, executed = report.score("phase")
    assert caught == executed > 0, report
    waits = [outcome.verdict for outcome in report.executed if outcome.mutation.kind == "barrier-wait"]
    assert waits.count("caught") >= 0.75 * (len(waits) - waits.count("redundant")), report
    for outcome in report.survivors:
        assert subject.explanation(outcome), f"{outcome.mutation}: {outcome.note or 'survived'}\n{report}"
        if outcome.mutation.kind == "dot-wait":  # one that waits for a matmul is always caught
            assert outcome.verdict == "redundant", report
    assert not [outcome for outcome in report.caught if outcome.by == "error"], report
