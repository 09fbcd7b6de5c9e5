from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import Heard, scripted

from jfabench.folder import ResultFolder
from jfabench.records import Case, Record, read_records
from jfabench.run import FolderError, SweepStoppedError, Workers, open_log, run_sweep
from jfabench.sweep import Sweep, load_sweep
from jfabench.visit import Job


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


# A sweep, with scripted workers --------------------------------------------------------------------------------------


class FakeWorkers:
    def __init__(self, run: Callable[[Job], Iterator[Record]]) -> None:
        self._run = run
        self.fresh = True
        self.started = self.closed = False
        self.following: list[int] = []

    def start(self, _: Any) -> None:
        self.started = True

    def run(self, job: Job, _: Any, following: int = 0) -> Iterator[Record]:
        assert self.started
        self.following.append(following)
        return self._run(job)

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


def two_shapes(
    tmp_path: Path, body: str, timeout: float = 20.0, per_shape: bool = False
) -> tuple[list[Record], list[str], Workers]:
    """A sweep over two shapes of six cases each; what the worker printed; the workers."""
    (tmp_path / "out").mkdir()
    log = tmp_path / "out" / "worker.log"
    command = scripted(tmp_path, "print(len(cases), flush=True)\n" + body)
    workers = Workers("cuda", log, timeout, command, per_shape=per_shape)
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


def test_each_shape_is_done_by_a_worker_of_its_own(tmp_path: Path) -> None:
    records, jobs, workers = two_shapes(tmp_path, "for i in range(6): record(i)\ndone()", per_shape=True)
    assert jobs == ["6", "6"]
    by_shape: dict[str, set[int | None]] = {}
    for record in read_records(tmp_path / "out" / "records.jsonl").records:
        by_shape.setdefault(record.case.shape_key, set()).add(record.worker)
    (first,), (second,) = by_shape.values()
    assert None not in (first, second)
    assert first != second
    assert records[0].worker == first
    assert workers._idle == []


def test_what_fails_in_a_worker_of_its_own_has_failed(tmp_path: Path) -> None:
    """It can owe nothing to another shape; what it may have spoilt for its neighbours is done in another process."""
    body = """
        for i in range(len(cases)):
            broken = cases[i]['provider'] == 'triton_jfa' and cases[i]['direction'] == 'bwd'
            if broken:
                send(event='phase', case=key(i), phase='check'); os._exit(9)
            record(i)
        done()
    """
    records, jobs, _ = two_shapes(tmp_path, textwrap.dedent(body), per_shape=True)
    assert jobs == ["6", "6"]
    assert sorted(record.status for record in records) == ["failed"] * 2 + ["ok"] * 10


def test_workers_are_prepared_for_the_shapes_that_follow(tmp_path: Path) -> None:
    workers = FakeWorkers(lambda job: map(ok, job.cases))
    settings = ["lengths.max_len=64", "lengths.fill=[0.1,0.5,0.9]"]
    folder = ResultFolder(tmp_path / "out")
    options: Any = {"device": "cpu", "command_line": "", "summaries": {}, "listener": Heard(), "workers": workers}
    run_sweep(load_sweep("jagged.yaml", "cpu", settings=settings), folder, **options)
    assert workers.following == [2, 1, 0]
    manifest = folder.read_manifest()
    assert manifest is not None
    assert manifest.workers == "per_shape"
    sweep = load_sweep("jagged.yaml", "cpu", settings=[*settings, "workers=shared"])
    with pytest.raises(FolderError, match="workers 'per_shape', this command asks for 'shared'"):
        run_sweep(sweep, folder, resume=True, **options)


def test_both_shapes_are_done_by_one_worker_where_workers_are_shared(tmp_path: Path) -> None:
    records, jobs, workers = two_shapes(tmp_path, "for i in range(6): record(i)\ndone()")
    assert jobs == ["6", "6"]
    assert len({record.worker for record in records}) == 1
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
    assert len({record.worker for record in records}) == 2


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
    assert len({record.worker for record in records}) == 2


@pytest.mark.parametrize("per_shape", [True, False])
def test_nothing_between_two_visits_goes_uncounted(tmp_path: Path, per_shape: bool) -> None:
    """Nor what is spent on a record that is not believed, or left to another worker: the accounts give the whole."""
    body = """
        send(event="phase", case=None, phase="oracle"); time.sleep(0.2)
        for i in range(len(cases)):
            send(event="phase", case=key(i), phase="check")
            if turn == 1 and i == 2:
                time.sleep(0.3); record(i, "failed")
            elif turn == 1 and i == 4:
                time.sleep(0.3); os._exit(1)
            else:
                record(i)
        send(event="phase", case=None, phase="finish"); time.sleep(0.1)
        done()
    """
    begun = time.monotonic()
    records, jobs, workers = two_shapes(tmp_path, textwrap.dedent(body), per_shape=per_shape)
    elapsed = time.monotonic() - begun
    assert jobs == (["6", "6"] if per_shape else ["6", "6", "3"])
    assert {record.status for record in records} == {"ok"}
    told = workers.startup_seconds + sum(sum(record.phases.values()) for record in records)
    assert elapsed - 1.0 < told <= elapsed
    assert told >= (0.5 if per_shape else 1.3)


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
