"""Host code that launches kernels, run with its launches simulated: a library's public function, a tutorial's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from . import fakes
from .launching import INTERPRETED, checked, launch, schedules
from .machine import Target
from .report import Report, Run
from .runtime import KernelError
from .scheduler import POLICIES, Policy
from .targets import TargetError, defined


@dataclass
class Simulation:
    """The launches that were made while it was in force, and whether there were configurations to choose among."""

    runs: list[Run] = field(default_factory=list)
    autotuned: bool = False

    @property
    def ok(self) -> bool:
        return all(run.ok for run in self.runs)


@contextlib.contextmanager
def simulated_gpu(
    arch: str = "sm_90",
    seed: int = 0,
    policy: Policy = "random",
    *,
    multiprocessors: int = 4,
    config: int | Callable[[Any], bool] = 0,
    kernels: Callable[[str], bool] = lambda _name: True,
    **options: Any,
) -> Iterator[Simulation]:
    """Every ``kernel[grid](...)`` on CPU tensors inside is simulated, and its run recorded.

    Triton's driver and ``torch.cuda`` tell of a GPU of ``arch`` with few multiprocessors, so that persistent programs
    get several tiles. ``config`` chooses among an autotuner's configurations. Launches of kernels whose name
    ``kernels`` does not accept are carried out without adversarial schedule and race detector, which is faster.
    ``options`` go to :func:`.launching.launch`.
    """
    if knobs.runtime.interpret:  # kernels would run, and nothing of them be seen
        raise KernelError(INTERPRETED)
    simulation = Simulation()
    capability = Target(arch).capability

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if warmup:
            return
        wanted = kernels(_name(kernel))
        how: dict[str, Any] = {"seed": seed, "policy": policy, "config": config, **options}
        if not wanted:
            how.update(seed=0, policy="early", detect_races=False, config=config if callable(config) else 0)
        simulation.autotuned |= wanted and isinstance(kernel, Autotuner)
        simulation.runs.append(launch(kernel, grid, *args, arch=arch, **how, **kwargs))

    gpu = fakes.properties(capability, multiprocessors)
    with (
        fakes.driver(capability),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(Autotuner, "run", run),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield simulation


def simulate_calls(
    function: Callable[[], object],
    *,
    arch: str = "sm_90",
    seeds: int | Iterable[int] = 3,
    policies: Iterable[Policy] = POLICIES,
    name: str | None = None,
    stop_at_first: bool = False,
    within: Callable[[str], contextlib.AbstractContextManager[object]] | None = None,
    **options: Any,
) -> Report:
    """Call ``function`` once for every seed and policy, with its launches simulated.

    It raises an :class:`AssertionError`, or returns False, if its results are wrong. ``options`` go to
    :func:`simulated_gpu`; ``within`` gives a further context, such as :func:`.attention.attention_on`.

    Raises:
        TargetError: a call launches no kernel, or none that has the configuration that ``config`` numbers, or returns
            something else than None, True or False.
    """
    report = Report(name or str(getattr(function, "__name__", "call")), arch)
    for seed, policy in schedules(seeds, policies):
        with simulated_gpu(arch, seed, policy, **options) as simulation:
            context = within(arch) if within else contextlib.nullcontext()
            with context:
                summary = Run(report.kernel, seed, policy)
                wrong = checked(function, summary)
        if not wrong:
            require_launch(simulation, name or defined(function), seed, policy)
            require_configuration(simulation, name or defined(function), options.get("config", 0))
        runs = simulation.runs or [summary]
        if simulation.ok:  # what else is wrong shows in the results, too
            runs[-1].findings += wrong
        report.runs += runs
        if stop_at_first and not report.ok:
            break
    return report


def require_launch(simulation: Simulation, who: str, seed: int, policy: Policy) -> None:
    """Raises :class:`TargetError` if ``who`` ran without anything to simulate, and so without anything to find."""
    if simulation.ok and not any(run.steps for run in simulation.runs):
        raise TargetError(
            f"{who} launched no kernel under seed {seed}, policy {policy!r}, so that nothing was simulated: it has to "
            "launch in each call, and to keep no results"
        )


def require_configuration(simulation: Simulation, who: str, config: int | Callable[[Any], bool]) -> None:
    """Raises :class:`TargetError` if a configuration was asked for, and no kernel that ``who`` launched has several."""
    if simulation.ok and config and not callable(config) and not simulation.autotuned:
        raise TargetError(
            f"configuration {config}: {who} launches no autotuned kernel, so that there is none to choose; leave it out"
        )


def _name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(kernel.__name__)
