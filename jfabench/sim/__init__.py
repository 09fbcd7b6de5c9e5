"""Runs the unchanged source of TLX kernels on a CPU, under adversarial schedules, with a race detector.

A kernel, once or under many schedules (tensors are CPU tensors, written to as on a GPU):

    from jfabench.sim import launch, simulate

    run = launch(kernel, (4,), x, out, N, BLOCK=128, arch="sm_90", seed=7, policy="late")     # print(run), run.findings
    report = simulate(kernel, (4,), (x, out, N), {"BLOCK": 128}, arch="sm_100", seeds=5,
                      check=lambda: torch.testing.assert_close(out, expected))
    report.require_ok()                                                     # raises, with the whole report, if not

Host code that launches kernels (autotuned or not) is run unchanged, and all its launches are simulated:

    from jfabench.sim import simulate_calls, simulated_gpu

    with simulated_gpu("sm_100", seed=3, policy="early") as gpu:
        out = some_library_function(q, k, v)                                # gpu.runs, gpu.ok
    simulate_calls(function_that_asserts, arch="sm_100", seeds=5).require_ok()

The project's own kernels, through the public function (for calls of your own, `attention_on` inside `simulated_gpu`):

    from jfabench.sim import CASES, simulate_attention
    simulate_attention(CASES["causal"], "bwd", "sm_90", seeds=20).require_ok()

The names are imported when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import CASES, Case, attention_on, simulate_attention
    from .host import simulate_calls, simulated_gpu
    from .launching import launch, simulate
    from .report import Finding, Report, Run
    from .runtime import KernelError
    from .targets import TargetError

__all__ = [
    "CASES",
    "Case",
    "Finding",
    "KernelError",
    "Report",
    "Run",
    "TargetError",
    "attention_on",
    "launch",
    "simulate",
    "simulate_attention",
    "simulate_calls",
    "simulated_gpu",
]
_HOMES = {
    "attention": ("CASES", "Case", "attention_on", "simulate_attention"),
    "host": ("simulate_calls", "simulated_gpu"),
    "launching": ("launch", "simulate"),
    "report": ("Finding", "Report", "Run"),
    "runtime": ("KernelError",),
    "targets": ("TargetError",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
