"""Policies that contradict themselves are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from jfabench.cli import main
from jfabench.policy import MeasurePolicy
from jfabench.sweep import load_sweep, shipped


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        ({"min_iterations": 20, "max_iterations": 3}, 20, 3),
        ({"min_iterations": 2, "max_iterations": 1}, 2, 1),
        ({"max_iterations": 3}, 12, 3),  # against the defaults
        ({"min_iterations": 1001}, 1001, 1000),
    ],
)
def test_more_at_least_than_at_most(given: dict[str, Any], least: int, most: int) -> None:
    sentence = (
        f"min_iterations: {least} and max_iterations: {most} contradict each other: set min_iterations to {most} at "
        f"most as well, or max_iterations to {least} at least"
    )
    with pytest.raises(ValidationError, match=re.escape(sentence)) as raised:
        MeasurePolicy(**given)
    assert raised.value.error_count() == 1


@pytest.mark.parametrize("count", [1, 12, 1000])
def test_as_many_at_least_as_at_most(count: int) -> None:
    policy = MeasurePolicy(min_iterations=count, max_iterations=count)  # type: ignore[call-arg]
    assert MeasurePolicy.model_validate(policy.model_dump()) == policy


@pytest.mark.parametrize("name", sorted(shipped()))
@pytest.mark.parametrize("scale", ["full", "cpu"])
def test_a_cap_below_what_a_shipped_file_wants_says_what_to_set_as_well(
    name: str, scale: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    least = load_sweep(name, scale).config.measure.min_iterations
    assert least > 3
    words = ["sweep", "--config", name, "--device", "cpu", "--dry-run", "--set", "measure.max_iterations=3"]
    if scale == "cpu":
        assert main(words) == 2
        assert f"min_iterations: {least} and max_iterations: 3 contradict" in capsys.readouterr().err
        assert main([*words, "--set", "measure.min_iterations=3"]) == 0
    both = load_sweep(name, scale, settings=["measure.max_iterations=3", "measure.min_iterations=3"]).config.measure
    assert (both.min_iterations, both.max_iterations) == (3, 3)
