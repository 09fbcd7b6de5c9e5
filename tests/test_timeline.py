"""Recording a case, with the GPU's part played by a kernel that leaves made-up rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jfabench import timeline
from jfabench.cli import main
from jfabench.kernels.attention import launch_sm90, record
from jfabench.kernels.attention.tiles import ENTRY, TileList
from jfabench.operator import Call
from jfabench.records import Case
from jfabench.reports import timeline as report
from jfabench.sweep import load_sweep

PROGRAMS, HEADS, BLOCK = 3, 2, 128


def tile_list(lengths: list[int], queries: int, *, over_keys: bool = False, room: int = 2) -> TileList:
    """As for queries that all sequences share: the heaviest first, blocks of a sequence from the last on."""
    starts = np.cumsum([0, *lengths])
    weights = [queries if over_keys else length for length in lengths]
    rows = [
        (block, 0, queries, starts[b], lengths[b], b * queries)
        for b in sorted(range(len(lengths)), key=lambda b: (-weights[b], b))
        for block in reversed(range(-(-(lengths[b] if over_keys else queries) // BLOCK)))
    ]
    entries = torch.full((1 + len(rows) + room, ENTRY.value), -7, dtype=torch.int32)  # room is never filled
    entries[0, 0] = len(rows)
    if rows:
        entries[1 : 1 + len(rows), :6] = torch.tensor(np.array(rows), dtype=torch.int32)
    return TileList(entries, len(rows) + room)


def fill(words: torch.Tensor, tiles: TileList, heads: int, direction: str) -> None:
    """What a kernel would write whose tiles take 1000 ns, and 10 more for each row, at 2 GHz."""
    entries = tiles.entries.numpy()
    for program in range(PROGRAMS):
        at = 50 * program
        words[0, program, :, 2:4] = torch.tensor([at, 2 * at])
        for step, pair in enumerate(range(program, int(entries[0, 0]) * heads, PROGRAMS)):
            at += 1000 + 10 * int(entries[1 + pair // heads, 4 if direction == "forward" else 2])
            words[step, program, :, :2] = torch.tensor([program, pair + 1])
            words[step, program, :, 4:6] = torch.tensor([at, 2 * at])
            words[step, program, 1:, 6 + record.WAITS.index("matmul")] = 200


# Order ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.integers(1, 300), st.booleans())
def test_the_order_of_the_batch(lengths: list[int], queries: int, over_keys: bool) -> None:
    tiles = tile_list(lengths, queries, over_keys=over_keys)
    ordered = timeline.in_batch_order(tiles)
    count = int(tiles.entries[0, 0])
    assert ordered.most == tiles.most
    assert int(ordered.entries[0, 0]) == count
    starts = np.cumsum([0, *lengths])
    expected = [
        [block, 0, queries, starts[b], lengths[b], b * queries]
        for b in range(len(lengths))
        for block in range(-(-(lengths[b] if over_keys else queries) // BLOCK))
    ]
    assert ordered.entries[1 : 1 + count, :6].tolist() == expected


def test_only_launches_inside_are_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = tile_list([5, 300, 20], 128)
    monkeypatch.setattr(launch_sm90, "build_tiles", lambda *_, **__: tiles)
    build: Any = lambda: launch_sm90.build_tiles(None, BLOCK)  # type: ignore[attr-defined] # noqa: E731
    with timeline._tiles_in("sorted"):
        assert build() is tiles
    with timeline._tiles_in("batch"):
        assert build().entries[1:4, 4].tolist() == [5, 300, 20]
    assert build() is tiles


# Tables --------------------------------------------------------------------------------------------------------------


def recorded(direction: str, tiles: TileList) -> record.Recording:
    with record.recording() as found:
        words = record.buffer(direction, PROGRAMS, tiles, HEADS)
        assert words is not None
        fill(words, tiles, HEADS, direction)
    return found[0]


def test_facts_of_a_run() -> None:
    lengths = [100, 40, 30, 20, 10]
    spans = timeline.table_of(recorded("forward", tile_list(lengths, BLOCK)))
    found = timeline.facts(spans, sms=PROGRAMS)
    assert (found["programs"], found["tiles"], found["sms"]) == (3, 10, 3)
    assert found["clock_hz"] == pytest.approx(2e9)
    assert (found["fixed_s"], found["per_row_s"]) == (pytest.approx(1e-6), pytest.approx(1e-8))
    # Dealt in turn: 100 40 20 10, 100 30 20, 40 30 10 rows, a head of a sequence each.
    cost = {0: 4 + 1.7, 1: 3 + 1.5, 2: 3 + 0.8}
    assert found["predicted_makespan_s"] == pytest.approx(cost[0] * 1e-6)
    assert found["predicted_imbalance"] == pytest.approx(cost[0] / (sum(cost.values()) / 3))
    assert found["policy_sorted_s"] == pytest.approx(cost[0] * 1e-6)
    # Every other round backwards: 100 30 20, 100 30 20, 40 40 10 10.
    assert found["policy_zigzag_s"] == pytest.approx((4 + 1.0) * 1e-6)


def test_tiles_of_the_backward_loop_over_queries() -> None:
    spans = timeline.table_of(recorded("backward", tile_list([300, 20], 64, over_keys=True)))
    assert set(spans["rows"]) == {64}
    assert set(spans["k_len"]) == {300, 20}


def test_a_launch_that_wrote_nothing_is_an_error() -> None:
    with record.recording() as found:
        record.buffer("forward", PROGRAMS, tile_list([5], BLOCK), HEADS)
    with pytest.raises(timeline.TimelineError, match="forward kernel: of 2 tiles were recorded"):
        timeline.table_of(found[0])


# A case --------------------------------------------------------------------------------------------------------------


class Provider:
    """Computes with the oracle, and launches a `forward` that records."""

    name = "tlx_jfa"
    broken = False

    def unavailable(self, device: str) -> None:
        return None

    def unsupported(self, params: Any, direction: str) -> None:
        return None

    def prepare(self, inputs: Any, direction: str) -> Call:
        from jfabench.operator import load_operator

        expected = load_operator("jagged_attention").oracle(inputs, ("fwd",)).tensors
        lengths = inputs.k_offsets.diff().tolist()

        def run() -> Any:
            tiles = launch_sm90.build_tiles(lengths, BLOCK)  # type: ignore[attr-defined]
            words = record.buffer("forward", PROGRAMS, tiles, HEADS)
            if words is not None:
                fill(words, tiles, HEADS, "forward")
            return {name: expected[name].to(inputs.q.dtype if name == "out" else torch.float32) for name in expected}

        def results(raw: Any) -> Any:
            return {name: value + 1 if self.broken else value for name, value in raw.items()}

        return Call(run, results)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    monkeypatch.setattr(launch_sm90, "build_tiles", lambda lengths, _: tile_list(lengths, 16))
    monkeypatch.setattr(timeline, "load_providers", lambda _: SimpleNamespace(by_name={"tlx_jfa": Provider()}))
    monkeypatch.setattr(timeline, "_select", lambda device: None)
    monkeypatch.setattr(timeline, "_machine", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(timeline, "_multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(timeline, "_flush", lambda device: None)
    monkeypatch.setattr(timeline, "_synchronize", lambda device: None)
    monkeypatch.setattr(timeline, "_cost_of_recording", lambda *_: {"unrecorded_s": 1e-3, "recorded_s": 2e-3})
    settings = ["lengths.max_len=64", "lengths.fill=0.5"]
    sweep = load_sweep("jagged.yaml", "cpu", settings=settings, only=["triton_jfa"], directions=["fwd"])
    return [replace(case, provider="tlx_jfa") for case in sweep.cases]


def test_recording_a_case(cases: list[Case], tmp_path: Path) -> None:
    said = list(timeline.record(cases, "cpu", ["sorted", "batch"], tmp_path))
    assert len(said) == 2
    assert "most for matmuls" in said[0]
    assert "recording takes 2000 us a call instead of 1000" in said[1]
    runs = pd.read_csv(tmp_path / report.RUNS)
    assert list(runs["order"]) == ["sorted", "batch"]
    spans = pd.read_csv(tmp_path / report.SPANS)
    assert len(spans) == 2 * 4 * HEADS * len(record.ROLES)  # of four sequences
    first = spans[(spans["run"] == 0) & (spans["role"] == "consumer 0")]
    assert list(first.sort_values("tile")["k_len"]) == sorted(first["k_len"], reverse=True)
    assert (first["end_s"] - first["start_s"]).to_numpy() == pytest.approx(1e-6 + 1e-8 * first["k_len"], abs=1e-9)
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {
        f"timeline-0-forward-{what}.{kind}" for what in ("sms", "waits") for kind in ("png", "svg")
    }


def test_wrong_results_are_no_timeline(cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Provider, "broken", True)
    with pytest.raises(timeline.TimelineError, match="out"):
        list(timeline.record(cases, "cpu", ["sorted"], tmp_path))


def test_a_provider_that_records_nothing(cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "buffer", lambda *_: None)
    with pytest.raises(timeline.TimelineError, match="launches no kernel that can be recorded"):
        list(timeline.record(cases, "cpu", ["sorted"], tmp_path))


# The command ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["timeline", "--config", "jagged.yaml"]) == 3
    assert "H100 or H200" in capsys.readouterr().err
    assert main(["timeline", "--config", "jagged.yaml", "--out", " "]) == 2
    assert main(["timeline", "--config", "jagged.yaml", "--set", "no=1"]) == 2
