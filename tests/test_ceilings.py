import json

import pytest

from jfabench import ceilings
from jfabench.folder import Ceilings

H200 = {"gpu": "NVIDIA H200", "sm_count": 132, "driver": "580.1", "cuda": "13.0", "torch": "2.11.0"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jfabench" / "ceilings.json"


def measured(env, flops=800e12):
    return Ceilings("X", {"bf16": flops, "fp16": flops}, 4.3e12, "measured", "note", "2026-01-01", env)


def test_stored_ceilings_are_found_by_machine(cache):
    other = {**H200, "driver": "590.0"}
    assert ceilings.store(measured(H200)) == cache
    ceilings.store(measured(other, 700e12))
    ceilings.store(measured(H200, 790e12))
    assert ceilings.load(H200) == measured(H200, 790e12)
    assert ceilings.load(other).flops["bf16"] == 700e12
    assert ceilings.load({**H200, "torch": "2.12.0"}) is None
    assert len(json.loads(cache.read_text())) == 2


def test_measured_ceilings_go_before_the_datasheet():
    assert ceilings.for_device(H200) == ceilings.datasheet("NVIDIA H200")
    ceilings.store(measured(H200))
    assert ceilings.for_device(H200).source == "measured"
    assert ceilings.for_device({"gpu": None, "cpu": "AMD EPYC"}) is None
    assert ceilings.for_device({}) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"NVIDIA H200, 132 SMs, driver 580.1, cuda 13.0, torch 2.11.0": {"a": 1}}']
)
def test_a_damaged_store_is_no_ceiling_and_can_be_written_again(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert ceilings.load(H200) is None
    ceilings.store(measured(H200))
    assert ceilings.load(H200) == measured(H200)


def test_the_store_is_in_the_home_folder_where_no_other_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ceilings.store_path() == tmp_path / ".cache" / "jfabench" / "ceilings.json"


@pytest.mark.parametrize(
    ("name", "flops", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA B200", 2250e12, 8e12),
    ],
)
def test_datasheet(name, flops, rate):
    found = ceilings.datasheet(name)
    assert found.flops == {"bf16": flops, "fp16": flops}
    assert found.bytes == rate
    assert found.source == "datasheet"
    assert "datasheet" in found.note


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "None", ""])
def test_no_figures_for_boards_that_the_table_does_not_have(name):
    assert ceilings.datasheet(name) is None


def test_a_ceiling_is_the_rate_of_the_fastest_tenth(monkeypatch):
    monkeypatch.setattr(ceilings, "_PAUSE_SECONDS", 0.0)
    blocks = iter([[5.0] * 12] * 7 + [[1.0, 2.0] * 6])

    class Sampler:
        def sample(self, call, iterations):
            assert iterations == 12
            return next(blocks)

    assert ceilings._fastest_tenth(lambda: None, Sampler()) == 2.0  # of 96 samples, 6 take 1 s and 6 take 2 s


def test_measuring_the_cpu(monkeypatch):
    pytest.importorskip("torch")
    quick = ceilings._SUSTAINED.model_copy(
        update={"rounds": 2, "min_iterations": 6, "max_iterations": 6, "max_seconds": 0.1, "warmup_seconds": 0.0}
    )
    monkeypatch.setattr(ceilings, "_SUSTAINED", quick)
    monkeypatch.setattr(ceilings, "_PAUSE_SECONDS", 0.0)
    found = ceilings.measure("cpu")
    assert found.device.startswith("CPU")
    assert found.source == "measured"
    assert set(found.flops) == {"bf16", "fp16"}
    assert all(1e8 < rate < 1e14 for rate in found.flops.values())  # FLOP/s of any CPU of this century
    assert 1e8 < found.bytes < 2e12
    ceilings.store(found)
    assert ceilings.for_device(found.env) == found
