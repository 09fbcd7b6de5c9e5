"""The command `simulate`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jfabench import command_line
from jfabench.exit_codes import FAILED, OK, USAGE, fail

from . import options

if TYPE_CHECKING:
    from .report import Report

EXAMPLES = """\
examples:
  python -m jfabench simulate kernels.attention.fwd_sm90 --seeds 20
  python -m jfabench simulate kernels.attention.bwd_sm90 --case causal --case keys=100:37,queries=64,heads=4,kv_heads=2
  python -m jfabench simulate my_tests.py:check_my_kernel --arch sm_100 --policy late --json report.json
"""

Simulated = Callable[[dict[str, Any]], "Report"]
"""Simulates something, under the seeds and policies that it is given by name."""


def add_command(command: command_line.Command) -> None:
    simulate = command(
        "simulate",
        "run TLX kernels on the CPU under adversarial schedules: results, races, deadlocks, misuse of barriers",
        _simulate,
        EXAMPLES,
    )
    options.add_target(simulate)
    simulate.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="CASE",
        help="for our kernels: broadcast, packed, causal, window, grouped, empty, or fields such as "
        "keys=100:37,queries=64,heads=4,kv_heads=2,D=64,causal,window=3:5 (repeatable; default: all that have names)",
    )
    simulate.add_argument(
        "--seeds", type=command_line.whole_number(1), default=3, metavar="N", help="how many seeds (default: 3)"
    )
    simulate.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="to repeat one (default: 0)")
    simulate.add_argument(
        "--policy",
        action="append",
        default=[],
        choices=["random", "early", "late"],
        help="when asynchronous operations happen (repeatable; default: all three)",
    )
    options.add_arch(simulate)
    options.add_configuration(simulate)
    simulate.add_argument("--barriers", action="store_true", help="print how each barrier was used")
    options.add_json(simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from .runtime import KernelError
    from .targets import RaisedError, TargetError

    file = options.report_file(arguments.json)
    try:
        reports = _reports(arguments)
    except (TargetError, ValueError) as error:
        return fail(error, USAGE)
    except (RaisedError, KernelError) as error:
        return fail(error, FAILED)
    code = OK if all(report.ok for report in reports) else FAILED
    return options.written(file, "[\n" + ",\n".join(report.to_json() for report in reports) + "\n]\n", code)


def _reports(arguments: argparse.Namespace) -> list[Report]:
    """One for each case, printed as soon as it is there."""
    from .scheduler import POLICIES

    first = arguments.first_seed
    schedules = {"seeds": range(first, first + arguments.seeds), "policies": arguments.policy or POLICIES}
    reports = []
    for name, run in _runs(arguments):
        report = run(schedules)
        print(f"{name}: {report}" if name else report, flush=True)
        if arguments.barriers:
            print(report.barrier_table(), flush=True)
        reports.append(report)
    return reports


def _runs(arguments: argparse.Namespace) -> list[tuple[str, Simulated]]:
    """What is to be simulated, by name."""
    from . import fakes, targets
    from .host import simulate_calls
    from .machine import Target

    target: str = arguments.target
    if ":" in target:
        if arguments.case:
            raise targets.TargetError(options.NO_CASE)
        arch = options.of_a_function(arguments.arch)
        with fakes.driver(Target(arch).capability):  # modules ask for it when they are imported
            function = targets.telling(targets.function(target))
        configuration = arguments.configuration
        return [("", lambda o: simulate_calls(function, arch=arch, config=configuration, **o))]
    return _attention(target, arguments)


def _attention(target: str, arguments: argparse.Namespace) -> list[tuple[str, Simulated]]:
    from .attention import CASES, Case, simulate_attention

    direction, arch = options.our_kernel(target, arguments.arch)
    configuration = arguments.configuration

    def run(case: Case) -> Simulated:
        return lambda o: simulate_attention(case, direction, arch, configuration=configuration, **o)

    return [(text, run(Case.parse(text))) for text in arguments.case or CASES]
