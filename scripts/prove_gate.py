"""Does the regression gate find what it should on this GPU, and nothing else?

    python scripts/prove_gate.py OUT [--times 5] [--seconds 500] [--only aa] [--only wait] [--only stage]

Exit codes: 0 each comparison found what it should, and nothing else; 1 one did not, or could not be made.

Needs a GPU of sm_90. In turns, by the code of `jfabench compare`:

- `aa` compares this tree with itself over the jagged grid, M=256, at a quarter of the batch: nothing may be slower;
- `wait` compares it with a copy in which each program of the forward spins for 3% of its own time at its end;
- `stage` compares it with a copy that has one slot of queries fewer, so that they neither stay nor are loaded ahead.

Both copies must be called slower in the forward, and not in the backward. The planted comparisons take short sequences:
in long ones the card's power limit, not the kernel, may decide. OUT gets summary.json, and a table of the cases of each
kind, whole after each comparison. None starts that would end after `--seconds` if it took as long as those of its kind
before it; the first of a kind starts in any case until then.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from jfabench import command_line, compare, interleaved
from jfabench.folder import write_json, write_whole
from jfabench.reports import comparison
from jfabench.sweep import load_sweep
from jfabench.trees import Tree
from jfabench.workers import SweepStoppedError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("jfabench", "kernels", "operators", "reports", "sweeps")
PROVIDER = "tlx_jfa"
BLOCK = ["measure.max_seconds=0.2", "measure.warmup_seconds=0.05", "measure.min_iterations=8"]
SHORT = ["q_len=256", "lengths.max_len=[512,1024,2048]", "lengths.fill=0.1"]
WHOLE = ["q_len=256", "batch=192"]  # checking takes most of the time
COLUMNS = [
    *("run", "direction", "label", "a_s", "b_s", "ratio", "low", "high", "stage", "verdict", "status_a", "status_b")
]

WAIT = """@triton.jit
def _cycles():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _linger(started):
    now = _cycles()
    until = now + (now - started) * 3 // 100
    while now < until:
        now = _cycles()


"""
KERNEL = "@triton.jit(do_not_specialize="


def replace_once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands {text.count(old)} times in the source, not once: this script must follow it")
    return text.replace(old, new)


def plant_stage(tree: Path) -> None:
    path = tree / "kernels/attention/config_sm90.py"
    path.write_text(replace_once(path.read_text(), "q_stages: int = 2", "q_stages: int = 1"))


def plant_wait(tree: Path) -> None:
    path = tree / "kernels/attention/fwd_sm90.py"
    before, kernel = path.read_text().split(KERNEL)
    kernel = replace_once(kernel, "    buffers = Buffers(", "    started = _cycles()\n    buffers = Buffers(")
    path.write_text(before + WAIT + KERNEL + kernel.rstrip("\n") + "\n    _linger(started)\n")


PLANTS: dict[str, Callable[[Path], None]] = {"wait": plant_wait, "stage": plant_stage}


def planted(kind: str, folder: Path) -> Tree:
    """A copy of this tree that is slower, with what tells where its packages are."""
    (folder / kind).mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder / kind)
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / kind / name, ignore=ignored)
    PLANTS[kind](folder / kind)
    return Tree(kind, folder / kind)


def compared(kind: str, other: Tree, out: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    here = Tree("this tree", ROOT)
    settings, pairs, repeated = (
        (WHOLE, 3, 6) if kind == "aa" else (SHORT, 6, 0)
    )  # of the planted the first pairs decide
    sweep = load_sweep("jagged.yaml", "full", settings=[*settings, *BLOCK], only=[PROVIDER])
    policy = interleaved.block_policy(sweep.config.measure, BLOCK)
    plan = interleaved.Plan((here, other), sweep.cases, policy, "cuda", pairs)
    began = time.monotonic()
    found = compare.measured(plan, out, repeated_pairs=repeated, floor=False)
    rows = comparison.table(found)
    summary = {
        "slower": [f"{change.case.direction} {change.label}" for change in found.of("slower")],
        "faster": [f"{change.case.direction} {change.label}" for change in found.of("faster")],
        "outcome": comparison.outcome(found),
        "largest_change": float((rows["ratio"] - 1).abs().max()),
        "cases_not_ok": int((rows["status_b"] != "ok").sum()),
        "seconds": time.monotonic() - began,
    }
    if kind == "aa":
        summary["floor"] = compare.measured_noise(found, out).floor
    return summary, rows


def faults(kinds: Iterable[str], summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What speaks against the gate in the summaries of comparisons, one by name: `aa-1`, `wait-1`, `wait-2`."""
    found = [f"{kind} was never compared, for want of time" for kind in kinds if f"{kind}-1" not in summaries]
    for name, summary in summaries.items():
        if "error" in summary:
            found.append(f"{name} failed")
            continue
        if summary["cases_not_ok"]:
            found.append(f"{name} has {summary['cases_not_ok']} cases that are not ok")
        planted = not name.startswith("aa-")
        slower = [case for case in summary["slower"] if not (planted and case.startswith("fwd "))]
        if slower:
            found.append(f"{name} calls {', '.join(slower)} slower")
        if planted and len(slower) == len(summary["slower"]):
            found.append(f"{name} calls no forward slower")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Does the regression gate find what it should on this GPU?")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--times", type=command_line.whole_number(1), default=5, help="comparisons of each kind (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=command_line.seconds, default=500, help="end by then (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=["aa", *PLANTS], help="kinds (default: all)")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("The planted slow-downs are in the kernels for Hopper: run it on a GPU of sm_90.")
    os.environ["JFABENCH_TUNE"] = "0"  # another configuration would be another kernel
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    summaries: dict[str, Any] = {}
    tables: dict[str, list[pd.DataFrame]] = {}
    longest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        kinds = list(dict.fromkeys(arguments.only or ["wait", "stage", "aa"]))
        trees = {kind: planted(kind, Path(folder)) for kind in kinds if kind in PLANTS}
        for turn, kind in itertools.product(range(arguments.times), kinds):
            start = time.monotonic()
            if start - began + longest.get(kind, 0.0) > arguments.seconds:
                continue
            name = f"{kind}-{turn + 1}"
            other = trees.get(kind, Tree("this tree", ROOT))
            try:
                summaries[name], rows = compared(kind, other, Path(folder) / "out" / name)
            except (compare.CompareError, SweepStoppedError) as error:
                summaries[name] = {"error": str(error)}
            else:
                tables.setdefault(kind, []).append(rows.assign(run=name))
                text = pd.concat(tables[kind])[COLUMNS].to_csv(index=False, float_format="%.6g")
                write_whole(arguments.out / f"{kind}.csv", text.encode())
            longest[kind] = max(longest.get(kind, 0.0), time.monotonic() - start)
            write_json(arguments.out / "summary.json", summaries)
            said = summaries[name].get("error") or f"slower {summaries[name]['slower'] or 'nothing'}"
            print(f"{name}, {longest[kind]:.0f} s: {said}", flush=True)
    found = faults(kinds, summaries)
    print("; ".join(found) if found else f"all {len(summaries)} comparisons found what they should, and nothing else")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
