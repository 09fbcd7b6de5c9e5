"""What the tests of reports share."""

from __future__ import annotations

from collections.abc import Callable
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
