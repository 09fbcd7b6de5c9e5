from __future__ import annotations

import gc

import pytest

from jfabench.collector import without_collector


def test_the_collector_is_off_inside_and_on_again_after_an_error() -> None:
    seen = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise RuntimeError

    with pytest.raises(RuntimeError), without_collector():
        fail()
    assert seen == [False]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
