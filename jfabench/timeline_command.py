"""The command `timeline`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from jfabench.exit_codes import FAILED, MACHINE, OK, USAGE, fail

EXAMPLES = """\
examples:
  python -m jfabench timeline --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --set lengths.fill=0.5
  python -m jfabench timeline --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --set lengths.fill=0.5 \\
      --direction bwd --order sorted --order batch --out results/mine
"""

Command = Callable[[str, str, Any, str], argparse.ArgumentParser]
"""Adds a command: name, help, function that runs it, examples."""


def add_command(command: Command) -> None:
    timeline = command(
        "timeline",
        "record from inside the TLX kernels when each tile ran where, and what warp groups waited for",
        _timeline,
        EXAMPLES,
    )
    timeline.add_argument("--config", required=True, metavar="FILE", help="a sweep file, by path or by name in sweeps/")
    timeline.add_argument("--out", metavar="DIR", help="result folder (default: results/timeline-<config>-<time>)")
    timeline.add_argument(
        "--only", action="append", default=[], metavar="PROVIDER", help="instead of tlx_jfa (repeatable)"
    )
    timeline.add_argument(
        "--direction", action="append", default=[], choices=["fwd", "bwd", "fwd_bwd"], help="instead of the file's"
    )
    timeline.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override a value (repeatable)"
    )
    timeline.add_argument(
        "--order",
        action="append",
        default=[],
        choices=["sorted", "batch"],
        help="of the tiles: heaviest first, as shipped, or that of the batch, to compare (repeatable; default: sorted)",
    )
    timeline.add_argument("--device", default="auto", help="auto, cuda or cuda:N (default: auto)")


def _timeline(arguments: argparse.Namespace) -> int:
    from jfabench.devices import choose_device
    from jfabench.sweep import ConfigError, load_sweep

    if arguments.out is not None and not arguments.out.strip():
        return fail("--out needs the name of a folder", USAGE)
    try:
        sweep = load_sweep(
            arguments.config,
            "full",
            settings=arguments.settings,
            only=arguments.only or ["tlx_jfa"],
            directions=arguments.direction,
        )
    except ConfigError as error:
        return fail(error, USAGE)
    device, _ = choose_device(arguments.device)
    if device is None or device == "cpu":
        return fail(
            "a timeline is recorded inside the TLX kernels on a GPU of sm_90, and there is none that can be used here: "
            "run it on an H100 or H200 (`python -m jfabench doctor` says what is missing)",
            MACHINE,
        )
    from jfabench import timeline

    if found := timeline.obstacle(device):
        return fail(found, MACHINE)
    folder = Path(arguments.out or f"results/timeline-{sweep.name}-{datetime.now():%Y%m%d-%H%M%S}")
    orders = list(dict.fromkeys(arguments.order or ["sorted"]))
    try:
        for line in timeline.record(sweep.cases, device, orders, folder):
            print(line, flush=True)
    except timeline.TimelineError as error:
        return fail(error, FAILED)
    except OSError as error:
        return fail(f"{folder} cannot be written: {error}. Choose another folder with --out, or make room", MACHINE)
    print(f"spans: {folder / 'timeline.csv'}, waits: {folder / 'waits.csv'}, pictures: {folder / 'charts'}")
    print(f"trace, for https://ui.perfetto.dev: {folder / 'timeline.trace.json'}")
    return OK
