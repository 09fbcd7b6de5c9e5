"""Injected faults: whatever a provider or the machine does, a sweep records it, goes on, and loses nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jfabench.records import Record, read_records

PLUGINS = Path(__file__).parent / "plugins"

CONFIG = """\
operator: jagged_attention
baseline: reference
providers: [reference]
directions: [fwd]
params: {batch: 3, heads: 1, head_dim: 64, dtype: bf16, broadcast_q: true, q_len: 8}
axes: {lengths: [{kind: list, values: [5, 0, 9]}]}
measure: {rounds: 2, min_iterations: 4, max_seconds: 0.05, warmup_seconds: 0.01}
cpu: {}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


def command(config: Path, out: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "jfabench", "sweep", "--device", "cpu"),
        *("--config", str(config), "--out", str(out), *options),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")])}


def sweep(config: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(config, out, *options), env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def only(*providers: str) -> list[str]:
    return [word for provider in providers for word in ("--only", provider)]


def by_provider(out: Path) -> dict[str, Record]:
    return {record.case.provider: record for record in read_records(out / "records.jsonl").records}


def test_every_kind_of_fault_is_recorded_and_the_rest_is_measured(config: Path, tmp_path: Path) -> None:
    expected = {
        "raises": ("failed", "planted failure"),
        "import_raises": ("unavailable", "its library cannot be imported (ImportError: libfaulty.so: undefined symbol"),
        "no_call": ("failed", "must return a jfabench.operator.Call"),
        "leaves_no_grad": ("wrong", "torch's grad mode"),
        "raises_when_asked": ("failed", "planted failure"),
        "memo": ("wrong", "NaN"),
        "accumulates": ("wrong", "out: "),
        "mutates": ("wrong", "it writes to its inputs (k)"),
        "raises_late": ("failed", "planted failure"),
        "wrong": ("wrong", "out: "),
        "nan": ("wrong", "NaN"),
        "unwritten": ("wrong", "out: "),
        "nothing": ("wrong", "no tensor"),
        "exits": ("failed", "exited with code 7"),
        "exits_late": ("failed", "exited with code 7"),
        "segfaults": ("failed", "SIGSEGV"),
        "killed": ("oom", "SIGKILL"),
        "allocates": ("oom", "memory"),
    }
    out = tmp_path / "out"
    done = sweep(config, out, *only("reference", *expected, "sdpa_padded"))
    records = by_provider(out)
    assert done.returncode == 1, done.stderr
    assert set(records) == {"reference", "sdpa_padded", *expected}
    for provider, (status, reason) in expected.items():
        record = records[provider]
        assert (record.status, reason in record.reason) == (status, True), (provider, record.status, record.reason)
        assert record.measurement is None, provider
        assert record.work is not None
        assert record.work.flops == 4 * 64 * 1 * 8 * 14
    assert "last words of the provider" in records["exits"].reason
    for provider in ("reference", "sdpa_padded"):
        assert records[provider].status == "ok", records[provider].reason
        assert records[provider].measurement is not None
    report = (out / "report.html").read_text()
    assert "planted failure" in report
    assert (out / "results.csv").exists()


def test_an_import_that_goes_wrong_costs_the_others_nothing(config: Path, tmp_path: Path) -> None:
    """One raises, one ends the process, one changes a setting of torch: the shape is measured all the same."""
    out = tmp_path / "out"
    done = sweep(config, out, *only("import_exits", "import_raises", "import_sets", "reference"))
    records = by_provider(out)
    assert done.returncode == 0, done.stderr
    # The second does not end its process again, since its case does not import anything.
    assert {name: record.status for name, record in records.items()} == {
        "import_raises": "unavailable",
        "import_exits": "ok",
        "import_sets": "ok",
        "reference": "ok",
    }
    log = (out / "worker.log").read_text()
    assert "library of import_exits: it is not imported ahead again" in log
    assert "import_sets changed torch's grad mode; changed back" in log


def test_shapes_share_a_process_only_on_request(config: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG.replace("axes: {", "axes: {q_len: [1, 2], "))
    for options, processes in (((), 2), (("--workers", "shared"), 1)):
        out = tmp_path / f"out-{'-'.join(options)}"
        done = sweep(config, out, *only("reference", "sdpa_padded"), *options)
        assert done.returncode == 0, done.stderr
        records = read_records(out / "records.jsonl").records
        assert len({(record.case.shape_key, record.worker) for record in records}) == 2, "one process for a shape"
        assert len({record.worker for record in records}) == processes
        told = done.stdout.replace("\n", " ")
        assert "overhead of a case" in told
        assert "start-up" in told


def test_a_promise_of_equal_bits_is_held_to(config: Path, tmp_path: Path) -> None:
    for deterministic, status in (("true", "wrong"), ("false", "ok")):
        out = tmp_path / deterministic
        sweep(config, out, *only("wobbles"), "--set", f"deterministic={deterministic}")
        record = by_provider(out)["wobbles"]
        assert record.status == status, record.reason
        assert ("not the same bits" in record.reason) == (status == "wrong")


@pytest.mark.parametrize("provider", ["sleeps", "sleeps_late"])
def test_a_hang_is_ended_by_the_timeout(config: Path, tmp_path: Path, provider: str) -> None:
    out = tmp_path / "out"
    started = time.monotonic()
    done = sweep(config, out, *only(provider, "reference"), "--timeout", "12")
    records = by_provider(out)
    assert done.returncode == 1
    assert records[provider].status == "timeout"
    assert "12 s" in records[provider].reason
    assert records["reference"].status == "ok", records["reference"].reason
    assert time.monotonic() - started < 120


def test_a_killed_sweep_resumes_and_repeats_nothing(config: Path, tmp_path: Path) -> None:
    config.write_text(
        CONFIG.replace("axes: {", "axes: {q_len: [1, 2, 3, 4], ").replace("providers: [reference]", "providers: [slow]")
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(config, out), env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    records_file = out / "records.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (records_file.exists() and records_file.read_text().count("\n") >= 1):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = records_file.read_bytes()
    finished = read_records(records_file).records
    assert 1 <= len(finished) < 4
    with records_file.open("ab") as file:
        file.write(b'{"case": {"operator": "jagged_at')  # torn by the kill

    refused = sweep(config, out)
    assert refused.returncode == 3
    assert "--resume" in refused.stderr

    done = sweep(config, out, "--resume")
    assert done.returncode == 0, done.stderr
    after = records_file.read_bytes()
    assert after.startswith(before)
    lines = [json.loads(line) for line in after.splitlines()]
    assert sorted(line["case"]["params"]["q_len"] for line in lines) == [1, 2, 3, 4]


def test_failed_cases_are_repeated_on_request_only(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep(config, out, *only("reference", "raises"))
    first = (out / "records.jsonl").read_bytes()
    sweep(config, out, *only("reference", "raises"), "--resume")
    assert (out / "records.jsonl").read_bytes() == first
    sweep(config, out, *only("reference", "raises"), "--resume", "--retry-failed")
    added = (out / "records.jsonl").read_bytes()[len(first) :].splitlines()
    assert [json.loads(line)["case"]["provider"] for line in added] == ["raises"]


def test_resuming_with_another_policy_is_refused(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep(config, out)
    done = sweep(config, out, "--resume", "--set", "measure.target=0.5")
    assert done.returncode == 3
    assert "policy" in done.stderr


def test_a_full_disk_stops_the_sweep_with_one_sentence(config: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the second record fits only in part."""
    out = tmp_path / "out"
    sweep(config, out)
    whole = (out / "records.jsonl").read_bytes()
    (out / "records.jsonl").unlink()
    done = subprocess.run(
        command(config, out, "--direction", "fwd", "--direction", "bwd"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 3 // 2, len(whole) * 3 // 2)),
    )
    assert done.returncode == 3
    assert "File too large" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    kept = read_records(out / "records.jsonl")
    assert [record.case.direction for record in kept.records] == ["fwd"]
    assert kept.bad_lines == ()

    resumed = sweep(config, out, "--direction", "fwd", "--direction", "bwd", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert len(read_records(out / "records.jsonl").records) == 2


def test_an_output_that_cannot_be_written_is_told_before_anything_runs(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = sweep(config, tmp_path / "file" / "out")
    assert done.returncode == 3
    assert "--out" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_sweeps_cannot_write_to_one_folder(config: Path, tmp_path: Path) -> None:
    from jfabench.folder import ResultFolder
    from jfabench.run import open_log

    folder = ResultFolder(tmp_path / "out")
    with open_log(folder):
        done = sweep(config, folder.root)
    assert done.returncode == 3
    assert "another sweep" in done.stderr
