"""Counters of the cases of a sweep: shapes are visited by the worker that measures, under Nsight Compute.

For each shape `ncu` runs this module as a program, which has a worker process do the job of `jfabench.visit` with one
timed call a case; `ncu` counts only the kernels inside the NVTX ranges of these calls. It replays each kernel once for
every few counters, which is most of what a run costs: about half a second a launch on an H200, for all counters. Caches
are flushed before each replay, so times from here are no benchmark times. A provider that chooses a configuration at
its first call does so outside these ranges, yet beside `ncu`: measure first, so that it has chosen.

`ncu` prints its counters when the program has ended. Each shape therefore has a run of its own: what is killed loses
the shape at hand, and no other.

The folder gets, whole after each shape: `counters.csv` (one row a counter of a kernel launch), `counters_wide.csv` (one
row a case, beside what `results.csv` says of it if the folder has one), `profile.jsonl` (a record for each case and
what became of it), and `profile.log` (what `ncu` and the providers printed).
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jfabench import ncu
from jfabench.folder import ResultFolder, write_whole
from jfabench.operator import case_facts, load_operator
from jfabench.policy import MeasurePolicy
from jfabench.ranges import range_name
from jfabench.records import NEUTRAL_STATUSES, Case, Record, read_records
from jfabench.run import Workers
from jfabench.sweep import Sweep
from jfabench.visit import Job

POLICY = MeasurePolicy(mode="wall", rounds=1, min_iterations=1, max_iterations=1, warm_up=False)  # type: ignore[call-arg]
"""One call, which is sampled: what a warm-up is for has been had, the call has compiled and was checked."""

GRACE = 120.0
"""Seconds beyond the time-out of a worker after which `ncu` itself counts as hanging."""

CASE_COLUMNS = ("operator", "provider", "direction", "seed", "shape", "label")
COLUMNS = (
    *CASE_COLUMNS,
    *("gpu", "calls", "minimal_bytes", "when"),
    *("launch", "kernel", "metric", "raw_metric", "value", "unit"),
)
"""Columns of `counters.csv`. The first five name the case as in `results.csv`; `calls` is how many calls of the
provider the rows come from, `launch` counts the launches of the case from 0, `value` is in SI units."""

_FROM_RESULTS = (
    "status", "mode", "median_s", "low_s", "high_s", "tflops", "bytes_per_s", "roofline_fraction", "speedup", "flags",
    "commit",
)  # fmt: skip

Row = dict[str, str]


class ProfileError(RuntimeError):
    """Nothing can be profiled here; the message says why and what to do. What was written before is kept."""


@dataclass
class Outcome:
    """What a profile run leaves: the record of each case, and how many of them have counters."""

    records: list[Record] = field(default_factory=list)
    counted: int = 0

    @property
    def failed(self) -> list[Record]:
        return [record for record in self.records if record.status not in NEUTRAL_STATUSES]


@dataclass(frozen=True)
class Plan:
    """How to profile: with which `ncu`, on which device, and which metrics (canonical ones by raw name)."""

    executable: str
    device: str
    metrics: Mapping[str, ncu.Metric]
    keep_reports: bool
    timeout: float


# The program that ncu runs --------------------------------------------------------------------------------------------


class _Heard:
    """Touches a file at every sign of life, for the process that waits for `ncu`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def phase(self, case: Case | None, phase: str) -> None:
        self._path.touch()

    def record(self, record: Record) -> None:
        self._path.touch()


def visit(folder: Path) -> None:
    """Does the job in `folder/job.json` and writes `records.jsonl` there; a case that kills its worker costs itself."""
    (folder / "pid").write_text(str(os.getpid()))
    asked = json.loads((folder / "job.json").read_text())
    threading.Thread(target=_end_without, args=(asked["profiler"],), daemon=True).start()
    job = Job.from_json(asked["job"])
    heard = _Heard(folder / "heard")
    left = list(job.cases)
    workers = Workers(job.device, folder / "worker.log", asked["timeout"])
    with closing(workers), (folder / "records.jsonl").open("a", encoding="utf-8") as file:
        while left:
            done = set()
            for record in workers.run(replace(job, cases=tuple(left)), heard):
                heard.record(record)
                file.write(record.to_line())
                file.flush()
                done.add(record.case)
            if not done:
                break
            left = [case for case in left if case not in done]


def _end_without(process: int) -> None:
    """Ends this program, and with it the worker and `ncu`, once the process that profiles has gone, however it went."""
    while Path(f"/proc/{process}").exists():
        time.sleep(1)
    os._exit(1)


