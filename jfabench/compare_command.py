"""The command `compare`: parses, calls, prints. Imports stand inside what needs them.

Exit codes: 0 nothing is slower and all that was right still is; 1 a case is slower, or no longer right; 2 the command
is not valid, or the two do not compare; 3 the machine or a folder cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfabench import command_line
from jfabench.exit_codes import FAILED, INTERRUPTED, MACHINE, OK, USAGE, fail

if TYPE_CHECKING:
    from jfabench.regression import Comparison

EXAMPLES = """\
examples:
  python -m jfabench compare main . --config jagged.yaml --only tlx_jfa   the work tree against main, measured in turns
  python -m jfabench compare results/monday results/today                 two result folders
  python -m jfabench compare --aa --config jagged.yaml                    the noise floor: this build against itself
"""

DEFAULTS: dict[str, Any] = {"pairs": 4, "repeat": 8, "device": "auto", "timeout": 300.0}
"""Of options that only measuring knows. Until it is known what is compared they are None, to tell which were given."""

MEASURING = ("config", "only", "direction", "measure", "settings", *DEFAULTS)


def add_command(command: command_line.Command) -> None:
    compare = command("compare", "compare two builds, or two result folders, case by case", _compare, EXAMPLES)
    compare.add_argument(
        "sides",
        nargs="*",
        metavar="A B",
        help="two result folders, or two builds: git revisions or folders of sources (. is the present one)",
    )
    compare.add_argument("--aa", action="store_true", help="measure one build against itself, and keep its noise floor")
    command_line.add_config(
        compare, "builds: a sweep file with the cases, by path or by name in sweeps/", required=False
    )
    command_line.add_new_folder(compare, "compare-<time>")
    command_line.add_only(compare)
    command_line.add_directions(compare)
    command_line.add_measure(compare)
    command_line.add_device(compare)
    command_line.add_settings(compare)
    compare.add_argument(
        "--pairs",
        type=command_line.whole_number(2),
        metavar="N",
        help=f"pairs of processes for all cases (default: {DEFAULTS['pairs']})",
    )
    compare.add_argument(
        "--repeat",
        type=command_line.whole_number(0),
        metavar="N",
        help="pairs of fresh processes that decide about suspicious cases; 0: the first pairs decide "
        f"(default: {DEFAULTS['repeat']})",
    )
    command_line.add_timeout(compare)
    compare.set_defaults(**dict.fromkeys(DEFAULTS))


def _compare(arguments: argparse.Namespace) -> int:
    from jfabench import compare, trees
    from jfabench.reports import comparison
    from jfabench.workers import SweepStoppedError

    wanted = "one build at most (default: the sources here)" if arguments.aa else "A and B"
    if arguments.repeat == 1:
        return fail("--repeat 1: one pair tells nothing about chance; use 2 or more, or 0", USAGE)
    if len(arguments.sides) > 1 if arguments.aa else len(arguments.sides) != 2:
        return fail(f"compare{' --aa' if arguments.aa else ''} needs {wanted}", USAGE)
    root = command_line.new_folder(arguments.out, "compare")
    try:
        import scipy.stats  # noqa: F401  -- better missed now than after everything was measured

        if not arguments.aa and all(compare.is_results(Path(side)) for side in arguments.sides):
            if ignored := _given(arguments, MEASURING):
                return fail(f"{ignored}: result folders are compared as they are; leave it out", USAGE)
            found = compare.from_folders(*map(Path, arguments.sides))
        else:
            found = _measured(arguments, root)
        if arguments.aa and not found.unmeasured:
            noise = compare.measured_noise(found, root)
            print(f"noise floor {100 * noise.floor:.2f}%, processes differ by {100 * noise.process_sd:.2f}%", end=" ")
            print(f"({noise.cases} cases, {noise.pairs} pairs); kept in {compare.store_noise(noise)}")
        comparison.show(found)
        print(f"results: {comparison.write_table(found, root)}")
        print(f"report:  {comparison.write_page(found, root).resolve()}")
    except ModuleNotFoundError as error:
        return command_line.missing(error)
    except (compare.CompareError, trees.TreeError) as error:
        return fail(error, USAGE)
    except SweepStoppedError as error:
        return fail(f"{error}. {_kept(compare, root)}", MACHINE)
    except OSError as error:
        return fail(f"{error}: make room, or choose another folder with --out. {_kept(compare, root)}", MACHINE)
    except KeyboardInterrupt:
        print(f"\ninterrupted. {_kept(compare, root)}", file=sys.stderr)
        return INTERRUPTED
    return FAILED if found.regressed or found.unmeasured else OK


def _kept(compare: Any, root: Path) -> str:
    """What is left of a comparison that did not come to its end."""
    try:
        compare.from_folders(root / "a", root / "b")
    except compare.CompareError:  # that command would say so, too
        return "Nothing was measured on both sides yet."
    return f"What was measured is kept: python -m jfabench compare {root / 'a'} {root / 'b'}"


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    flags = {"settings": "--set"}
    return ", ".join(flags.get(name, f"--{name}") for name in names if getattr(arguments, name) not in (None, []))


def _measured(arguments: argparse.Namespace, root: Path) -> Comparison:
    import tempfile

    from jfabench import compare, interleaved, trees

    _require_builds(arguments.sides)
    left_out = {name: value for name, value in DEFAULTS.items() if getattr(arguments, name) is None}
    arguments = argparse.Namespace(**vars(arguments) | left_out)
    if not arguments.config:
        raise compare.CompareError(
            "builds are measured: name the cases with --config, such as --config jagged.yaml (result folders, which "
            "have a records.jsonl, need none)"
        )
    sweep, device = command_line.load_and_choose_device(arguments)
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


class _Status:
    """A line on a terminal that says what is going on; elsewhere, nothing."""

    def __enter__(self) -> Callable[[str], None]:
        from rich.console import Console

        self._status = Console(stderr=True).status("preparing")
        self._status.start()
        return lambda text: self._status.update(text)

    def __exit__(self, *error: Any) -> None:
        self._status.stop()
