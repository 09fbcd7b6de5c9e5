"""The heatmap: shares of time against a plain loop, colours, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from jfabench.reports import palette
from jfabench.reports.heatmap import BINS, Occupancy, busy_shares, heatmap, save


def table(*rows: tuple[object, ...], label: bool = False) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["sm", "start", "end", *(["label"] if label else [])])


spans = st.lists(
    st.tuples(st.integers(0, 3), st.floats(0, 10), st.floats(0, 5)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=12,
)


@given(spans)
@settings(max_examples=50)
def test_shares_are_overlaps_over_widths(rows: list[tuple[int, float, float]]) -> None:
    edges = np.linspace(0, 15, 8)
    found = busy_shares(table(*rows), edges, 4)
    for sm in range(4):
        for i, (low, high) in enumerate(itertools.pairwise(edges)):
            overlap = sum(max(0.0, min(end, high) - max(start, low)) for s, start, end in rows if s == sm)
            assert found[sm, i] == pytest.approx(overlap / (high - low), abs=1e-9)


def pixels(figure: Figure, panel: int = 0) -> np.ndarray:
    data = figure.axes[panel].images[0].get_array()
    assert data is not None
    return np.asarray(data)


def test_idle_time_is_blank_and_work_has_the_colour_of_its_label() -> None:
    work = table((0, 1e-6, 2e-6, "load"), (0, 2e-6, 3e-6, "wait"), (1, 1e-6, 2e-6, "load"), label=True)
    figure = heatmap([Occupancy("a", work, sms=3)], title="t", label="role")
    cells = pixels(figure)
    assert cells.shape == (3, BINS, 4)
    np.testing.assert_allclose(cells[2, :, 3], 0)  # this one has no work
    np.testing.assert_allclose(cells[1, : BINS // 2, 3], 1)
    np.testing.assert_allclose(cells[1, BINS // 2 :, 3], 0)
    first, second = (to_hex(cells[0, i, :3]) for i in (0, -1))
    assert (first, second) == (palette.STYLES[0].color, palette.STYLES[1].color)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["load", "wait"]
    ax = figure.axes[0]
    assert ax.get_xlabel() == "microseconds"
    assert ax.get_xlim()[0] == 0  # time begins with the first start
    assert ax.lines[0].get_xdata()[0] == pytest.approx(2.0)


def test_numbers_get_a_scale_and_programs_share_a_line() -> None:
    work = table((0, 0.0, 1.0, 1), (0, 0.0, 2.0, 9), label=True)
    figure = heatmap([Occupancy("a", work, lanes=2)], title="t", unit="steps", label="steps of a tile")
    cells = pixels(figure)
    np.testing.assert_allclose(cells[0, : BINS // 2, 3], 1)
    np.testing.assert_allclose(cells[0, BINS // 2 :, 3], 0.5)
    assert cells[0, 0, 0] > cells[0, -1, 0]  # between the least and the largest number it is lighter than the largest
    assert figure.axes[0].get_xlabel() == "steps"
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["1", "9"]
    same = heatmap([Occupancy("a", table((0, 0.0, 1.0, 4), label=True))], title="t", label="steps")
    assert len(same.axes) == 1  # one number needs no scale


def test_panels_share_the_axis_of_time() -> None:
    panels = [Occupancy(str(i), table((0, 5.0, 5.0 + i)), note="a note") for i in (1, 2, 3, 4)]
    figure = heatmap(panels, title="t", subtitle="where from")
    for ax in figure.axes:
        assert ax.get_xlim() == pytest.approx((0.0, 4.08))
    assert [ax.lines[0].get_xdata()[0] for ax in figure.axes] == pytest.approx([1, 2, 3, 4])
    assert figure.axes[0].get_xlabel() == "seconds"
    assert "where from" in [text.get_text() for text in figure.texts]


def test_many_words_share_a_colour() -> None:
    work = table(*((0, float(i), i + 1.0, f"w{i}") for i in range(12)), label=True)
    figure = heatmap([Occupancy("a", work)], title="t")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*(f"w{i}" for i in range(7)), "other"]
    assert pixels(figure)[0, -1, 3] == 1


def test_no_work_at_all() -> None:
    figure = heatmap([Occupancy("a", table(), sms=2)], title="t")
    assert pixels(figure).shape == (2, BINS, 4)
    assert not pixels(figure)[..., 3].any()


@pytest.mark.parametrize(
    ("frame", "part"),
    [
        (pd.DataFrame({"sm": [0], "start": [0.0]}), "lacks end"),
        (table((0, 2.0, 1.0)), "ends before it starts"),
        (table((-1, 0.0, 1.0)), "negative number"),
    ],
)
def test_a_wrong_table_is_refused(frame: pd.DataFrame, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        heatmap([Occupancy("mine", frame)], title="t")
    with pytest.raises(ValueError, match="at least one"):
        heatmap([], title="t")


def test_files_are_small_and_always_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    starts = rng.random(3000)
    work = pd.DataFrame({"sm": rng.integers(0, 132, 3000), "start": starts, "end": starts + 0.02})
    written = []
    for name in ("a", "b"):
        png, svg = save(heatmap([Occupancy("x", work, 132)], title="t"), tmp_path / "new" / name)
        assert Image.open(png).size[0] > 500
        written.append((png.read_bytes(), svg.read_bytes()))
    assert written[0] == written[1]
    assert len(written[0][0]) < 100_000
    assert b"multiprocessor" in written[0][1]
