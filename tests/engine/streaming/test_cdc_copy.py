"""A mirror that begins with a copy, while others write to the source: in the end both have the same rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from engine.streaming.cdc.test_copying import AtStep, Crash
from engine.streaming.conftest import rows, run_once
from weft.engine.load import open_tables
from weft.engine.streaming.cdc import copying
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Sources
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.supervisor import Supervisor
from weft.pipelines.streaming.declare import make
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


@pytest.fixture(params=["postgres", "mysql"])
def source(request: pytest.FixtureRequest, shared_server: Any) -> Iterator[Any]:
    with shared_server(request.param).database() as url:
        yield weft.connect(name="shop", url=url)


class Writer:
    """Changes a table, and publishes each change some time after its commit."""

    def __init__(self, tables: SqlTables, changes: Any) -> None:
        self.tables, self.changes, self.random = tables, changes, random.Random(5)
        self.rows: dict[int, int] = {}
        self.waiting: list[dict[str, Any]] = []
        self.numbers = iter(range(1, 1_000_000))
        self._run("CREATE TABLE people (id INT PRIMARY KEY, n INT)")

    def _run(self, statement: str) -> None:
        with self.tables.driver.session("publish") as session:
            session.run(statement)

    def work(self, changes: int) -> None:
        """Insert, update and delete rows, and change keys; publish all but the last few."""
        for _ in range(changes):
            self._change(next(self.numbers))
        self.publish(len(self.waiting) - 3)

    def publish(self, count: int) -> None:
        sent, self.waiting = self.waiting[:count], self.waiting[count:]
        if sent:
            weft.publish_sync(self.changes, sent)

    def _change(self, number: int) -> None:
        key = self.random.randrange(60)
        before = {"id": key, "n": self.rows[key]} if key in self.rows else None
        after: dict[str, Any] | None = {"id": key, "n": number}
        if before is None:
            op, sql = "c", f"INSERT INTO people VALUES ({key}, {number})"
        elif self.random.random() < 0.4:
            op, sql, after = "d", f"DELETE FROM people WHERE id = {key}", None
        elif (moved := self.random.randrange(60)) not in self.rows:
            op, sql = "u", f"UPDATE people SET id = {moved}, n = {number} WHERE id = {key}"
            after = {"id": moved, "n": number}
        else:
            op, sql = "u", f"UPDATE people SET n = {number} WHERE id = {key}"
        self._run(sql)
        self.rows.pop(key, None)
        if after is not None:
            self.rows[after["id"]] = number
        place = {"lsn": number, "ts_ms": 1_770_000_000_000 + number}
        self.waiting.append({"op": op, "before": before, "after": after, "source": place})


@pytest.mark.brief("postgres")
def test_others_write_while_it_is_copied(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are changed, deleted or get another key before, between and after the ranges; it is stopped after the
    first range, and crashes after the third."""
    monkeypatch.setattr(copying, "ROWS_A_RANGE", 6)
    changes = weft.stream(name="changes", fields={"op": "string", "before": "json", "after": "json", "source": "json"})(
        lambda: None
    )
    tables = open_tables(source)
    writer = Writer(tables, changes)
    writer.work(60)
    declared: dict[str, Any] = {
        "name": "copies",
        "source": changes,
        "target_table": (None, "mirror"),
        "cdc": weft.CDC(
            envelope="debezium",
            key_field="after.id",
            snapshot="copy",
            snapshot_connection=source,
            snapshot_table="people",
        ),
    }

    supervisor = Supervisor(SparkEngine(make(**declared, target="default")))

    def write() -> None:
        writer.work(15)
        if step.ranges == 1:
            supervisor.stop()
        if step.ranges == 3:
            raise Crash

    with AtStep(write) as step:
        supervisor.run()
        assert step.ranges <= 2
        assert Sources(Checkpoint("copies").home).check(make(**declared, target="default"))
        step.ranges = 2
        with pytest.raises(Crash):
            run_once(**declared)
        writer.work(15)
        run_once(**declared)
    assert step.ranges > 4  # the third range was not noted
    writer.work(15)
    writer.publish(len(writer.waiting))
    run_once(**declared)
    assert rows("mirror", "id, n") == sorted(writer.rows.items(), key=repr)
    assert rows("people", "id, n", source) == rows("mirror", "id, n")
    tables.close()
