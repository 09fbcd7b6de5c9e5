from __future__ import annotations

import pytest

from jfabench.progress import progress_listener
from jfabench.records import Case, Record


@pytest.mark.parametrize("statuses", [["ok", "ok"], ["ok", "failed", "unsupported"]])
def test_a_log_gets_a_line_for_each_case_that_went_wrong_and_no_other(
    statuses: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    case = Case("op", "mine", "bwd", {})
    with progress_listener(len(statuses)) as listener:
        for status in statuses:
            listener.phase(case, "measure")
            listener.record(Record(case, status, "", "it broke", inputs={"label": "N=8"}))  # type: ignore[arg-type]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "failed: mine bwd N=8: it broke\n" * statuses.count("failed")
