import subprocess
import sys
from contextlib import nullcontext

import pytest

from jfabench import ranges


@pytest.fixture(autouse=True)
def fresh():
    ranges.nvtx_range.cache_clear()
    yield
    ranges.nvtx_range.cache_clear()


class FakeDomain:
    def __init__(self):
        self.calls = []

    def get_event_attributes(self, message):
        return message

    def push_range(self, attributes):
        self.calls.append(("push", attributes))

    def pop_range(self):
        self.calls.append(("pop",))


@pytest.fixture
def domain(monkeypatch):
    nvtx = pytest.importorskip("nvtx")
    domain = FakeDomain()
    monkeypatch.setattr(ranges, "_driver_present", lambda: True)
    monkeypatch.setattr(nvtx, "get_domain", lambda name: domain if name == "jfabench" else None)
    return domain


def test_ranges_nest_and_close_on_an_exception(domain):
    with pytest.raises(KeyError), ranges.nvtx_range("measure"), ranges.nvtx_range("tlx/fwd"):
        raise KeyError
    assert domain.calls == [("push", "measure"), ("push", "tlx.fwd"), ("pop",), ("pop",)]


def test_one_name_can_be_used_again_inside_itself(domain):
    with ranges.nvtx_range("a"), ranges.nvtx_range("a"):
        pass
    with ranges.nvtx_range("a"):
        pass
    assert domain.calls == [("push", "a"), ("push", "a"), ("pop",), ("pop",), ("push", "a"), ("pop",)]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("prepare/fa4_kernel/bwd", "prepare.fa4_kernel.bwd"),
        ("N=1024 fill=0.5 M=256", "N=1024 fill=0.5 M=256"),
        ("a@b,c[d]e*f+g$h\\i(j)", "a_b_c_d_e_f_g_h_i_j_"),
    ],
)
def test_names_hold_no_character_that_a_filter_takes_for_syntax(name, shown):
    assert ranges.range_name(name) == shown
    assert ranges.include_filter(name) == f"jfabench@{shown}/"


def test_without_a_driver_nothing_happens(monkeypatch):
    monkeypatch.setattr(ranges, "_driver_present", lambda: False)
    assert isinstance(ranges.nvtx_range("a"), nullcontext)


def test_without_nvtx_nothing_happens(monkeypatch):
    monkeypatch.setattr(ranges, "_driver_present", lambda: True)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with ranges.nvtx_range("a"):
        pass


@pytest.mark.parametrize("disabled", ["", "1"])
def test_the_installed_nvtx_accepts_our_ranges(disabled):
    code = (
        "from jfabench import ranges; ranges._driver_present = lambda: True\n"
        "with ranges.nvtx_range('a'), ranges.nvtx_range('b'): print(type(ranges.nvtx_range('a')).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"NVTX_DISABLE": disabled}, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("_Range", 0), done.stderr
