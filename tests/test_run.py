from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfabench.folder import ResultFolder
from jfabench.policy import MeasurePolicy
from jfabench.records import Case, Record, read_records
from jfabench.run import FolderError, SweepStoppedError, Workers, open_log, run_sweep
from jfabench.sweep import Sweep, load_sweep
from jfabench.visit import Job
from jfabench.worker import EXIT_START_AFRESH


class Heard:
    def __init__(self) -> None:
        self.phases: list[tuple[str | None, str]] = []
        self.records: list[Record] = []

    def phase(self, case: Case | None, phase: str) -> None:
        self.phases.append((case.provider if case else None, phase))

    def record(self, record: Record) -> None:
        self.records.append(record)


def small_sweep() -> Sweep:
    return load_sweep("jagged.yaml", "cpu", settings=["lengths.max_len=64", "lengths.fill=0.5"])


def ok(case: Case) -> Record:
    return Record(case, "ok", "2026-01-01T00:00:00+00:00", env={"gpu": None})


# The log -------------------------------------------------------------------------------------------------------------


@given(torn=st.binary(max_size=200).filter(lambda tail: b"\n" not in tail), whole=st.integers(0, 3))
def test_a_torn_tail_is_cut_and_whole_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, torn: bytes, whole: int
) -> None:
    folder = ResultFolder(tmp_path_factory.mktemp("log"))
    cases = small_sweep().cases
    lines = "".join(ok(case).to_line() for case in cases[:whole]).encode()
    folder.records.write_bytes(lines + torn)
    with open_log(folder) as log:
        log.mend()
        log.append(ok(cases[5]))
    assert folder.records.read_bytes() == lines + ok(cases[5]).to_line().encode()


def test_a_torn_tail_longer_than_one_read_is_cut(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    line = ok(small_sweep().cases[0]).to_line().encode()
    folder.records.write_bytes(line + b"x" * 300_000)
    with open_log(folder) as log:
        log.mend()
    assert folder.records.read_bytes() == line


def test_a_whole_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    line = ok(small_sweep().cases[0]).to_line().encode()
    folder.records.write_bytes(line + line[:-1])
    with open_log(folder) as log:
        log.mend()
    assert folder.records.read_bytes() == line + line


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "records.jsonl").write_text("precious, without a newline")
    with pytest.raises(FolderError, match="exists already"):
        start(tmp_path, lambda job: map(ok, job.cases))
    assert (tmp_path / "out" / "records.jsonl").read_text() == "precious, without a newline"


# A worker, replaced by a script --------------------------------------------------------------------------------------


