"""Which family of kernels computes a problem: by the architecture of its device, or as the caller says."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .fwd_triton import forward_kernel
from .interpret import is_interpreted
from .notice import say_once
from .problem import Problem

# The TLX family: its launch module for each compute capability. They import TLX, and so only where they are used.
TLX_LAUNCHERS = {(9, 0): "launch_sm90", (10, 0): "launch_sm100"}


class Launcher(Protocol):
    """What a launch module offers."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """``out`` ``[rows, H, D]`` and ``lse`` ``[H, rows]``."""
        ...

    def backward(
        self, problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, *, need_dq: bool, need_dkdv: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """``dq, dk, dv``, shaped like ``q``, ``k``, ``v``; None where not needed."""
        ...


class Obstacle(NamedTuple):
    """Why the TLX kernels cannot run on a device, and what to do about it."""

    reason: str
    remedy: str


@functools.cache
def launcher(kernels: str, device: torch.device) -> Launcher:
    """The launch module for ``kernels`` (``"auto"``, ``"tlx"`` or ``"triton"``) on ``device``.

    ``"auto"`` is the TLX family where it can run, else the plain Triton kernels, which is said once.
    """
    obstacle = tlx_obstacle(device)
    if kernels == "tlx" and obstacle:
        raise RuntimeError(f'jagged_flash_attention: no kernels="tlx" here: {obstacle.reason}; {obstacle.remedy}.')
    if kernels == "triton" or obstacle:
        if not (device.type == "cuda" or is_interpreted(forward_kernel)):
            raise RuntimeError(
                f"jagged_flash_attention runs on CUDA tensors, got {device}: to run on the CPU, set TRITON_INTERPRET=1 "
                "in the environment before Python starts."
            )
        if obstacle and kernels == "auto":
            say_once(f"{obstacle.reason}; using the plain Triton kernels")
        return _module("launch_triton")
    return _module(TLX_LAUNCHERS[torch.cuda.get_device_capability(device)])


def tlx_obstacle(device: torch.device) -> Obstacle | None:
    plain = 'pass kernels="triton" or "auto"'
    if is_interpreted(forward_kernel):
        return Obstacle("the TLX kernels cannot be interpreted", f"{plain}, or unset TRITON_INTERPRET")
    if device.type != "cuda":
        return Obstacle(f"the TLX kernels run on NVIDIA GPUs, not on the {device.type}", "move the tensors to a GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability not in TLX_LAUNCHERS:
        known = " or ".join(map(_architecture, TLX_LAUNCHERS))
        return Obstacle(f"no TLX kernels for {_architecture(capability)}", f"{plain}, or use a GPU of {known}")
    if importlib.util.find_spec("triton.language.extra.tlx") is None:
        remedy = f"install fbtriton in its place (`python -m jfabench doctor --repair` does), or {plain}"
        return Obstacle("the installed triton has no TLX, which fbtriton has", remedy)
    return None


def _architecture(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)


def _module(name: str) -> Launcher:
    module: Launcher = importlib.import_module(f".{name}", __package__)
    return module
