"""The commands `compare`, `history` and `nightly`: parse, call, print. Imports stand inside what needs them.

Exit codes of `compare`: 0 nothing is slower and all that was right still is; 1 a case is slower, or no longer right; 2
the command is not valid, or the two do not compare; 3 the machine or a folder cannot be used. Those of `nightly` are
told in `jfabench.nightly`: 0 good, 1 regression, 4 wrong results, 3 infrastructure, 2 not valid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfabench.exit_codes import FAILED, INTERRUPTED, MACHINE, OK, USAGE, fail

if TYPE_CHECKING:
    from jfabench.history import History
    from jfabench.regression import Comparison
    from jfabench.sweep import Sweep


COMPARE_EXAMPLES = """\
examples:
  python -m jfabench compare main . --config jagged.yaml --only tlx_jfa   the work tree against main, measured in turns
  python -m jfabench compare results/monday results/today                 two result folders
  python -m jfabench compare --aa --config jagged.yaml                    the noise floor: this build against itself
"""
HISTORY_EXAMPLES = """\
examples:
  python -m jfabench history import results/monday results/today
  python -m jfabench history report --out results/history
  JFABENCH_HISTORY=postgresql://runner@db.example/jfabench python -m jfabench history runs
"""
NIGHTLY_EXAMPLES = """\
examples:
  python -m jfabench nightly --config nightly.yaml --db sqlite:////srv/jfabench/history.sqlite
  python -m jfabench nightly --config nightly.yaml --gate tlx_jfa --gate triton_jfa --out results/tonight

