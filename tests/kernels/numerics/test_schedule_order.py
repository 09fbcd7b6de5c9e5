"""Predicted schedules take tiles in the order in which the kernels' list has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jfabench.kernels.attention.tiles import Sequences, build_tiles
from jfabench.schedule import Shape, tiles


@pytest.mark.parametrize("over_keys", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_list_has_the_predicted_tiles_in_the_predicted_order(device: str, shared: bool, over_keys: bool) -> None:
    rng = np.random.default_rng(int(shared))
    for batch in (1, 5, 19):
        keys, m = rng.integers(0, 700, batch), int(rng.integers(1, 400))
        keys[0] = 500
        queries = np.full(batch, m) if shared else keys
        ends = torch.tensor([0, *np.cumsum(keys)], dtype=torch.int32, device=device)
        sequences = Sequences(None if shared else ends, ends, m if shared else int(keys.sum()), int(keys.sum()))
        entries = build_tiles(sequences, 128, over_keys=over_keys).entries.cpu()
        listed = entries[1 : int(entries[0, 0]) + 1, :6].tolist()

        work = tiles(queries, keys, Shape(over_keys, 128, 64), heads=1)
        order = work.weights_first(queries if over_keys else keys)
        starts = np.cumsum(keys) - keys
        expected = [[int(work.block[i]), int(starts[work.sequence[i]]), int(keys[work.sequence[i]])] for i in order]
        assert [[block, k_start, k_len] for block, _, _, k_start, k_len, _ in listed] == expected
