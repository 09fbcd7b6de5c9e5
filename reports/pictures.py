"""How every picture looks, and how it becomes files: SVG whose text stays text, and small PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from jfabench.folder import write_whole
from jfabench.reports import palette, svg

_DPI = 144

RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable, and set in the reader's own font
    "svg.hashsalt": "jfabench",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 9.5,
    "axes.edgecolor": palette.LINE,
    "axes.labelcolor": palette.MUTED,
    "axes.titlecolor": palette.TEXT,
    "text.color": palette.TEXT,
    "xtick.color": palette.MUTED,
    "ytick.color": palette.MUTED,
    "grid.color": palette.LINE,
    "figure.facecolor": palette.BACKGROUND,
    "axes.facecolor": palette.BACKGROUND,
    "text.parse_math": False,  # names may hold a dollar sign
}
"""Settings under which figures are drawn and saved: fonts and salts are read while saving."""


def png(figure: Figure) -> bytes:
    """A chart needs few colours: a palette makes the file a quarter of the size."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(_DPI)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(buffer, format="png")
    return buffer.getvalue()


def svg_text(figure: Figure) -> str:
    """The figure as compact SVG, always the same for the same figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return svg.compact(buffer.getvalue())


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Writes `<stem>.png` and `<stem>.svg`, each as a whole, and returns their paths. Raises `OSError`."""
    with rc_context(RC):
        contents = {".svg": svg_text(figure).encode(), ".png": png(figure)}
    for suffix, content in contents.items():
        write_whole(stem.with_name(stem.name + suffix), content)
    return stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
