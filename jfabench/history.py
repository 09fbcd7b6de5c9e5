"""The history of runs, in a database: SQLite for one machine, PostgreSQL for a fleet of runners.

A *run* is one result folder, known again by the first line of its records, which never changes, packed or not.
Importing is one transaction for each folder, and may be repeated at any time, also by several processes at once: what
is there stays as it is, what a resumed sweep has added is added. A process that is killed in the middle leaves nothing
behind.

Runs belong to a *machine*, which is a kind of GPU with its driver and software (`machine_of`), so that unlike is never
compared with like. The whole record is kept beside the median that charts need: a corrected formula needs no new run.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from jfabench import env as environments
from jfabench.changes import Point, Run, Series
from jfabench.counted import read_folder
from jfabench.folder import ResultFolder
from jfabench.intervals import median_interval
from jfabench.records import Case, Record, lines_of

T = TypeVar("T")

SCHEMA = 1
DEFAULT_URL = "sqlite:///results/history.sqlite"
URL_VARIABLE = "JFABENCH_HISTORY"

_ATTEMPTS, _PAUSE = 8, 0.2
_LOCK = 0x6A666162  # an arbitrary number for PostgreSQL's advisory lock: one process creates the tables


class HistoryError(RuntimeError):
    """The database, or what should go into it, cannot be used; the message says why and what to do."""


class DatabaseNameError(HistoryError):
    """What was given names no database that could ever be used here."""


# Tables --------------------------------------------------------------------------------------------------------------

_tables = sql.MetaData()
_id = sql.Integer().with_variant(sql.BigInteger, "postgresql")
_schema = sql.Table("jfabench_schema", _tables, sql.Column("version", sql.Integer, primary_key=True))
_machines = sql.Table(
    "machines",
    _tables,
    sql.Column("id", _id, primary_key=True),
    sql.Column("key", sql.Text, unique=True, nullable=False),
)
_cases = sql.Table(
    "cases",
    _tables,
    sql.Column("id", _id, primary_key=True),
    sql.Column("digest", sql.String(64), unique=True, nullable=False),
    sql.Column("key", sql.Text, nullable=False),
    sql.Column("label", sql.Text, nullable=False),
)
_runs = sql.Table(
    "runs",
    _tables,
    sql.Column("id", _id, primary_key=True),
    sql.Column("digest", sql.String(64), unique=True, nullable=False),
    sql.Column("machine", sql.ForeignKey("machines.id"), nullable=False, index=True),
    sql.Column("started", sql.String(32), nullable=False, index=True),
    sql.Column("config", sql.Text, nullable=False),
    sql.Column("commit_id", sql.String(64)),
    sql.Column("dirty", sql.Boolean),
    sql.Column("env", sql.Text, nullable=False),
    sql.Column("verdict", sql.String(16), nullable=False),
)
_results = sql.Table(
    "results",
    _tables,
    sql.Column("run", sql.ForeignKey("runs.id"), primary_key=True),
    sql.Column("case_id", sql.ForeignKey("cases.id"), primary_key=True),
    sql.Column("status", sql.String(16), nullable=False),
    sql.Column("median_s", sql.Double),
    sql.Column("record", sql.LargeBinary, nullable=False),
)


# Types ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Imported:
    """What an import did: the run, whether it was new, and how many results were added or replaced."""

    run: int
    new: bool
    results: int


def machine_of(env: Mapping[str, Any]) -> str:
    """One text for everything that must be equal for times to be compared: GPU, driver, CUDA, torch, triton."""
    triton = env.get("triton") or {}
    versions = [f"{name} {triton[name]}" for name in sorted(triton)]
    return ", ".join([environments.machine_key(env), *versions])


# The database --------------------------------------------------------------------------------------------------------


class History:
    """A database of runs. Raises `HistoryError` wherever it cannot be used, `DatabaseNameError` for a bad address.

    With `reading`, nothing is created or changed: a database will do that its user may only read.
    """

    def __init__(self, url: str | None = None, *, reading: bool = False) -> None:
        given = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        try:
            parsed = sql.make_url(given)
            backend = parsed.get_backend_name()
            if backend not in ("sqlite", "postgresql"):
                raise DatabaseNameError(f"{_hidden(given)}: SQLite and PostgreSQL are supported, such as {DEFAULT_URL}")
            if backend == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            elif parsed.database in (None, "", ":memory:"):
                raise DatabaseNameError(f"{given}: would be forgotten at once; name a file, such as {DEFAULT_URL}")
            elif not reading:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            elif not Path(parsed.database).exists():
                raise HistoryError(f"{given}: there is no such file; `python -m jfabench history import DIR` makes it")
        except (sql.exc.SQLAlchemyError, ValueError, OSError) as error:
            kind = HistoryError if isinstance(error, OSError) else DatabaseNameError
            raise kind(
                f"{_hidden(given)}: not a database that can be used ({error}); name one such as {DEFAULT_URL} or "
                "postgresql://user@host/name"
            ) from None
        self.name = parsed.render_as_string(hide_password=True)
        try:
            self._engine = sql.create_engine(parsed, **_options(backend))
        except ModuleNotFoundError as error:
            raise HistoryError(f"{self.name} needs {error.name}: pip install 'jfabench[history]'") from None
        if self._engine.dialect.name == "sqlite":
            sql.event.listen(self._engine, "connect", _set_up_sqlite)
            begin = "BEGIN" if reading else "BEGIN IMMEDIATE"
            sql.event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        self._transaction(self._require_schema if reading else self._create)

    def close(self) -> None:
        self._engine.dispose()

    def _create(self, connection: sql.Connection) -> None:
        """Makes the tables that are not there yet."""
        if self._engine.dialect.name == "postgresql":
            connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_LOCK)))
        _schema.create(connection, checkfirst=True)
        found = self._require_schema(connection)
        _tables.create_all(connection, checkfirst=True)
        if found is None:
            connection.execute(_schema.insert().values(version=SCHEMA))

    def _require_schema(self, connection: sql.Connection) -> int | None:
        """The schema of the database, None where it has none yet."""
        if not sql.inspect(connection).has_table(_schema.name):
            raise HistoryError(f"{self.name} holds no history; `python -m jfabench history import DIR` begins one")
        found: int | None = connection.scalar(sql.select(sql.func.max(_schema.c.version)))
        if found is not None and found > SCHEMA:
            raise HistoryError(
                f"{self.name} has schema {found}, newer than this jfabench knows ({SCHEMA}): update jfabench"
            )
        return found

    def _transaction(self, work: Callable[[sql.Connection], T]) -> T:
        """Does `work` whole or not at all; again where another process stood in the way."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._engine.begin() as connection:
                    return work(connection)
            except sql.exc.OperationalError as error:
                if attempt == _ATTEMPTS or not _may_pass(error):
                    raise self._unusable(error) from None
                time.sleep(_PAUSE * attempt)
            except sql.exc.SQLAlchemyError as error:
                raise self._unusable(error) from None
        raise AssertionError("unreachable")

    def _unusable(self, error: Exception) -> HistoryError:
        return HistoryError(
            f"{self.name}: {_first_line(error)}. Nothing was changed; check that this is the right database (--db, or "
            f"${URL_VARIABLE}), and that it can be reached and written"
        )

    # Writing

    def add(self, folder: ResultFolder, verdict: str = "unknown") -> Imported:
        """Imports a result folder, or what it has more than at its last import."""
        records, digest = _read(folder)
        known = [record for record in records if record.env]
        if not known:
            raise HistoryError(f"{folder.stored}: no record says which machine it is from, so nothing can be imported")
        machine, *others = sorted({machine_of(record.env) for record in known})
        if others:
            raise HistoryError(
                f"{folder.stored}: mixes machines ({'; '.join([machine, *others])}); import each run by itself"
            )
        env = dict(known[0].env)
        manifest = folder.read_manifest()
        values = {
            "digest": digest,
            "started": min(record.when for record in records),
            "config": manifest.config if manifest else "",
            "commit_id": env.get("commit"),
            "dirty": env.get("dirty"),
            "env": json.dumps(env, sort_keys=True),
            "verdict": verdict,
        }
        return self._transaction(lambda connection: self._add(connection, machine, values, records))

    def _add(
        self, connection: sql.Connection, machine: str, run: dict[str, Any], records: Sequence[Record]
    ) -> Imported:
        insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert

        def kept(table: sql.Table, column: str) -> Any:
            """Inserts what is not there yet."""
            return insert(table).on_conflict_do_nothing(index_elements=[column])

        connection.execute(kept(_machines, "key"), {"key": machine})
        place = connection.scalar(sql.select(_machines.c.id).where(_machines.c.key == machine))
        statement = kept(_runs, "digest").values(**run, machine=place).returning(_runs.c.id)
        new = connection.scalar(statement) is not None
        number = connection.scalar(sql.select(_runs.c.id).where(_runs.c.digest == run["digest"]))
        assert number is not None
        ids = self._case_ids(connection, kept(_cases, "digest"), records)
        query = sql.select(_results.c.case_id, _results.c.record).where(_results.c.run == number)
        stored = {row.case_id: row.record for row in connection.execute(query)}
        rows = [_result_row(number, ids[record.case], record) for record in records]
        changed = [row for row in rows if stored.get(row["case_id"]) != row["record"]]
        if changed:
            statement = insert(_results)
            update = {name: statement.excluded[name] for name in ("status", "median_s", "record")}
            connection.execute(statement.on_conflict_do_update(index_elements=["run", "case_id"], set_=update), changed)
        return Imported(number, new, len(changed))

    def _case_ids(self, connection: sql.Connection, kept: Any, records: Sequence[Record]) -> dict[Case, int]:
        """The numbers of the records' cases; new ones are inserted."""
        of = {hashlib.sha256(record.case.key.encode()).hexdigest(): record for record in records}
        # Always in the same order, so that no two processes wait for each other in a circle.
        rows = [
            {"digest": digest, "key": of[digest].case.key, "label": str(of[digest].inputs.get("label", ""))}
            for digest in sorted(of)
        ]
        connection.execute(kept, rows)
        query = sql.select(_cases.c.digest, _cases.c.id).where(_cases.c.digest.in_(of))
        return {of[row.digest].case: row.id for row in connection.execute(query)}

    def judge(self, run: int, verdict: str) -> None:
        """Notes what came of a run: `good`, `regression`, `wrong`."""
        self._transaction(
            lambda connection: connection.execute(_runs.update().where(_runs.c.id == run).values(verdict=verdict))
        )

    # Reading

    def runs(self, machine: str | None = None) -> list[Run]:
        """All runs, or those of one machine, the oldest first."""
        query = sql.select(_runs, _machines.c.key.label("machine_key")).join(_machines)
        if machine is not None:
            query = query.where(_machines.c.key == machine)
        rows = self._transaction(
            lambda connection: connection.execute(query.order_by(_runs.c.started, _runs.c.id)).all()
        )
        return [
            Run(row.id, row.machine_key, row.started, row.config, row.commit_id or "", bool(row.dirty), row.verdict)
            for row in rows
        ]

    def last_good(self, machine: str, config: str, before: str) -> Run | None:
        """The latest run of the same grid and machine that was judged good and started before `before`."""
        found = [
            run for run in self.runs(machine) if run.verdict == "good" and run.config == config and run.started < before
        ]
        return found[-1] if found else None

    def records(self, run: int) -> dict[Case, Record]:
        """The records of a run, as they were imported."""
        query = sql.select(_results.c.record).where(_results.c.run == run)
        rows = self._transaction(lambda connection: connection.scalars(query).all())
        records = [Record.from_json(json.loads(zlib.decompress(row))) for row in rows]
        return {record.case: record for record in records}

    def series(self, machine: str | None = None) -> list[Series]:
        """The times of every case with a right result, by machine, in the order in which cases first occurred."""
        runs = {run.id: run for run in self.runs(machine)}
        query = (
            sql.select(_results.c.run, _results.c.median_s, _cases.c.id, _cases.c.key, _cases.c.label)
            .join(_cases)
            .join(_runs)
            .where(_results.c.status == "ok", _results.c.median_s.is_not(None))
            .order_by(_cases.c.id, _runs.c.started, _runs.c.id)
        )
        rows = self._transaction(lambda connection: connection.execute(query).all())
        groups: dict[tuple[str, int], list[Any]] = {}
        for row in rows:
            if row[0] in runs:
                groups.setdefault((runs[row[0]].machine, row[2]), []).append(row)
        return [
            Series(
                key,
                Case.from_json(json.loads(group[0][3])),
                group[0][4],
                tuple(Point(runs[number], seconds) for number, seconds, *_ in group),
            )
            for (key, _), group in groups.items()
        ]


