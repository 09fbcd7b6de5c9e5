"""Charts: what is drawn, inspected as matplotlib objects; and files that are valid, small and always the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from PIL import Image

from jfabench.reports import charts, figures, svg
from jfabench.reports.load import Results


def panels(results: Results, metric: figures.Metric) -> dict[str, Axes]:
    spec = next(spec for spec in figures.figures(results, []) if spec.metric is metric)
    return {panel.title: panel.axes for panel in charts.render(spec)[1]}


def lines(ax: Axes) -> dict[str, Any]:
    return {c.get_label(): c for c in ax.containers if isinstance(c, ErrorbarContainer)}


def crosses(ax: Axes) -> list[tuple[str, float]]:
    return [
        (line.get_label().removeprefix("_no number: "), float(x))
        for line in ax.lines
        if line.get_marker() == "x"
        for x in line.get_xdata()
    ]


def test_each_panel_has_a_line_per_provider_with_its_numbers(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid())
    drawn = panels(found, figures.SPEED)
    assert list(drawn) == [f"fill = {f}, {d}" for d in ("forward", "backward") for f in (0.1, 0.5, 0.9)]
    ax = drawn["fill = 0.9, forward"]
    assert set(lines(ax)) == set(synthetic.FRACTION)
    rows = found.rows.query("`lengths.fill` == 0.9 and direction == 'fwd' and provider == 'fa4'")
    data, _, bars = lines(ax)["fa4"]
    np.testing.assert_array_equal(data.get_xdata(), synthetic.LENGTHS)
    np.testing.assert_allclose(data.get_ydata(), rows["tflops"])
    ends = np.array(bars[0].get_segments())[:, :, 1]
    np.testing.assert_allclose(ends[:, 0], rows["flops"] / rows["high_s"] / 1e12)
    np.testing.assert_allclose(ends[:, 1], rows["flops"] / rows["low_s"] / 1e12)


def test_the_x_axis_is_logarithmic_and_names_the_real_values(results: Callable[..., Results]) -> None:
    ax = next(iter(panels(results(synthetic.grid()), figures.SPEED).values()))
    assert ax.get_xscale() == "log"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["512", "1024", "2048", "4096", "8192"]
    assert ax.get_xlabel() == "longest sequence N (keys)"


def test_the_roofline_is_drawn_or_its_place_told(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid())
    drawn = panels(found, figures.SPEED)
    roof = [line for line in drawn["fill = 0.9, forward"].lines if line.get_label() == "roofline (measured)"]
    expected = found.rows.query("`lengths.fill` == 0.9 and direction == 'fwd'").drop_duplicates("shape")
    np.testing.assert_allclose(roof[0].get_ydata(), expected["flops"] / expected["roofline_s"] / 1e12)
    texts = [text.get_text() for text in drawn["fill = 0.9, backward"].texts]
    assert "roofline above: 800" in texts


def test_every_case_without_a_number_is_marked_and_named(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid())
    spec = next(iter(figures.figures(found, [])))
    panel = {panel.title: panel for panel in charts.render(spec)[1]}["fill = 0.1, backward"]
    assert panel.notes == ("sdpa_padded: oom at 8192", "fa3: unsupported", "fa4: timeout at 2048")
    # fa3 has no number at all here: it is named, not drawn.
    assert sorted(crosses(panel.axes)) == [("fa4", 2048.0), ("sdpa_padded", 8192.0)]
    y = lines(panel.axes)["fa4"][0].get_ydata()
    assert np.isnan(y[2])  # the line breaks there
    assert np.isfinite(np.delete(y, 2)).all()


def test_a_case_that_was_not_run_is_marked_too(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    (panel,) = charts.render(next(iter(figures.figures(results(records[:-1]), []))))[1]
    assert panel.notes == ("fa4: not run at 1024",)


def test_a_speedup_without_a_baseline_is_marked(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    records[0] = replace(records[0], status="failed", measurement=None)
    spec = next(spec for spec in figures.figures(results(records), []) if spec.metric is figures.SPEEDUP)
    (panel,) = charts.render(spec)[1]
    assert panel.notes == ("fa4: not comparable at 512", "fa4_kernel: failed at 512")
    assert ("fa4", 512.0) in crosses(panel.axes)


def test_speedups_are_on_a_logarithmic_axis_that_shows_one(results: Callable[..., Results]) -> None:
    ax = next(iter(panels(results(synthetic.grid()), figures.SPEEDUP).values()))
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[0] < 1 < ax.get_ylim()[1]
    assert 1.0 in ax.yaxis.get_major_locator()()


@pytest.mark.parametrize("factor", [1e-6, 0.01, 0.3, 1.0, 1.1, 5.0, 300.0])
def test_speedups_of_any_size_have_a_few_ticks(results: Callable[..., Results], factor: float) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    for at, record in enumerate(records):
        if record.case.provider == "fa4":
            measurement = synthetic.measured(record)
            rounds = tuple(tuple(sample / factor for sample in block) for block in measurement.rounds)
            records[at] = replace(record, measurement=replace(measurement, rounds=rounds))
    ax = next(iter(panels(results(records), figures.SPEEDUP).values()))
    ticks = ax.yaxis.get_major_locator()()
    low, high = ax.get_ylim()
    assert 2 <= len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)
    assert low < min(0.9, factor) < max(1.0, factor) < high


def test_a_very_wide_interval_does_not_flatten_its_panel(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    noisy = replace(synthetic.measured(records[1]), rounds=((1e-4,) * 3, (1e-2,) * 3))
    records[1] = replace(records[1], measurement=noisy)
    found = results(records)
    assert found.rows["low_s"].min() < 1e-12  # two rounds that differ a hundredfold
    for metric in (figures.SPEED, figures.SPEEDUP):
        ax = next(iter(panels(found, metric).values()))
        y = [value for line in lines(ax).values() for value in line[0].get_ydata()]
        assert ax.get_ylim()[1] < 2 * max(y)


def test_fractions_share_one_scale(results: Callable[..., Results]) -> None:
    limits = {ax.get_ylim() for ax in panels(results(synthetic.grid()), figures.ROOFLINE).values()}
    assert limits == {(0.0, 105.0)}


def test_a_cpu_figure_says_that_it_is_no_performance_result(results: Callable[..., Results]) -> None:
    env = {**synthetic.ENV, "gpu": None}
    records = [replace(record, env=env) for record in synthetic.grid((512, 1024), (0.5,))]
    found = results(records, device="cpu")
    for spec in figures.figures(found, []):
        assert spec.subtitle.startswith(figures.CPU_NOTE)
        for panel in charts.render(spec)[1]:
            texts = [text.get_text().replace("\n", " ") for text in panel.axes.texts]
            assert figures.CPU_NOTE in texts


def test_slow_machines_get_a_unit_that_reads_well(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4",))
    slow = [replace(r, work=replace(r.work, flops=r.work.flops / 1e4)) for r in records if r.work]
    ax = next(iter(panels(results(slow), figures.SPEED).values()))
    assert "GFLOP/s" in [text.get_text() for text in ax.texts]


def test_parameters_that_may_be_null_are_an_axis_like_any_other(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,))
    scaled = [replace(r, case=replace(r.case, params={**r.case.params, "sm_scale": 0.25})) for r in records]
    drawn = panels(results(records + scaled), figures.SPEED)
    assert list(drawn) == [f"sm_scale = {s}, {d}" for d in ("forward", "backward") for s in ("none", 0.25)]
    assert all(len(ax.containers) >= 5 for ax in drawn.values())


def test_two_grids_get_figures_and_axes_of_their_own(results: Callable[..., Results]) -> None:
    """A merged report of jagged and dense shapes, whose N have different names."""
    found = results(synthetic.grid((512, 1024), (0.1, 0.5)) + synthetic.dense((512, 4096)))
    specs = [spec for spec in figures.figures(found, []) if spec.metric is figures.SPEED]
    assert [spec.stem for spec in specs] == ["speed-lengths_fill", "speed-lengths_constant"]
    ticks = [[t.get_text() for t in charts.render(spec)[1][0].axes.get_xticklabels()] for spec in specs]
    assert ticks == [["512", "1024"], ["512", "4096"]]
    labels = [charts.render(spec)[1][0].axes.get_xlabel() for spec in specs]
    assert labels == ["longest sequence N (keys)", "sequence length N"]


def test_panels_of_one_line_stand_side_by_side_forward_first(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), directions=("bwd", "fwd"))
    figure, drawn = charts.render(next(iter(figures.figures(results(records), []))))
    assert [panel.title for panel in drawn] == ["forward", "backward"]
    first, second = (panel.axes.get_position() for panel in drawn)
    assert first.x1 < second.x0
    assert first.y0 == second.y0
    figure.canvas.draw()
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)


def test_large_integers_are_written_out(results: Callable[..., Results]) -> None:
    records = synthetic.grid((1_048_576, 2_097_152), (0.5,), providers=("fa4",), directions=("fwd",))
    ax = next(iter(panels(results(records), figures.SPEED).values()))
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1048576", "2097152"]


def test_files_are_valid_and_always_the_same(results: Callable[..., Results]) -> None:
    found = results(synthetic.grid(fills=(0.1, 0.5), directions=("bwd",)))
    folder = found.target.charts
    folder.mkdir()
    (folder / "speed-old.svg").write_text("left from an earlier report")
    (folder / "mine.svg").write_text("the user's own")
    (folder / "speedy.svg").write_text("the user's own")
    charts.draw(found)
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {
        "mine.svg",
        "speedy.svg",
        *(f"{m.name}.{kind}" for m in figures.METRICS for kind in ("svg", "png")),
    }
    charts.draw(found)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    for metric in figures.METRICS:
        root = ElementTree.fromstring(first[f"{metric.name}.svg"])
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"fill = 0.1, backward", "triton_jfa", "8192"} <= texts
        with Image.open(folder / f"{metric.name}.png") as image:
            image.verify()
            assert image.width > 800


def test_the_charts_of_an_earlier_report_stay_until_the_new_ones_stand(
    results: Callable[..., Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(synthetic.grid((512, 1024), (0.5,)))
    charts.draw(found)
    (found.target.charts / "speed-M_64.svg").write_text("old")
    before = {path.name for path in found.target.charts.iterdir()}

    def fail(figure: object) -> bytes:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(charts, "png", fail)
        with pytest.raises(OSError, match="no space"):
            charts.draw(found)
    assert {path.name for path in found.target.charts.iterdir()} == before
    charts.draw(found)
    assert {path.name for path in found.target.charts.iterdir()} == before - {"speed-M_64.svg"}


def test_a_long_axis_gets_bands_and_markers_where_a_point_stands_alone(results: Callable[..., Results]) -> None:
    records = synthetic.grid(range(100, 7000, 100), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    records[1] = replace(records[1], status="failed", measurement=None)
    records[5] = replace(records[5], status="failed", measurement=None)
    found = results(records)
    ax = next(iter(panels(found, figures.SPEED).values()))
    line = next(line for line in ax.lines if line.get_label() == "fa4")
    assert np.isnan(line.get_ydata()[[0, 2]]).all()
    assert 1 in line.get_markevery()
    assert len(line.get_markevery()) < 25
    assert len(ax.collections) == 2
    assert ("fa4", 100.0) in crosses(ax)
    charts.draw(found)
    assert max(path.stat().st_size for path in found.target.charts.iterdir()) < 200_000


def test_names_with_special_characters_are_drawn_as_they_are(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    odd = "a$b_{c}$<&"
    records = [replace(r, case=replace(r.case, provider=odd)) if r.case.provider == "fa4" else r for r in records]
    drawn = charts.draw(results(records))
    assert all("a$b_{c}$&lt;&amp;" in panel.svg for chart in drawn.charts for panel in chart.panels)


def test_panels_take_their_colours_from_the_page(results: Callable[..., Results]) -> None:
    drawn = charts.draw(results(synthetic.grid(fills=(0.1, 0.5), directions=("bwd",))))
    for chart in drawn.charts:
        for panel in chart.panels:
            root = ElementTree.fromstring(panel.svg)
            assert root.findtext("title") == f"{chart.title}: {panel.title}"
            assert "#" not in panel.svg.replace("url(#", "").replace('href="#', "")
            assert "var(--text)" in panel.svg
            ids = {element.get("id") for element in root.iter() if element.get("id")}
            used = {element.get("href", "").lstrip("#") for element in root.iter() if element.get("href")}
            assert used <= ids


def test_no_number_at_all_draws_nothing_and_says_so(results: Callable[..., Results]) -> None:
    records = [replace(r, status="failed", measurement=None) for r in synthetic.grid((512,), (0.5,))]
    drawn = charts.draw(results(records))
    assert drawn.charts == ()
    assert drawn.omitted == ("No case has a number, so there is nothing to draw.",)


def test_compacting_changes_coordinates_only() -> None:
    source = """<?xml version="1.0"?>
    <svg xmlns="http://www.w3.org/2000/svg" width="10pt"><metadata>x</metadata>
     <g id="panel-0"><path id="used" d="M 0.123456 1
    L 2 3
    "/><text id="unused" x="1.23456">0.0625× of 1.23456</text><use href="#used"/></g></svg>"""
    text = svg.compact(source)
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}g/{space}text") == "0.0625× of 1.23456"
    path = root.find(f"{space}g/{space}path")
    assert path is not None
    assert path.attrib == {"id": "used", "d": "M 0.12 1 L 2 3"}
    assert "unused" not in text
    assert "metadata" not in text


def test_long_names_get_room_and_very_long_ones_are_cut(results: Callable[..., Results]) -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4_kernel", "fa4"), directions=("fwd",))
    long = "a_provider_with_quite_a_long_name"
    records = [replace(r, case=replace(r.case, provider=long)) if r.case.provider == "fa4" else r for r in records]
    fig, (panel,) = charts.render(next(iter(figures.figures(results(records), []))))
    fig.canvas.draw()
    (label,) = [text for text in panel.axes.texts if text.get_text().startswith("a_provider")]
    assert label.get_text() == "a_provider_with_quite_a…"
    assert label.get_window_extent().x1 <= fig.bbox.x1


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(-0.5, 1.5), max_size=12), st.floats(0.01, 0.08))
def test_labels_are_apart_in_order_and_inside(heights: dict[str, float], gap: float) -> None:
    placed = charts.spread(heights, gap)
    order = sorted(heights, key=lambda name: heights[name])
    values = [placed[name] for name in order]
    assert all(b - a >= gap - 1e-9 for a, b in itertools.pairwise(values))
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in values)
