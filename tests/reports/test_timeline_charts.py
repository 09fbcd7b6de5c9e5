"""What a timeline shows, computed from tables whose answers can be seen in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from jfabench.reports import timeline
from jfabench.reports.timeline import Timeline

RUN = {
    "operator": "jagged_attention",
    "provider": "tlx_jfa",
    "direction": "fwd",
    "seed": 0,
    "shape": "s",
    "label": "B=2 N=64",
    "kernel": "forward",
    "order": "sorted",
    "order_text": "heaviest tiles first",
    "gpu": "a GPU",
    "sms": 3,
    "clock_hz": 1e9,
    "unrecorded_s": 1e-3,
    "recorded_s": 1.05e-3,
}
WAITS = ("q", "k", "v", "dout", "turn", "pair", "stores", "matmul")


def span(sm: int, program: int, role: str, step: int, start: float, end: float, rows: int, **waits: int) -> Any:
    """Of a tile of `rows` keys; times in microseconds, at a clock of 1 GHz."""
    return {
        "run": 0,
        "sm": sm,
        "program": program,
        "role": role,
        "step": step,
        "tile": 10 * program + step,
        "head": 0,
        "block": 0,
        "q_len": 128,
        "k_len": rows,
        "rows": rows,
        "start_s": start * 1e-6,
        "end_s": end * 1e-6,
        "cycles": round((end - start) * 1000),
        **{f"wait_{name}": waits.get(name, 0) for name in WAITS},
    }


def table() -> Timeline:
    """Two multiprocessors. A tile takes a microsecond, and another for each ten keys; the second one starts late."""
    spans = [
        span(0, 0, "loader", 0, 0.0, 3.0, 30, k=1500),
        span(0, 0, "loader", 1, 3.0, 5.5, 20, k=1000),
        span(0, 0, "consumer 0", 0, 0.0, 4.0, 30, k=400, matmul=1600),
        span(0, 0, "consumer 0", 1, 4.0, 7.0, 20, k=300, matmul=1400),
        span(2, 1, "loader", 0, 1.0, 1.5, 10),
        span(2, 1, "consumer 0", 0, 1.0, 3.0, 10, stores=100),
    ]
    return Timeline(pd.DataFrame([{"run": 0, **RUN}]), pd.DataFrame(spans))


def test_balance() -> None:
    found = timeline.balance(table().spans)
    assert found.makespan_s == pytest.approx(7e-6)
    assert found.imbalance == pytest.approx(7 / 4.5)  # 7 and 2 us
    assert (found.fixed_s, found.per_row_s) == (pytest.approx(1e-6), pytest.approx(1e-7))
    assert found.predicted_makespan_s == pytest.approx(7e-6)
    assert found.predicted_imbalance == pytest.approx(7 / 4.5)


def test_balance_of_tiles_that_are_all_alike() -> None:
    steps = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    spans = [span(program, program, "consumer 0", step, 2 * step, 2 * step + 2, 50) for program, step in steps]
    found = timeline.balance(pd.DataFrame(spans))
    assert (found.fixed_s, found.per_row_s) == (pytest.approx(2e-6), 0.0)
    assert found.predicted_imbalance == pytest.approx(6 / 5)


def test_waits() -> None:
    found = timeline.waits(table()).set_index(["role", "wait"])
    assert dict(found["cycles"]) == {
        ("consumer 0", "k"): 700,
        ("consumer 0", "stores"): 100,
        ("consumer 0", "matmul"): 3000,
        ("consumer 0", "work"): 9000 - 3800,
        ("loader", "k"): 2500,
        ("loader", "work"): 6000 - 2500,
    }
    assert dict(found["share"].groupby("role").sum()) == {"consumer 0": pytest.approx(1), "loader": pytest.approx(1)}
    assert found["seconds"]["consumer 0", "matmul"] == pytest.approx(1.5e-6)  # a program's, of two
    assert found["what"]["loader", "k"] == "a free slot of K"
    assert found["what"]["consumer 0", "k"] == "K"


def test_the_bottleneck_is_what_consumers_wait_for_most() -> None:
    found = timeline.waits(table())
    assert timeline.bottleneck(found) == "consumers wait 42% of their time, most for matmuls (33%)"
    assert timeline.bottleneck(found[found["wait"] == "work"]) == "consumers never wait"


def test_the_trace_is_in_chromes_format() -> None:
    events = json.loads(json.dumps(list(timeline.trace_events(table()))))
    spans = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert len(spans) == 6
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in spans:
        assert event["dur"] > 0
        assert {"name", "ts", "pid", "tid", "args"} <= event.keys()
    second = next(event for event in spans if event["ts"] == 4.0)
    assert (second["dur"], second["pid"], second["name"]) == (3.0, 0, "20 keys")
    assert second["args"]["waited for matmuls"] == 1.4
    assert names[0, None] == "forward sorted, SM 000"
    assert names[0, second["tid"]] == "program 0: consumer 0"
    assert names[2, spans[-1]["tid"]] == "program 0: consumer 0"  # the first program of its multiprocessor


def test_programs_of_one_multiprocessor_have_threads_of_their_own() -> None:
    spans = [span(1, program, role, 0, 0, 1, 10) for program in (5, 9) for role in ("loader", "consumer 0")]
    events = list(timeline.trace_events(Timeline(table().runs, pd.DataFrame(spans))))
    assert len({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}) == 4
    assert "program 1: loader" in {event["args"]["name"] for event in events if event["ph"] == "M"}


def test_build(tmp_path: Path) -> None:
    first, batch = table(), table()
    runs = pd.concat([first.runs, batch.runs.assign(run=1, order="batch", order_text="in the order of the batch")])
    spans = pd.concat([first.spans, batch.spans.assign(run=1)])
    runs.to_csv(tmp_path / timeline.RUNS, index=False)
    spans.to_csv(tmp_path / timeline.SPANS, index=False)
    written = timeline.build(tmp_path)
    assert [path.name for path in written] == [
        *("timeline-0-forward-sms.png", "timeline-0-forward-sms.svg"),
        *("timeline-0-forward-waits.png", "timeline-0-forward-waits.svg"),
    ]
    for path in written:
        if path.suffix == ".png":
            assert min(Image.open(path).size) > 200
        else:
            text = path.read_text()
            assert "heaviest tiles first" in text
            assert "in the order of the batch" in text
            assert "recording makes a call 5.0% longer" in text
    assert "7 us, imbalance 1.556; predicted 7 us, 1.556" in written[1].read_text()
    bars = written[-1].read_text()
    assert "most for matmuls (33%)" in bars
    assert "own loads" not in bars  # nobody waits for it
    assert set(pd.read_csv(tmp_path / timeline.WAITS)["run"]) == {0, 1}
    trace = json.loads((tmp_path / timeline.TRACE).read_text())
    assert len({event["pid"] for event in trace["traceEvents"]}) == 4