# The runs -------------------------------------------------------------------------------------------------------------


def plan(
    ncu_path: str | None, device: str, choice: ncu.Choice, *, keep_reports: bool, timeout: float
) -> tuple[Plan, list[str]]:
    """What would be done, and notes for the user: metrics that are left out. Raises `ProfileError`."""
    from jfabench import env

    if ncu_path is None:
        raise ProfileError(
            "no ncu on PATH or where CUDA installs it: install Nsight Compute, or put its folder on PATH"
        )
    capability = env.compute_capability() if device != "cpu" else None
    architecture = ncu.nearest_architecture(capability)
    exact = capability is None or architecture == "sm_{}{}".format(*capability)
    known = ncu.known_metrics(ncu_path, ncu.CHIPS[architecture] if exact else None)
    metrics, unknown = ncu.select(choice, architecture, known)
    notes = [_left_out(unknown, "this ncu does not know")] if unknown else []
    return Plan(ncu_path, device, metrics, keep_reports, timeout), notes


def _left_out(raws: Iterable[str], why: str) -> str:
    return f"left out, because {why} them: {', '.join(sorted(raws))}"


def groups(cases: Sequence[Case], each_alone: bool) -> list[tuple[Case, ...]]:
    """The cases that share a run of `ncu`: those of one shape, unless each is to have a report of its own."""
    if each_alone:
        return [(case,) for case in cases]
    return [tuple(group) for _, group in itertools.groupby(cases, key=lambda case: case.shape_key)]


