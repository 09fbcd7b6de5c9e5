"""The history on both databases: what is imported is there once, whatever happens meanwhile."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nights
import pytest
import sqlalchemy as sql

from jfabench.cli import main
from jfabench.folder import ResultFolder
from jfabench.history import History, HistoryError, machine_of, opened
from jfabench.records import SCHEMA

CASES, RUNS = 40, 8


def postgres_programs() -> Path | None:
    """The folder of initdb and pg_ctl: on PATH, or where Debian puts them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")) or [Path(shutil.which("pg_ctl") or "/nowhere")]
    return found[-1].parent if found[-1].exists() else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL server of its own, reached by a socket; yields the URL without a database's name."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian, Ubuntu: apt install postgresql)")
    root = Path(tempfile.mkdtemp(prefix="jfabench-pg-"))  # the server's user cannot enter pytest's folders
    as_user: list[str] = []
    if os.geteuid() == 0:  # it refuses to run as root
        as_user = ["runuser", "-u", "postgres", "--"]
        shutil.chown(root, "postgres")

    def run(*command: str) -> None:
        done = subprocess.run([*as_user, *command], capture_output=True, text=True, cwd="/", timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    data, log = str(root / "data"), str(root / "log")
    run(str(programs / "initdb"), "-D", data, "-A", "trust", "-U", "postgres", "--no-sync")
    options = f"-k {root} -c listen_addresses= -c fsync=off -c max_connections=30"
    control = [str(programs / "pg_ctl"), "-D", data, "-w", "-l", log]
    subprocess.run(
        [*as_user, *control, "-o", options, "start"], check=True, cwd="/", timeout=60, stdout=subprocess.DEVNULL
    )
    try:
        yield f"postgresql://postgres@/{{}}?host={root}"
    finally:
        run(*control, "-m", "immediate", "stop")
        shutil.rmtree(root)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/history.sqlite"
    pattern = request.getfixturevalue("server")
    name = f"test_{uuid.uuid4().hex}"
    admin = sql.create_engine(
        pattern.format("postgres").replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    with admin.connect() as connection:
        connection.execute(sql.text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return pattern.format(name)


@pytest.fixture
def history(url: str) -> Iterator[History]:
    opened = History(url)
    yield opened
    opened.close()


def folder_of(root: Path, number: int, cases: int = 3, seconds: float = 1e-3) -> ResultFolder:
    records = [nights.record(nights.case(2**i), seconds * (i + 1), nights.night(number)) for i in range(cases)]
    return nights.write(root / f"run-{number}", records)


def counts(history: History) -> tuple[int, int]:
    runs = history.runs()
    return len(runs), sum(len(history.records(run.id)) for run in runs)


def test_what_is_imported_comes_back(history: History, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0)
    imported = history.add(folder)
    assert (imported.new, imported.results) == (True, 3)
    (run,) = history.runs()
    assert (run.machine, run.config, run.verdict) == (machine_of(nights.ENV), "nightly", "unknown")
    assert "fbtriton 3.7.4" in run.machine
    lines = sorted(record.to_line() for record in history.records(run.id).values())
    assert lines == sorted(folder.records.read_text().splitlines(keepends=True))


def test_importing_again_changes_nothing(history: History, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0)
    history.add(folder)
    again = history.add(folder)
    assert (again.new, again.results) == (False, 0)
    assert counts(history) == (1, 3)


def test_a_resumed_run_is_completed(history: History, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0)
    history.add(folder)
    late = nights.record(nights.case(1), 5e-3, nights.night(1))  # repeated by --retry-failed: the later record counts
    more = nights.record(nights.case(999), 2e-3, nights.night(1))
    with folder.records.open("a") as file:
        file.write(late.to_line() + more.to_line())
    again = history.add(folder)
    assert (again.new, again.results) == (False, 2)
    (run,) = history.runs()
    assert history.records(run.id)[late.case] == late
    assert counts(history) == (1, 4)


def test_series_are_in_order_and_by_machine(history: History, tmp_path: Path) -> None:
    for number in (2, 0, 1):
        history.add(folder_of(tmp_path, number, cases=1, seconds=1e-3 * (number + 1)))
    other = nights.record(nights.case(1), 9.0, nights.night(3), {**nights.ENV, "torch": "2.13.0"})
    history.add(nights.write(tmp_path / "other", [other]))
    series = history.series()
    assert sorted(len(one.points) for one in series) == [1, 3]
    long = max(series, key=lambda one: len(one.points))
    assert [point.seconds for point in long.points] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert long.case == nights.case(1)
    assert len(history.series(long.machine)) == 1


def test_the_last_good_run_is_of_the_same_machine_and_grid(history: History, tmp_path: Path) -> None:
    first = history.add(folder_of(tmp_path, 0), "good").run
    second = history.add(folder_of(tmp_path, 1)).run
    history.judge(second, "regression")
    machine = machine_of(nights.ENV)
    good = history.last_good(machine, "nightly", nights.night(2).isoformat())
    assert good is not None
    assert good.id == first
    assert history.last_good(machine, "jagged", nights.night(2).isoformat()) is None
    assert history.last_good("another machine", "nightly", nights.night(2).isoformat()) is None
    assert history.last_good(machine, "nightly", nights.night(0).isoformat()) is None


def test_a_record_of_a_newer_schema_is_refused(history: History, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0)
    newer = json.loads(folder.records.read_text().splitlines()[0]) | {"schema": SCHEMA + 1}
    folder.records.write_text(folder.records.read_text() + json.dumps(newer) + "\n")
    with pytest.raises(HistoryError, match=rf"schema {SCHEMA + 1} is newer .* update jfabench"):
        history.add(folder)
    assert history.runs() == []


def test_a_newer_database_is_refused(url: str) -> None:
    history = History(url)
    with history._engine.begin() as connection:
        connection.execute(sql.text("UPDATE jfabench_schema SET version = 99"))
    history.close()
    with pytest.raises(HistoryError, match=r"has schema 99, newer .* update jfabench"):
        History(url)


def test_mixed_machines_are_refused(history: History, tmp_path: Path) -> None:
    records = [
        nights.record(nights.case(1), 1.0, nights.night(0)),
        nights.record(nights.case(2), 1.0, nights.night(0), {**nights.ENV, "gpu": "NVIDIA B200"}),
    ]
    with pytest.raises(HistoryError, match="mixes machines"):
        history.add(nights.write(tmp_path / "mixed", records))
    assert history.runs() == []


def test_failed_cases_are_kept_and_have_no_time(history: History, tmp_path: Path) -> None:
    failed = replace(nights.record(nights.case(2), 1.0, nights.night(0)), status="failed", measurement=None, reason="x")
    history.add(nights.write(tmp_path / "run", [nights.record(nights.case(1), 1.0, nights.night(0)), failed]))
    (run,) = history.runs()
    assert history.records(run.id)[failed.case].reason == "x"
    assert [one.case for one in history.series()] == [nights.case(1)]


@pytest.mark.parametrize(
    "text", ["no url", "oracle://host/x", "mysql://host/x", "postgresql://u:secret@nowhere.invalid/x", "sqlite://"]
)
def test_a_database_that_cannot_be_used_is_named(text: str) -> None:
    with pytest.raises(HistoryError) as failure:
        History(text)
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("sqlalchemy", ["history", "runs"]),
        ("psycopg", ["history", "runs", "--db", "postgresql://nowhere.invalid/x"]),
        ("scipy", ["compare", ".", "."]),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(package: str, arguments: list[str]) -> None:
    program = f"import sys; sys.modules[{package!r}] = None\nfrom jfabench.cli import main\nsys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert package in done.stderr
    assert "pip install 'jfabench[history]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_reading_changes_nothing_and_needs_no_right_to_write(url: str, tmp_path: Path) -> None:
    with opened(url) as history:
        history.add(folder_of(tmp_path, 0))
    path = Path(url.removeprefix("sqlite:///"))
    before = path.read_bytes() if url.startswith("sqlite") else b""
    with opened(url, reading=True) as history:
        assert counts(history) == (1, 3)
        if url.startswith("sqlite"):
            begun: list[str] = []
            sql.event.listen(
                history._engine, "before_cursor_execute", lambda _c, _u, text, *_: begun.append(text), retval=False
            )
            history.runs()
            assert not any("IMMEDIATE" in text for text in begun)  # which takes the lock of a writer
            assert path.read_bytes() == before


def test_what_is_not_there_is_not_made_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "typo" / "history.sqlite"
    with pytest.raises(HistoryError, match="no such file; `python -m jfabench history import"):
        History(f"sqlite:///{path}", reading=True)
    assert not path.parent.exists()
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(HistoryError, match="holds no history"):
        History(f"sqlite:///{tmp_path}/empty.sqlite", reading=True)


def test_an_import_that_met_another_writer_is_repeated_whole(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jfabench.history._PAUSE", 0.0)
    case_ids, failures = history._case_ids, [sql.exc.OperationalError("INSERT", {}, Exception("deadlock detected"))]

    def once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return case_ids(*arguments)

    monkeypatch.setattr(history, "_case_ids", once)
    assert history.add(folder_of(tmp_path, 0)).new
    assert counts(history) == (1, 3)


def test_a_folder_that_cannot_be_imported_does_not_hold_up_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [str(folder_of(tmp_path, number).root) for number in range(2)]
    url = f"sqlite:///{tmp_path}/history.sqlite"
    assert main(["history", "import", good[0], "nowhere", good[1], "--db", url]) == 2
    assert "nowhere: no records.jsonl here" in capsys.readouterr().err
    with opened(url, reading=True) as history:
        assert counts(history) == (2, 6)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "records.jsonl").write_text("no record")
    assert main(["history", "import", str(tmp_path / "damaged"), "nowhere", "--db", url]) == 3  # the worse of the two
    assert "no record that can be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["no url", "oracle://host/x", "sqlite://", "sqlite:///:memory:", "postgresql://h:port/x"]
)
@pytest.mark.parametrize("command", [["history", "runs"], ["history", "import", "nowhere"]])
def test_what_is_no_address_of_a_database_is_a_mistake_of_the_command(
    command: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--db", text]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "JavaScript:alert(1)//https://github.com/o/n",
        "data:text/html,x",
        "file:///etc",
        "//github.com/o/n",
        "github.com/o/n",
        "https://",
        "https:///o/n",
        "https://[x",
        "https://github.com/o n",
        "java\nscript:alert(1)",
    ],
)
def test_commits_are_linked_to_pages_of_the_web_only(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/history.sqlite"
    assert main(["history", "import", str(folder_of(tmp_path, 0).root), "--db", url]) == 0
    command = ["history", "report", "--db", url, "--out", str(tmp_path / "pages")]
    assert main([*command, "--repository", address]) == 2
    assert "http or https" in capsys.readouterr().err
    assert not (tmp_path / "pages").exists()


def test_an_address_stays_inside_its_attribute(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/history.sqlite"
    assert main(["history", "import", str(folder_of(tmp_path, 0).root), "--db", url]) == 0
    command = ["history", "report", "--db", url, "--out", str(tmp_path)]
    assert main([*command, "--repository", """https://x.example/"><script>alert('1')</script>"""]) == 0
    page = (tmp_path / "trends.html").read_text()
    assert "https://x.example/" in page
    assert "<script>alert" not in page


# Several processes ---------------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")  # starting Python anew takes longer than all that is done here


class Importer:
    """A process that imports folders, one after the other, when it is told to go."""

    def __init__(self, url: str, *folders: ResultFolder) -> None:
        self._here, there = FORK.Pipe()
        self.process = FORK.Process(target=self._work, args=(there, url, folders))
        self.process.start()
        there.close()

    @staticmethod
    def _work(there: Connection, url: str, folders: Sequence[ResultFolder]) -> None:
        with opened(url) as history:
            there.send("ready")
            there.recv()
            for folder in folders:
                history.add(folder)
                there.send("added")

    def is_ready(self) -> bool:
        return self._here.poll(60) and self._here.recv() == "ready"

    def go(self) -> None:
        self._here.send("go")

    def added(self) -> int:
        """How many folders it has imported, once it has ended."""
        count = 0
        with suppress(EOFError, ConnectionResetError):  # it was killed
            while self._here.poll(60):
                count += self._here.recv() == "added"
        self.process.join(60)
        return count


def test_eight_writers_lose_and_duplicate_nothing(url: str, tmp_path: Path) -> None:
    folders = [folder_of(tmp_path, number, CASES) for number in range(RUNS)]
    shuffled = [random.Random(seed).sample(folders, len(folders)) for seed in range(8)]
    writers = [Importer(url, *order) for order in shuffled]  # all import all, and race to create the tables, too
    assert [writer.is_ready() for writer in writers] == [True] * 8  # all of them, before any goes on
    for writer in writers:
        writer.go()
    assert [writer.added() for writer in writers] == [RUNS] * 8
    assert [writer.process.exitcode for writer in writers] == [0] * 8
    history = History(url)
    assert counts(history) == (RUNS, RUNS * CASES)
    assert sorted(len(one.points) for one in history.series()) == [RUNS] * CASES
    history.close()


def test_a_killed_import_leaves_all_or_nothing(url: str, tmp_path: Path) -> None:
    cases = 1500
    folders = [folder_of(tmp_path, number, 60) for number in range(2)]
    big = nights.write(
        tmp_path / "big",
        [nights.record(nights.case(10_000 + i), 1e-3, nights.night(5)) for i in range(cases)],
    )
    before = History(url)
    before.add(folders[0])
    killed_inside = 0
    for delay in (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25):
        writer = Importer(url, big)
        assert writer.is_ready()
        writer.go()
        time.sleep(delay)
        writer.process.kill()
        finished = writer.added() == 1
        killed_inside += not finished
        found = counts(before)
        assert found in ((1, 60), (2, 60 + cases))
        assert not finished or found == (2, 60 + cases)
    assert killed_inside >= 2  # the test has seen what it is about
    before.add(big)
    before.add(folders[1])
    assert counts(before) == (3, 120 + cases)
    before.close()
