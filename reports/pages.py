"""Pages other than a sweep's report: a template of the same style, in one HTML file without any network access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jfabench.reports import html


def page(template: str, **values: Any) -> str:
    """The page that a template below `templates/` makes of `values`; it may include `page_head.html`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(theme=html.theme(), **values)