def profile(sweep: Sweep, folder: ResultFolder, chosen: Plan, say: Callable[[str], None] = print) -> Outcome:
    """Profiles every case of `sweep` and writes the files named above into `folder`.

    Raises `ProfileError` when no case can be profiled (no permission, say) or the folder cannot be written.
    """
    outcome = Outcome()
    noted: set[str] = set()
    work = groups(sweep.cases, chosen.keep_reports)
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        table = Table.read(folder)
        for number, cases in enumerate(work, start=1):
            began = time.monotonic()
            run = _run(cases, folder, chosen, say)
            chosen = run.plan
            rows = [row for record, readings in run.found for row in tidy(record, readings, chosen.metrics)]
            table.add(rows)
            table.write(folder)
            records = [_with_counters(record, rows) for record, _ in run.found]
            with (folder.root / "profile.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(record.to_line() for record in records)
            outcome.records += records
            outcome.counted += sum(1 for record in records if record.counters)
            if empty := run.without_value - noted:
                say(_left_out(empty, "ncu gave no value for"))
                noted |= empty
            say(f"[{number}/{len(work)}] {_label(cases[0])}, {time.monotonic() - began:.0f} s: {_summary(run.found)}")
            for record in records:
                if record.status not in NEUTRAL_STATUSES:
                    say(f"  {record.case.provider} {record.case.direction} {record.status}: {record.reason}")
            if run.fatal:
                raise ProfileError(f"{run.fatal} (details in {folder.root / 'profile.log'})")
    except OSError as error:
        raise ProfileError(
            f"{error}. Choose another folder with --out, or make room; what was written is kept"
        ) from None
    return outcome


def _label(case: Case) -> str:
    operator = load_operator(case.operator)
    return operator.label(operator.parse(case.params))


def _summary(found: Sequence[tuple[Record, Sequence[ncu.Reading]]]) -> str:
    words = []
    for record, readings in found:
        launches = len({reading.launch for reading in readings})
        what = f"{launches} launches" if launches else record.status
        words.append(f"{record.case.provider} {record.case.direction} {what}")
    return ", ".join(words)


def _with_counters(record: Record, rows: Sequence[Row]) -> Record:
    """The record with the row of its case in `counters_wide.csv`, and without its times, which are no benchmark's."""
    mine = [row for row in rows if case_columns(record.case).items() <= row.items()]
    skip = {*CASE_COLUMNS, "gpu", "when"}
    counters = {name: value for line in wide(mine) for name, value in line.items() if name not in skip and value != ""}
    return replace(record, measurement=None, counters=counters)


@dataclass(frozen=True)
class _Run:
    """What came of one run of `ncu`: each case with its readings, the plan for the next run, and why there is none."""

    found: tuple[tuple[Record, tuple[ncu.Reading, ...]], ...]
    plan: Plan
    fatal: str = ""

    @property
    def without_value(self) -> set[str]:
        """The raw names of the metrics that no launch has a value of."""
        readings = [reading for _, mine in self.found for reading in mine]
        return {r.raw for r in readings} - {r.raw for r in readings if r.value is not None}


def _run(cases: Sequence[Case], folder: ResultFolder, chosen: Plan, say: Callable[[str], None]) -> _Run:
    while True:
        with tempfile.TemporaryDirectory(prefix="jfabench-profile-") as name:
            here = Path(name)
            job = Job(tuple(cases), chosen.device, POLICY)
            asked = {"job": job.to_json(), "timeout": chosen.timeout, "profiler": os.getpid()}
            (here / "job.json").write_text(json.dumps(asked))
            log = here / "ncu.log"
            report = here / "report.ncu-rep" if chosen.keep_reports else None
            command = _command(cases, chosen, here, report)
            ended = _execute(command, here, chosen.timeout)
            said = "\n".join(_text(path) for path in (log, here / "output"))
            readings = ncu.read_csv(_imported(chosen, report) if report else _text(log))
            records = read_records(here / "records.jsonl").records if (here / "records.jsonl").exists() else ()
            _keep_log(folder, cases, here, said)
            if report and report.exists():  # an older one stays where there is no new one
                kept = _report_path(folder, cases[0])
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(report, kept)
        refused = ncu.refused_metrics(said)
        fewer = {raw: metric for raw, metric in chosen.metrics.items() if ncu.base_name(raw) not in refused}
        if readings or not fewer or len(fewer) == len(chosen.metrics):
            break
        say(_left_out(set(chosen.metrics) - set(fewer), "ncu refused"))
        chosen = replace(chosen, metrics=fewer)

    problem = None if readings else ncu.explain(ncu.messages(said))
    reason = problem.message if problem else ended or _no_word(said)
    of_case = {record.case: record for record in records}
    found = []
    for case in cases:
        mine = tuple(r for r in readings if r.is_in(_range_of(case)) or (len(cases) == 1 and not r.ranges))
        record = _completed(of_case.get(case) or Record(case, "timeout" if ended else "failed", _now(), reason))
        if record.status == "ok" and not mine:
            why = f"ncu saw no kernel in the range {range_name(_range_of(case))}" if readings else reason
            if readings and not any(r.ranges for r in readings):
                why = "this ncu does not print the NVTX ranges of a kernel: add --keep-reports to profile case by case"
            record = replace(record, status="timeout" if ended else "failed", reason=why)
        found.append((record, mine if record.status == "ok" else ()))
    return _Run(tuple(found), chosen, problem.message if problem and problem.fatal else "")


def _command(cases: Sequence[Case], chosen: Plan, here: Path, report: Path | None) -> list[str]:
    program = (sys.executable, "-m", "jfabench.profile_sweep", str(here))
    names = [_range_of(case) for case in cases]
    return ncu.command(chosen.executable, names, tuple(chosen.metrics), program, log=here / "ncu.log", report=report)


def first_command(sweep: Sweep, folder: ResultFolder, chosen: Plan) -> list[str]:
    """The command line of the first run of `ncu`, to show; its work folder is a temporary one."""
    cases = groups(sweep.cases, chosen.keep_reports)[0]
    return _command(cases, chosen, Path("WORK"), _report_path(folder, cases[0]) if chosen.keep_reports else None)


def _range_of(case: Case) -> str:
    """The name of the NVTX range around its timed calls (see `jfabench.visit`)."""
    return f"{case.provider}/{case.direction}"


def _no_word(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith('"')]
    return f"ncu gave no counters; its last word: {lines[-1][:300]}" if lines else "ncu gave no counters and no reason"


def _completed(record: Record) -> Record:
    """Gives the record of a worker that died, or never began, what is known of its case."""
    if record.work is not None:
        return record
    work, facts = case_facts(load_operator(record.case.operator), record.case)
    return replace(record, work=work, inputs=facts)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _report_path(folder: ResultFolder, case: Case) -> Path:
    columns = case_columns(case)
    stem = range_name("-".join([columns["provider"], columns["direction"], columns["shape"], columns["seed"]]))
    return folder.root / "ncu-reports" / f"{stem}.ncu-rep"


def _execute(command: Sequence[str], here: Path, timeout: float) -> str:
    """Runs `ncu`. Returns why it was ended; empty where it ended by itself, whatever its exit code."""
    values = {**os.environ, "PYTHONSAFEPATH": "1"} if sys.flags.safe_path else None
    heard = here / "heard"
    heard.touch()
    with (here / "output").open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=values, start_new_session=True
            )
        except OSError as error:
            raise ProfileError(f"{command[0]} does not start ({error.strerror}): reinstall Nsight Compute") from None
        try:
            while time.time() - heard.stat().st_mtime < timeout + GRACE:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    return ""
        finally:
            if process.poll() is None:
                _kill(process, here)
    return (
        f"nothing was heard of ncu for {timeout + GRACE:g} s and it was ended: ask for fewer counters "
        "(--metrics roofline), or give it more time (--timeout)"
    )


