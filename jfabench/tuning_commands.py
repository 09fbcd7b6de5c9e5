"""The commands for people who tune kernels: `waterfall` and `schedule`. Imports stand inside what needs them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jfabench.exit_codes import MACHINE, OK, USAGE, fail

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

Command = Callable[[str, str, Any, str], argparse.ArgumentParser]
"""Adds a command: name, help, function that runs it, examples."""


def add_commands(command: Command) -> None:
    waterfall = command(
        "waterfall",
        "what each stage of a TLX kernel costs: variants without it, wrong by design, timed in turns",
        _waterfall,
        WATERFALL_EXAMPLES,
    )
    waterfall.add_argument("--config", required=True, metavar="FILE", help="a sweep file, by path or by name")
    waterfall.add_argument("--out", metavar="DIR", help="result folder (default: results/waterfall-<config>-<time>)")
    waterfall.add_argument(
        "--direction", action="append", default=[], choices=["fwd", "bwd"], help="instead of the file's"
    )
    waterfall.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="override a value (repeatable)"
    )
    waterfall.add_argument(
        "--rounds", type=_count, default=8, metavar="N", help="turns of every variant, of 3 calls each (default: 8)"
    )

    schedule = command(
        "schedule",
        "which multiprocessor would compute which tile when, under each policy; predicted, needs no GPU",
        _schedule,
        SCHEDULE_EXAMPLES,
    )
    source = schedule.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="FILE", help="keys of each sequence: a CSV (or Parquet) file, a row each")
    source.add_argument("--config", metavar="FILE", help="the shapes of a sweep file, by path or by name")
    source.add_argument("--calibrate", metavar="DIR", help="fit the costs of a tile to the results in this folder")
    schedule.add_argument(
        "--short-below",
        type=_count,
        metavar="N",
        help="with --calibrate: the forward took blocks of 64 keys below this mean length (default: 512)",
    )
    schedule.add_argument("--column", metavar="NAME", help="with --lengths: the column (default: the file's only one)")
    schedule.add_argument("--q-len", type=_count, metavar="M", help="with --lengths: queries (default: 256)")
    schedule.add_argument("--heads", type=_count, metavar="H", help="with --lengths: heads (default: 4)")
    schedule.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="with --config: override"
    )
    schedule.add_argument(
        "--direction", action="append", default=[], choices=["fwd", "bwd"], help="(default: the file's, or fwd)"
    )
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
    schedule.add_argument("--out", metavar="DIR", help="result folder (default: results/schedule)")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _multiprocessors(text: str) -> int:
    count = _count(text)
    if count > MOST_SMS:
        raise argparse.ArgumentTypeError(f"{text}: no GPU has so many; at most {MOST_SMS} can be drawn")
    return count


_ONLY_WITH = {
    "--lengths": ("--column", "--q-len", "--heads"),
    "--config": ("--set",),
    "--calibrate": ("--short-below",),
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


def _waterfall(arguments: argparse.Namespace) -> int:
    from jfabench.devices import choose_device
    from jfabench.sweep import ConfigError, load_sweep

    if arguments.out is not None and not arguments.out.strip():
        return fail("--out needs the name of a folder", USAGE)
    try:
        sweep = load_sweep(
            arguments.config,
            "full",
            settings=arguments.settings,
            only=["tlx_jfa"],
            directions=arguments.direction,
        )
    except ConfigError as error:
        return fail(error, USAGE)
    device, _ = choose_device("auto")
    if device is None or device == "cpu":
        return fail(
            "a waterfall times variants of the TLX kernels on a GPU of sm_90, and there is none that can be used here: "
            "run it on an H100 or H200 (`python -m jfabench doctor` says what is missing)",
            MACHINE,
        )
    from jfabench import waterfall

    if found := waterfall.obstacle(device):
        return fail(found, MACHINE)
    folder = _folder(arguments.out, f"waterfall-{sweep.name}")
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


def _schedule(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from jfabench import schedule_run
    from jfabench.schedule import POLICIES
    from jfabench.sweep import ConfigError

    if wrong := _misplaced(arguments):
        return fail(wrong, USAGE)
    if arguments.out is not None and not arguments.out.strip():
        return fail("--out needs the name of a folder", USAGE)
    if arguments.calibrate is not None:
        return _calibrate(Path(arguments.calibrate), arguments.short_below or 512)
    folder = Path(arguments.out or "results/schedule")
    try:
        works = _works(arguments)
        policies = [policy for policy in POLICIES if policy in (arguments.policy or POLICIES)]
        predictions = [schedule_run.predict(work, arguments.sms or 132, policies, arguments.gpu) for work in works]
    except (ConfigError, schedule_run.ScheduleError) as error:
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


def _works(arguments: argparse.Namespace) -> Any:
    from jfabench import schedule_run
    from jfabench.sweep import load_sweep

    if arguments.lengths is not None:
        directions = arguments.direction or ["fwd"]
        return schedule_run.of_file(
            arguments.lengths, arguments.column, arguments.q_len or 256, arguments.heads or 4, 128, directions
        )
    sweep = load_sweep(arguments.config, "full", settings=arguments.settings, directions=arguments.direction)
    return schedule_run.of_sweep(sweep)


def _calibrate(folder: Any, short_below: int) -> int:
    from jfabench import calibration
    from jfabench.schedule_run import ScheduleError

    try:
        fits = calibration.fit_folder(folder, short_below)
    except ScheduleError as error:
        return fail(error, USAGE)
    for line in calibration.lines(fits):
        print(line)
    return OK


def _folder(out: str | None, name: str) -> Any:
    from datetime import datetime
    from pathlib import Path

    return Path(out if out is not None else f"results/{name}-{datetime.now():%Y%m%d-%H%M%S}")
