"""Colours: readable, stable, never two providers alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfabench.reports import palette

NAMES = st.lists(st.sampled_from([*"abcdefghijklmnopqrstuvwxyz", *palette._KNOWN]), max_size=30)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio of two colours `#rrggbb`."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_black_and_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("style", palette.STYLES, ids=lambda style: style.color)
def test_every_colour_can_carry_text_in_both_themes(style: palette.Style) -> None:
    assert contrast(style.color, palette.BACKGROUND) >= 4.5
    assert contrast(style.dark, palette.DARK_BACKGROUND) >= 4.5


def test_muted_text_can_be_read_in_both_themes() -> None:
    assert contrast(palette.MUTED, palette.BACKGROUND) >= 4.5
    assert contrast(palette.DARK_MUTED, palette.DARK_BACKGROUND) >= 4.5


@given(NAMES)
def test_no_two_providers_look_alike(names: list[str]) -> None:
    styles = palette.assign(names)
    assert list(styles) == list(dict.fromkeys(names))
    looks = {(style.color, style.marker) for style in styles.values()}
    assert len(looks) == len(styles)


@given(st.permutations(["tlx_jfa", "fa4", "zzz", "aaa", "fa3"]), st.integers(0, 5))
def test_a_look_depends_on_neither_order_nor_known_companions(names: list[str], count: int) -> None:
    everything = palette.assign(["aaa", "fa3", "fa4", "tlx_jfa", "zzz"])
    assert palette.assign(names) == everything
    some = [name for name in names[:count] if name in palette._KNOWN]
    assert all(palette.assign(some)[name] == everything[name] for name in some)
