"""What code asks of a GPU and its driver, answered without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as driver_config


class FakeDriver:
    """Triton's driver of a simulated NVIDIA GPU, whose tensors are on the CPU."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils = SimpleNamespace(get_device_properties=lambda _device: vars(properties(capability)))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_device_capability(self, _device: Any = None) -> tuple[int, int]:
        return divmod(self._capability, 10)


def properties(capability: int, multiprocessors: int = 4) -> SimpleNamespace:
    """As ``torch.cuda.get_device_properties`` gives them; few multiprocessors, so that programs get several tiles."""
    major, minor = divmod(capability, 10)
    return SimpleNamespace(
        name=f"simulated sm_{capability}",
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        multiprocessor_count=multiprocessors,
        shared_memory_per_block_optin=232448,
        max_shared_mem=232448,
        total_memory=2**34,
        warp_size=32,
    )


@contextlib.contextmanager
def driver(capability: int) -> Iterator[None]:
    """Triton's active driver is a fake one."""
    with mock.patch.object(driver_config, "_active", FakeDriver(capability)):
        yield
