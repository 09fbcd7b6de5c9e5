"""For pytest: a test that runs under many schedules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from .host import require_launch, simulated_gpu
from .launching import schedules
from .report import Report
from .scheduler import POLICIES, Policy
from .targets import defined


def under_schedules(
    arch: str, seeds: int | Iterable[int] = 3, policies: Iterable[Policy] = POLICIES, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for every seed and policy, each a test of its own, with all kernel launches in it simulated.

        @under_schedules("sm_100", seeds=5)
        def test_attention():
            torch.testing.assert_close(attention(q, k, v), expected)

    It fails if the test does, if anything was found, or if nothing was launched. ``options`` go to
    :func:`.host.simulated_gpu`.
    """
    chosen = schedules(seeds, policies)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, schedule: tuple[int, Policy], **kwargs: Any) -> None:
            seed, policy = schedule
            with simulated_gpu(arch, seed, policy, **options) as gpu:
                try:
                    test(*args, **kwargs)
                finally:  # what was found explains wrong results, too
                    Report(test.__name__, arch, gpu.runs).require_ok()
            require_launch(gpu, defined(test), seed, policy)

        signature = inspect.signature(test)
        schedule = inspect.Parameter("schedule", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), schedule])  # type: ignore[attr-defined]
        ids = [f"{policy}-{seed}" for seed, policy in chosen]
        marked: Callable[..., None] = pytest.mark.parametrize("schedule", chosen, ids=ids)(run)
        return marked

    return decorate
