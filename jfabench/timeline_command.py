"""The command `timeline`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse

from jfabench import command_line
from jfabench.exit_codes import FAILED, MACHINE, OK, fail

EXAMPLES = """\
examples:
  python -m jfabench timeline --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --set lengths.fill=0.5
  python -m jfabench timeline --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --set lengths.fill=0.5 \\
      --direction bwd --order sorted --order batch --out results/mine
"""


def add_command(command: command_line.Command) -> None:
    timeline = command(
        "timeline",
        "record from inside the TLX kernels when each tile ran where, and what warp groups waited for",
        _timeline,
        EXAMPLES,
    )
    command_line.add_config(timeline)
    command_line.add_new_folder(timeline, "timeline-<config>-<time>")
    command_line.add_only(timeline, "instead of tlx_jfa (repeatable)")
    command_line.add_directions(timeline)
    command_line.add_settings(timeline)
    timeline.add_argument(
        "--order",
        action="append",
        default=[],
        choices=["sorted", "batch"],
        help="of the tiles: heaviest first, as shipped, or that of the batch, to compare (repeatable; default: sorted)",
    )
    command_line.add_device(timeline, "auto, cuda or cuda:N")


def _timeline(arguments: argparse.Namespace) -> int:
    sweep, device = command_line.load_for_hopper(
        arguments, "a timeline is recorded inside", only=arguments.only or ["tlx_jfa"]
    )
    from jfabench import timeline

    if found := timeline.obstacle(device):
        return fail(found, MACHINE)
    folder = command_line.new_folder(arguments.out, f"timeline-{sweep.name}")
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
