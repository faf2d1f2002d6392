"""The first copy of a table, range by range; inside one database, without Spark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import weft
from weft.engine.load import open_tables
from weft.engine.streaming.cdc import copying
from weft.engine.streaming.cdc.copying import copied, tables_to_copy
from weft.engine.streaming.cdc.routes import resolved
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Copies
from weft.engine.streaming.query import Query
from weft.engine.streaming.targets import place_of
from weft.errors import BusyError, DeclarationError, LoadRefusedError, NotFoundError
from weft.pipelines.streaming.declare import make
from weft.project import Project, use
from weft.spark_support.folder import LocalFolder, Location
from weft.systems.sql.tables import Slice, SqlTables

KEYS = {
    "number": ("id BIGINT", "id", [str(each * 7) for each in range(20)]),
    "text": ("id VARCHAR(20)", "id", [f"'{word}'" for word in ("b", "B", "ä", "a''", "aa", "z", "Z z", "\\", "0")]),
    "both": ("id INT, line VARCHAR(9)", "id, line", [f"{each // 4}, 'l{each}'" for each in range(20)]),
    "date": ("id DATE", "id", [f"'2026-01-{each:02}'" for each in range(1, 12)]),
}


@pytest.fixture(params=["postgres", "mysql"])
def warehouse(request: pytest.FixtureRequest, shared_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(copying, "ROWS_A_RANGE", 3)
    with use(Project()), shared_server(request.param).database() as url:
        yield weft.connect(name="warehouse", url=url)


@pytest.fixture
def home(tmp_path: Path) -> Location:
    return Location(LocalFolder(), str(tmp_path / "checkpoint"))


@pytest.fixture
def tables(warehouse: Any) -> Iterator[SqlTables]:
    opened = open_tables(warehouse)
    yield opened
    opened.close()


def run_sql(tables: SqlTables, *statements: str) -> None:
    with tables.driver.session("publish") as session:
        for each in statements:
            session.run(each)


def rows(tables: SqlTables, table: str) -> list[tuple[Any, ...]]:
    sql = f"SELECT * FROM {tables.table(None, table)}"
    found = [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
    return sorted((tuple(row.values()) for row in found), key=repr)


def mirror(warehouse: Any, keys: str = "id", **options: Any) -> Any:
    changes = weft.stream(name="changes", connection=warehouse, fields={})(lambda: None)
    cdc = weft.CDC(
        envelope="debezium",
        key_field=keys.replace(" ", ""),
        snapshot="copy",
        snapshot_connection=warehouse,
        **{"snapshot_table": "people", **options},
    )
    return resolved(make(name="copies", source=changes, target=warehouse, target_table="mirror", cdc=cdc))


class AtStep(logging.Handler):
    """Calls a function whenever a range was copied."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work, self.ranges = work, 0

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "copied":
            self.ranges += 1
            self.work()

    def __enter__(self) -> AtStep:
        self.logger = logging.getLogger("weft.streaming")
        self.level = self.logger.level
        self.logger.setLevel(logging.DEBUG)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level)


class Crash(BaseException):
    """The end of a process."""


@pytest.mark.brief("postgres-number", "postgres-both", "mysql-text", "mysql-date")
@pytest.mark.parametrize("kind", KEYS)
def test_all_rows_also_after_a_crash(warehouse: Any, tables: SqlTables, home: Location, kind: str) -> None:
    columns, keys, values = KEYS[kind]
    collation = " COLLATE utf8mb4_general_ci" if tables.dialect == "mysql" else ""
    if kind == "text" and collation:  # to which some of these are one word
        values = [each for each in values if each not in ("'B'", "'ä'")]
    run_sql(
        tables,
        f"CREATE TABLE people ({columns}{collation if kind == 'text' else ''}, name TEXT, PRIMARY KEY ({keys}))",
        *(f"INSERT INTO people VALUES ({each}, 'x')".replace("\\", "\\\\" if collation else "\\") for each in values),
    )
    pipeline = mirror(warehouse, keys)

    def crash() -> None:
        if step.ranges == 2:
            raise Crash

    with AtStep(crash) as step, pytest.raises(Crash):
        copied(pipeline, home, threading.Event())
    assert 0 < len(rows(tables, "mirror")) < len(values)
    with AtStep(lambda: None) as again:
        assert copied(pipeline, home, threading.Event())
    assert rows(tables, "mirror") == rows(tables, "people")
    with AtStep(lambda: None) as never:
        assert copied(pipeline, home, threading.Event())
    # The second range was not noted, and is copied again.
    assert (again.ranges > 1, never.ranges) == (True, 0)


