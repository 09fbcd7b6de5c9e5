from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from scripted_worker import Heard, scripted

from jfabench import workers as workers_module
from jfabench.policy import MeasurePolicy
from jfabench.records import Record
from jfabench.sweep import Sweep, load_sweep
from jfabench.visit import Job
from jfabench.worker import EXIT_START_AFRESH
from jfabench.workers import Workers


def small_sweep() -> Sweep:
    return load_sweep("jagged.yaml", "cpu", settings=["lengths.max_len=64", "lengths.fill=0.5"])


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
    assert heard.phases == [(None, "start"), ("sdpa_padded", "check")]
    assert len({record.worker for record in records}) == 1


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


def three_cases() -> Job:
    return Job(small_sweep().cases[:3], "cpu", MeasurePolicy())  # type: ignore[call-arg]


def processes(records: Iterable[Record]) -> set[int | None]:
    return {record.worker for record in records}


ALL_WELL = "record(0); record(1, 'unsupported'); record(2)\ndone()"


def test_each_job_has_a_process_of_its_own(tmp_path: Path) -> None:
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, ALL_WELL), per_shape=True)
    seen: set[int | None] = set()
    for _ in range(3):
        records = list(workers.run(three_cases(), Heard()))
        assert workers.fresh
        assert len(records) == 3
        (process,) = processes(records)
        seen.add(process)
    assert len(seen) == 3
    assert workers._idle == []


def test_workers_are_prepared_for_the_jobs_that_follow_and_the_oldest_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "CORES_PER_WORKER", 1)
    monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda _: range(2))
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, ALL_WELL), per_shape=True)
    (first,) = processes(workers.run(three_cases(), Heard(), following=5))
    waiting = [worker.process.pid for worker in workers._idle]
    assert len(waiting) == 2, "no more than there are cores for"
    assert first not in waiting
    (second,) = processes(workers.run(three_cases(), Heard(), following=1))
    assert second == waiting[-1]
    assert [worker.process.pid for worker in workers._idle] == waiting[:1], "no more than there are jobs for"
    (last,) = workers._idle
    workers.close()
    assert last.process.returncode is not None


def test_nothing_is_prepared_beside_a_measurement_on_a_cpu(tmp_path: Path) -> None:
    workers = Workers("cpu", tmp_path / "worker.log", 20.0, scripted(tmp_path, ALL_WELL), per_shape=True)
    assert len(list(workers.run(three_cases(), Heard(), following=5))) == 3
    assert workers._idle == []


def test_the_first_worker_is_waited_for_and_that_time_is_no_cases(tmp_path: Path) -> None:
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, ALL_WELL, before="time.sleep(0.5)"))
    workers.start(Heard())
    assert workers.startup_seconds >= 0.5
    (ready,) = workers._idle
    records = list(workers.run(three_cases(), Heard()))
    assert processes(records) == {ready.process.pid}
    assert sum(sum(record.phases.values()) for record in records) < 0.4
    workers.close()


def test_a_worker_is_told_what_to_import(tmp_path: Path) -> None:
    command = scripted(tmp_path, ALL_WELL, before="print(json.dumps(prepared), flush=True)")
    log = tmp_path / "worker.log"
    workers = Workers("cuda:1", log, 20.0, command, operator="jagged_attention", providers=["reference", "fa3"])
    list(workers.run(three_cases(), Heard()))
    workers.close()
    assert json.loads(log.read_text()) == {
        "operator": "jagged_attention",
        "providers": ["reference", "fa3"],
        "device": "cuda:1",
    }


@pytest.mark.parametrize("end", ["os._exit(9)", "time.sleep(60)"], ids=["ends it", "hangs"])
@pytest.mark.parametrize("started", [True, False])
def test_an_import_that_takes_the_worker_down_is_not_done_ahead_again(tmp_path: Path, end: str, started: bool) -> None:
    """It costs no case: whether the provider can be used is found out in a case of its own."""
    before = f"""
        for name in prepared["providers"]:
            importing(name)
            if name == "bad":
                {end}
    """
    log = tmp_path / "worker.log"
    command = scripted(tmp_path, "print(prepared['providers'], flush=True)\n" + ALL_WELL, before)
    workers = Workers("cuda", log, 3.0, command, providers=["good", "bad", "fine"])
    if started:
        workers.start(Heard())
    records = list(workers.run(three_cases(), Heard(), following=1))
    assert [record.status for record in records] == ["ok", "unsupported", "ok"]
    assert "library of bad" in log.read_text()
    assert log.read_text().splitlines()[-1] == "['good', 'fine']"
    workers.close()


