"""Colours and markers: one of each for every provider, the same in every chart, table and theme.

Both palettes are told apart with the common forms of colour blindness, together with the markers, and every colour has
a contrast of at least 4.5 to 1 on its background, so that it may carry text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BACKGROUND, TEXT, MUTED, LINE = "#ffffff", "#1b1f24", "#57606a", "#d5dae1"
DARK_BACKGROUND, DARK_TEXT, DARK_MUTED, DARK_LINE = "#161a1f", "#e8ebef", "#a3acb8", "#3a424d"


@dataclass(frozen=True)
class Style:
    """`slot` numbers the colour (`--s0`, `--s1`, ... in the report's style sheet); `color` is its light variant."""

    slot: int
    color: str
    dark: str
    marker: str
    line: str


_LIGHT = ("#0060b0", "#b84300", "#00734f", "#9b3e86", "#866000", "#5a5f66", "#a81c34", "#006f80", "#5b4bc4", "#6b4a2f")
_DARK = ("#6cb4ff", "#ff9b5e", "#4fd1a1", "#f09bdd", "#e8c14a", "#b4bac2", "#ff8e9a", "#5ccfe0", "#b3a7ff", "#d9b08c")
_MARKERS = ("o", "s", "^", "D", "v", "P", "*", "p", "h", "<")
STYLES = tuple(
    Style(slot, light, dark, marker, "-" if slot != 5 else "--")
    for slot, (light, dark, marker) in enumerate(zip(_LIGHT, _DARK, _MARKERS, strict=True))
)

# Fixed, so that two reports with different selections of providers still look alike.
_KNOWN = {
    "tlx_jfa": 0,
    "fa4_kernel": 1,
    "triton_jfa": 2,
    "fa4": 4,
    "fa3": 3,
    "sdpa_padded": 5,
    "torch_varlen": 7,
}


def assign(providers: Iterable[str]) -> dict[str, Style]:
    """A style for each provider: the fixed one of a known name, the free ones in alphabetical order for others.

    More providers than styles share colours, never colour and marker.
    """
    names = list(dict.fromkeys(providers))
    slots = {name: _KNOWN[name] for name in names if name in _KNOWN}
    free = [style.slot for style in STYLES if style.slot not in slots.values()]
    others = sorted(name for name in names if name not in slots)
    styles = {}
    for name in names:
        if name in slots:
            styles[name] = STYLES[slots[name]]
            continue
        place = others.index(name)
        if place < len(free):
            styles[name] = STYLES[free[place]]
        else:
            again = place - len(free)
            base = STYLES[again % len(STYLES)]
            shifted = _MARKERS[(base.slot + 1 + again // len(STYLES)) % len(_MARKERS)]
            styles[name] = Style(base.slot, base.color, base.dark, shifted, ":")
    return styles
