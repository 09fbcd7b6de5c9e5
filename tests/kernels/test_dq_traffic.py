"""The model of dQ's traffic, against counts by hand, and the configurations that follow from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfabench.kernels.attention.config_bwd_sm100 import CANDIDATES, PAIR, SHORT, candidates, default, deterministic
from jfabench.kernels.attention.dq_traffic import B200, SCHEMES, Shape, cheapest, cost
from jfabench.kernels.attention.kinds import Kind

SCHEME = {scheme.name: scheme for scheme in SCHEMES}
LIMIT = 227 * 1024


def test_one_full_block_by_hand() -> None:
    """128 queries and 256 keys: 128 x 64 floats, once for each 128 or 256 keys; five matmuls of 128 x 256 x 64."""
    shape = Shape((128,), (256,), heads=1, head_dim=64, broadcast=False)
    assert shape.flops == 5 * 2 * 128 * 256 * 64
    single, pair, separate = (cost(shape, SCHEME[name]) for name in ("single", "pair", "separate"))
    assert (single.added_bytes, pair.added_bytes, separate.added_bytes) == (2 * 128 * 64 * 4, 128 * 64 * 4, 0)
    assert (single.meetings, pair.meetings) == (2, 1)
    assert single.bytes_per_flop == 4 / (5 * 2 * 128)
    assert single.seconds == 2 * 128 * 64 * 4 / B200.added_bytes
    assert separate.seconds == 7 * 2 * 128 * 256 * 64 / B200.flops


def test_broadcast_queries_meet_over_the_batch_and_copies_divide_that() -> None:
    shape = Shape((100, 100, 100), (1, 0, 300), heads=2, head_dim=128, broadcast=True)
    assert cost(shape, SCHEME["single"]).meetings == 4
    assert cost(shape, SCHEME["pair"]).meetings == 3
    assert cost(shape, SCHEME["replicas"]).meetings == 4 / 8
    packed = Shape(shape.queries, shape.keys, heads=2, head_dim=128, broadcast=False)
    assert cost(packed, SCHEME["single"]).meetings == 3
    assert cost(packed, SCHEME["single"]).added_bytes == cost(shape, SCHEME["single"]).added_bytes


lengths = st.lists(st.integers(0, 3000), min_size=1, max_size=6)


@given(lengths, st.integers(1, 600), st.sampled_from([64, 128]))
def test_a_pair_never_adds_more_and_the_cheapest_is_the_least(keys: list[int], queries: int, head_dim: int) -> None:
    shape = Shape((queries,) * len(keys), tuple(keys), heads=4, head_dim=head_dim, broadcast=True)
    found = {name: cost(shape, scheme) for name, scheme in SCHEME.items()}
    assert found["single"].added_bytes / 2 <= found["pair"].added_bytes <= found["single"].added_bytes
    assert found["single"].added_bytes == sum(4 * queries * math.ceil(k / 128) * head_dim * 4 for k in keys)
    assert cheapest(shape).seconds == min(c.seconds for c in found.values())


def kind(mean_q: int, mean_k: int, head_dim: int = 128) -> Kind:
    return Kind("sm100", "backward", "bfloat16", head_dim, 1, True, False, False, mean_q, mean_k)


def test_defaults_follow_the_model() -> None:
    assert default(kind(256, 1024)) == PAIR
    assert default(kind(64, 64)).block_m == SHORT.block_m
    assert default(kind(256, 64)).add_dq is False  # half of a pair's tile would be padding, and matmuls are idle
    assert default(kind(256, 1024, 64)).ctas == 1


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("mean_q", "mean_k"), [(0, 0), (1, 1), (64, 512), (256, 128), (512, 4096)])
def test_candidates_fit_and_start_with_the_default(head_dim: int, mean_q: int, mean_k: int) -> None:
    given_kind = kind(mean_q, mean_k, head_dim)
    found = candidates(given_kind, LIMIT)
    assert found[0] == default(given_kind)
    assert len(set(found)) == len(found) >= len(CANDIDATES[head_dim])
    assert all(config.fits(head_dim, LIMIT) and config.tmem_columns(head_dim) <= 512 for config in found)
    assert not deterministic(found[0]).add_dq


def test_what_does_not_fit_is_no_candidate() -> None:
    small = 200 * 1024
    assert {c.add_dq for c in candidates(kind(256, 1024), small)} <= {True, False}
    assert all(c.shared_bytes(128) <= small for c in candidates(kind(256, 1024), small))
    assert not PAIR.fits(64, LIMIT)  # half of the columns of Q would be 32, another layout


@pytest.mark.parametrize("head_dim", CANDIDATES)
def test_configurations_survive_the_file_of_choices(head_dim: int) -> None:
    for config in CANDIDATES[head_dim]:
        assert json.loads(json.dumps(asdict(config))) == asdict(config)
