"""Takes a figure's SVG apart into its panels, so that a page can flow them, and lets CSS choose the colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from xml.etree import ElementTree

from jfabench.reports import palette

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _XLINK)

Box = tuple[float, float, float, float]

_VARIABLES = {
    palette.BACKGROUND: "var(--bg)",
    palette.TEXT: "var(--text)",
    palette.MUTED: "var(--muted)",
    palette.LINE: "var(--line)",
    **{style.color: f"var(--s{style.slot})" for style in palette.STYLES},
}
_COLORS = re.compile("|".join(_VARIABLES))


_LONG_NUMBER = re.compile(r"\d+\.\d{3,}")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def compact(svg: str) -> str:
    """The same picture in a third of the text: no line breaks, coordinates to 0.01 pt, no ids that nothing refers to.

    Groups `panel-<i>` keep their id.
    """
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", svg))
    names = {name for pair in used for name in pair if name}
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r' id="([^"]*)"', lambda match: match[0] if match[1] in names or match[1].startswith("panel-") else "", svg
    )
    svg = re.sub(r"<[^>]*>", lambda tag: _LONG_NUMBER.sub(_rounded, tag[0]), svg)  # not in texts: they are for people
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r"<!DOCTYPE[^>]*>", "", svg)
    return re.sub(r' "(?=[ />])', '"', re.sub(r">\s+<", "><", svg)).strip() + "\n"


def split_panels(svg: str, boxes: Sequence[Box], titles: Sequence[str]) -> list[str]:
    """One SVG for each group `panel-<i>` of a figure, with colours from CSS variables and the page's own font.

    Args:
        svg: the figure, in points, with one group of id `panel-<i>` for each box.
        boxes: left, top, width and height of each panel in points, from the top left corner.
        titles: the accessible name of each panel.
    """
    root = ElementTree.fromstring(svg)
    groups = {element.get("id"): element for element in root.iter(f"{{{_SVG}}}g")}
    # Markers are defined inside the panels that use them first; clip paths at the end of the figure.
    defined = {
        child.get("id", ""): ElementTree.tostring(child, encoding="unicode")
        for defs in root.iter(f"{{{_SVG}}}defs")
        for child in defs
        if child.get("id")
    }
    panels = []
    for number, ((left, top, width, height), title) in enumerate(zip(boxes, titles, strict=True)):
        group = ElementTree.tostring(groups[f"panel-{number}"], encoding="unicode").replace(f' id="panel-{number}"', "")
        lent = [text for name, text in defined.items() if f"#{name}" in group and f'id="{name}"' not in group]
        body = f"<title>{escape(title)}</title><defs>{''.join(lent)}</defs>{group}"
        view = f"{left:.0f} {top:.0f} {width:.0f} {height:.0f}"
        panels.append(f'<svg role="img" viewBox="{view}">{_themed(body)}</svg>')
    return panels


def _themed(body: str) -> str:
    body = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", body).replace("xlink:href", "href")
    body = re.sub(r" ?font-family: [^;\"]*;?", "", body)
    return _COLORS.sub(lambda match: _VARIABLES[match[0]], body)