def scripted(tmp_path: Path, body: str) -> tuple[str, ...]:
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, signal, sys, time
            stream = os.fdopen(int(sys.argv[1]), "w")
            def send(**event):
                stream.write(json.dumps(event) + "\\n"); stream.flush()
            def key(i):
                return json.dumps(cases[i], sort_keys=True, separators=(",", ":"))
            def record(i, status="ok"):
                send(event="record", record={"case": cases[i], "status": status, "when": str(os.getpid()), "schema": 1})
            def done():
                send(event="done", again=True)
            for turn, line in enumerate(sys.stdin):
                cases = json.loads(line)["cases"]
            """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return (sys.executable, str(script))


def visit(tmp_path: Path, body: str, timeout: float = 20.0) -> tuple[list[Record], Heard]:
    heard = Heard()
    job = Job(small_sweep().cases[:3], "cpu", MeasurePolicy())  # type: ignore[call-arg]
    workers = Workers("cpu", tmp_path / "worker.log", timeout, scripted(tmp_path, body))
    return list(workers.run(job, heard)), heard


def outcomes(records: list[Record]) -> list[tuple[str, str]]:
    return [(record.case.provider, record.status) for record in records]


def test_records_and_phases_of_a_good_worker(tmp_path: Path) -> None:
    records, heard = visit(
        tmp_path, "send(event='phase', case=key(1), phase='check')\nfor i in range(3): record(i)\nsend(event='done')"
    )
    assert outcomes(records) == [("reference", "ok"), ("sdpa_padded", "ok"), ("triton_jfa", "ok")]
    assert heard.phases == [("sdpa_padded", "check")]


def test_the_case_at_hand_is_blamed_for_a_crash(tmp_path: Path) -> None:
    records, _ = visit(
        tmp_path, "record(0)\nsend(event='phase', case=key(2), phase='measure')\nos.kill(os.getpid(), signal.SIGABRT)"
    )
    assert outcomes(records) == [("reference", "ok"), ("triton_jfa", "failed")]
    assert "SIGABRT" in records[1].reason
    assert "'measure'" in records[1].reason


def test_a_crash_before_any_case_is_blamed_on_all(tmp_path: Path) -> None:
    records, _ = visit(tmp_path, "send(event='phase', case=None, phase='inputs')\nsys.exit('no driver')")
    assert outcomes(records) == [(name, "failed") for name in ("reference", "sdpa_padded", "triton_jfa")]
    assert all("code 1" in record.reason and "no driver" in record.reason for record in records)


def test_a_lost_device_blames_nobody_after_its_record(tmp_path: Path) -> None:
    records, _ = visit(
        tmp_path,
        f"send(event='phase', case=None, phase='finish')\nrecord(0)\nos._exit({EXIT_START_AFRESH})",
    )
    assert outcomes(records) == [("reference", "ok")]


def test_a_child_that_holds_the_pipe_open_does_not_hide_the_crash(tmp_path: Path) -> None:
    records, _ = visit(
        tmp_path,
        "send(event='phase', case=key(0), phase='check')\nif os.fork() == 0: time.sleep(60)\nos._exit(9)",
        timeout=30,
    )
    assert outcomes(records) == [("reference", "failed")]
    assert "code 9" in records[0].reason


def test_noise_on_the_pipe_and_repeated_records_are_ignored(tmp_path: Path) -> None:
    noise = "stream.write('garbage\\n[1]\\n{}\\n'); record(0); record(0); record(1); record(2); send(event='done')"
    records, _ = visit(tmp_path, noise)
    assert outcomes(records) == [("reference", "ok"), ("sdpa_padded", "ok"), ("triton_jfa", "ok")]


def test_a_timeout_counts_from_the_last_event(tmp_path: Path) -> None:
    steps = "for _ in range(4):\n    send(event='phase', case=key(0), phase='measure'); time.sleep(0.5)\n"
    records, _ = visit(tmp_path, steps + "record(0); record(1); record(2); send(event='done')", timeout=1.5)
    assert outcomes(records)[0] == ("reference", "ok")
    records, _ = visit(tmp_path, steps + "time.sleep(60)", timeout=1.5)
    assert outcomes(records) == [("reference", "timeout")]


def test_a_worker_held_ready_gets_the_next_job_and_is_ended_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"open({str(tmp_path / 'started')!r}, 'a').write(str(os.getpid()) + '\\n')\nfor i in range(3): record(i)\n"
    command = scripted(tmp_path, body + "send(event='done')")
    job = Job(small_sweep().cases[:3], "cpu", MeasurePolicy())  # type: ignore[call-arg]
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, command)
    workers.hold_ready()
    workers.hold_ready()
    (waiting,) = workers._idle
    assert len(list(workers.run(job, Heard()))) == 3
    assert (tmp_path / "started").read_text().split() == [str(waiting.process.pid)]
    workers.hold_ready()
    (waiting,) = workers._idle
    workers.close()
    assert waiting.process.returncode is not None
    first, second = workers.run(job, Heard()), workers.run(job, Heard())
    assert len([*first, *second]) == 6
    on_cpu = Workers("cpu", tmp_path / "worker.log", 20.0, command)
    on_cpu.hold_ready()
    assert on_cpu._idle == []


def test_a_worker_in_which_all_went_well_takes_the_next_job(tmp_path: Path) -> None:
    command = scripted(tmp_path, "record(0); record(1, 'unsupported'); record(2)\ndone()")
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, command)
    job = Job(small_sweep().cases[:3], "cpu", MeasurePolicy())  # type: ignore[call-arg]
    processes = []
    for fresh in (True, False, False):
        records = list(workers.run(job, Heard()))
        workers.hold_ready()
        assert workers.fresh is fresh
        processes += [record.when for record in records]
    assert len(processes) == 9
    assert len(set(processes)) == 1
    (one,) = workers._idle
    workers.close()
    assert one.process.returncode == 0, "it has ended by itself"


@pytest.mark.parametrize(
    "body",
    [
        "record(0); record(1, 'wrong'); record(2)\ndone()",
        "record(0); record(1, 'failed'); record(2)\ndone()",
        "record(0); record(2)\ndone()",
        "record(0); record(1); record(2)\nsend(event='done', again=False)",
        "record(0); record(1); record(2)\nsend(event='done')",
        "record(0); record(1); record(2)\nos._exit(1)",
    ],
    ids=["wrong", "failed", "silent", "unfit", "does not say", "dies"],
)
def test_no_other_worker_does(tmp_path: Path, body: str) -> None:
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, body))
    job = Job(small_sweep().cases[:3], "cpu", MeasurePolicy())  # type: ignore[call-arg]
    first = {record.when for record in workers.run(job, Heard()) if record.when.isdigit()}
    assert workers._idle == []
    second = {record.when for record in workers.run(job, Heard()) if record.when.isdigit()}
    assert workers.fresh
    assert first.isdisjoint(second)


# A sweep, with scripted workers --------------------------------------------------------------------------------------


class FakeWorkers:
    def __init__(self, run: Callable[[Job], Iterator[Record]]) -> None:
        self._run = run
        self.fresh = True
        self.closed = False
        self.held = 0

    def run(self, job: Job, _: Any) -> Iterator[Record]:
        return self._run(job)

    def hold_ready(self) -> None:
        self.held += 1

    def close(self) -> None:
        self.closed = True


def start(tmp_path: Path, run: Callable[[Job], Iterator[Record]], **options: Any) -> list[Record]:
    workers = FakeWorkers(run)
    try:
        return run_sweep(
            small_sweep(),
            ResultFolder(tmp_path / "out"),
            device="cpu",
            command_line="test",
            summaries={},
            listener=Heard(),
            workers=workers,  # type: ignore[arg-type]
            **options,
        )
    finally:
        assert workers.closed


def test_after_a_crash_the_rest_of_the_shape_gets_a_fresh_worker(tmp_path: Path) -> None:
    jobs: list[list[tuple[str, str]]] = []

    def worker(job: Job) -> Iterator[Record]:
        jobs.append([(case.provider, case.direction) for case in job.cases])
        if len(jobs) == 1:
            yield ok(job.cases[1])
            yield Record(job.cases[2], "failed", "", reason="crash")
        else:
            yield from map(ok, job.cases)

    records = start(tmp_path, worker)
    first, second = jobs
    assert len(first) == 6
    assert second == [first[0], *first[3:]]
    assert sorted(record.status for record in records) == ["failed"] + ["ok"] * 5
    crashed = next(record for record in records if record.status == "failed")
    assert crashed.work is not None, "the work of a crashed case is known all the same"
    assert crashed.inputs["label"]


def test_a_worker_that_does_nothing_cannot_loop_for_ever(tmp_path: Path) -> None:
    with pytest.raises(SweepStoppedError, match="without a word"):
        start(tmp_path, lambda _: iter(()))


def test_a_case_that_lacked_memory_beside_others_is_tried_alone(tmp_path: Path) -> None:
    jobs: list[int] = []

    def worker(job: Job) -> Iterator[Record]:
        jobs.append(len(job.cases))
        for case in job.cases:
            hungry = case.provider == "triton_jfa"
            greedy = hungry and case.direction == "bwd"
            yield Record(case, "oom" if greedy or (hungry and len(job.cases) > 1) else "ok", "", env={"gpu": None})

    records = start(tmp_path, worker)
    assert jobs == [6, 1, 1]
    assert [r.case.direction for r in records if r.status == "oom"] == ["bwd"]
    assert len(read_records(tmp_path / "out" / "records.jsonl").records) == 6


def two_shapes(tmp_path: Path, body: str, timeout: float = 20.0) -> tuple[list[Record], list[str], Workers]:
    """A sweep over two shapes of six cases each; what the worker printed; the workers."""
    (tmp_path / "out").mkdir()
    log = tmp_path / "out" / "worker.log"
    workers = Workers("cuda", log, timeout, scripted(tmp_path, "print(len(cases), flush=True)\n" + body))
    records = run_sweep(
        load_sweep("jagged.yaml", "cpu", settings=["lengths.max_len=64", "lengths.fill=[0.5,0.9]"]),
        ResultFolder(tmp_path / "out"),
        device="cpu",
        command_line="test",
        summaries={},
        listener=Heard(),
        workers=workers,
    )
    return records, log.read_text().split(), workers


def test_both_shapes_are_done_by_one_worker(tmp_path: Path) -> None:
    records, jobs, workers = two_shapes(tmp_path, "for i in range(6): record(i)\ndone()")
    assert jobs == ["6", "6"]
    assert len({record.when for record in records}) == 1
    assert workers._idle == []


@pytest.mark.parametrize(
    ("failing", "rest"),
    [
        ("record(2, 'failed')", "1"),
        ("record(2, 'oom')", "1"),
        ("send(event='phase', case=key(2), phase='check'); os.kill(os.getpid(), signal.SIGSEGV)", "4"),
        ("send(event='phase', case=key(2), phase='check'); time.sleep(60)", "4"),
        ("send(event='phase', case=None, phase='oracle'); sys.exit(3)", "4"),
    ],
    ids=["raises", "lacks memory", "crashes", "hangs", "crashes before any case"],
)
def test_what_fails_in_a_used_worker_is_repeated_in_a_fresh_one(tmp_path: Path, failing: str, rest: str) -> None:
    body = f"""
        for i in range(len(cases)):
            if turn == 1 and i == 2:
                {failing}
            else:
                record(i)
        done()
    """
    records, jobs, _ = two_shapes(tmp_path, textwrap.dedent(body), timeout=3.0)
    assert jobs == ["6", "6", rest]
    assert [record.status for record in records] == ["ok"] * 12
    assert len({record.case for record in records}) == 12
    assert len({record.when for record in records}) == 2


def test_a_case_that_fails_in_a_fresh_worker_too_has_failed(tmp_path: Path) -> None:
    body = "hits = cases[0]['params']['lengths']['fill'] == 0.9\nfor i in range(len(cases)):\n"
    body += "    broken = hits and cases[i]['provider'] == 'triton_jfa' and cases[i]['direction'] == 'bwd'\n"
    body += "    record(i, 'failed' if broken else 'ok')\ndone()"
    records, jobs, _ = two_shapes(tmp_path, body)
    assert jobs == ["6", "6", "1"]
    assert sorted(record.status for record in records) == ["failed"] + ["ok"] * 11


def test_what_has_failed_in_a_fresh_worker_is_not_doubted_again(tmp_path: Path) -> None:
    """A provider that hangs at every shape costs one time-out for each."""
    body = """
        for i in range(len(cases)):
            if cases[i]['provider'] == 'triton_jfa' and cases[i]['direction'] == 'bwd':
                send(event='phase', case=key(i), phase='check'); time.sleep(60)
            record(i)
        done()
    """
    records, jobs, _ = two_shapes(tmp_path, textwrap.dedent(body), timeout=2.0)
    assert sorted(record.status for record in records) == ["ok"] * 10 + ["timeout"] * 2
    assert len(jobs) <= 4


def test_a_wrong_result_in_a_used_worker_is_a_verdict(tmp_path: Path) -> None:
    body = "for i in range(6): record(i, 'wrong' if turn and i == 4 else 'ok')\ndone()"
    records, jobs, _ = two_shapes(tmp_path, body)
    assert jobs == ["6", "6"]
    assert sorted(record.status for record in records) == ["ok"] * 11 + ["wrong"]


def test_a_worker_that_died_while_it_waited_costs_no_case(tmp_path: Path) -> None:
    body = "for i in range(6): record(i)\nif turn == 0 and cases[0]['params']['lengths']['fill'] == 0.5:\n"
    body += "    done(); os._exit(1)\ndone()"
    records, jobs, _ = two_shapes(tmp_path, body)
    assert jobs == ["6", "6"]
    assert [record.status for record in records] == ["ok"] * 12
    assert len({record.when for record in records}) == 2


def test_nothing_between_two_visits_goes_uncounted(tmp_path: Path) -> None:
    """A job was asked for when the last record of the one before came."""
    jobs: list[Job] = []

    def worker(job: Job) -> Iterator[Record]:
        jobs.append(job)
        yield from map(ok, job.cases[:4])
        before.append(time.time())
        time.sleep(0.2)

    before: list[float] = []
    start(tmp_path, worker)
    assert [len(job.cases) for job in jobs] == [6, 2]
    assert jobs[1].asked <= before[0]


def test_a_folder_of_a_newer_jfabench_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    newer = {**ok(small_sweep().cases[0]).to_json(), "schema": 99}
    (tmp_path / "out" / "records.jsonl").write_text(json.dumps(newer) + "\n")
    with pytest.raises(FolderError, match="update jfabench"):
        start(tmp_path, lambda job: map(ok, job.cases), resume=True)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    start(tmp_path, lambda job: map(ok, job.cases))
    (tmp_path / "out" / "run.json").write_text("{")
    with pytest.raises(FolderError, match=r"run\.json"):
        start(tmp_path, lambda job: map(ok, job.cases), resume=True)


def test_a_later_command_may_add_to_a_folder_but_not_hide_what_is_missing(tmp_path: Path) -> None:
    start(tmp_path, lambda job: map(ok, job.cases))
    folder = ResultFolder(tmp_path / "out")
    lines = folder.records.read_text().splitlines(keepends=True)
    folder.records.write_text("".join(lines[:2]))
    fewer = load_sweep("jagged.yaml", "cpu", settings=["lengths.max_len=64", "lengths.fill=0.5"], only=["reference"])
    run_sweep(
        fewer,
        folder,
        device="cpu",
        command_line="another",
        summaries={},
        listener=Heard(),
        resume=True,
        workers=FakeWorkers(lambda job: map(ok, job.cases)),  # type: ignore[arg-type]
    )
    manifest = folder.read_manifest()
    assert manifest is not None
    assert manifest.cases == 6
    assert manifest.command == "test"


def test_resume_skips_what_is_there_and_needs_to_be_asked_for(tmp_path: Path) -> None:
    started: list[int] = []

    def worker(job: Job) -> Iterator[Record]:
        started.append(len(job.cases))
        for number, case in enumerate(job.cases):
            if len(started) == 1 and number == 4:
                raise KeyboardInterrupt
            yield ok(case)

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, worker)
    with pytest.raises(FolderError, match="--resume"):
        start(tmp_path, worker)
    assert len(start(tmp_path, worker, resume=True)) == 6
    assert started == [6, 2]
    assert len(read_records(tmp_path / "out" / "records.jsonl").records) == 6
