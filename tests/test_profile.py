"""`jfabench profile` end to end on the CPU: a script stands for `ncu`, the worker and the files are real."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jfabench import cli, measure, ncu, profile_sweep
from jfabench.folder import ResultFolder
from jfabench.records import Case, Measurement, Record, Work, read_records
from jfabench.reports import derive
from jfabench.sweep import load_sweep
from jfabench.visit import Job

DATA = Path(__file__).parent / "data"
SMALL = ["--config", "jagged.yaml", "--device", "cpu", "--set", "lengths.max_len=32", "--set", "lengths.fill=0.5"]

FAKE = """\
#!{python}
import json, os, subprocess, sys, time
from pathlib import Path

words, mode, data = sys.argv[1:], os.environ["FAKE_NCU"], Path({data!r})
with open(os.environ["FAKE_NCU_CALLS"], "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if "--query-metrics" in words:
    for name in (data / "ncu_metrics_gh100.txt").read_text().split():
        if name != "lts__t_bytes" or mode != "lacks":
            print(name, "  Counter  byte  # what it counts")
    sys.exit()
if "--import" in words:
    print(Path(words[words.index("--import") + 1]).read_text(), end="")
    sys.exit()
log = Path(words[words.index("--log-file") + 1])
program = words[words.index("--log-file") + 2:]
if mode == "permission":
    log.write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters\\n")
    sys.exit(1)
if mode == "mismatch":
    print("==ERROR== Cuda driver is not compatible with Nsight Compute.")
    sys.exit(1)
if mode == "crash":
    print("ncu: error while loading shared libraries: libX.so")
    sys.exit(127)
if mode == "hang":
    time.sleep(60)
if mode == "second hangs" and len(open(os.environ["FAKE_NCU_CALLS"]).readlines()) > 2:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
    sys.exit()
if mode == "refuses" and "lts__t_bytes.sum" in words[words.index("--metrics") + 1]:
    log.write_text("==ERROR== Failed to find metric regex:^lts__t_bytes(.(sum))?$\\n")
    sys.exit(1)
code = subprocess.call(program)
if mode == "nothing":
    log.write_text("==WARNING== No kernels were profiled.\\n")
    sys.exit(code)
text = (data / "ncu_nvtx.csv").read_text().replace("triton_jfa", "sdpa_padded")
if "--export" in words:
    Path(words[words.index("--export") + 1]).write_text((data / "ncu_many_metrics.csv").read_text())
    text = "==PROF== Report\\n"
log.write_text(text)
sys.exit(code)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in for `ncu` first on PATH; what it is called with is in the attribute `calls` of the result."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "ncu"
    script.write_text(FAKE.format(python=sys.executable, data=str(DATA)))
    script.chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_NCU_CALLS", str(calls))

    class Fake:
        def mode(self, name: str) -> None:
            monkeypatch.setenv("FAKE_NCU", name)

        @property
        def runs(self) -> list[list[str]]:
            lines = calls.read_text().splitlines() if calls.exists() else []
            return [words for words in map(json.loads, lines) if "--metrics" in words]

    stand_in = Fake()
    stand_in.mode("ok")
    return stand_in


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def profile(out: Path, *words: str) -> int:
    return cli.main(["profile", *SMALL, "--only", "sdpa_padded", "--out", str(out), *words])


# End to end -----------------------------------------------------------------------------------------------------------


def test_counters_of_one_shape_in_both_directions(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert profile(out, "--metrics", "roofline") == cli.OK
    (run,) = fake.runs
    assert "jfabench@sdpa_padded.fwd/" in run
    assert "jfabench@sdpa_padded.bwd/" in run

    rows = table(out / "counters.csv")
    assert tuple(rows[0]) == profile_sweep.COLUMNS
    assert len(rows) == 24
    assert {row["direction"] for row in rows} == {"fwd", "bwd"}
    assert {row["metric"] for row in rows} == {"duration_s"}
    assert {row["unit"] for row in rows} == {"s"}
    assert {row["calls"] for row in rows} == {"1"}
    forward = [row for row in rows if row["direction"] == "fwd"]
    assert [row["launch"] for row in forward] == [str(i) for i in range(8)]
    assert float(forward[0]["value"]) == pytest.approx(4.8e-6)

    lines = {row["direction"]: row for row in table(out / "counters_wide.csv")}
    assert set(lines) == {"fwd", "bwd"}
    total = sum(float(row["value"]) for row in forward)
    assert float(lines["fwd"]["duration_s"]) == pytest.approx(total)
    assert lines["fwd"]["main_kernel"] == "forward_kernel"
    assert lines["bwd"]["main_kernel"] == "dkdv_kernel"

    records = read_records(out / "profile.jsonl").records
    assert {record.status for record in records} == {"ok"}
    assert all(record.measurement is None and record.counters["duration_s"] for record in records)
    assert "8 launches" in capsys.readouterr().out
    assert "Connected to process" in (out / "profile.log").read_text()


def test_a_report_for_each_case_is_kept_and_read(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    case = load_sweep("jagged.yaml", "cpu", settings=SMALL[5::2], only=["sdpa_padded"]).cases[0]
    columns = profile_sweep.case_columns(case)
    known = {**columns, "label": "", "gpu": "", "status": "ok", "median_s": "0.25", "tflops": "7"}
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, known)
        writer.writeheader()
        writer.writerows([{**known, "provider": "another"}, known])

    assert profile(out, "--direction", "fwd", "--keep-reports") == cli.OK
    (report,) = (out / "ncu-reports").iterdir()
    assert report.name == f"sdpa_padded-fwd-{columns['shape']}-0.ncu-rep"
    rows = table(out / "counters.csv")
    assert len({row["launch"] for row in rows}) == 3
    assert {"duration_s", "dram_read_bytes", "l2_hit_pct", "stall_gmma", "tensor_pipe_elapsed_pct"} <= {
        row["metric"] for row in rows
    }
    assert all(row["raw_metric"] != "smsp__inst_executed.sum" for row in rows)  # not one of the table
    (line,) = table(out / "counters_wide.csv")
    assert 60 < float(line["l2_hit_pct"]) < 80
    assert (line["median_s"], line["tflops"]) == ("0.25", "7")
    assert float(line["minimal_bytes"]) > 0

    before = (out / "counters.csv").read_bytes()
    fake.mode("permission")  # the old report is neither lost nor taken for a new one
    assert profile(out, "--direction", "fwd", "--keep-reports") == cli.MACHINE
    assert report.exists()
    assert (out / "counters.csv").read_bytes() == before


def test_another_choice_adds_to_the_same_files(fake: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert profile(out, "--direction", "fwd") == cli.OK
    fake.mode("lacks")
    assert profile(out, "--direction", "bwd", "--metrics", "memory") == cli.OK
    assert len(table(out / "counters.csv")) == 24
    assert len(table(out / "counters_wide.csv")) == 2
    assert "lts__t_bytes.sum" not in " ".join(fake.runs[-1])
    assert "lts__t_bytes.sum" in " ".join(fake.runs[0])


def test_a_metric_that_ncu_refuses_is_left_out(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.mode("refuses")
    assert profile(tmp_path / "out", "--direction", "fwd", "--metrics", "memory") == cli.OK
    assert "left out, because ncu refused them: lts__t_bytes.sum" in capsys.readouterr().out
    assert len(fake.runs) == 2


# Where it fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "code", "part", "in_stdout"),
    [
        ("permission", cli.MACHINE, "--cap-add=SYS_ADMIN", False),
        ("mismatch", cli.MACHINE, "do not fit together", False),
        ("crash", cli.FAILED, "libX.so", True),
        ("nothing", cli.FAILED, "no kernel", True),
        ("hang", cli.FAILED, "--metrics roofline", True),
    ],
)
def test_one_sentence_says_what_to_do_and_what_was_written_stays(
    fake: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    code: int,
    part: str,
    in_stdout: bool,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    row = {**dict.fromkeys(profile_sweep.COLUMNS, ""), "provider": "earlier", "metric": "duration_s", "value": "1"}
    row["calls"] = "1"
    (out / "counters.csv").write_bytes(profile_sweep._csv(profile_sweep.COLUMNS, [row]))
    monkeypatch.setattr(profile_sweep, "GRACE", 0.1)
    fake.mode(mode)
    words = ["--timeout", "0.5"] if mode == "hang" else []
    assert profile(out, *words) == code
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert part in (printed.out if in_stdout else printed.err)
    assert [row["provider"] for row in table(out / "counters.csv")] == ["earlier"]
    records = read_records(out / "profile.jsonl").records
    assert [record.case.direction for record in records] == ["fwd", "bwd"]
    assert {record.status for record in records} == {"timeout" if mode == "hang" else "failed"}
    assert all(part in record.reason for record in records)


def test_a_killed_run_keeps_the_shapes_that_it_had_counted(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.mode("second hangs")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is killed tidies nothing up
    out = tmp_path / "out"
    words = [*SMALL, "--set", "lengths.fill=[0.5,0.9]", "--only", "sdpa_padded", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "jfabench", "profile", *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(fake.runs) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    lines = table(out / "counters_wide.csv")
    assert [(line["direction"], line["label"].split()[1]) for line in lines] == [
        ("bwd", "fill=0.5"),
        ("fwd", "fill=0.5"),
    ]
    assert len(table(out / "counters.csv")) == 24
    assert len(read_records(out / "profile.jsonl").records) == 2


def test_a_case_that_kills_its_worker_costs_itself_alone(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = str(Path(__file__).parent / "plugins")
    monkeypatch.syspath_prepend(plugins)
    monkeypatch.setenv("PYTHONPATH", plugins)
    words = ["profile", *SMALL, "--only", "exits", "--only", "sdpa_padded", "--direction", "fwd"]
    assert cli.main([*words, "--out", str(tmp_path)]) == cli.FAILED
    printed = capsys.readouterr()
    assert "exits fwd failed: the process exited with code 7" in printed.out
    assert "1 of 2 cases could not be profiled" in printed.err
    assert {row["provider"] for row in table(tmp_path / "counters.csv")} == {"sdpa_padded"}
    records = {record.case.provider: record for record in read_records(tmp_path / "profile.jsonl").records}
    assert {name: record.status for name, record in records.items()} == {"exits": "failed", "sdpa_padded": "ok"}
    assert records["exits"].work is not None


def test_no_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jfabench.doctor.find_ncu", lambda: None)
    assert profile(tmp_path / "out") == cli.MACHINE
    assert "install Nsight Compute" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert profile(tmp_path / "out", "--dry-run") == cli.OK
    assert "--nvtx-include" in capsys.readouterr().out


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["profile", "--help"])
    text = capsys.readouterr().out
    assert "examples:" in text
    for choice in ncu.CHOICES:
        assert choice in text


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jfabench.devices.gpu_names", list)
    assert cli.main(["profile", "--config", "jagged.yaml"]) == cli.MACHINE
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_a_file_that_is_not_ours_is_left_alone(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "counters.csv").write_text("precious\n")
    assert profile(tmp_path) == cli.MACHINE
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "counters.csv").read_text() == "precious\n"
    assert fake.runs == []


def test_a_provider_that_is_missing_here_is_no_failure_but_nothing_was_profiled(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", *SMALL, "--only", "fa4", "--direction", "fwd", "--out", str(tmp_path)]
    assert cli.main(words) == cli.FAILED
    assert "nothing was profiled" in capsys.readouterr().err


def test_what_ncu_runs_ends_with_it(tmp_path: Path) -> None:
    """Also where `ncu` has put it into a session of its own."""
    script = textwrap.dedent(
        """
        import subprocess, sys, time
        inside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]],
                                  start_new_session=True)
        open(sys.argv[1] + "/pid", "w").write(str(inside.pid))
        time.sleep(60)
        """
    )
    outer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], start_new_session=True)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    profile_sweep._kill(outer, tmp_path)
    inside = Path("/proc") / (tmp_path / "pid").read_text()
    while inside.exists() and "Z" not in (inside / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert outer.poll() is not None


def test_what_ncu_runs_ends_with_the_process_that_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was killed, and could end nothing itself: here a call that never returns."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "plugins"))
    case = replace(
        load_sweep("jagged.yaml", "cpu", settings=SMALL[5::2], only=["sdpa_padded"]).cases[0], provider="sleeps"
    )
    profiler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    job = Job((case,), "cpu", profile_sweep.POLICY).to_json()
    (tmp_path / "job.json").write_text(json.dumps({"job": job, "timeout": 60.0, "profiler": profiler.pid}))
    program = subprocess.Popen([sys.executable, "-m", "jfabench.profile_sweep", str(tmp_path)])
    deadline = time.monotonic() + 60
    while not children_of(program.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (worker,) = children_of(program.pid)
    profiler.kill()
    profiler.wait()
    assert program.wait(20) == 1
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children_of(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_only_the_call_that_is_counted_is_made_in_a_range() -> None:
    calls: list[str] = []
    outcomes = measure.measure_interleaved(
        {name: partial(calls.append, name) for name in "ab"}, measure.make_sampler("wall", "cpu"), profile_sweep.POLICY
    )
    assert calls == ["a", "b"]
    assert {outcome.warmup_iterations for outcome in outcomes.values() if isinstance(outcome, Measurement)} == {0}


# The tables -----------------------------------------------------------------------------------------------------------


def reading(launch: int, raw: str, value: float | None, kernel: str = "k") -> ncu.Reading:
    return ncu.Reading(launch, kernel, raw, value, "")


def record_of(case: Case) -> Record:
    measurement = Measurement("wall", ((0.1,),), "iterations", warmup_iterations=1)
    return Record(case, "ok", "now", work=Work(1.0, 400.0), measurement=measurement, inputs={"label": "N=1"})


def test_one_row_a_case_says_what_one_call_does() -> None:
    metrics, _ = ncu.select("all", "sm_90")
    case = Case("op", "p", "fwd", {"n": 1})
    raw = {name: metric.raw_on("sm_90") or "" for name, metric in ncu.BY_NAME.items()}
    readings = []
    for launch, (kernel, seconds, percent, registers) in enumerate([("a", 3.0, 80, 100), ("b", 1.0, 40, 200)] * 2):
        readings += [
            reading(launch + 5, raw["duration_s"], seconds, kernel),
            reading(launch + 5, raw["tensor_pipe_pct"], percent, kernel),
            reading(launch + 5, raw["registers"], registers, kernel),
            reading(launch + 5, raw["dram_bytes"], 300.0, kernel),
            reading(launch + 5, raw["local_load_bytes"], 8.0, kernel),
            reading(launch + 5, raw["local_store_bytes"], 4.0, kernel),
            reading(launch + 5, raw["sm_cycles_active_max"], 150.0, kernel),
            reading(launch + 5, raw["sm_cycles_active_avg"], 100.0, kernel),
            reading(launch + 5, raw["sm_cycles_elapsed_avg"], 200.0, kernel),
            reading(launch + 5, raw["l2_hit_pct"], None, kernel),
        ]
    rows = profile_sweep.tidy(record_of(case), readings, metrics)
    assert {row["calls"] for row in rows} == {"2"}
    assert not [row for row in rows if row["metric"] == "l2_hit_pct"]
    (line,) = profile_sweep.wide(rows)
    assert line["duration_s"] == 4.0
    assert line["tensor_pipe_pct"] == 70.0
    assert line["registers"] == 200
    assert line["dram_bytes"] == 600.0
    assert line["dram_over_minimal"] == 1.5
    assert line["local_bytes"] == 24.0
    assert line["imbalance"] == 1.5
    assert line["sm_active_pct"] == 50.0
    assert line["launches_per_call"] == 2
    assert (line["main_kernel"], line["main_kernel_share"]) == ("a", 0.75)
    assert line["label"] == "N=1"


def test_a_metric_measured_again_replaces_the_old_and_others_stay(tmp_path: Path) -> None:
    metrics, _ = ncu.select("all", "sm_90")
    case = Case("op", "p", "fwd", {"n": 1})
    first = [reading(0, "gpu__time_duration.sum", 1.0), reading(1, "gpu__time_duration.sum", 1.0)]
    other = [reading(0, "dram__bytes.sum", 7.0)]
    found = profile_sweep.Table(profile_sweep.tidy(record_of(case), [*first, *other], metrics))
    again = [reading(0, "gpu__time_duration.sum", 2.0)]
    found.add(profile_sweep.tidy(record_of(case), again, metrics))
    found.write(ResultFolder(tmp_path))
    kept = {(row["metric"], row["value"]) for row in profile_sweep.Table.read(ResultFolder(tmp_path)).rows}
    assert kept == {("duration_s", "2"), ("dram_bytes", "7")}


def test_cases_are_named_as_in_results() -> None:
    case = load_sweep("jagged.yaml").cases[0]
    (row,) = derive.table([Record(case, "ok", "")])[list(profile_sweep.CASE_COLUMNS[:5])].astype(str).to_dict("records")
    assert row == profile_sweep.case_columns(case)


def test_times_of_another_gpu_are_not_put_beside_the_counters(tmp_path: Path) -> None:
    case = Case("op", "p", "fwd", {"n": 1})
    known = {**profile_sweep.case_columns(case), "label": "", "gpu": "NVIDIA H100", "median_s": "0.25"}
    (tmp_path / "results.csv").write_bytes(profile_sweep._csv(tuple(known), [known]))
    metrics, _ = ncu.select("all", "sm_90")
    for gpu, expected in (("NVIDIA H100", "0.25"), ("NVIDIA H200", None)):
        record = replace(record_of(case), env={"gpu": gpu})
        found = profile_sweep.Table(profile_sweep.tidy(record, [reading(0, "dram__bytes.sum", 7.0)], metrics))
        found.write(ResultFolder(tmp_path))
        (line,) = table(tmp_path / "counters_wide.csv")
        assert line.get("median_s") == expected


def test_shapes_share_a_run_unless_each_case_keeps_a_report() -> None:
    cases = load_sweep("jagged.yaml", "cpu", only=["sdpa_padded"]).cases
    assert sorted(map(len, profile_sweep.groups(cases, each_alone=False))) == [2] * 6
    assert len(profile_sweep.groups(cases, each_alone=True)) == 12
