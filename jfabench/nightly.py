"""The nightly run: measure, compare with the last good night of the same machine, measure again what looks slower.

Steps: ceilings, sweep, counters (where the driver permits them), history, comparison, repetition, report. The first
three are the project's own commands, in processes of their own. What looks slower than in the last good night is only
*suspicious*: two nights differ by more than chance within one. The two commits are then built side by side, and the
suspicious cases measured in turns (`jfabench.compare`); what is slower there, too, is a regression.

A night is good if no case is slower and none that should be right is wrong; then it is what later nights are compared
with. Exit codes: 0 good; 1 a regression; 4 wrong results, whatever else; 3 the machine, its software or the database
failed, so that nothing is known; 2 the command is not valid.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jfabench import compare, env, interleaved, regression, trees
from jfabench.changes import Run
from jfabench.counted import read_folder
from jfabench.folder import ResultFolder
from jfabench.history import History, HistoryError, machine_of
from jfabench.records import Case, Record
from jfabench.regression import BROKEN, CaseResult, Comparison
from jfabench.sweep import Sweep
from jfabench.workers import SweepStoppedError

GOOD, REGRESSION, INFRASTRUCTURE, WRONG = 0, 1, 3, 4

State = Literal["done", "skipped", "failed"]


class InfrastructureError(RuntimeError):
    """Nothing is known about the code, for a reason that has nothing to do with it."""


@dataclass(frozen=True)
class Step:
    name: str
    state: State
    text: str
    seconds: float


@dataclass(frozen=True)
class Options:
    """What a night does.

    `gate` are the providers that can fail it, `tree` the sources that are measured again beside the last good commit,
    `pairs` how often. `timeout` is for a step of a case, `limit` for a whole command, in seconds.
    """

    sweep: Sweep
    device: str
    out: Path
    database: str | None
    gate: tuple[str, ...]
    settings: tuple[str, ...] = ()
    tree: str = "."
    pairs: int = compare.REPEATED_PAIRS
    ceilings: bool = True
    counters: bool = True
    timeout: float = 300.0
    limit: float = 3600.0


@dataclass
class Night:
    """What is known of a night so far."""

    options: Options
    steps: list[Step] = field(default_factory=list)
    records: tuple[Record, ...] = ()
    machine: str = ""
    run: int | None = None
    last: Run | None = None
    against_last: Comparison | None = None
    repeated: Comparison | None = None
    regressions: tuple[CaseResult, ...] = ()
    wrong: tuple[Record, ...] = ()
    failure: str = ""

    @property
    def folder(self) -> ResultFolder:
        return ResultFolder(self.options.out / "run")

    @property
    def code(self) -> int:
        if self.wrong:
            return WRONG
        if self.failure:
            return INFRASTRUCTURE
        return REGRESSION if self.regressions else GOOD

    @property
    def commit(self) -> str:
        return str(next((r.env["commit"] for r in self.records if r.env.get("commit")), "") or "")


def run(options: Options, say: Callable[[str], None] = print) -> Night:
    """Does all steps. What the machine is to blame for ends up in `failure`; steps that can still be done, are."""
    night = Night(options)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JFABENCH_TUNE", "0")  # a choice that a process makes by chance is no change of the code
    if options.ceilings:
        _do(night, "ceilings", lambda: _command(night, "ceilings", "--device", options.device), say, needed=False)
    _do(night, "sweep", lambda: _sweep(night), say)
    if not night.records:
        return night
    if options.counters and options.device != "cpu":
        _do(night, "counters", lambda: _counters(night), say, needed=False)
    history: list[History] = []
    _do(night, "history", lambda: history.append(_import(night)), say)
    if history:
        try:
            _judge(night, history[0], say)
        finally:
            history[0].close()
    return night


def _judge(night: Night, history: History, say: Callable[[str], None]) -> None:
    last = night.last
    if last is None:
        night.steps.append(Step("comparison", "skipped", "no good night of this machine and grid yet", 0.0))
        say(f"comparison: skipped ({night.steps[-1].text})")
    else:
        _do(night, "comparison", lambda: _compare(night, last, history.records(last.id)), say)
        if suspicious := _suspicious(night):
            _do(night, "repetition", lambda: _repeat(night, last, suspicious), say)
    if night.code != INFRASTRUCTURE and night.run is not None:
        history.judge(night.run, {GOOD: "good", REGRESSION: "regression", WRONG: "wrong"}[night.code])


def _do(
    night: Night, name: str, action: Callable[[], str | None], say: Callable[[str], None], needed: bool = True
) -> None:
    """Does one step and notes its end. One that is not `needed` may fail and leave the night worth something."""
    begin = time.monotonic()
    state: State = "done"
    try:
        text = action() or ""
    except Exception as error:
        expected = isinstance(error, InfrastructureError | HistoryError | SweepStoppedError | ValueError | OSError)
        if not expected:  # a fault of ours: it must not look like a regression, as Python's own exit code would
            traceback.print_exc()
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        state = "failed" if needed else "skipped"
        if needed:
            night.failure = night.failure or f"{name}: {text}"
    night.steps.append(Step(name, state, text, time.monotonic() - begin))
    say(f"{name}: {state}{f' ({text})' if text else ''}")


# Steps ---------------------------------------------------------------------------------------------------------------


def _command(night: Night, *arguments: str, accepted: Sequence[int] = (0,)) -> None:
    """Runs one of our commands. Raises `InfrastructureError` where its exit code is not one of `accepted`.

    It dies with this process: a killed night leaves nobody behind who uses the GPU, and the folder can be used again.
    """
    log = night.options.out / f"{arguments[0]}.log"
    die_with_parent = ctypes.CDLL(None).prctl
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", "jfabench", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=night.options.limit,
                check=False,
                preexec_fn=lambda: die_with_parent(1, signal.SIGKILL),  # Linux: PR_SET_PDEATHSIG is 1
            )
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"took longer than {night.options.limit:g} s; see {log}") from None
    if done.returncode not in accepted:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise InfrastructureError(f"{lines[-1] if lines else 'no output'} (exit code {done.returncode}; see {log})")


def _grid(night: Night, providers: Sequence[str] = ()) -> list[str]:
    """The options that name the grid, for `sweep` and `profile`."""
    options = night.options
    words = ["--config", str(options.sweep.path), "--device", options.device, "--out", str(night.folder.root)]
    for setting in options.settings:
        words += ["--set", setting]
    for provider in providers:
        words += ["--only", provider]
    return words


def _sweep(night: Night) -> str:
    """Measures the grid, or goes on with it where a killed night left it; a case that fails is no failure of this."""
    options = night.options
    resume = ["--resume"] if night.folder.records.exists() else []
    if resume:
        _require_same_commit(night.folder)
    timeout = ["--timeout", str(options.timeout)]
    try:
        _command(night, "sweep", *_grid(night, options.sweep.config.providers), *timeout, *resume, accepted=(0, 1))
    finally:
        if night.folder.records.exists():
            night.records = read_folder(night.folder)
    right = [record for record in night.records if record.status == "ok"]
    if not right:
        reasons = {record.reason for record in night.records}
        raise InfrastructureError(f"no case gave a right result: {'; '.join(sorted(reasons))[:400]}")
    if len(night.records) < len(options.sweep.cases):
        raise InfrastructureError(f"{len(night.records)} of {len(options.sweep.cases)} cases have a record")
    night.machine = machine_of(next(record.env for record in right))
    night.wrong = tuple(r for r in night.records if r.status in BROKEN and r.case.provider in options.gate)
    return f"{len(right)} of {len(night.records)} cases right"


def _require_same_commit(folder: ResultFolder) -> None:
    """What a killed night left is gone on with, unless it is of another commit."""
    now = env.environment("cpu")["commit"]
    before = next((record.env["commit"] for record in read_folder(folder) if record.env.get("commit")), now)
    if before != now:
        raise InfrastructureError(
            f"{folder.root} was begun at commit {before[:12]} and this is {str(now)[:12]}: choose another --out"
        )


def _counters(night: Night) -> None:
    _command(night, "profile", *_grid(night, night.options.gate), "--metrics", "roofline", accepted=(0, 1))
    night.records = read_folder(night.folder)


def _import(night: Night) -> History:
    history = History(night.options.database)
    try:
        night.run = history.add(night.folder).run
        started = min(record.when for record in night.records)
        night.last = history.last_good(night.machine, night.options.sweep.name, started)
    except BaseException:
        history.close()
        raise
    return history


def _compare(night: Night, last: Run, before: Mapping[Case, Record]) -> str:
    """Compares with the last good night, for what it is worth: times of two nights, and what else changed."""
    now = {record.case: record for record in night.records}
    if not now.keys() & before.keys():
        return f"the last good night ({last.started[:10]}) measured none of these cases: nothing to compare with"
    labels = (f"{last.started[:10]} ({last.commit[:12] or 'no commit'})", f"this night ({night.commit[:12]})")
    night.against_last = compare.from_blocks(labels, ([before], [now]), paired=False)
    lost = [r for r in night.against_last.cases if r.status[0] == "ok" and r.status[1] == "unavailable"]
    if gone := {r.case.provider for r in lost if r.case.provider in night.options.gate}:
        raise InfrastructureError(f"{', '.join(sorted(gone))} could run in the last good night and is unavailable now")
    return f"with {labels[0]}"


def _suspicious(night: Night) -> tuple[CaseResult, ...]:
    """Gated cases that took longer than in the last good night, by more than half of what counts."""
    if night.against_last is None:
        return ()
    limit = night.against_last.limit
    return tuple(
        result
        for result in night.against_last.cases
        if result.case.provider in night.options.gate
        and result.estimate.shown.middle > 1
        and regression.is_suspicious(result.estimate.shown.middle, limit)
    )


def _repeat(night: Night, last: Run, suspicious: Sequence[CaseResult]) -> str:
    """Measures the suspicious cases again: both commits in turns, or this one alone where the old one is not here.

    A case that the old commit cannot compute any more, for want of its old environment say, counts as measured alone.
    """
    options = night.options
    with tempfile.TemporaryDirectory(prefix="jfabench-") as folder:
        now = trees.find(options.tree, Path(folder))
        then, missing = now, ""
        if not last.commit or last.dirty:
            missing = "the last good night was not measured from a commit"
        else:
            try:
                then = trees.find(last.commit, Path(folder))
            except trees.TreeError as error:
                missing = str(error)
        plan = interleaved.Plan(
            (then, now),
            tuple(result.case for result in suspicious),
            interleaved.block_policy(options.sweep.config.measure, options.settings),
            options.device,
            options.pairs,
            options.timeout,
        )
        root = options.out / f"repetition-{time.strftime('%Y%m%d-%H%M%S')}"
        again = compare.measured(plan, root, repeated_pairs=0)
    alone, sides = suspicious, list(interleaved.SIDES)
    if not missing:
        night.repeated = again
        gone = {result.case for result in again.cases if result.status[0] != "ok"}
        alone, sides = [result for result in suspicious if result.case in gone], ["b"]
        missing = f"it has no right result in {len(alone)} cases now" if alone else ""
    blocks = [block for side in sides for block in compare.read_side(root / side)]
    slower = {result.case: result for result in again.of("slower")} if night.repeated else {}
    slower |= {result.case: result for result in _still_slower(night, alone, blocks)}
    night.regressions = tuple(slower.values())
    worse = {case: r for block in blocks for case, r in block.items() if r.status in BROKEN}
    night.wrong += tuple(worse.values())  # right in the sweep, but not every time
    found = f"{len(night.regressions)} of {len(suspicious)} suspicious cases are slower"
    found += f", {len(worse)} not right every time" if worse else ""
    return f"{found}; measured without the old commit ({missing})" if missing else found


def _still_slower(
    night: Night, suspicious: Sequence[CaseResult], blocks: Sequence[compare.Block]
) -> Iterator[CaseResult]:
    """Cases whose fastest fresh process still takes longer than the last good night, by more than what counts."""
    assert night.against_last is not None
    for result in suspicious:
        records = [block[result.case] for block in blocks if result.case in block]
        values = [regression.block_value(r.measurement.rounds) for r in records if r.measurement]
        known = [value for value in values if not math.isnan(value)]
        if known and math.exp(min(known)) > (1 + night.against_last.limit) * result.seconds[0]:
            yield result
