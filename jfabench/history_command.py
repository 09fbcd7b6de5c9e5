"""The command `history`: parses, calls, prints. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jfabench import command_line
from jfabench.command_line import CommandError
from jfabench.exit_codes import FAILED, MACHINE, OK, USAGE, fail

if TYPE_CHECKING:
    from jfabench.history import History

EXAMPLES = """\
examples:
  python -m jfabench history import results/monday results/today
  python -m jfabench history report --out results/history
  JFABENCH_HISTORY=postgresql://runner@db.example/jfabench python -m jfabench history runs
"""


def add_command(command: command_line.Command) -> None:
    history = command("history", "keep runs in a database, and draw their trends", _history, EXAMPLES)
    actions = history.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("import", help="store result folders; what is stored already stays as it is")
    add.add_argument("folders", nargs="+", metavar="DIR", help="result folders that `sweep` wrote")
    report = actions.add_parser("report", help="trend charts with change points marked, as one HTML page")
    command_line.add_out(report, "where trends.html goes (default: results/history)", "results/history")
    report.add_argument("--machine", metavar="TEXT", help="only machines whose name holds this, such as H200")
    report.add_argument(
        "--repository",
        type=_address,
        metavar="URL",
        help="link commits there (default: the repository here, if it is on GitHub)",
    )
    actions.add_parser("runs", help="list the runs")
    for action in actions.choices.values():
        add_database(action)


def add_database(parser: argparse.ArgumentParser) -> None:
    """`--db`, found under the name `db`; None stands for the default that `jfabench.history.opened` knows."""
    parser.add_argument(
        "--db",
        metavar="URL",
        help="sqlite:///FILE or postgresql://... (default: $JFABENCH_HISTORY, else sqlite:///results/history.sqlite)",
    )


def _address(text: str) -> str:
    """An address that a page may link to: of the schemes that browsers open, those that run nothing."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and parts.hostname and text.isprintable() and " " not in text
    except ValueError:
        fits = False
    if not fits:
        raise CommandError(
            f"--repository {text}: commits can be linked to an http or https address only, such as "
            "https://github.com/owner/name",
            USAGE,
        )
    return text


def _history(arguments: argparse.Namespace) -> int:
    try:
        from jfabench.history import DatabaseNameError, HistoryError, opened
    except ModuleNotFoundError as error:
        return command_line.missing(error)
    try:
        with opened(arguments.db, reading=arguments.action != "import") as history:
            return int(_ACTIONS[arguments.action](history, arguments))
    except ModuleNotFoundError as error:
        return command_line.missing(error)
    except OSError as error:
        return fail(f"the page could not be written ({error}): make room, or choose another folder with --out", MACHINE)
    except DatabaseNameError as error:
        return fail(error, USAGE)
    except (HistoryError, ValueError) as error:
        return fail(error, MACHINE)


def _import(history: History, arguments: argparse.Namespace) -> int:
    from jfabench.folder import ResultFolder
    from jfabench.history import HistoryError

    code = OK
    for name in arguments.folders:  # where one cannot be used, the others may be better
        folder = ResultFolder(Path(name))
        if not folder.stored.exists():
            code = max(code, fail(f"{name}: no records.jsonl here; name a folder that `jfabench sweep` wrote", USAGE))
            continue
        try:
            done = history.add(folder)
        except HistoryError as error:
            code = max(code, fail(error, MACHINE))
        else:
            print(f"{name}: {'a new run' if done.new else 'known already'}, {done.results} results added or replaced")
    return code


def _report(history: History, arguments: argparse.Namespace) -> int:
    from jfabench import trees
    from jfabench.nightly_report import links_of_repository
    from jfabench.reports import trends

    series = [one for one in history.series() if (arguments.machine or "") in one.machine]
    if not series:
        return fail(f"{history.name}: no run{' of such a machine' if arguments.machine else ''} with a time", FAILED)
    links = trends.github(arguments.repository) if arguments.repository else links_of_repository(tree=trees.here())
    target = arguments.out / "trends.html"
    found = trends.write(series, target, links)
    print(f"{len(series)} series, {len(found)} changes")
    print(f"report:  {target.resolve()}")
    return OK


def _runs(history: History, _: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("run", "started", "grid", "commit", "verdict", "machine"):
        table.add_column(heading, justify="left")
    for run in history.runs():
        commit = run.commit[:12] + ("+" if run.dirty else "")
        table.add_row(str(run.id), run.started, escape(run.config), commit, run.verdict, escape(run.machine))
    console = Console()
    if not console.is_terminal:  # a file has room for whole lines
        console.width = max(console.width, 200)
    console.print(table)
    return OK


_ACTIONS = {"import": _import, "report": _report, "runs": _runs}
