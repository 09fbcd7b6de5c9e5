"""The command `mutate`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jfabench import command_line
from jfabench.exit_codes import FAILED, OK, USAGE, fail

from .command import TARGET, write

if TYPE_CHECKING:
    from .mutate import MutationReport, Outcome

EXAMPLES = """\
examples:
  python -m jfabench mutate kernels.attention.fwd_sm90 --case window
  python -m jfabench mutate kernels.attention.bwd_sm90 --case keys=300:128,D=64 --kind barrier-wait --kind phase
  python -m jfabench mutate my_tests.py:check_my_kernel --kernel my_kernels.py:my_kernel --arch sm_100 --fail-under 0.9
"""


def add_command(command: command_line.Command) -> None:
    mutate = command(
        "mutate",
        "leave out or change each wait, arrival, fence and phase of a TLX kernel in turn: is it noticed?",
        _mutate,
        EXAMPLES,
    )
    mutate.add_argument("target", metavar="TARGET", help=TARGET)
    mutate.add_argument(
        "--kernel",
        metavar="KERNEL",
        help="of a function: the kernel that it launches and that is to be changed, module:name or file.py:name",
    )
    mutate.add_argument(
        "--case", default="packed", metavar="CASE", help="for our kernels: as for `simulate` (default: packed)"
    )
    mutate.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="KIND",
        help="only this kind of fault, such as barrier-wait, phase, fence (repeatable; default: all)",
    )
    mutate.add_argument(
        "--seeds",
        type=command_line.whole_number(1),
        default=2,
        metavar="N",
        help="how many seeds, of three policies each (default: 2)",
    )
    mutate.add_argument(
        "--arch", metavar="ARCH", help="such as sm_90, sm_100 (default: by the module's name, or sm_90)"
    )
    mutate.add_argument(
        "--configuration", type=int, default=0, metavar="N", help="which configuration of the kernel (default: 0)"
    )
    mutate.add_argument(
        "--fail-under",
        type=_share,
        metavar="SHARE",
        help="exit code 1 if a smaller share of the faults is caught, from 0 to 1",
    )
    mutate.add_argument("--json", metavar="FILE", help="write the report there, too")


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 0 to 1")
    return value


def _mutate(arguments: argparse.Namespace) -> int:
    from .mutate import BaselineError
    from .runtime import KernelError
    from .targets import TargetError

    try:
        report = _report(arguments)
        print(report)
        if arguments.json:
            write(arguments.json, report.to_json() + "\n")
    except (TargetError, ValueError) as error:
        return fail(error, USAGE)
    except (BaselineError, KernelError) as error:
        return fail(error, FAILED)
    caught, executed = report.score()
    if not executed:
        return fail(f"{arguments.target} executes nothing that could be changed", FAILED)
    return FAILED if caught < (arguments.fail_under or 0) * executed else OK


def _report(arguments: argparse.Namespace) -> MutationReport:
    from .mutate import mutate
    from .mutations import KINDS

    options = {"seeds": arguments.seeds, "kinds": arguments.kind or KINDS, "progress": _show}
    if ":" in arguments.target:
        test, kernel, arch = _of_function(arguments)
        return mutate(test, kernel, arch=arch, config=arguments.configuration, **options)
    return _of_ours(arguments, options)


def _of_function(arguments: argparse.Namespace) -> tuple[Callable[[], object], Any, str]:
    from . import fakes, targets
    from .machine import Target

    if not arguments.kernel:
        raise targets.TargetError(
            f"{arguments.target}: which of the kernels that it launches? Say so: --kernel module:name or file.py:name"
        )
    arch = arguments.arch or "sm_90"
    with fakes.driver(Target(arch).capability):  # modules ask for it when they are imported
        test, kernel = targets.function(arguments.target), targets.find(arguments.kernel)
    if not targets.is_kernel(kernel):
        raise targets.TargetError(f"{arguments.kernel}: expected a @triton.jit function")
    return test, kernel, arch


def _of_ours(arguments: argparse.Namespace, options: dict[str, Any]) -> MutationReport:
    from jfabench.kernels.attention.launch import TLX_LAUNCHERS

    from .attention import KERNELS, Case
    from .mutate_attention import mutate_attention
    from .targets import TargetError

    module = arguments.target.rpartition(".")[2]
    known = [f"{direction}_sm{major}{minor}" for major, minor in TLX_LAUNCHERS for direction in KERNELS]
    if module not in known:
        ours = ", ".join(f"kernels.attention.{name}" for name in known)
        raise TargetError(f"{arguments.target}: expected one of {ours}, or module:function, or file.py:function")
    direction, _, suffix = module.partition("_")
    return mutate_attention(
        Case.parse(arguments.case),
        direction,
        arguments.arch or suffix.replace("sm", "sm_"),
        configuration=arguments.configuration,
        **options,
    )


def _show(outcome: Outcome) -> None:
    """Progress, for people who wait for minutes."""
    by = f"{outcome.verdict}: {outcome.by}" if outcome.by else outcome.verdict
    print(f"{by:24} {outcome.mutation}", file=sys.stderr, flush=True)
