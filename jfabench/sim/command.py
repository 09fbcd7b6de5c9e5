"""The command `simulate`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfabench import command_line
from jfabench.exit_codes import FAILED, OK, USAGE, fail

if TYPE_CHECKING:
    from .report import Report

EXAMPLES = """\
examples:
  python -m jfabench simulate kernels.attention.fwd_sm90 --seeds 20
  python -m jfabench simulate kernels.attention.bwd_sm90 --case causal --case keys=100:37,queries=64,heads=4,kv_heads=2
  python -m jfabench simulate my_tests.py:check_my_kernel --arch sm_100 --policy late --json report.json
"""
TARGET = (
    "our kernels by their module (kernels.attention.fwd_sm90), or a function without arguments that launches kernels "
    "on CPU tensors and raises AssertionError, or returns False, if they are wrong: module:function, file.py:function"
)

Simulated = Callable[[dict[str, Any]], "Report"]
"""Simulates something, under the seeds and policies that it is given by name."""


def add_command(command: command_line.Command) -> None:
    simulate = command(
        "simulate",
        "run TLX kernels on the CPU under adversarial schedules: results, races, deadlocks, misuse of barriers",
        _simulate,
        EXAMPLES,
    )
    simulate.add_argument("target", metavar="TARGET", help=TARGET)
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
    simulate.add_argument(
        "--arch", metavar="ARCH", help="such as sm_90, sm_100 (default: by the module's name, or sm_90)"
    )
    simulate.add_argument(
        "--configuration",
        type=command_line.whole_number(0),
        default=0,
        metavar="N",
        help="which configuration of the kernel (default: 0)",
    )
    simulate.add_argument("--barriers", action="store_true", help="print how each barrier was used")
    simulate.add_argument("--json", metavar="FILE", help="write the report there, too")


def _simulate(arguments: argparse.Namespace) -> int:
    from .runtime import KernelError
    from .targets import RaisedError, TargetError

    try:
        reports = _reports(arguments)
        if arguments.json:
            write(arguments.json, "[\n" + ",\n".join(report.to_json() for report in reports) + "\n]\n")
    except (TargetError, ValueError) as error:
        return fail(error, USAGE)
    except (RaisedError, KernelError) as error:
        return fail(error, FAILED)
    return OK if all(report.ok for report in reports) else FAILED


def _reports(arguments: argparse.Namespace) -> list[Report]:
    """One for each case, printed as soon as it is there."""
    from .scheduler import POLICIES

    first = arguments.first_seed
    options = {"seeds": range(first, first + arguments.seeds), "policies": arguments.policy or POLICIES}
    reports = []
    for name, run in _runs(arguments):
        report = run(options)
        print(f"{name}: {report}" if name else report, flush=True)
        if arguments.barriers:
            print(report.barrier_table(), flush=True)
        reports.append(report)
    return reports


def write(path: str, text: str) -> None:
    """Writes a report. Raises `TargetError` if that is not possible."""
    from .targets import TargetError

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TargetError(f"{path}: the report cannot be written ({error.strerror})") from error


def _runs(arguments: argparse.Namespace) -> list[tuple[str, Simulated]]:
    """What is to be simulated, by name."""
    from . import fakes, targets
    from .host import simulate_calls
    from .machine import Target

    target: str = arguments.target
    if ":" in target:
        if arguments.case:
            raise targets.TargetError("--case is for our kernels; a function has its own inputs")
        arch = arguments.arch or "sm_90"
        with fakes.driver(Target(arch).capability):  # modules ask for it when they are imported
            function = targets.telling(targets.function(target))
        configuration = arguments.configuration
        return [("", lambda o: simulate_calls(function, arch=arch, config=configuration, **o))]
    return _attention(target, arguments)


def _attention(target: str, arguments: argparse.Namespace) -> list[tuple[str, Simulated]]:
    from jfabench.kernels.attention.launch import TLX_LAUNCHERS

    from .attention import CASES, Case, simulate_attention
    from .targets import TargetError

    known = [f"{direction}_sm{major}{minor}" for major, minor in TLX_LAUNCHERS for direction in ("fwd", "bwd")]
    module = target.rpartition(".")[2]
    if module not in known:
        ours = ", ".join(f"kernels.attention.{name}" for name in known)
        raise TargetError(f"{target}: expected one of {ours}, or module:function, or file.py:function")
    direction, _, suffix = module.partition("_sm")
    arch = arguments.arch or f"sm_{suffix}"
    configuration = arguments.configuration

    def run(case: Case) -> Simulated:
        return lambda o: simulate_attention(case, direction, arch, configuration=configuration, **o)

    return [(text, run(Case.parse(text))) for text in arguments.case or CASES]
