"""The command `mutate`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jfabench import command_line
from jfabench.exit_codes import FAILED, OK, USAGE, fail

from . import options

if TYPE_CHECKING:
    from .mutate import MutationReport, Outcome

EXAMPLES = """\
examples:
  python -m jfabench mutate kernels.attention.fwd_sm90 --case window
  python -m jfabench mutate kernels.attention.bwd_sm90 --case keys=300:128,D=64 --kind barrier-wait --kind phase
  python -m jfabench mutate my_tests.py:check_my_kernel --kernel my_kernels.py:my_kernel --arch sm_100 --fail-under 0.9
"""
DEFAULT_CASE = "packed"


def add_command(command: command_line.Command) -> None:
    mutate = command(
        "mutate",
        "leave out or change each wait, arrival, fence and phase of a TLX kernel in turn: is it noticed?",
        _mutate,
        EXAMPLES,
    )
    options.add_target(mutate)
    mutate.add_argument(
        "--kernel",
        metavar="KERNEL",
        help="of a function: the kernel that it launches and that is to be changed, module:name or file.py:name",
    )
    mutate.add_argument("--case", metavar="CASE", help=f"for our kernels: as for `simulate` (default: {DEFAULT_CASE})")
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
    options.add_arch(mutate)
    options.add_configuration(mutate)
    mutate.add_argument(
        "--fail-under",
        type=_share,
        metavar="SHARE",
        help="exit code 1 if a smaller share of the faults is caught, from 0 to 1",
    )
    options.add_json(mutate)


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

    file = options.report_file(arguments.json)
    try:
        report = _report(arguments)
        print(report)
    except (TargetError, ValueError) as error:
        return fail(error, USAGE)
    except (BaselineError, KernelError) as error:
        return fail(error, FAILED)
    caught, executed = report.score()
    code = FAILED if caught < (arguments.fail_under or 0) * executed else OK
    if not executed:
        code = fail(f"{arguments.target} executes nothing that could be changed", FAILED)
    return options.written(file, report.to_json() + "\n", code)


def _report(arguments: argparse.Namespace) -> MutationReport:
    from .mutate import mutate
    from .mutations import KINDS

    how = {"seeds": arguments.seeds, "kinds": arguments.kind or KINDS, "progress": _show}
    if ":" in arguments.target:
        test, kernel, arch = _of_function(arguments)
        return mutate(test, kernel, arch=arch, config=arguments.configuration, **how)
    return _of_ours(arguments, how)


def _of_function(arguments: argparse.Namespace) -> tuple[Callable[[], object], Any, str]:
    from . import fakes, targets
    from .machine import Target

    if arguments.case is not None:
        raise targets.TargetError(options.NO_CASE)
    if not arguments.kernel:
        raise targets.TargetError(
            f"{arguments.target}: which of the kernels that it launches? Say so: --kernel module:name or file.py:name"
        )
    arch = options.of_a_function(arguments.arch)
    name = targets.anchored(arguments.kernel)
    with fakes.driver(Target(arch).capability):  # modules ask for it when they are imported
        test, kernel = targets.function(arguments.target), targets.find(name)
    if not targets.is_kernel(kernel):
        raise targets.TargetError(f"{arguments.kernel}: expected a @triton.jit function")
    return test, kernel, arch


def _of_ours(arguments: argparse.Namespace, how: dict[str, Any]) -> MutationReport:
    from .attention import Case
    from .mutate_attention import mutate_attention
    from .targets import TargetError

    direction, arch = options.our_kernel(arguments.target, arguments.arch)
    if arguments.kernel is not None:
        raise TargetError("--kernel is for a function; of our kernels, the target is the one that is changed")
    case = Case.parse(DEFAULT_CASE if arguments.case is None else arguments.case)
    return mutate_attention(case, direction, arch, configuration=arguments.configuration, **how)


def _show(outcome: Outcome) -> None:
    """Progress, for people who wait for minutes."""
    by = f"{outcome.verdict}: {outcome.by}" if outcome.by else outcome.verdict
    print(f"{by:24} {outcome.mutation}", file=sys.stderr, flush=True)
