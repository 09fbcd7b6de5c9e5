"""Mutations of the project's own attention kernels, tested through their public function against the oracle."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention import KERNEL, KERNELS, PACKAGE, TOLERANCE, Case, attention, attention_on, problem
from .host import simulated_gpu
from .launching import numbered
from .mutate import MutationReport, mutate

Choose = Callable[[Any, tuple[Any, ...]], Any]


def mutate_attention(
    case: Case,
    direction: str = "fwd",
    arch: str = "sm_90",
    *,
    configuration: int = 0,
    multiprocessors: int = 1,
    choose: Choose | None = None,
    **options: Any,
) -> MutationReport:
    """Mutate the kernel of one direction, in a test that compares its results with the oracle's.

    With one multiprocessor its programs get as many tiles as there are. ``configuration`` is one of the kernel's
    configurations by number, which it has to have; ``choose(kind, usable)`` picks one otherwise. ``options`` go to
    :func:`.mutate.mutate`.
    """
    prefix = KERNELS[direction]

    def chosen(kind: Any, usable: tuple[Any, ...]) -> Any:
        if kind.kernel != prefix:
            return usable[0]
        return choose(kind, usable) if choose else numbered(usable, configuration, KERNEL)

    within = functools.partial(attention_on, multiprocessors=multiprocessors, choose=chosen)
    inputs, expected = problem(case, direction)
    compute: Callable[[], list[Tensor]] = functools.partial(attention, case, inputs, direction)
    if direction == "bwd":
        with simulated_gpu(arch), within(arch):
            compute = _backward(case, inputs)

    def test() -> None:
        for actual, wanted in zip(compute(), expected, strict=True):
            torch.testing.assert_close(actual.float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)

    suffix = arch.replace("_", "")
    kernel = getattr(importlib.import_module(f"{PACKAGE}.{direction}_{suffix}"), f"{prefix}_{suffix}_kernel")
    return mutate(test, kernel, arch=arch, within=within, kernels=lambda name: name.startswith(prefix), **options)


def _backward(case: Case, inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Runs the forward pass, once for all mutants; what is returned runs the backward pass."""
    from jfabench.kernels import jagged_flash_attention

    offsets = torch.tensor([0, *case.keys]).cumsum(0)
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    out = jagged_flash_attention(
        q, k, v, offsets, broadcast_q=case.queries is not None, causal=case.causal, window=case.window
    )
    return lambda: list(torch.autograd.grad(out, (q, k, v), inputs[3], retain_graph=True))
