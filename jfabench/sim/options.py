"""What the commands `simulate` and `mutate` share: options, our kernels by name, and the file of a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from jfabench import command_line
from jfabench.command_line import CommandError
from jfabench.exit_codes import MACHINE, USAGE, fail

TARGET = (
    "our kernels by their module (kernels.attention.fwd_sm90), or a function without arguments that launches kernels "
    "on CPU tensors and raises AssertionError, or returns False, if they are wrong: module:function, file.py:function"
)
OF_A_FUNCTION = "sm_90"
"""What a function is simulated on, if nobody says."""

NO_CASE = "--case is for our kernels; a function has its own inputs"


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help=TARGET)


def add_arch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        help=f"sm_90 or sm_100 (default: by the module's name; of a function, {OF_A_FUNCTION})",
    )


def add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--configuration",
        type=command_line.whole_number(0),
        default=0,
        metavar="N",
        help="which configuration of the kernel (default: 0)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")


# What they mean ------------------------------------------------------------------------------------------------------


def of_a_function(arch: str | None) -> str:
    """What `--arch` means for a function. Raises ValueError with the valid values."""
    from .machine import Target

    return Target(OF_A_FUNCTION if arch is None else arch).arch


def our_kernel(target: str, arch: str | None) -> tuple[str, str]:
    """Direction and architecture of one of our kernels: `kernels.attention.fwd_sm90` is `("fwd", "sm_90")`.

    Raises `TargetError` if there is no such kernel, or if `--arch` is another one's, and ValueError if it is none's.
    """
    from jfabench.kernels.attention.launch import TLX_LAUNCHERS

    from .attention import KERNELS
    from .machine import Target
    from .targets import TargetError

    known = {
        f"{direction}_sm{major}{minor}": (direction, f"sm_{major}{minor}")
        for major, minor in TLX_LAUNCHERS
        for direction in KERNELS
    }
    module = target.removeprefix("jfabench.").removeprefix("kernels.attention.")
    if module not in known:
        ours = ", ".join(f"kernels.attention.{name}" for name in known)
        raise TargetError(f"{target}: expected one of {ours}, or module:function, or file.py:function")
    direction, own = known[module]
    if arch is not None and Target(arch).arch != own:
        other = f"kernels.attention.{direction}_{arch.replace('_', '')}"
        raise TargetError(f"--arch {arch}: {target} is for {own}; leave --arch out, or name {other}")
    return direction, own


def report_file(given: str | None) -> Path | None:
    """The file that `--json` names, wherever a target goes; tried now, for after the last run it would be too late.

    Raises `CommandError` if nothing can be written there.
    """
    if given is None:
        return None
    path = Path(given).absolute()
    try:
        _try_to_write(path)
    except OSError as error:
        raise CommandError(
            f"--json {given}: no report can be written there ({error.strerror}): name a file that can be written, in "
            "a folder that there is",
            USAGE,
        ) from None
    return path


def _try_to_write(path: Path) -> None:
    """Opens a file, and leaves it as it was. Raises OSError."""
    new = not path.exists()
    if not new and not path.is_file() and not path.is_dir():
        return  # a pipe or a device: opening it may wait, or end what reads it
    with path.open("ab"):
        pass
    if new:
        path.resolve().unlink()


def written(path: Path | None, text: str, code: int) -> int:
    """Writes a report, if one is wanted, and returns `code`; if that fails after all, says so, and never returns 0."""
    if path is None:
        return code
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return fail(f"{path}: the report cannot be written ({error.strerror})", code or MACHINE)
    return code