def _kill(process: subprocess.Popen[bytes], here: Path) -> None:
    """Ends `ncu` and the program that it runs, which may be in a session of its own; the worker dies with that one."""
    with suppress(OSError, ValueError):
        inside = int((here / "pid").read_text())
        if str(here).encode() in Path(f"/proc/{inside}/cmdline").read_bytes():
            os.kill(inside, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _imported(chosen: Plan, report: Path) -> str:
    """The counters in a report as CSV, empty where there is none."""
    if not report.exists():
        return ""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            ncu.import_command(chosen.executable, report), capture_output=True, text=True, errors="replace", timeout=300
        )
        return done.stdout
    return ""


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _keep_log(folder: ResultFolder, cases: Sequence[Case], here: Path, said: str) -> None:
    plain = "\n".join(line for line in said.splitlines() if line.strip() and not line.startswith('"'))
    text = f"--- {_label(cases[0])}: {', '.join(f'{c.provider} {c.direction}' for c in cases)}\n{plain}\n"
    with (folder.root / "profile.log").open("a", encoding="utf-8", errors="replace") as file:
        file.write(text + _text(here / "worker.log"))


# The tables -----------------------------------------------------------------------------------------------------------


def case_columns(case: Case) -> Row:
    """The columns that name a case, as `results.csv` has them."""
    return {
        "operator": case.operator,
        "provider": case.provider,
        "direction": case.direction,
        "seed": str(case.seed),
        "shape": hashlib.sha256(case.shape_key.encode()).hexdigest()[:10],
    }


def tidy(record: Record, readings: Sequence[ncu.Reading], metrics: Mapping[str, ncu.Metric]) -> list[Row]:
    """The rows of one case in `counters.csv`, with `imbalance` and `sm_active_pct` of each launch computed."""
    if not readings:
        return []
    measurement = record.measurement
    calls = measurement.warmup_iterations + sum(map(len, measurement.rounds)) if measurement else 1
    common = {
        **case_columns(record.case),
        "label": str(record.inputs.get("label", "")),
        "gpu": str(record.env.get("gpu") or ""),
        "calls": str(calls),
        "minimal_bytes": _number(record.work.bytes) if record.work else "",
        "when": record.when,
    }
    launches = {launch: index for index, launch in enumerate(sorted({r.launch for r in readings}))}
    rows = []
    for launch, group in itertools.groupby(sorted(readings, key=lambda r: r.launch), key=lambda r: r.launch):
        values: dict[str, float] = {}
        for reading in group:
            metric = metrics.get(reading.raw)
            if metric is None or reading.value is None:
                continue
            values[metric.name] = reading.value
            rows.append(
                {
                    **common,
                    "launch": str(launches[launch]),
                    "kernel": reading.kernel,
                    "metric": metric.name,
                    "raw_metric": reading.raw,
                    "value": _number(reading.value),
                    "unit": reading.unit or metric.unit,
                }
            )
        for name, top, bottom, factor, unit in _RATIOS:
            if values.get(bottom, 0) > 0 and top in values:
                formula = f"{'100 ' if factor != 1 else ''}{ncu.BY_NAME[top].raw} / {ncu.BY_NAME[bottom].raw}"
                value = _number(factor * values[top] / values[bottom])
                rows.append({**rows[-1], "metric": name, "raw_metric": formula, "value": value, "unit": unit})
    return rows


_RATIOS = (
    ("imbalance", "sm_cycles_active_max", "sm_cycles_active_avg", 1.0, ""),
    ("sm_active_pct", "sm_cycles_active_avg", "sm_cycles_elapsed_avg", 100.0, "%"),
)
"""Computed for each launch: name, numerator, denominator, factor, unit."""


