"""What launch code asks of a device; a CPU, which interprets, counts as one multiprocessor."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def gpu_name(device: torch.device) -> str:
    return str(properties(device).name)


def multiprocessors(device: torch.device) -> int:
    return int(properties(device).multi_processor_count) if device.type == "cuda" else 1


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    return int(properties(device).shared_memory_per_block_optin)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
