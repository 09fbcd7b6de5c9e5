"""What commands share: options that say the same everywhere, and the way from them to a sweep and a device.

Imports stand inside what needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jfabench.exit_codes import MACHINE, USAGE, fail

if TYPE_CHECKING:
    from jfabench.sweep import Scale, Sweep

Run = Callable[[argparse.Namespace], int]
"""Carries out a command; returns its exit code, or raises `CommandError`."""

Command = Callable[[str, str, Run, str], argparse.ArgumentParser]
"""Adds a command: name, help, function that runs it, examples."""

SHORT_FOR = {"measure": "measure.mode", "workers": "workers"}
"""Options by name, and the keys of a sweep file that they set."""


INSTEAD_OF_A_GPU = "; use --device cpu for the small scale"
"""How `devices.choose_device` ends why there is no GPU: of no use to a command that has no small scale."""


class CommandError(Exception):
    """Why a command cannot go on, in one sentence, and the exit code that it ends with."""

    def __init__(self, message: object, code: int) -> None:
        super().__init__(str(message))
        self.code = code


# Values --------------------------------------------------------------------------------------------------------------


def whole_number(least: int) -> Callable[[str], int]:
    """Reads a whole number that is at least `least`, itself at least 0."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least {least}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """Reads a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number of seconds")
    return value


def _folder(text: str) -> Path:
    if not text.strip():  # an empty variable of a script; argparse would print its usage, too
        raise CommandError("--out needs the name of a folder", USAGE)
    return Path(text)


# Options -------------------------------------------------------------------------------------------------------------


def add_config(
    parser: argparse._ActionsContainer,
    help_text: str = "a sweep file, by path or by name in sweeps/",
    *,
    required: bool = True,
) -> None:
    parser.add_argument("--config", required=required, metavar="FILE", help=help_text)


def add_out(parser: argparse.ArgumentParser, help_text: str, default: str | None = None) -> None:
    """`--out`, as a `Path`. A name of blanks ends the command with `CommandError` when it is parsed."""
    parser.add_argument("--out", type=_folder, default=default, metavar="DIR", help=help_text)


def add_new_folder(parser: argparse.ArgumentParser, default: str) -> None:
    """`--out` of a command that makes a result folder, by default that of `new_folder`."""
    add_out(parser, f"result folder (default: results/{default})")


def add_only(parser: argparse.ArgumentParser, help_text: str = "only this one (repeatable)") -> None:
    parser.add_argument("--only", action="append", default=[], metavar="PROVIDER", help=help_text)


def add_directions(
    parser: argparse.ArgumentParser,
    choices: Sequence[str] = ("fwd", "bwd", "fwd_bwd"),
    help_text: str = "instead of the file's",
) -> None:
    parser.add_argument("--direction", action="append", default=[], choices=choices, help=help_text)


def add_settings(parser: argparse.ArgumentParser, help_text: str = "override a value (repeatable)") -> None:
    """`--set`, found under the name `settings`."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help=help_text)


def add_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", choices=["profiler", "events", "cudagraph", "wall"], help="how to time (default: the file's)"
    )


def add_device(parser: argparse.ArgumentParser, words: str = "auto, cpu, cuda or cuda:N") -> None:
    parser.add_argument("--device", default="auto", help=f"{words} (default: auto)")


def add_timeout(parser: argparse.ArgumentParser, default: int = 300) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=float(default),
        metavar="SECONDS",
        help=f"kill a step that takes longer (default: {default})",
    )


# From options to what is to be done ----------------------------------------------------------------------------------


def new_folder(out: Path | None, name: str) -> Path:
    """The folder that `--out` names, or one in `results/` with the time in its name."""
    return out or Path(f"results/{name}-{datetime.now():%Y%m%d-%H%M%S}")


def load(arguments: argparse.Namespace, scale: Scale = "full", *, only: Sequence[str] = ()) -> Sweep:
    """The sweep that `--config` names, as the other options change it; those that the command lacks change nothing.

    `only` names providers instead of `--only`. Raises `CommandError` if the file, a setting or a name is not valid.
    """
    from jfabench.sweep import ConfigError, load_sweep

    given = vars(arguments)
    settings = [f"{key}={given[option]}" for option, key in SHORT_FOR.items() if given.get(option)]
    try:
        return load_sweep(
            arguments.config,
            scale,
            settings=[*arguments.settings, *settings],
            only=only or given.get("only", ()),
            skip=given.get("skip", ()),
            directions=given.get("direction", ()),
        )
    except ConfigError as error:
        raise CommandError(error, USAGE) from None


def _chosen_device(wanted: str) -> tuple[str | None, str]:
    """`devices.choose_device`; raises `CommandError` for what names no device."""
    from jfabench.devices import choose_device

    try:
        return choose_device(wanted)
    except ValueError as error:
        raise CommandError(error, USAGE) from None


def usable_device(wanted: str) -> tuple[str, str]:
    """The device that `--device` means here, and what people should know about it.

    Raises `CommandError` with the reason where it cannot be used.
    """
    device, note = _chosen_device(wanted)
    if device is None:
        raise CommandError(note, MACHINE)
    return device, note


def load_for(arguments: argparse.Namespace, device: str) -> Sweep:
    """`load` at the scale of `device`; raises `CommandError` if it cannot be timed there as is wanted, too."""
    sweep = load(arguments, "cpu" if device == "cpu" else "full")
    try:
        sweep.config.measure.mode_on(device.split(":")[0])
    except ValueError as error:
        raise CommandError(error, USAGE) from None
    return sweep


def load_and_choose_device(arguments: argparse.Namespace) -> tuple[Sweep, str]:
    """What a command that also runs on a CPU measures, and where; prints what people should know about the device."""
    device, note = usable_device(arguments.device)
    sweep = load_for(arguments, device)
    if note:
        print(note)
    return sweep, device


def load_for_hopper(arguments: argparse.Namespace, what: str, *, only: Sequence[str]) -> tuple[Sweep, str]:
    """What a command that looks into the TLX kernels for Hopper runs, and on which GPU.

    `what` begins the sentence of the `CommandError` that is raised without one, and that has the reason.
    """
    sweep = load(arguments, only=only)
    wanted = vars(arguments).get("device", "auto")
    device, note = _chosen_device("cuda" if wanted == "auto" else wanted)
    if device is None or device == "cpu":
        reason = "--device cpu is none" if device else note.removesuffix(INSTEAD_OF_A_GPU)
        raise CommandError(
            f"{what} the TLX kernels on a GPU of sm_90, and there is none that can be used here ({reason}): "
            "run it on an H100 or H200 (`python -m jfabench doctor` says what is missing)",
            MACHINE,
        )
    return sweep, device


def missing(error: ImportError) -> int:
    """Tells people what to install for `compare`, `history` and `nightly`, and returns the exit code."""
    return fail(
        f"{error.name} is not installed, and this command needs it: pip install 'jfabench[history]', or "
        "scripts/setup.sh --history",
        MACHINE,
    )
