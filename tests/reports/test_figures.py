"""What is drawn: axes, panels, figures, and the words around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import synthetic

from jfabench.reports import figures
from jfabench.reports.load import Results


def test_layout_takes_x_panel_and_figures_from_the_grid(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid(queries=(64, 256)))
    assert figures.layout(found.rows, found.axes) == figures.Layout("lengths.max_len", "lengths.fill", ("q_len",))


def test_layout_leaves_out_what_follows_from_x(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid(fills=(0.5,)))  # the longest N has a smaller batch
    assert found.rows["batch"].nunique() == 2
    assert figures.layout(found.rows, []) == figures.Layout("lengths.max_len", None, ())


def test_layout_of_a_single_case_and_of_words_only(results: Callable[..., Results]) -> None:
    one = synthetic.grid((512,), (0.5,))
    assert figures.layout(results(one).rows, []) == figures.Layout(None, None, ())
    half = [replace(r, case=replace(r.case, params={**r.case.params, "dtype": "fp16"})) for r in one]
    assert figures.layout(results(one + half, "two").rows, ["dtype"]) == figures.Layout("dtype", None, ())


def test_without_ceilings_or_baseline_there_is_only_the_speed(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid((512, 1024)), ceilings=None, baseline=None)
    assert [spec.metric for spec in figures.figures(found, [])] == [figures.SPEED]
    assert "no ceilings" in next(iter(figures.figures(found, []))).subtitle


def test_one_file_for_each_further_axis_value_and_what_is_left_out_is_said(results: Callable[..., Results]) -> None:
    queries = (1, 2, 3, 4, 5, 6)
    found = results(
        synthetic.grid((512, 1024, 2048, 4096, 5000, 6000, 7000), (0.5, 0.9), queries, ("fa4", "fa4_kernel"))
    )
    omitted: list[str] = []
    stems = [spec.stem for spec in figures.figures(found, omitted) if spec.metric is figures.SPEED]
    assert stems == [f"speed-M_{m}" for m in queries[:3]]
    assert omitted == ["Drawn are the first 3 of 6 combinations of M; the table below has all."]


def test_a_figure_without_any_number_is_named(results: Callable[..., Results]) -> None:
    records = [
        replace(r, status="oom", measurement=None) if r.case.params["q_len"] == 512 else r
        for r in synthetic.grid((512, 1024), (0.5, 0.9), (256, 512))
    ]
    omitted: list[str] = []
    # Of equally many values the last axis of the manifest is x, the one before it makes panels.
    found = results(records, axes=("q_len", "lengths.fill", "lengths.max_len"))
    stems = [spec.stem for spec in figures.figures(found, omitted)]
    assert stems == ["speed-M_256", "speedup-M_256", "roofline-M_256"]
    assert omitted[0] == "Speed, M = 512: no case has a number."


@pytest.mark.parametrize(("changes", "words"), [({}, ""), ({"causal": True}, "causal")])
def test_the_subtitle_says_what_all_panels_share(
    results: Callable[..., Results], changes: dict[str, Any], words: str
) -> None:
    records = [
        replace(r, case=replace(r.case, params={**r.case.params, **changes}))
        for r in synthetic.grid((512, 1024), (0.5,))
    ]
    subtitle = next(iter(figures.figures(results(records), []))).subtitle
    expected = ["NVIDIA H200", "bf16", "B=768", "H=4", "H_kv=4", "D=128", words, "measured ceilings"]
    assert subtitle == " · ".join(word for word in expected if word)


def test_file_names_are_accepted_everywhere() -> None:
    assert figures._stem(figures.SPEED, {"lengths.path": "a/b c:*.csv"}) == "speed-path_a_b_c_.csv"
