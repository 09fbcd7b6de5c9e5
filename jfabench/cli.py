"""The command line: parses, calls, prints. Every import beyond argparse stands inside the command that needs it.

Exit codes: 0 all is well; 1 a case failed, was wrong or is slower than it was, nothing could be measured, or a kernel
does not compile or starts to spill; 2 the command or a sweep file is not valid; 3 the machine, the database or the
result folder cannot be used; 4 wrong results (`nightly`, where 1 is a regression); 130 interrupted (what was measured
is kept).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jfabench import (
    __version__,
    command_line,
    compare_command,
    history_command,
    nightly_command,
    timeline_command,
    tuning_commands,
)
from jfabench.command_line import CommandError
from jfabench.exit_codes import FAILED, INTERRUPTED, MACHINE, OK, USAGE, fail
from jfabench.sim import command as sim_command
from jfabench.sim import mutate_command

if TYPE_CHECKING:
    from pathlib import Path

    from jfabench.folder import ResultFolder
    from jfabench.records import Record
    from jfabench.sweep import Sweep

DESCRIPTION = "Measures jagged flash attention kernels against their peers."
EXAMPLES = """\
examples:
  python -m jfabench sweep --config jagged.yaml                 measure the jagged grid; report in results/
  python -m jfabench sweep --config jagged.yaml --dry-run       what would be measured, and its cost
  python -m jfabench profile --config jagged.yaml               hardware counters of its kernels, by Nsight Compute
  python -m jfabench list                                       operators and providers, and what is missing
  python -m jfabench doctor                                     check GPU, drivers and packages
"""
SWEEP_EXAMPLES = """\
examples:
  python -m jfabench sweep --config jagged.yaml --out results/mine
  python -m jfabench sweep --config jagged.yaml --only triton_jfa --only fa4_kernel --direction bwd
  python -m jfabench sweep --config dense.yaml --set lengths.length=[1024,4096] --set batch=64
  python -m jfabench sweep --config my.yaml --out results/mine --resume    go on after an interruption
"""
PROFILE_EXAMPLES = """\
examples:
  python -m jfabench profile --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --out results/mine
  python -m jfabench profile --config jagged.yaml --only tlx_jfa --direction bwd --metrics stalls --keep-reports
"""
INSPECT_EXAMPLES = """\
examples:
  python -m jfabench inspect                                      every kernel for every architecture: minutes
  python -m jfabench inspect --arch sm_90 --kernel forward_kernel
  python -m jfabench inspect --out after --against before/inspect.csv    exit code 1 if a kernel starts to spill
