"""The command `nightly`: parses, calls, prints. Imports stand inside what needs them.

Its exit codes are told in `jfabench.nightly`: 0 good, 1 regression, 4 wrong results, 3 infrastructure, 2 not valid.
"""

from __future__ import annotations

import argparse
import sys

from jfabench import command_line
from jfabench.exit_codes import INTERRUPTED, MACHINE, USAGE, fail
from jfabench.history_command import add_database

EXAMPLES = """\
examples:
  python -m jfabench nightly --config nightly.yaml --db sqlite:////srv/jfabench/history.sqlite
  python -m jfabench nightly --config nightly.yaml --gate tlx_jfa --gate triton_jfa --out results/tonight

exit codes: 0 good, 1 a regression, 4 wrong results, 3 the machine or the database failed, 2 the command is not valid
"""


def add_command(command: command_line.Command) -> None:
    nightly = command(
        "nightly",
        "measure, compare with the last good night of this machine, repeat what looks slower, report",
        _nightly,
        EXAMPLES,
    )
    command_line.add_config(nightly)
    command_line.add_new_folder(nightly, "nightly-<time>")
    add_database(nightly)
    nightly.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="PROVIDER",
        help="one that can fail the night (repeatable; default: all but the baseline)",
    )
    command_line.add_device(nightly)
    command_line.add_settings(nightly)
    nightly.add_argument(
        "--pairs",
        type=command_line.whole_number(2),
        default=8,
        metavar="N",
        help="pairs of processes of a repetition (default: 8)",
    )
    nightly.add_argument("--no-ceilings", action="store_true", help="do not measure the device's ceilings")
    nightly.add_argument("--no-counters", action="store_true", help="do not count with Nsight Compute")
    command_line.add_timeout(nightly)
    nightly.add_argument(
        "--limit",
        type=command_line.seconds,
        default=3600.0,
        metavar="SECONDS",
        help="end sweep or counters (default: 3600)",
    )


def _nightly(arguments: argparse.Namespace) -> int:
    try:
        from jfabench import nightly, nightly_report, trees
        from jfabench.history import DatabaseNameError, HistoryError, opened
    except ModuleNotFoundError as error:
        return command_line.missing(error)
    sweep, device = command_line.load_and_choose_device(arguments)
    providers = sweep.config.providers
    if unknown := [name for name in arguments.gate if name not in providers]:
        return fail(f"--gate {unknown[0]}: not in this grid, which has {', '.join(providers)}", USAGE)
    gate = arguments.gate or [name for name in providers if name != sweep.config.baseline]
    out = command_line.new_folder(arguments.out, "nightly")
    if nightly_report.is_finished(out):
        return fail(f"{out} holds a night that has come to its end; choose another --out", USAGE)
    try:
        with opened(arguments.db):
            pass  # better known now than after everything was measured
    except HistoryError as error:
        return fail(error, USAGE if isinstance(error, DatabaseNameError) else MACHINE)
    options = nightly.Options(
        sweep,
        device,
        out,
        arguments.db,
        tuple(gate),
        settings=tuple(arguments.settings),
        tree=trees.here(),
        pairs=arguments.pairs,
        ceilings=not arguments.no_ceilings,
        counters=not arguments.no_counters,
        timeout=arguments.timeout,
        limit=arguments.limit,
    )
    night = None
    try:
        night = nightly.run(options, lambda text: print(text, flush=True))
        print(nightly_report.TITLES[night.code])
        files = nightly_report.write(night, nightly_report.links_of_repository(tree=options.tree))
    except ModuleNotFoundError as error:
        return command_line.missing(error)
    except OSError as error:  # what is known of the code stays known
        code = fail(f"{error}; make room, or choose another folder with --out", MACHINE)
        return night.code or code if night else code
    except KeyboardInterrupt:
        print(f"\ninterrupted: what was measured is kept; the same command with --out {out} goes on", file=sys.stderr)
        return INTERRUPTED
    for path in (night.folder.report, *files):
        print(path)
    return night.code