def _options(backend: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": 60.0}} if backend == "sqlite" else {"pool_pre_ping": True}


def _set_up_sqlite(connection: Any, _: Any) -> None:
    """Transactions are begun by us, as writers at once: one that became a writer later could find itself too late."""
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")


def _result_row(run: int, case: int, record: Record) -> dict[str, Any]:
    middle = median_interval(record.measurement.rounds).middle if record.measurement else None
    return {
        "run": run,
        "case_id": case,
        "status": record.status,
        "median_s": middle if middle is not None and middle > 0 else None,
        "record": zlib.compress(record.to_line().encode(), 6),
    }


def _read(folder: ResultFolder) -> tuple[tuple[Record, ...], str]:
    """The records of a folder, and what the run is known by: the hash of the first line."""
    try:
        records = read_folder(folder)
        first = next((line for line in lines_of(folder.stored) if line.strip()), b"")
    except OSError as error:
        raise HistoryError(f"{folder.stored}: cannot be read ({error.strerror}); name a result folder") from None
    except ValueError as error:
        raise HistoryError(str(error)) from None
    if not records:
        raise HistoryError(f"{folder.stored}: no record that can be read")
    return records, hashlib.sha256(first).hexdigest()


def _may_pass(error: Exception) -> bool:
    """Whether what failed can succeed if it is repeated: a lock, a deadlock, a server that restarts."""
    text = str(error).lower()
    return any(word in text for word in ("locked", "deadlock", "could not serialize", "starting up", "busy"))


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _hidden(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://...@{tail}" if at else url


@contextmanager
def opened(url: str | None, *, reading: bool = False) -> Iterator[History]:
    history = History(url, reading=reading)
    try:
        yield history
    finally:
        history.close()