@pytest.mark.brief("postgres")
def test_it_can_be_stopped(warehouse: Any, tables: SqlTables, home: Location) -> None:
    run_sql(tables, "CREATE TABLE people (id INT PRIMARY KEY)", *(f"INSERT INTO people VALUES ({n})" for n in range(9)))
    stopping = threading.Event()
    with AtStep(stopping.set):
        assert not copied(mirror(warehouse), home, stopping)
    assert len(rows(tables, "mirror")) == 3
    assert copied(mirror(warehouse), home, threading.Event())
    assert rows(tables, "mirror") == rows(tables, "people")


def test_it_waits_for_transactions_that_have_begun(
    warehouse: Any, tables: SqlTables, home: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their changes may be before the noted end already, though nobody sees their rows."""
    run_sql(tables, "CREATE TABLE people (id INT PRIMARY KEY)", "INSERT INTO people VALUES (1)")
    asked, kind = threading.Semaphore(0), type(tables)
    look = kind.running_transactions

    def looked(self: SqlTables, session: Any) -> set[str]:
        found = look(self, session)
        asked.release()
        return found

    monkeypatch.setattr(kind, "running_transactions", looked)
    copy = threading.Thread(target=copied, args=(mirror(warehouse), home, threading.Event()))
    with tables.driver.session("publish") as session:
        session.run("INSERT INTO people VALUES (2)")
        copy.start()
        for _ in range(3):
            assert asked.acquire(timeout=120)
        noted = Copies(home).of(place_of(mirror(warehouse).targets[0], warehouse))
        assert noted is not None
        assert (noted["table"], noted["keys"], noted["after"]) == ("people", ["id"], None)
    copy.join(120)
    assert rows(tables, "mirror") == [(1,), (2,)]


@pytest.mark.brief("postgres")
def test_all_tables_of_a_route(warehouse: Any, tables: SqlTables, home: Location) -> None:
    for name in ("people", "pets"):
        run_sql(tables, f"CREATE TABLE {name} (id INT PRIMARY KEY)", f"INSERT INTO {name} VALUES (1), (2), (3), (4)")
    changes = weft.stream(name="changes", connection=warehouse, fields={})(lambda: None)
    route = {"people": "mirror", "pets": "other"}
    cdc = weft.CDC(envelope="debezium", route=route, key_field="id", snapshot="copy", snapshot_connection=warehouse)
    pipeline = resolved(make(name="copies", source=changes, target=warehouse, cdc=cdc))
    assert tables_to_copy(pipeline) == ["people", "pets"]
    assert copied(pipeline, home, threading.Event())
    assert [rows(tables, each) for each in route.values()] == [rows(tables, each) for each in route]


@pytest.mark.brief("postgres")
def test_what_is_refused(warehouse: Any, tables: SqlTables, home: Location) -> None:
    run_sql(tables, "CREATE TABLE people (id INT PRIMARY KEY, name TEXT)", "INSERT INTO people VALUES (1, 'a')")
    with pytest.raises(NotFoundError, match="There is no table persons"):
        copied(mirror(warehouse, snapshot_table="persons"), home, threading.Event())
    with pytest.raises(DeclarationError, match="has no column 'no', which is a key"):
        copied(mirror(warehouse, "no"), home, threading.Event())
    with pytest.raises(DeclarationError, match="does not say which table"):
        copied(mirror(warehouse, snapshot_table=None), home, threading.Event())
    soft = {"delete_mode": "soft", "soft_delete_column": "gone"}
    with pytest.raises(DeclarationError, match="does not know the type of soft_delete_column"):
        copied(mirror(warehouse, **soft), home, threading.Event())
    run_sql(tables, "CREATE TABLE mirror (id INT PRIMARY KEY, gone BOOLEAN)")
    assert copied(mirror(warehouse, **soft), home, threading.Event())
    assert rows(tables, "mirror") == [(1, None)]
    with pytest.raises(LoadRefusedError, match="mirror of the connection 'warehouse' has rows") as refused:
        copied(mirror(warehouse), Location(home.folder, f"{home.path} of another"), threading.Event())
    assert "weft cdc verify copies --source warehouse --mend" in str(refused.value.hint)


# ---------------------------------------------------------------------------------------------------- without a server


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(copying, "ROWS_A_RANGE", 3)
    with use(Project()):
        file = weft.connect(name="file", kind="sqlite", path=str(tmp_path / "file.db"))
        with closing(open_tables(file)) as tables:
            for name in ("people", "others"):
                run_sql(tables, f"CREATE TABLE {name} (id BIGINT PRIMARY KEY, line BIGINT)")
                run_sql(tables, *(f"INSERT INTO {name} VALUES ({each}, {each})" for each in range(8)))
        yield file


def test_a_copy_does_not_go_on_with_another_table(file: Any, home: Location) -> None:
    stopping = threading.Event()
    with AtStep(stopping.set):
        assert not copied(mirror(file, snapshot_table="others"), home, stopping)
    for other in (mirror(file), mirror(file, "line", snapshot_table="others")):
        with pytest.raises(DeclarationError, match=r"has rows of a copy of others .* by id, and now") as refused:
            copied(other, home, threading.Event())
        assert "weft checkpoints reset copies" in str(refused.value.hint)
    assert copied(mirror(file, snapshot_table="others"), home, threading.Event())
    with pytest.raises(DeclarationError, match="has rows of a copy of others"):
        copied(mirror(file), home, threading.Event())


def test_targets_of_one_name_in_two_places_are_both_copied(
    file: Any, home: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections without a name have the same label."""
    targets = [
        weft.Target(connection=weft.connect(kind="sqlite", path=str(tmp_path / name)), table="mirror")
        for name in ("a.db", "b.db")
    ]
    loaded: list[Any] = []
    # From one file to another Spark would carry the rows.
    monkeypatch.setattr(copying._Copy, "_load", lambda copy, *_: loaded.append(copy.target))
    changes = weft.stream(name="changes", connection=file, fields={})(lambda: None)
    cdc = weft.CDC(
        envelope="debezium", key_field="id", snapshot="copy", snapshot_connection=file, snapshot_table="people"
    )
    pipeline = resolved(make(name="copies", source=changes, targets=targets, cdc=cdc))
    assert copied(pipeline, home, threading.Event())
    assert set(map(id, loaded)) == set(map(id, pipeline.targets))


def test_a_rewind_keeps_what_was_copied(tmp_path: Path) -> None:
    checkpoint = Checkpoint("copies", str(tmp_path / "checkpoint"))
    written = {
        "metadata": '{"id": "1"}',
        "offsets/0": 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1}\n5',
        "commits/0": "v1\n{}",
    }
    for name, text in written.items():
        checkpoint.home.at(name).write(text)
    Copies(checkpoint.home).note("mirror", done=True)
    with checkpoint.changing():
        checkpoint.rewind([3], {})
    assert checkpoint.positions(1) == (3,)
    assert Copies(checkpoint.home).of("mirror") == {"done": True}


def test_a_lease_that_is_lost_during_a_copy_is_an_error(
    file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(mirror(file), checkpoint=Checkpoint("copies", str(tmp_path / "checkpoint")))
    query.stop()  # as the lease does that is lost
    assert query.wait()
    lost = SimpleNamespace(is_lost=True, release=lambda: None)
    monkeypatch.setattr(query.checkpoint.lock, "_lease", lost)
    with pytest.raises(BusyError, match="no longer holds its checkpoint"):
        query.wait()