exit codes: 0 good, 1 a regression, 4 wrong results, 3 the machine or the database failed, 2 the command is not valid
"""

Command = Callable[..., argparse.ArgumentParser]


def add_commands(command: Command) -> None:
    """Adds the parsers; `command(name, help, run, epilog)` makes one."""
    _add_compare(command)
    _add_history(command)
    _add_nightly(command)


def _missing(error: ImportError) -> int:
    return fail(
        f"{error.name} is not installed, and this command needs it: pip install 'jfabench[history]', or "
        "scripts/setup.sh --history",
        MACHINE,
    )


# compare -------------------------------------------------------------------------------------------------------------


def _add_compare(command: Command) -> None:
    compare = command("compare", "compare two builds, or two result folders, case by case", _compare, COMPARE_EXAMPLES)
    compare.add_argument(
        "sides",
        nargs="*",
        metavar="A B",
        help="two result folders, or two builds: git revisions or folders of sources (. is the present one)",
    )
    compare.add_argument("--aa", action="store_true", help="measure one build against itself, and keep its noise floor")
    compare.add_argument("--config", metavar="FILE", help="builds: the sweep file with the cases to measure")
    compare.add_argument("--out", metavar="DIR", help="where the results go (default: results/compare-<time>)")
    compare.add_argument("--only", action="append", default=[], metavar="PROVIDER", help="only this one (repeatable)")
    compare.add_argument(
        "--direction", action="append", default=[], choices=["fwd", "bwd", "fwd_bwd"], help="instead of the file's"
    )
    compare.add_argument("--measure", choices=["profiler", "events", "cudagraph", "wall"], help="how to time")
    compare.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    compare.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override a value (repeatable)"
    )
    compare.add_argument(
        "--pairs", type=_at_least(2), default=4, metavar="N", help="pairs of processes for all cases (default: 4)"
    )
    compare.add_argument(
        "--repeat",
        type=_at_least(0),
        default=8,
        metavar="N",
        help="pairs of fresh processes that decide about suspicious cases; 0: the first pairs decide (default: 8)",
    )
    compare.add_argument(
        "--timeout",
        type=_at_least(1),
        default=300,
        metavar="SECONDS",
        help="kill a step that takes longer (default: 300)",
    )


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number, at least {least}")
        return int(text)

    return parse


def _compare(arguments: argparse.Namespace) -> int:
    from jfabench import compare, trees
    from jfabench.reports import comparison
    from jfabench.sweep import ConfigError
    from jfabench.workers import SweepStoppedError

    wanted = "one build at most (default: the sources here)" if arguments.aa else "A and B"
    if arguments.out is not None and not arguments.out.strip():
        return fail("--out needs the name of a folder", USAGE)
    if arguments.repeat == 1:
        return fail("--repeat 1: one pair tells nothing about chance; use 2 or more, or 0", USAGE)
    if len(arguments.sides) > 1 if arguments.aa else len(arguments.sides) != 2:
        return fail(f"compare{' --aa' if arguments.aa else ''} needs {wanted}", USAGE)
    root = _out(arguments.out, "compare")
    try:
        import scipy.stats  # noqa: F401  -- better missed now than after everything was measured

        if not arguments.aa and all(compare.is_results(Path(side)) for side in arguments.sides):
            if ignored := _given(arguments, ("config", "only", "direction", "measure", "settings")):
                return fail(f"{ignored}: result folders are compared as they are; leave it out", USAGE)
            found = compare.from_folders(*map(Path, arguments.sides))
        else:
            found = _measured(arguments, root)
        if arguments.aa:
            noise = compare.measured_noise(found, root)
            print(f"noise floor {100 * noise.floor:.2f}%, processes differ by {100 * noise.process_sd:.2f}%", end=" ")
            print(f"({noise.cases} cases, {noise.pairs} pairs); kept in {compare.store_noise(noise)}")
        comparison.show(found)
        print(f"results: {comparison.write_table(found, root)}")
        print(f"report:  {comparison.write_page(found, root).resolve()}")
    except ModuleNotFoundError as error:
        return _missing(error)
    except (compare.CompareError, trees.TreeError, ConfigError) as error:
        return fail(error, USAGE)
    except SweepStoppedError as error:
        return fail(f"{error}. {_kept(compare, root)}", MACHINE)
    except OSError as error:
        return fail(f"{error}: make room, or choose another folder with --out. {_kept(compare, root)}", MACHINE)
    except KeyboardInterrupt:
        print(f"\ninterrupted. {_kept(compare, root)}", file=sys.stderr)
        return INTERRUPTED
    return FAILED if found.regressed else OK


def _kept(compare: Any, root: Path) -> str:
    """What is left of a comparison that did not come to its end."""
    if not compare.is_results(root / "b"):
        return "Nothing was measured yet."
    return f"What was measured is kept: python -m jfabench compare {root / 'a'} {root / 'b'}"


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    flags = {"settings": "--set"}
    return ", ".join(flags.get(name, f"--{name}") for name in names if getattr(arguments, name))


def _measured(arguments: argparse.Namespace, root: Path) -> Comparison:
    import tempfile

    from jfabench import compare, interleaved, trees

    _require_builds(arguments.sides)
    device, sweep = _sweep(arguments)
    names = arguments.sides * 2 if arguments.aa and arguments.sides else arguments.sides or [trees.here()] * 2
    with tempfile.TemporaryDirectory(prefix="jfabench-") as folder, _Status() as say:
        found = [trees.find(name, Path(folder)) for name in names]
        plan = interleaved.Plan(
            (found[0], found[1]),
            sweep.cases,
            interleaved.block_policy(sweep.config.measure, arguments.settings),
            device,
            arguments.pairs,
            arguments.timeout,
        )
        return compare.measured(plan, root, repeated_pairs=arguments.repeat, floor=not arguments.aa, say=say)


def _require_builds(names: Sequence[str]) -> None:
    """Raises `CompareError` where one of them is a result folder."""
    from jfabench.compare import CompareError, is_results

    results = [name for name in names if is_results(Path(name))]
    others = [name for name in names if name not in results]
    if results and others:
        raise CompareError(
            f"{results[0]} is a result folder, and {others[0]} is none (it has no records.jsonl): name two result "
            "folders, or two builds"
        )
    if results:
        raise CompareError(f"--aa measures a build, and {results[0]} is a result folder: name a revision, or sources")


def _sweep(arguments: argparse.Namespace) -> tuple[str, Sweep]:
    from jfabench.compare import CompareError
    from jfabench.devices import choose_device
    from jfabench.sweep import load_sweep
    from jfabench.workers import SweepStoppedError

    if not arguments.config:
        raise CompareError(
            "builds are measured: name the cases with --config, such as --config jagged.yaml (result folders, which "
            "have a records.jsonl, need none)"
        )
    device, note = choose_device(arguments.device)
    if device is None:
        raise SweepStoppedError(note)
    if note:
        print(note)
    settings = [*arguments.settings, *([f"measure.mode={arguments.measure}"] if arguments.measure else [])]
    sweep = load_sweep(
        arguments.config,
        "cpu" if device == "cpu" else "full",
        settings=settings,
        only=arguments.only,
        directions=arguments.direction,
    )
    try:
        sweep.config.measure.mode_on(device.split(":")[0])
    except ValueError as error:
        raise CompareError(str(error)) from None
    return device, sweep


def _out(out: str | None, name: str) -> Path:
    from datetime import datetime

    return Path(out or f"results/{name}-{datetime.now():%Y%m%d-%H%M%S}")


class _Status:
    """A line on a terminal that says what is going on; elsewhere, nothing."""

    def __enter__(self) -> Callable[[str], None]:
        from rich.console import Console

        self._status = Console(stderr=True).status("preparing")
        self._status.start()
        return lambda text: self._status.update(text)

    def __exit__(self, *error: Any) -> None:
        self._status.stop()


# history -------------------------------------------------------------------------------------------------------------


def _add_history(command: Command) -> None:
    history = command("history", "keep runs in a database, and draw their trends", _history, HISTORY_EXAMPLES)
    actions = history.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("import", help="store result folders; what is stored already stays as it is")
    add.add_argument("folders", nargs="+", metavar="DIR", help="result folders that `sweep` wrote")
    report = actions.add_parser("report", help="trend charts with change points marked, as one HTML page")
    report.add_argument("--out", metavar="DIR", default="results/history", help="(default: results/history)")
    report.add_argument("--machine", metavar="TEXT", help="only machines whose name holds this, such as H200")
    report.add_argument(
        "--repository", metavar="URL", help="link commits there (default: the repository here, if it is on GitHub)"
    )
    actions.add_parser("runs", help="list the runs")
    for action in actions.choices.values():
        _add_database(action)


def _add_database(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--db",
        metavar="URL",
        help="sqlite:///FILE or postgresql://... (default: $JFABENCH_HISTORY, else sqlite:///results/history.sqlite)",
    )


def _history(arguments: argparse.Namespace) -> int:
    try:
        from jfabench.history import HistoryError, opened
    except ModuleNotFoundError as error:
        return _missing(error)
    try:
        with opened(arguments.db, reading=arguments.action != "import") as history:
            return int(_HISTORY_ACTIONS[arguments.action](history, arguments))
    except ModuleNotFoundError as error:
        return _missing(error)
    except OSError as error:
        return fail(f"the page could not be written ({error}): make room, or choose another folder with --out", MACHINE)
    except (HistoryError, ValueError) as error:
        return fail(error, MACHINE)


def _history_import(history: History, arguments: argparse.Namespace) -> int:
    from jfabench.folder import ResultFolder
    from jfabench.history import HistoryError

    code = OK
    for name in arguments.folders:
        try:
            done = history.add(ResultFolder(Path(name)))
        except HistoryError as error:  # the others may be better
            code = fail(error, MACHINE)
        else:
            print(f"{name}: {'a new run' if done.new else 'known already'}, {done.results} results added or replaced")
    return code


def _history_report(history: History, arguments: argparse.Namespace) -> int:
    from jfabench import trees
    from jfabench.nightly_report import links_of_repository
    from jfabench.reports import trends

    series = [one for one in history.series() if (arguments.machine or "") in one.machine]
    if not series:
        return fail(f"{history.name}: no run{' of such a machine' if arguments.machine else ''} with a time", FAILED)
    links = trends.github(arguments.repository) if arguments.repository else links_of_repository(tree=trees.here())
    target = Path(arguments.out) / "trends.html"
    found = trends.write(series, target, links)
    print(f"{len(series)} series, {len(found)} changes")
    print(f"report:  {target.resolve()}")
    return OK


def _history_runs(history: History, _: argparse.Namespace) -> int:
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


_HISTORY_ACTIONS = {"import": _history_import, "report": _history_report, "runs": _history_runs}


# nightly -------------------------------------------------------------------------------------------------------------


def _add_nightly(command: Command) -> None:
    nightly = command(
        "nightly",
        "measure, compare with the last good night of this machine, repeat what looks slower, report",
        _nightly,
        NIGHTLY_EXAMPLES,
    )
    nightly.add_argument("--config", required=True, metavar="FILE", help="a sweep file, by path or by name in sweeps/")
    nightly.add_argument("--out", metavar="DIR", help="result folder (default: results/nightly-<time>)")
    _add_database(nightly)
    nightly.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="PROVIDER",
        help="one that can fail the night (repeatable; default: all but the baseline)",
    )
    nightly.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    nightly.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override a value (repeatable)"
    )
    nightly.add_argument(
        "--pairs", type=_at_least(2), default=8, metavar="N", help="pairs of processes of a repetition (default: 8)"
    )
    nightly.add_argument("--no-ceilings", action="store_true", help="do not measure the device's ceilings")
    nightly.add_argument("--no-counters", action="store_true", help="do not count with Nsight Compute")
    nightly.add_argument(
        "--timeout", type=_at_least(1), default=300, metavar="SECONDS", help="kill a step of a case (default: 300)"
    )
    nightly.add_argument(
        "--limit", type=_at_least(1), default=3600, metavar="SECONDS", help="end sweep or counters (default: 3600)"
    )


def _nightly(arguments: argparse.Namespace) -> int:
    from jfabench.sweep import ConfigError, load_sweep

    if arguments.out is not None and not arguments.out.strip():
        return fail("--out needs the name of a folder", USAGE)
    try:
        from jfabench import nightly, nightly_report, trees
    except ModuleNotFoundError as error:
        return _missing(error)
    from jfabench.devices import choose_device

    device, note = choose_device(arguments.device)
    if device is None:
        return fail(note, MACHINE)
    try:
        sweep = load_sweep(arguments.config, "cpu" if device == "cpu" else "full", settings=arguments.settings)
    except ConfigError as error:
        return fail(error, USAGE)
    providers = sweep.config.providers
    if unknown := [name for name in arguments.gate if name not in providers]:
        return fail(f"--gate {unknown[0]}: not in this grid, which has {', '.join(providers)}", USAGE)
    gate = arguments.gate or [name for name in providers if name != sweep.config.baseline]
    out = _out(arguments.out, "nightly")
    if nightly_report.is_finished(out):
        return fail(f"{out} holds a night that has come to its end; choose another --out", USAGE)
    if note:
        print(note)
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
        return _missing(error)
    except OSError as error:  # what is known of the code stays known
        code = fail(f"{error}; make room, or choose another folder with --out", MACHINE)
        return night.code or code if night else code
    except KeyboardInterrupt:
        print(f"\ninterrupted: what was measured is kept; the same command with --out {out} goes on", file=sys.stderr)
        return INTERRUPTED
    for path in (night.folder.report, *files):
        print(path)
    return night.code
