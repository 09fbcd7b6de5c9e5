"""Names of devices: which there are at all. Which of them a machine has is tested with the command line."""

from __future__ import annotations

import pytest
import torch

from jfabench import devices


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["A", "B"])
    monkeypatch.setattr(devices, "torch_cuda_devices", lambda: 2)


@pytest.mark.parametrize(
    "wanted",
    [
        *("", " ", "gpu", "CPU", "cpu:0", "auto:0", "cuda:", "cuda 1", "cuda:x", "cuda:-1", "cuda:1.0", "cuda:01"),
        *("cuda:٣", "cuda:1\n", "cuda:" + 5000 * "9"),
    ],
    ids=lambda wanted: repr(wanted[:12]),
)
def test_what_names_no_device(wanted: str) -> None:
    with pytest.raises(ValueError, match="expected auto, cpu, cuda or cuda:N"):
        devices.choose_device(wanted)


@pytest.mark.parametrize("wanted", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_what_names_one_names_it_for_torch_too(wanted: str) -> None:
    device, _ = devices.choose_device(wanted)
    assert device == wanted == str(torch.device(wanted))


@pytest.mark.parametrize("wanted", ["cuda:2", "cuda:10", "cuda:999999999"])
def test_one_that_there_is_not_is_a_reason(wanted: str) -> None:
    device, reason = devices.choose_device(wanted)
    assert device is None
    assert reason.startswith(f"--device {wanted}: torch sees 2 CUDA device(s), numbered from 0")