"""


class _Parser(argparse.ArgumentParser):
    """Names the nearest valid choice when a word is misspelt, and refuses blank values."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises `CommandError` for a blank value: an empty variable of a script, which would mean "not given"."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if any(isinstance(word, str) and not word.strip() for word in _as_list(value)):
                name = action.option_strings[-1] if action.option_strings else action.metavar
                raise CommandError(f"{name} was given a blank value (is a variable empty?): name one", USAGE)
        return found, rest

    def error(self, message: str) -> Any:
        import difflib

        words = [word for action in self._actions for word in (*action.option_strings, *(action.choices or ()))]
        for wrong in sys.argv[1:]:
            close = difflib.get_close_matches(wrong, [str(w) for w in words], n=1, cutoff=0.6)
            if close and wrong not in words and wrong in message:
                message += f" (did you mean {close[0]!r}?)"
                break
        super().error(message)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="jfabench", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"jfabench {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, help_text: str, run: command_line.Run, epilog: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text, epilog=epilog, formatter_class=raw)
        sub.set_defaults(run=run)
        return sub

    sweep = command("sweep", "measure the grid of a sweep file and write a report", _sweep, SWEEP_EXAMPLES)
    command_line.add_config(sweep)
    command_line.add_new_folder(sweep, "<config>-<time>")
    command_line.add_only(sweep)
    sweep.add_argument(
        "--skip", action="append", default=[], metavar="PROVIDER", help="leave this one out (repeatable)"
    )
    command_line.add_directions(sweep)
    command_line.add_measure(sweep)
    command_line.add_device(sweep)
    command_line.add_settings(sweep)
    sweep.add_argument(
        "--workers",
        choices=["per_shape", "shared"],
        help="a process for each shape, or one until anything fails in it, which is faster (default: the file's)",
    )
    sweep.add_argument("--dry-run", action="store_true", help="print the cases and their cost, and stop")
    sweep.add_argument("--resume", action="store_true", help="go on in --out: measure only what it does not hold yet")
    sweep.add_argument("--retry-failed", action="store_true", help="with --resume: repeat the cases that are not ok")
    command_line.add_timeout(sweep)

    report = command(
        "report", "write results.csv, charts and report.html again, from one or more result folders", _report
    )
    report.add_argument("folders", nargs="+", metavar="DIR", help="result folders; several are merged into the first")
    command_line.add_out(report, "write the merged report here instead")

    profile = command(
        "profile",
        "count what kernels do (tensor cores, memory, stalls) with Nsight Compute",
        _profile,
        PROFILE_EXAMPLES,
    )
    command_line.add_config(profile)
    command_line.add_new_folder(profile, "profile-<config>-<time>")
    command_line.add_only(profile)
    command_line.add_directions(profile)
    command_line.add_settings(profile)
    profile.add_argument(
        "--metrics",
        choices=["roofline", "tensor", "memory", "stalls", "all"],
        default="all",
        help="which counters: fewer need fewer replays of each kernel (default: all)",
    )
    command_line.add_device(profile, "auto, cuda, cuda:N; cpu tries the command out")
    profile.add_argument("--keep-reports", action="store_true", help="keep an .ncu-rep of each case, for Nsight's GUI")
    profile.add_argument("--dry-run", action="store_true", help="print the cases and the ncu command, and stop")
    command_line.add_timeout(profile, 600)

    command("list", "operators, providers and sweep files; why a provider is unavailable and how to get it", _list)

    doctor = command("doctor", "check GPU, driver, packages, profilers, and say what to do", _doctor)
    doctor.add_argument(
        "--repair", action="store_true", help="put fbtriton in place where upstream triton clashes with it"
    )

    ceilings = command("ceilings", "measure this device's matrix and copy rates, for the roofline", _ceilings)
    command_line.add_device(ceilings)
    command_line.add_out(ceilings, "store them in this result folder, too")

    inspect = command(
        "inspect",
        "compile every kernel, without a GPU: registers, spills, shared memory, instructions of each role",
        _inspect,
        INSPECT_EXAMPLES,
    )
    inspect.add_argument(
        "--arch", metavar="ARCH,...", help="such as sm_90,sm_100 (default: all that kernels exist for)"
    )
    inspect.add_argument("--kernel", metavar="NAME", help="only the kernel of this name")
    command_line.add_out(inspect, "where inspect.csv goes (default: results/inspect)", "results/inspect")
    inspect.add_argument(
        "--against",
        metavar="FILE",
        help="an earlier inspect.csv: exit code 1 if spills, registers or memory grew since",
    )
    tuning_commands.add_commands(command)
    timeline_command.add_command(command)
    compare_command.add_command(command)
    history_command.add_command(command)
    nightly_command.add_command(command)
    sim_command.add_command(command)
    mutate_command.add_command(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
        return int(arguments.run(arguments))
    except CommandError as error:
        return fail(error, error.code)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `jfabench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# sweep ---------------------------------------------------------------------------------------------------------------


def _sweep(arguments: argparse.Namespace) -> int:
    from jfabench.operator import load_providers
    from jfabench.phases import overhead_sentence
    from jfabench.run import SweepStoppedError, Workers, run_sweep

    if arguments.resume and not arguments.out:
        return fail("--resume needs --out, the folder to go on in", USAGE)
    if arguments.retry_failed and not arguments.resume:
        return fail("--retry-failed needs --resume", USAGE)
    sweep, device = command_line.load_and_choose_device(arguments)
    if arguments.dry_run:
        return _dry_run(sweep)

    folder = _folder(arguments.out, sweep.name)
    known = load_providers(sweep.config.operator).by_name
    summaries = {name: known[name].summary for name in sweep.config.providers}
    invocation = shlex.join(["python", "-m", "jfabench", *sys.argv[1:]])
    workers = Workers(
        device,
        folder.root / "worker.log",
        arguments.timeout,
        operator=sweep.config.operator,
        providers=sweep.config.providers,
        per_shape=sweep.config.workers == "per_shape",
    )
    code = OK
    records: list[Record] = []
    try:
        from jfabench.progress import progress_listener

        with progress_listener(len(sweep.cases)) as listener:
            records = run_sweep(
                sweep,
                folder,
                device=device,
                command_line=invocation,
                summaries=summaries,
                listener=listener,
                resume=arguments.resume,
                retry_failed=arguments.retry_failed,
                workers=workers,
            )
    except SweepStoppedError as error:
        return fail(error, MACHINE)
    except OSError as error:
        return fail(f"{error}. What was measured is kept; the same command with --resume goes on", MACHINE)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted: what was measured is kept; the same command with --out {shlex.quote(str(folder.root))} "
            "--resume goes on",
            file=sys.stderr,
        )
        code = INTERRUPTED
    if told := overhead_sentence(records, workers.startup_seconds):
        print(told)
    again = f"The records are safe: make room, then `jfabench report {shlex.quote(str(folder.root))}`"
    written = _write_report([folder], folder, again)
    return code or written or _verdict(records)


def _verdict(records: Sequence[Record]) -> int:
    from jfabench.records import failing

    bad = failing(records)
    if bad:
        counts: dict[str, int] = {}
        for record in bad:
            counts[record.status] = counts.get(record.status, 0) + 1
        words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        return fail(f"{len(bad)} of {len(records)} cases gave no right result ({words}); see the report", FAILED)
    if not any(record.status == "ok" for record in records):
        return fail("nothing was measured: no provider is available here for these cases (see `jfabench list`)", FAILED)
    return OK


def _folder(out: Path | None, name: str) -> ResultFolder:
    from jfabench.folder import ResultFolder

    return ResultFolder(command_line.new_folder(out, name))


def _dry_run(sweep: Sweep) -> int:
    _print_cases(sweep)
    policy = sweep.config.measure
    limit = len(sweep.cases) * (policy.max_seconds + policy.warmup_seconds)
    print(
        f"measured calls and warm-up: at most {limit:,.0f} s unless a single call is slow "
        f"({policy.max_seconds + policy.warmup_seconds:g} s a case); checking and compiling come on top"
    )
    return OK


def _print_cases(sweep: Sweep) -> None:
    from rich.console import Console
    from rich.table import Table

    from jfabench.operator import load_operator

    operator = load_operator(sweep.config.operator)
    table = Table(title=f"{sweep.name}: {len(sweep.cases)} cases at {sweep.scale} scale")
    for heading in ("shape", "direction", "providers", "GFLOP", "minimal MB", "tensors MB"):
        table.add_column(heading, justify="left" if heading in ("shape", "direction") else "right")
    shapes = {(case.shape_key, case.direction): case for case in sweep.cases}
    for case in shapes.values():
        params = operator.parse(case.params)
        work = operator.work(params, case.direction, case.seed)
        table.add_row(
            operator.label(params),
            case.direction,
            str(len(sweep.config.providers)),
            f"{work.flops / 1e9:,.3f}" if work.flops < 1e9 else f"{work.flops / 1e9:,.1f}",
            f"{work.bytes / 1e6:,.1f}",
            f"{operator.memory(params, case.seed) / 1e6:,.1f}",
        )
    Console().print(table)


# profile -------------------------------------------------------------------------------------------------------------


def _profile(arguments: argparse.Namespace) -> int:
    from jfabench import doctor, profile_sweep

    try:
        device, note = command_line.usable_device(arguments.device)
        if device == "cpu" and arguments.device != "cpu" and not arguments.dry_run:
            why = "no NVIDIA GPU that can be used here, and only GPUs have these counters (see `doctor`)"
            raise CommandError(why, MACHINE)
    except CommandError:
        command_line.load(arguments)  # what is wrong with the file comes first: it can be mended here
        raise
    sweep = command_line.load_for(arguments, device)
    if note:
        print(note)
    folder = _folder(arguments.out, f"profile-{sweep.name}")
    try:
        plan, notes = profile_sweep.plan(
            doctor.find_ncu() or ("ncu" if arguments.dry_run else None),
            device,
            arguments.metrics,
            keep_reports=arguments.keep_reports,
            timeout=arguments.timeout,
        )
        print(*notes, sep="\n", end="\n" if notes else "")
        if arguments.dry_run:
            _print_cases(sweep)
            print(f"ncu for the first of them: {shlex.join(profile_sweep.first_command(sweep, folder, plan))}")
            return OK
        outcome = profile_sweep.profile(sweep, folder, plan)
    except profile_sweep.ProfileError as error:
        return fail(error, MACHINE)
    print(f"counters: {folder.root / 'counters.csv'}, by case: {folder.root / 'counters_wide.csv'}")
    if outcome.failed:
        return fail(f"{len(outcome.failed)} of {len(outcome.records)} cases could not be profiled", FAILED)
    if not outcome.counted:
        return fail("nothing was profiled: no provider is available here (see `jfabench list`)", FAILED)
    return OK


# report, list, doctor, ceilings --------------------------------------------------------------------------------------


def _report(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from jfabench.folder import ResultFolder

    folders = [ResultFolder(Path(name)) for name in arguments.folders]
    for folder in folders:
        if not folder.stored.exists():
            return fail(f"{folder.root}: no records.jsonl here; name a folder that `jfabench sweep` wrote", USAGE)
    target = ResultFolder(arguments.out) if arguments.out else folders[0]
    return _write_report(folders, target, "Make room, or name another folder with --out")


def _write_report(folders: Sequence[ResultFolder], target: ResultFolder, remedy: str) -> int:
    """`remedy` is told where the target cannot be written."""
    from jfabench.reports import html, terminal

    if not any(folder.stored.exists() for folder in folders):
        return OK
    try:
        built = html.build(folders, target)
    except OSError as error:
        return fail(f"the report could not be written: {error}. {remedy}", MACHINE)
    except ValueError as error:  # says itself what to do
        return fail(f"the report could not be written: {error}", MACHINE)
    terminal.show(built)
    print(f"results: {target.table}")
    print(f"report:  {_shown(target.report)}")
    return OK


def _shown(path: Path) -> str:
    return str(path.resolve())


def _list(_: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from jfabench.operator import OPERATOR_MODULES, load_providers
    from jfabench.sweep import shipped

    device, note = command_line.usable_device("auto")
    console = Console()
    if note:
        console.print(note, markup=False, highlight=False)
    for operator in OPERATOR_MODULES:
        providers = load_providers(operator)
        table = Table(title=f"operator {operator}", show_lines=True)
        for heading in ("provider", "here", "what is timed, or how to get it"):
            table.add_column(heading)
        for provider in providers.by_name.values():
            try:
                missing: object = provider.unavailable(device.split(":")[0])
            except Exception as error:
                missing = f"asking it failed: {type(error).__name__}: {error}"
            text = f"{provider.summary}\n{missing}" if missing else provider.summary
            table.add_row(provider.name, "no" if missing else "yes", escape(text))
        for plugin in providers.broken:
            table.add_row(plugin.name, "broken", escape(plugin.why))
        console.print(table)
    console.print(f"sweep files: {', '.join(shipped())}", highlight=False)
    return OK


def _doctor(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from jfabench import doctor

    if arguments.repair:
        try:
            print(doctor.repair_triton())
        except RuntimeError as error:
            return fail(error, MACHINE)
    findings = doctor.examine()
    table = Table()
    for heading in ("check", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}
    for finding in findings:
        table.add_row(
            finding.name,
            f"[{colours[finding.status]}]{finding.status}[/]",
            escape(finding.detail),
            escape(finding.remedy or ""),
        )
    Console().print(table)
    return FAILED if any(finding.status == "fail" for finding in findings) else OK


def _ceilings(arguments: argparse.Namespace) -> int:
    from jfabench import ceilings
    from jfabench.folder import ResultFolder, write_json

    device, _ = command_line.usable_device(arguments.device)
    try:
        measured = ceilings.measure(device)
    except RuntimeError as error:
        return fail(f"the ceilings could not be measured: {error}", MACHINE)
    for dtype, rate in measured.flops.items():
        print(f"{measured.device}: {dtype} matrix product {rate / 1e12:,.2f} TFLOP/s")
    print(f"{measured.device}: copy {measured.bytes / 1e9:,.1f} GB/s (read + written)")
    code = OK
    try:
        print(f"stored in {ceilings.store(measured)}; reports of this device use them for the roofline")
    except OSError as error:
        code = fail(
            f"they could not be stored for later reports ({error}): name a folder that can be written as "
            "XDG_CACHE_HOME",
            MACHINE,
        )
    if arguments.out:
        try:
            write_json(ResultFolder(arguments.out).ceilings, measured.to_json())
        except OSError as error:
            code = fail(f"--out {arguments.out} cannot be used ({error}): name another folder, or make room", MACHINE)
    return code


# inspect -------------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from jfabench import inspect_compare, inspect_kernels, inspect_table

    target = arguments.out / "inspect.csv"
    broken: Exception | None = None
    try:
        # Read first: it may be the file that is written anew.
        baseline = inspect_compare.read_rows(Path(arguments.against)) if arguments.against else None
        archs = inspect_kernels.architectures(arguments.arch)
        with Console(stderr=True).status("compiling") as status:
            inspected = inspect_kernels.inspect_kernels(
                archs, arguments.kernel, lambda text: status.update(f"compiling for {text}")
            )
    except inspect_kernels.InspectionError as error:
        return fail(error, USAGE)
    except inspect_kernels.CompilationError as error:
        broken, inspected = error, list(error.inspected)
        if not inspected:
            return fail(error, FAILED)
    except inspect_kernels.ToolchainError as error:
        return fail(error, MACHINE)
    console = Console()
    if not console.is_terminal:  # a file has room for whole tables
        console.width = max(console.width, 140)
    inspect_table.show(inspected, console)
    rows = inspect_kernels.flat_rows(inspected)
    try:
        inspect_kernels.write_rows(target, rows)
    except OSError as error:
        return fail(f"{target} could not be written: {error}", MACHINE)
    print(f"results: {target}")
    fails = False
    if baseline is not None:
        comparison = inspect_compare.compare(baseline, rows)
        inspect_table.show_comparison(comparison, arguments.against, console)
        fails = comparison.fails
    if broken is not None:
        return fail(broken, FAILED)
    return FAILED if fails else OK
