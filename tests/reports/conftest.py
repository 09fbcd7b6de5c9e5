"""What the tests of reports share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic

from jfabench.records import Record
from jfabench.reports.load import Results, load


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Results]:
    def make(records: list[Record], name: str = "run", ceilings: Any = synthetic.CEILINGS, **run: Any) -> Results:
        manifest = synthetic.manifest(len(records), **run)
        return load([synthetic.write_folder(tmp_path / name, records, run=manifest, ceilings=ceilings)])

    return make


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium with its driver; a test is skipped where there is none."""
    chromium, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver_program):
        pytest.skip("no chromium with chromedriver here: install Debian's `chromium` and `chromium-driver`")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_program))
    yield driver
    driver.quit()
