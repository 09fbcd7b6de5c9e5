"""The commands for people who tune kernels: `waterfall` and `schedule`. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jfabench import command_line
from jfabench.exit_codes import MACHINE, OK, USAGE, fail

if TYPE_CHECKING:
    from jfabench.schedule_run import Work

WATERFALL_EXAMPLES = """\
examples:
  python -m jfabench waterfall --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --set lengths.fill=0.5
  python -m jfabench waterfall --config jagged.yaml --direction bwd --set lengths.max_len=[512,4096] --out results/mine
"""
SCHEDULE_EXAMPLES = """\
examples:
  python -m jfabench schedule --lengths traffic.csv --sms 148
  python -m jfabench schedule --lengths traffic.csv --column tokens --q-len 64 --policy zigzag --policy dynamic
  python -m jfabench schedule --config jagged.yaml --set q_len=256 --set lengths.max_len=1024 --out results/mine
  python -m jfabench schedule --calibrate results/mine          a and b of a tile from measured times, and how well
"""

MOST_SMS = 1024


def add_commands(command: command_line.Command) -> None:
    _add_waterfall(command)
    _add_schedule(command)


# waterfall -----------------------------------------------------------------------------------------------------------


def _add_waterfall(command: command_line.Command) -> None:
    waterfall = command(
        "waterfall",
        "what each stage of a TLX kernel costs: variants without it, wrong by design, timed in turns",
        _waterfall,
        WATERFALL_EXAMPLES,
    )
    command_line.add_config(waterfall)
    command_line.add_new_folder(waterfall, "waterfall-<config>-<time>")
    command_line.add_directions(waterfall, ["fwd", "bwd"])
    command_line.add_settings(waterfall)
    waterfall.add_argument(
        "--rounds",
        type=command_line.whole_number(1),
        default=8,
        metavar="N",
        help="turns of every variant, of 3 calls each (default: 8)",
    )


def _waterfall(arguments: argparse.Namespace) -> int:
    sweep, device = command_line.load_for_hopper(arguments, "a waterfall times variants of", only=["tlx_jfa"])
    from jfabench import waterfall

    if found := waterfall.obstacle(device):
        return fail(found, MACHINE)
    folder = command_line.new_folder(arguments.out, f"waterfall-{sweep.name}")
    try:
        rows = waterfall.waterfall(sweep.cases, device, folder / "waterfall.csv", arguments.rounds)
        from jfabench.reports import pictures
        from jfabench.reports import waterfall as bars

        picture, _ = pictures.save(bars.draw(bars.read(folder / "waterfall.csv")), folder / "waterfall")
    except waterfall.WaterfallError as error:
        return fail(error, MACHINE)
    except BrokenPipeError:
        raise  # whoever read what is printed has gone, which is no fault of the folder
    except OSError as error:
        return fail(f"{folder} could not be written ({error}): make room, or choose another with --out", MACHINE)
    print(f"{len(rows)} rows: {folder / 'waterfall.csv'}, {picture} (wrong by design: no speedups)")
    return OK


# schedule ------------------------------------------------------------------------------------------------------------


def _add_schedule(command: command_line.Command) -> None:
    count = command_line.whole_number(1)
    schedule = command(
        "schedule",
        "which multiprocessor would compute which tile when, under each policy; predicted, needs no GPU",
        _schedule,
        SCHEDULE_EXAMPLES,
    )
    source = schedule.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="FILE", help="keys of each sequence: a CSV (or Parquet) file, a row each")
    command_line.add_config(source, "the shapes of a sweep file, by path or by name in sweeps/", required=False)
    source.add_argument("--calibrate", metavar="DIR", help="fit the costs of a tile to the results in this folder")
    schedule.add_argument("--column", metavar="NAME", help="with --lengths: the column (default: the file's only one)")
    schedule.add_argument("--q-len", type=count, metavar="M", help="with --lengths: queries (default: 256)")
    schedule.add_argument("--heads", type=count, metavar="H", help="with --lengths: heads (default: 4)")
    command_line.add_settings(schedule, "with --config: override a value (repeatable)")
    command_line.add_directions(schedule, ["fwd", "bwd"], "(default: the file's, or fwd)")
    schedule.add_argument(
        "--sms", type=_multiprocessors, metavar="N", help="multiprocessors: H100, H200 132, B200 148 (default: 132)"
    )
    schedule.add_argument(
        "--policy",
        action="append",
        default=[],
        choices=["none", "sorted", "zigzag", "lpt", "dynamic"],
        help="(repeatable; default: all)",
    )
    schedule.add_argument("--gpu", metavar="NAME", help="take the costs measured there, whatever --sms says")
    schedule.add_argument("--tiles", action="store_true", help="write schedule_tiles.csv, too: a row a tile")
    command_line.add_new_folder(schedule, "schedule")


def _multiprocessors(text: str) -> int:
    count = command_line.whole_number(1)(text)
    if count > MOST_SMS:
        raise argparse.ArgumentTypeError(f"{text}: no GPU has so many; at most {MOST_SMS} can be drawn")
    return count


_ONLY_WITH = {
    "--lengths": ("--column", "--q-len", "--heads"),
    "--config": ("--set",),
    "--calibrate": (),
}
_NOT_WITH_CALIBRATE = ("--direction", "--sms", "--policy", "--gpu", "--tiles", "--out")


def _misplaced(arguments: argparse.Namespace) -> str:
    """What is wrong with the options of `schedule` beside the source of its lengths; empty if nothing is."""

    def given(flag: str) -> bool:
        name = {"--set": "settings"}.get(flag, flag.removeprefix("--").replace("-", "_"))
        return getattr(arguments, name) not in (None, [], False)

    (source,) = filter(given, _ONLY_WITH)
    for needed, flags in _ONLY_WITH.items():
        if needed != source and (wrong := next(filter(given, flags), None)):
            return f"{wrong} is for {needed}, and says nothing with {source}: leave it out"
    wrong = next(filter(given, _NOT_WITH_CALIBRATE), None) if source == "--calibrate" else None
    return f"{wrong} says nothing with --calibrate: leave it out" if wrong else ""


def _schedule(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jfabench import schedule_run
    from jfabench.schedule import POLICIES

    if wrong := _misplaced(arguments):
        return fail(wrong, USAGE)
    if arguments.calibrate is not None:
        return _calibrate(Path(arguments.calibrate))
    folder = arguments.out or Path("results/schedule")
    try:
        works = _works(arguments)
        policies = [policy for policy in POLICIES if policy in (arguments.policy or POLICIES)]
        predictions = [schedule_run.predict(work, arguments.sms or 132, policies, arguments.gpu) for work in works]
    except schedule_run.ScheduleError as error:
        return fail(error, USAGE)
    schedule_run.show(predictions, Console())
    try:
        schedule_run.write_csv(folder / "schedule.csv", schedule_run.rows(predictions))
        if arguments.tiles:
            schedule_run.write_tiles(folder / "schedule_tiles.csv", predictions)
        for found in predictions[: schedule_run.MOST_PICTURES]:
            print(f"heatmap: {schedule_run.draw(found, folder)}")
    except BrokenPipeError:
        raise  # whoever read what is printed has gone, which is no fault of the folder
    except OSError as error:
        return fail(f"{folder} could not be written ({error}): make room, or choose another with --out", MACHINE)
    if len(predictions) > schedule_run.MOST_PICTURES:
        print(f"heatmaps of the first {schedule_run.MOST_PICTURES} cases only: choose others with --set")
    print(f"results: {folder / 'schedule.csv'}")
    return OK


def _works(arguments: argparse.Namespace) -> list[Work]:
    from jfabench import schedule_run

    if arguments.lengths is not None:
        directions = arguments.direction or ["fwd"]
        queries, heads = arguments.q_len or schedule_run.QUERIES, arguments.heads or schedule_run.HEADS
        return schedule_run.of_file(arguments.lengths, arguments.column, queries, heads, 128, directions)
    return schedule_run.of_sweep(command_line.load(arguments))


def _calibrate(folder: Path) -> int:
    from jfabench import calibration
    from jfabench.schedule_run import ScheduleError

    try:
        fits = calibration.fit_folder(folder)
    except ScheduleError as error:
        return fail(error, USAGE)
    for line in calibration.lines(fits):
        print(line)
    return OK
