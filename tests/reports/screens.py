"""Pages in a real browser, on a screen of some width."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def show_page(browser: Any, page: Path, width: int, *, dark: bool = False) -> None:
    """Opens the file; below 600 px the screen is a phone's."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce"},  # else a click may come while the page still scrolls
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what came before
    browser.get(page.resolve().as_uri())
