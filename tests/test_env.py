import importlib.metadata
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jfabench import env

READING = {"reasons": [], "slowed_s": {}, "at_s": 100.0}


# Environment ----------------------------------------------------------------------------------------------------------


def test_environment_of_a_cpu_run(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    found = env.environment("cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["gpu"] is None
    assert found["cpu_cores"] >= 1
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert "x" not in found["variables"].values()


def test_environment_has_the_same_keys_on_every_machine(monkeypatch):
    broken = env.environment("cpu")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert env.environment("cuda").keys() == broken.keys()
    assert env.environment("cuda")["gpu"] is None


def test_a_cpu_environment_imports_no_torch():
    code = (
        "import sys; from jfabench import env; env.environment('cpu'); env.clocks('cpu'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_cuda_facts_come_from_torch(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, major=9, minor=0, total_memory=150_000_000_000, L2_cache_size=1
    )
    torch = SimpleNamespace(
        cuda=SimpleNamespace(get_device_properties=lambda device: properties), version=SimpleNamespace(cuda="13.0")
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(env, "driver_version", lambda: "580.1")
    found = env.environment("cuda")
    assert (found["gpu"], found["sm_count"], found["compute_capability"]) == ("NVIDIA H200", 132, "9.0")
    assert (found["cuda"], found["driver"], found["l2_bytes"]) == ("13.0", "580.1", 1)


def git(folder, *arguments):
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a copy of the module in it, as if jfabench were imported from there."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "jfabench"
    package.mkdir()
    module = package / "env.py"
    module.write_text("# a copy\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(env, "__file__", str(module))
    env._checkout.cache_clear()
    yield tmp_path
    env._checkout.cache_clear()


def test_commit_and_dirty_flag(checkout):
    head = git(checkout, "rev-parse", "HEAD").strip()
    (checkout / "results.jsonl").write_text("not tracked\n")
    assert env._checkout() == {"commit": head, "dirty": False}
    env._checkout.cache_clear()
    (checkout / "jfabench" / "env.py").write_text("# changed\n")
    assert env._checkout() == {"commit": head, "dirty": True}


def test_an_installed_copy_inside_another_checkout_has_no_commit(checkout, monkeypatch):
    installed = checkout / ".venv" / "jfabench" / "env.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("# not tracked\n")
    monkeypatch.setattr(env, "__file__", str(installed))
    assert env._checkout() == {"commit": None, "dirty": None}


def test_flash_attention_is_found_under_each_of_its_names(monkeypatch, tmp_path):
    def install(**versions):
        known = {name.replace("_", "-"): found for name, found in versions.items()}

        def installed(name):
            if name in known:
                return known[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(env.metadata, "version", installed)
        found = env.environment("cpu")
        return found["flash_attn_4"], found["flash_attn_3"], found["fa3_fwd"]

    assert install() == (None, None, None)
    assert install(flash_attn_4="4.0.0b36", fa3_fwd="0.0.3") == ("4.0.0b36", None, "0.0.3")
    assert install(fa4="4.0.0", flash_attn_3="3.0.0") == ("4.0.0", "3.0.0", None)
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert install() == (None, "unversioned", None)


H200 = {"gpu": "NVIDIA H200", "sm_count": 132, "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "python": "3.12.1"}


def test_machine_key_changes_with_what_changes_speed():
    assert env.machine_key(H200) == "NVIDIA H200, 132 SMs, driver 580.1, cuda 13.0, torch 2.11.0"
    for name in ("gpu", "sm_count", "driver", "cuda", "torch"):
        assert env.machine_key({**H200, name: "other"}) != env.machine_key(H200)
    assert env.machine_key({**H200, "python": "3.13.0", "commit": "abc"}) == env.machine_key(H200)
    cpu = {"gpu": None, "cpu": "AMD EPYC", "cpu_cores": 2, "torch": "2.13.0"}
    assert env.machine_key(cpu) == "CPU AMD EPYC, 2 cores, torch 2.13.0"


def test_device_name():
    assert env.device_name(H200) == "NVIDIA H200"
    assert env.device_name({"gpu": None, "cpu": "AMD EPYC"}) == "CPU (AMD EPYC)"
    assert env.device_name({}) == "CPU"


# Clocks ---------------------------------------------------------------------------------------------------------------


class FakeNvml:
    """Two GPUs; the functions that `env` needs of NVML, under NVML's names and units (mW, MHz, ns)."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 2, 0
    NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP = 74
    NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN = 269
    uuids = ("GPU-aaaa-1111", "GPU-bbbb-2222")

    def __init__(self):
        self.open = 0

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return (0, 1)[index]

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self.uuids[handle]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return self.uuids.index(uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus):  # noqa: N802
        return {"00000000:1b:00.0": 1}[bus]

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return {1: 1980, 2: 3201}[kind] + handle

    def nvmlDeviceGetTemperature(self, handle, kind):  # noqa: N802
        return 40 + handle

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 610_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):  # noqa: N802
        raise RuntimeError("not supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return 0x4 | 0x1

    def nvmlDeviceGetFieldValues(self, handle, fields):  # noqa: N802
        known = {74: 2_500_000_000}
        return [
            SimpleNamespace(nvmlReturn=0 if field in known else 3, value=SimpleNamespace(ullVal=known.get(field, 9)))
            for field in fields
        ]

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return ([9, 0], [10, 0])[handle]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_clocks(nvml):
    found = env.clocks("cuda")
    assert found.pop("at_s") > 0
    assert found == {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "temperature_c": 40,
        "power_w": 610.5,
        "power_limit_w": None,  # what a GPU does not support is None, and hides nothing else
        "reasons": ["gpu_idle", "sw_power_cap"],
        "slowed_s": {"sw_power_cap": 2.5},
    }
    assert nvml.open == 0


def test_no_clocks_without_a_gpu(monkeypatch):
    assert env.clocks("cpu") == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert env.clocks("cuda") == {}


@pytest.mark.parametrize(
    ("device", "visible", "temperature"),
    [
        ("cuda", None, 40),
        ("cuda:1", None, 41),
        ("cuda", "1", 41),
        ("cuda:1", "1,0", 40),
        ("cuda:0", "GPU-bbbb-2222", 41),
        ("cuda:0", "GPU-b", 41),
    ],
)
def test_clocks_of_the_visible_device(nvml, monkeypatch, device, visible, temperature):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert env.clocks(device)["temperature_c"] == temperature


@pytest.mark.parametrize(
    "identity", [{"uuid": "bbbb-2222"}, {"pci_domain_id": 0, "pci_bus_id": 27, "pci_device_id": 0}]
)
def test_torch_knows_best_which_device_is_meant(nvml, monkeypatch, identity):
    cuda = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda device: SimpleNamespace(**identity))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert env.clocks("cuda")["temperature_c"] == 41


def test_our_names_of_reasons_are_those_of_nvml():
    pynvml = pytest.importorskip("pynvml")
    for mask, name, _ in env._REASONS:
        theirs = "".join(word.capitalize() for word in name.split("_"))
        found = getattr(pynvml, f"nvmlClocksThrottleReason{theirs}", None)
        assert found == mask, name
    for field in env._COUNTERS.values():
        assert isinstance(getattr(pynvml, field), int)


def test_an_unknown_reason_is_shown_as_its_bit():
    assert env.reason_names(0) == []
    assert env.reason_names(0x8 | 0x2000) == ["hw_slowdown", "0x2000"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, []),
        (READING, READING, []),
        ({**READING, "reasons": ["gpu_idle"]}, {**READING, "reasons": ["applications_clocks_setting"]}, []),
        ({**READING, "reasons": ["hw_slowdown"]}, READING, ["hw_slowdown"]),
        (READING, {**READING, "reasons": ["sw_power_cap", "gpu_idle"]}, ["sw_power_cap"]),
        ({"reasons": None, "slowed_s": {}, "at_s": 1.0}, {"reasons": None, "slowed_s": {}, "at_s": 2.0}, []),
    ],
)
def test_throttled_names_what_slows(before, after, expected):
    assert env.throttled(before, after) == expected


@pytest.mark.parametrize(("slowed", "expected"), [(0.0, []), (0.09, []), (0.11, ["sw_power_cap"])])
def test_throttling_between_two_readings_shows_in_the_counters(slowed, expected):
    before = {**READING, "slowed_s": {"sw_power_cap": 7.0}}
    after = {**READING, "slowed_s": {"sw_power_cap": 7.0 + slowed, "hw_thermal_slowdown": 5.0}, "at_s": 110.0}
    assert env.throttled(before, after) == expected


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, (9, 0)), ("1,0", (10, 0)), ("GPU-bbbb", (10, 0)), ("7", None)]
)
def test_compute_capability_of_the_first_visible_gpu(nvml, monkeypatch, visible, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert env.compute_capability() == expected
    assert nvml.open == 0


def test_compute_capability_of_the_device_that_torch_uses(nvml, monkeypatch):
    cuda = SimpleNamespace(is_initialized=lambda: True, get_device_capability=lambda: (12, 0))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert env.compute_capability() == (12, 0)


def test_no_compute_capability_without_nvml(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert env.compute_capability() is None