def wide(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row a case from the rows of `counters.csv`: what one call does.

    Amounts (seconds, bytes, instructions) are summed over the launches of a call; rates and percentages are means
    weighted with the launches' durations; `registers` is the most that any kernel takes. `dram_over_minimal` is
    `dram_bytes` over the bytes moved if each is moved once; `main_kernel` is the one that takes the most time.
    """
    lines = []
    for _, group in itertools.groupby(sorted(rows, key=_case_of), key=_case_of):
        mine = list(group)
        calls = max(float(mine[0]["calls"]), 1.0)
        seconds = {row["launch"]: float(row["value"]) for row in mine if row["metric"] == "duration_s"}
        by_metric: dict[str, list[Row]] = {}
        for row in mine:
            by_metric.setdefault(row["metric"], []).append(row)
        line: dict[str, Any] = {name: mine[-1][name] for name in (*CASE_COLUMNS, "gpu", "when")}
        line["launches_per_call"] = len({row["launch"] for row in mine}) / calls
        line |= _main_kernel(by_metric.get("duration_s", []))
        for name, values in sorted(by_metric.items(), key=lambda item: _ORDER.get(item[0], len(_ORDER))):
            line[name] = _combined(name, values, seconds)
        if "local_load_bytes" in line and "local_store_bytes" in line:
            line["local_bytes"] = line["local_load_bytes"] + line["local_store_bytes"]
        if minimal := float(mine[0]["minimal_bytes"] or 0):
            line["minimal_bytes"] = minimal
            if "dram_bytes" in line:
                line["dram_over_minimal"] = line["dram_bytes"] / minimal
        lines.append(line)
    return lines


_ORDER = {name: place for place, name in enumerate([*ncu.BY_NAME, *(ratio[0] for ratio in _RATIOS)])}


def _case_of(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in CASE_COLUMNS[:5])


def _combined(name: str, rows: Sequence[Row], seconds: Mapping[str, float]) -> float:
    combine = ncu.BY_NAME[name].combine if name in ncu.BY_NAME else "mean"
    values = [float(row["value"]) for row in rows]
    if combine == "max":
        return max(values)
    if combine == "sum":
        return sum(values) / max(float(rows[0]["calls"]), 1.0)
    weights = [seconds.get(row["launch"], 0.0) for row in rows]
    if not all(weights):
        weights = [1.0] * len(values)
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def _main_kernel(durations: Sequence[Row]) -> dict[str, Any]:
    by_kernel: dict[str, float] = {}
    for row in durations:
        by_kernel[row["kernel"]] = by_kernel.get(row["kernel"], 0.0) + float(row["value"])
    total = sum(by_kernel.values())
    if not total:
        return {}
    kernel = max(by_kernel, key=lambda name: by_kernel[name])
    return {"main_kernel": kernel, "main_kernel_share": by_kernel[kernel] / total}


@dataclass
class Table:
    """The rows of `counters.csv`: those that the folder had, and those that replace or follow them."""

    rows: list[Row]

    @classmethod
    def read(cls, folder: ResultFolder) -> Table:
        """Raises `ProfileError` for a file that is not ours: it is not overwritten."""
        path = folder.root / "counters.csv"
        if not path.exists():
            return cls([])
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ProfileError(f"{path} was not written by this jfabench; move it away, or choose another --out")
            return cls(list(reader))

    def add(self, rows: Sequence[Row]) -> None:
        """A metric of a case replaces what was known of the same, over all its launches; other metrics stay."""
        new = {(_case_of(row), row["metric"]) for row in rows}
        self.rows = [row for row in self.rows if (_case_of(row), row["metric"]) not in new] + list(rows)

    def write(self, folder: ResultFolder) -> None:
        write_whole(folder.root / "counters.csv", _csv(COLUMNS, self.rows))
        lines = wide(self.rows)
        results = _results(folder)
        for line in lines:
            known = results.get(tuple(str(line[name]) for name in CASE_COLUMNS[:5]), {})
            if known.get("gpu") in (None, "", line["gpu"]):  # times of another GPU do not belong beside its counters
                line |= {name: known[name] for name in _FROM_RESULTS if name in known}
        columns = dict.fromkeys(name for line in lines for name in line)
        write_whole(folder.root / "counters_wide.csv", _csv(tuple(columns), lines))


def _results(folder: ResultFolder) -> dict[tuple[str, ...], Row]:
    """The rows of the folder's `results.csv` by case; none where there is no such file."""
    if not folder.table.exists():
        return {}
    with folder.table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if {*CASE_COLUMNS} <= {*row}]
    return {_case_of(row): row for row in rows}


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _number(value) if isinstance(value, float) else value for name, value in row.items()})
    return text.getvalue().encode()


def _number(value: float) -> str:
    return f"{value:.12g}"


if __name__ == "__main__":
    visit(Path(sys.argv[1]))
