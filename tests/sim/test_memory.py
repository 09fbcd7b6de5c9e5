"""Where buffers lie, and which bytes views and regions cover."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jfabench.sim.clocks import Actor, Clock, RegionTable, conflicts
from jfabench.sim.memory import Allocation, Group, contiguous_strides, extent, place_tree, runs


def columns(allocation: Allocation) -> list[int]:
    """First column of each buffer in tensor memory."""
    return [allocation.start(i) // 4 for i in range(allocation.count)]


def test_overlap_is_that_of_the_compiler() -> None:
    """Offsets as in the TTGIR of blackwell_fa_ws_pipelined_persistent with 128 x 128 tiles, by fbtriton 3.7.4.

    There P is every fourth pair of 8x128x64xf16, of 32 columns each, and alpha, l, m are columns 64, 65, 66 of each 128
    (193x128x1xf32 and so on).
    """
    qk = Allocation("tmem", 128 * 4, 2, None)
    p = Allocation("tmem", 64 * 2, 4, None)
    alpha, row_sum, row_max = (Allocation("tmem", 4, 2, None) for _ in range(3))
    tree = Group([qk, Group([Group([p], "shared", 2), alpha, row_sum, row_max], "distinct", 1)], "shared", 1)
    place_tree(tree, 0, extent(tree))
    assert columns(qk) == [0, 128]
    assert columns(p) == [0, 32, 128, 160]
    assert [columns(x) for x in (alpha, row_sum, row_max)] == [[64, 192], [65, 193], [66, 194]]


DIMENSIONS = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Start, shape, strides, item size of a slice of a contiguous array, permuted."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    shape = draw(DIMENSIONS)
    strides = contiguous_strides(shape, itemsize)
    part = [draw(st.integers(1, n)) for n in shape]
    start = sum(draw(st.integers(0, n - m)) * s for n, m, s in zip(shape, part, strides, strict=True))
    order = draw(st.permutations(range(len(shape))))
    return start, tuple(part[i] for i in order), tuple(strides[i] for i in order), itemsize


def covered(view: tuple[int, tuple[int, ...], tuple[int, ...], int]) -> set[int]:
    start, shape, strides, itemsize = view
    places = itertools.product(*map(range, shape))
    firsts = [start + sum(i * s for i, s in zip(place, strides, strict=True)) for place in places]
    return {first + byte for first in firsts for byte in range(itemsize)}


@given(views())
def test_runs_cover_the_view(view: tuple[int, tuple[int, ...], tuple[int, ...], int]) -> None:
    starts, width = runs(*view)
    assert {int(start) + byte for start in starts for byte in range(width)} == covered(view)
    assert len(starts) * width == len(covered(view))


@given(views(), views())
def test_regions_overlap_and_cover_as_sets_do(
    one: tuple[int, tuple[int, ...], tuple[int, ...], int], other: tuple[int, tuple[int, ...], tuple[int, ...], int]
) -> None:
    table = RegionTable()
    first, second = table.add(0, *runs(*one), "one"), table.add(1, *runs(*other), "other")
    assert (second in first.overlapping) == bool(covered(one) & covered(other))
    assert (second in first.covered) == (covered(other) <= covered(one))
    assert (first in second.covered) == (covered(one) <= covered(other))


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["read", "write", "sync"]), st.integers(0, 2)), max_size=25
)


@given(EVENTS)
def test_races_are_those_of_a_plain_history(events: list[tuple[int, str, int]]) -> None:
    """Three lanes access a region, or learn of each other: up to the first race, searching all accesses agrees."""
    table = RegionTable()
    region = table.add(0, np.array([0]), 4, "region")
    clocks = [Clock() for _ in range(3)]
    ticks = [1, 1, 1]
    known: list[set[int]] = [set(), set(), set()]  # accesses that happened before, by lane
    history: list[tuple[int, str]] = []
    for lane in range(3):
        clocks[lane].set(lane, 1)
    for lane, what, other in events:
        if what == "sync":  # `lane` learns all that `other` knows
            clocks[lane].join(clocks[other])
            known[lane] |= known[other]
            ticks[other] += 1
            clocks[other].set(other, ticks[other])
            continue
        racing, _ = conflicts(region, Actor("actor", clocks[lane], lane, None), what)
        unordered = {
            i for i, (by, kind) in enumerate(history) if i not in known[lane] and by != lane and "write" in (kind, what)
        }
        assert bool(racing) == bool(unordered)
        if racing:
            return  # what comes after a race may be hidden by it
        known[lane].add(len(history))
        history.append((lane, what))
