"""The ablation script, as far as it goes without a GPU: what it compares, its lists of tiles, and its tables."""

from __future__ import annotations

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jfabench.kernels.attention import config_sm90 as configs
from jfabench.kernels.attention.tiles import Sequences

PATH = Path(__file__).resolve().parent.parent / "scripts" / "ablation.py"


@pytest.fixture(scope="module")
def ablation() -> Any:
    spec = importlib.util.spec_from_file_location("ablation", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablation"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_idea_has_a_row(ablation: Any) -> None:
    forward, backward = ablation.forward_variants(), ablation.backward_variants()
    names = [variant.name for variant in forward]
    for word in ("zigzag", "none", "sorted", "LPT"):
        assert any("schedule" in name and word in name for name in names), word
    assert {"peel=False", "pingpong=False", "late=False", "lazy=False", "queries loaded for each tile"} <= set(names)
    stages = {variant.config.kv_stages for variant in forward if variant.config.block_n == 64}
    assert stages == {2, 4}
    assert {"add_dq=False", "stages=3"} <= {variant.name for variant in backward}
    for group in (forward, backward):
        assert len({variant.name for variant in group}) == len(group)
        assert group[0].plain  # the base
    # In the order of the batch and heaviest first are dealt in the same way, so that the order is all that differs.
    none, in_order = (next(v for v in forward if v.name == f"schedule {word}") for word in ("none", "sorted"))
    assert none.config == in_order.config == replace(configs.ForwardConfig(), zigzag=False)
    assert (none.schedule, in_order.schedule) == (ablation.unsorted_tiles, None)


@pytest.mark.parametrize("over_keys", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_unsorted_list_has_every_tile_in_the_order_of_the_batch(
    ablation: Any, over_keys: bool, shared: bool
) -> None:
    keys, m = [300, 0, 64, 129], 200
    ends = torch.tensor([0, *np.cumsum(keys)], dtype=torch.int32)
    sequences = Sequences(None if shared else ends, ends, m if shared else sum(keys), sum(keys))
    made = ablation.unsorted_tiles(sequences, 128, over_keys=over_keys)
    expected = []
    for b, n in enumerate(keys):
        start = sum(keys[:b])
        queries = (0, m, b * m) if shared else (start, n, start)
        for block in range(-(-(n if over_keys else queries[1]) // 128)):
            expected.append([block, queries[0], queries[1], start, n, queries[2]])
    assert made.most == len(expected) == int(made.entries[0, 0])
    assert made.entries[1:, :6].tolist() == expected


def column(ablation: Any) -> Any:
    base, *others = ablation.forward_variants()
    seconds = {base: 1e-3, others[0]: 0.8e-3}
    shape = ablation.Shape("made up", 256, np.array([1024, 512]))
    return ablation.Column(shape, seconds, {"forward": base.config, "backward": None}), base, others


def test_the_tables(ablation: Any, tmp_path: Path) -> None:
    found, base, others = column(ablation)
    speed = 4 * 128 * 4 * 256 * (1024 + 512) / 1e-3 * 1e-12
    text = ablation.table([base, *others[:2]], [found])
    lines = text.splitlines()
    assert lines[0] == "| forward | made up |"
    assert lines[2] == f"| {base.name} | **{speed:.0f}** |"
    assert lines[3] == f"| {others[0].name} | {speed / 0.8:.0f} (+25.0%) |"
    assert lines[4] == f"| {others[1].name} | does not fit |"
    ablation.write_csv(tmp_path / "a.csv", [found])
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["serves_untuned"]) for row in rows] == [(base.name, "True"), (others[0].name, "False")]
    assert float(rows[0]["tflops"]) == pytest.approx(speed, rel=1e-4)


def test_without_a_gpu_it_says_so(ablation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ablation.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="sm_90"):
        ablation.main()