def test_a_worker_that_cannot_even_start_is_reported(tmp_path: Path) -> None:
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, "", before="sys.exit('no torch')"))
    workers.start(Heard())
    records = list(workers.run(three_cases(), Heard()))
    assert [record.status for record in records] == ["failed"] * 3
    assert "no torch" in records[0].reason


def test_a_worker_of_an_older_revision_can_be_used(tmp_path: Path) -> None:
    """It says neither when something happened nor that it is ready, and wants to know when its job was asked for."""
    script = tmp_path / "old.py"
    script.write_text(
        "import json, os, sys\n"
        "stream = os.fdopen(int(sys.argv[1]), 'w')\n"
        "for line in sys.stdin:\n"
        "    job = json.loads(line)\n"
        "    assert job['asked'] == 0\n"
        "    events = [{'event': 'phase', 'case': None, 'phase': 'inputs'}]\n"
        "    for case in job['cases']:\n"
        "        record = {'case': case, 'status': 'ok', 'when': '', 'schema': 1}\n"
        "        events.append({'event': 'record', 'record': record})\n"
        "    for event in [*events, {'event': 'done', 'again': True}]:\n"
        "        stream.write(json.dumps(event) + '\\n'); stream.flush()\n"
    )
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, (sys.executable, str(script)))
    for _ in range(2):
        records = list(workers.run(three_cases(), Heard()))
        assert [record.status for record in records] == ["ok"] * 3
        assert all(set(record.phases) <= {"start", "inputs"} for record in records)
    assert not workers.fresh
    workers.close()


def test_every_second_is_in_the_account_of_one_case(tmp_path: Path) -> None:
    """By the clock of the worker's events: 3 s until it has begun, 2 s of inputs, and so on."""
    body = """
        begin = time.monotonic() + 3
        send(event="phase", case=None, phase="inputs", at=begin)
        send(event="phase", case=key(0), phase="check", at=begin + 2)
        send(event="record", at=begin + 3, record={"case": cases[0], "status": "ok", "when": "", "schema": 1})
        send(event="phase", case=key(1), phase="warmup", at=begin + 4)
        send(event="phase", case=key(2), phase="measure", at=begin + 10)
        send(event="phase", case=None, phase="finish", at=begin + 11)
        for i in (1, 2):
            send(event="record", at=begin + 13, record={"case": cases[i], "status": "ok", "when": "", "schema": 1})
        done()
    """
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, body))
    workers.start(Heard())
    one, two, three = workers.run(three_cases(), Heard())
    workers.close()
    start = one.phases["start"]
    assert start == pytest.approx(1.0, abs=0.2)
    assert one.phases == pytest.approx({"start": start, "inputs": 2 / 3, "check": 1.0}, abs=1e-3)
    # What passed between the first record and the next phase is the others'.
    common = {"start": start, "inputs": 2 / 3, "check": 1 / 2, "finish": 1.0}
    assert two.phases == pytest.approx({**common, "warmup": 6.0}, abs=1e-3)
    assert three.phases == pytest.approx({**common, "measure": 1.0}, abs=1e-3)


def test_a_case_that_kills_its_worker_has_the_time_until_its_end(tmp_path: Path) -> None:
    body = "send(event='phase', case=key(1), phase='check'); time.sleep(0.5); os._exit(3)"
    (record,), _ = visit(tmp_path, body)
    assert record.status == "failed"
    assert record.phases["check"] >= 0.5
    assert record.worker is not None


def test_a_worker_in_which_all_went_well_takes_the_next_job_where_they_are_shared(tmp_path: Path) -> None:
    workers = Workers("cuda", tmp_path / "worker.log", 20.0, scripted(tmp_path, ALL_WELL))
    seen: set[int | None] = set()
    for fresh in (True, False, False):
        seen |= processes(workers.run(three_cases(), Heard(), following=1))
        assert workers.fresh is fresh
    assert len(seen) == 1
    one = workers._idle[-1]
    assert len(workers._idle) == 2, "and a fresh one waits beside it"
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
    first = processes(workers.run(three_cases(), Heard()))
    assert workers._idle == []
    second = processes(workers.run(three_cases(), Heard()))
    assert workers.fresh
    assert first.isdisjoint(second)
