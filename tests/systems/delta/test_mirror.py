"""Changes of a table, applied to a Delta table: one MERGE a batch, and a gate that drops what is late."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, forget_last_commit, run_once
from systems.tables.test_change_histories import WAYS, Batches, Source, check_versions, checked, together
from systems.tables.test_changes import DEBEZIUM, MESSAGES, NOW, change, milliseconds
from systems.tables.test_changes import row as whole_row
from weft import CDC
from weft.engine import spark_io
from weft.engine.streaming.cdc.applying import ChangeBatch
from weft.engine.streaming.cdc.envelopes import opened
from weft.engine.streaming.cdc.newest import newest
from weft.pipelines.streaming.execution import CdcReport
from weft.project import Project
from weft.systems.load import Load

BEGAN = 1_770_000_000_000


class Lake:
    """A stream of envelopes, and a pipeline that applies them to a Delta table."""

    def __init__(self, spark: Any, folder: Path, **cdc: Any) -> None:
        self.spark, self.folder = spark, folder / "lake"
        self.events = declare(op="string", before="json?", after="json?", source="json?")
        self.cdc = CDC(envelope="debezium", key_field="after.id", **cdc)

    def publish(self, *changes: tuple[str, Any, Any, int]) -> None:
        for op, before, after, lsn in changes:
            source = {"lsn": lsn, "ts_ms": BEGAN + lsn}
            weft.publish_sync("events", {"op": op, "before": before, "after": after, "source": source})

    def run(self) -> None:
        run_once(
            name="mirror",
            source=self.events,
            target=weft.DeltaLocalConnection(path=str(self.folder)),
            target_table=("default", "customers"),
            target_primary_key=["id"],
            cdc=self.cdc,
        )

    def rows(self, columns: str = "*") -> list[tuple[Any, ...]]:
        path = self.folder / "default" / "customers"
        return [tuple(row) for row in self.spark.sql(f"SELECT {columns} FROM delta.`{path}` ORDER BY id").collect()]

    def versions(self) -> int:
        return len(list((self.folder / "default" / "customers" / "_delta_log").glob("*.json")))


@pytest.fixture
def lake(spark: Any, streams: Project, project: Path) -> Lake:
    return Lake(spark, project)


def row(id_: int, name: str | None, **more: Any) -> dict[str, Any]:
    return {"id": id_, "name": name, **more}


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_changes_become_rows_by_one_commit_a_batch(lake: Lake) -> None:
    lake.publish(("r", None, row(1, "a"), 1), ("c", None, row(2, "b"), 2), ("c", None, row(3, "c"), 3))
    lake.run()
    assert lake.rows() == [(1, "a"), (2, "b"), (3, "c")]
    before = lake.versions()
    lake.publish(
        ("u", row(1, "a"), row(1, "A"), 4),
        ("u", row(1, "A"), row(1, "AA"), 5),
        ("d", row(2, "b"), None, 6),
        ("u", row(3, "c"), row(4, "moved"), 7),
    )
    lake.run()
    assert lake.rows() == [(1, "AA"), (4, "moved")]
    assert lake.versions() == before + 1
    # Late, repeated, and of a key that is deleted.
    lake.publish(("u", None, row(1, "old"), 3), ("c", None, row(2, "b"), 2), ("c", None, row(5, "e"), 8))
    lake.run()
    assert lake.rows() == [(1, "AA"), (4, "moved"), (5, "e")]
    # A truncate, which rows that came after it survive.
    lake.publish(("c", None, row(6, "f"), 12), ("t", None, None, 10), ("u", None, row(4, "later"), 11))
    lake.run()
    assert lake.rows() == [(4, "later"), (6, "f")]
    # A batch that Spark takes for undone is in the table.
    forget_last_commit("mirror")
    after = lake.versions()
    lake.run()
    assert (lake.rows(), lake.versions()) == ([(4, "later"), (6, "f")], after)


@pytest.mark.full
@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_columns_are_added_types_kept_and_rows_marked(spark: Any, streams: Project, project: Path) -> None:
    lake = Lake(spark, project, schema_evolution="evolve", delete_mode="soft", soft_delete_column="gone_at")
    path = lake.folder / "default" / "customers"
    spark.sql(
        f"CREATE TABLE delta.`{path}` (id INT, name STRING, day DATE, n DECIMAL(10,2), gone_at TIMESTAMP) USING delta"
    )
    lake.publish(
        ("c", None, row(1, "a", day=19782, n="1.50"), 1),
        ("c", None, row(2, "b", day=None, n=None), 2),
        ("c", None, row(5, "e", day=None, n=None), 2),
    )
    lake.run()
    assert [tuple(map(str, each)) for each in lake.rows("id, name, day, n, gone_at")] == [
        ("1", "a", "2024-02-29", "1.50", "None"),
        ("2", "b", "None", "None", "None"),
        ("5", "e", "None", "None", "None"),
    ]
    unavailable = "__debezium_unavailable_value"
    lake.publish(
        ("u", None, row(1, unavailable, day=19783, n="2.50", more="x"), 3),
        ("d", row(2, "b"), None, 4),
        ("u", None, row(9, unavailable, day=1, n=None, more=None), 5),  # there is no row whose name it could keep
        ("u", row(2, "b"), row(3, unavailable, day=1, n="3.50", more="y"), 6),  # that row is gone
        ("u", row(1, "a"), row(7, unavailable, day=1, n="7.50", more="z"), 7),
        ("u", row(50, "e"), row(5, unavailable, day=1, n="5.50", more="w"), 8),  # it has its new key already, by a copy
    )
    lake.run()
    assert [tuple(map(str, each)) for each in lake.rows("id, name, day, n, more, gone_at IS NULL")] == [
        ("1", "a", "2024-02-29", "1.50", "None", "False"),
        ("2", "b", "None", "None", "None", "False"),
        ("3", "None", "1970-01-02", "3.50", "y", "True"),
        ("5", "e", "1970-01-02", "5.50", "w", "True"),
        ("7", "a", "1970-01-02", "7.50", "z", "True"),
        ("9", "None", "1970-01-02", "None", "None", "True"),
    ]
    gates = list((path / "_weft_cdc").glob("*/*.arrow"))
    assert len(gates) <= 2, json.dumps([str(each) for each in gates])


class _Broken(logging.Handler):
    """Breaks a load off once it has taken a step."""

    def __init__(self, step: str) -> None:
        super().__init__(logging.DEBUG)
        self.step = step

    def handle(self, record: logging.LogRecord) -> bool:
        if record.getMessage() == self.step:
            raise RuntimeError(f"broken off: {self.step}")
        return True


@pytest.mark.full
@pytest.mark.parametrize("step", ["begun", "created", "checked", "committed"])
@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_a_batch_that_is_broken_off_is_there_once(lake: Lake, step: str) -> None:
    lake.publish(("c", None, row(1, "a"), 1), ("c", None, row(2, "b"), 2))
    lake.run()
    lake.publish(("u", None, row(1, "A"), 5), ("d", row(2, "b"), None, 6))
    steps, handler = logging.getLogger("weft.commit"), _Broken(step)
    level = steps.level
    steps.addHandler(handler)
    steps.setLevel(logging.DEBUG)
    try:
        with pytest.raises(Exception, match=f"broken off: {step}"):
            lake.run()
    finally:
        steps.removeHandler(handler)
        steps.setLevel(level)
    lake.run()
    lake.publish(("u", None, row(1, "late"), 4), ("u", None, row(2, "late"), 5), ("c", None, row(3, "c"), 7))
    lake.run()
    assert lake.rows() == [(1, "A"), (3, "c")]


class _Applied:
    """A Delta table that batches are applied to without a pipeline: a batch takes a second all the same."""

    def __init__(self, spark: Any, folder: Path, table: str, mode: str) -> None:
        self.spark, self.path = spark, folder / "lake" / "default" / table
        self.lake = weft.DeltaLocalConnection(path=str(folder / "lake"))
        self.load = Load.declare(target=("default", table), mode=mode, keys=("id",), pipeline="mirrors")
        self.batches = numbers()

    def apply(self, messages: list[dict[str, Any]]) -> CdcReport:
        found = opened(pa.Table.from_pylist(messages, schema=MESSAGES), DEBEZIUM)
        batch = ChangeBatch(DEBEZIUM, found, newest(found), [], found.skipped)
        load = replace(self.load, moment=NOW, checkpoint_id="one", batch_id=next(self.batches))
        rows, load = batch.planned(load, None)
        frame = self.spark.createDataFrame(pa.Table.from_batches(rows.batches, rows.schema))
        return batch.report([spark_io.write(frame, self.lake, load)])

    def rows(self) -> list[dict[str, Any]]:
        return [each.asDict() for each in self.spark.sql(f"SELECT * FROM delta.`{self.path}` ORDER BY id").collect()]


def _check_mirror(table: _Applied, batches: Batches, source: Source) -> None:
    first = [change("c", None, whole_row(100, "x", 1.5), 0), change("d", whole_row(100), None, 0, 1)]
    for messages in [first, *batches, source.log]:
        report = table.apply(messages)
        told = (report.creates, report.updates, report.deletes, report.idempotent_skipped)
        assert sum(told) == sum(each["op"] != "t" for each in messages)
    assert told[:3] == (0, 0, 0)
    assert table.rows() == sorted(source.stored.values(), key=lambda each: each["id"])


def _check_history(table: _Applied, batches: Batches, source: Source, *, back: bool) -> None:
    for messages in [[change("c", None, whole_row(100, "x", 1.5), 0)], *batches, source.log]:
        report = table.apply(messages)
    # All of it again: no version is there twice.
    assert (report.creates, report.updates, report.deletes) == (0, 0, 0)
    check_versions(table.rows(), source, back=back)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@WAYS
def test_the_mirror_is_what_the_source_has(
    spark: Any, project: Path, count: Callable[..., int], options: dict[str, bool]
) -> None:
    _check_mirror(_Applied(spark, project, "mirror", "merge"), *together(count(2000), **options))


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@WAYS
def test_the_mirror_of_a_source_that_is_truncated(
    spark: Any, project: Path, count: Callable[..., int], options: dict[str, bool]
) -> None:
    tables = numbers()

    def check(batches: Batches, source: Source) -> None:
        _check_mirror(_Applied(spark, project, f"mirror_{next(tables)}", "merge"), batches, source)

    checked(count(100), check, **options)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("back", [False, True])
def test_a_history_has_every_version(spark: Any, project: Path, count: Callable[..., int], back: bool) -> None:
    batches, source = together(count(2000), back=back)
    _check_history(_Applied(spark, project, "history", "scd2"), batches, source, back=back)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("back", [False, True])
def test_a_history_of_a_source_that_is_truncated(
    spark: Any, project: Path, count: Callable[..., int], back: bool
) -> None:
    tables = numbers()

    def check(batches: Batches, source: Source) -> None:
        _check_history(_Applied(spark, project, f"history_{next(tables)}", "scd2"), batches, source, back=back)

    checked(count(100), check, back=back)


@pytest.mark.parametrize("has_positions", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_history_by_one_commit_a_batch(spark: Any, project: Path, has_positions: bool) -> None:
    """Late, repeated, deleted, truncated, and several changes of one millisecond."""
    table = _Applied(spark, project, "history", "scd2")

    def said(*step: Any, lsn: int, ts: int) -> dict[str, Any]:
        return change(*step, lsn=lsn if has_positions else None, ts=ts)

    one = said("c", None, whole_row(1, "a"), lsn=1, ts=1)
    of_one_time = [said("d", whole_row(1), None, lsn=4, ts=5), said("c", None, whole_row(1, "c"), lsn=5, ts=5)]
    last = [said("c", None, whole_row(2, "x"), lsn=6, ts=6), said("t", lsn=7, ts=8)]
    late = said("u", None, whole_row(1, "b"), lsn=2, ts=3)
    for each in ([one], of_one_time, last, [late, one], [*of_one_time, *last]):
        report = table.apply(each)
    assert (report.creates, report.updates, report.deletes, report.idempotent_skipped) == (0, 0, 0, 3)
    found = [(each["name"], milliseconds(each["valid_from"]), milliseconds(each["valid_to"])) for each in table.rows()]
    assert sorted(found) == [("a", 1, 3), ("b", 3, 5), ("c", 5, 8), ("x", 6, 8)]
    assert not any(each["is_current"] for each in table.rows())
