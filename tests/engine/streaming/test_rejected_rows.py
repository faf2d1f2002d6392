"""Dead letters of rows that a target rejects, and from where they are."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from engine.streaming.letters import kept_letters, letters_of, letters_of_stream, replay_all
from weft.errors import WeftError
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("plain_spark")


@pytest.mark.brief("mysql-driver")
@pytest.mark.usefixtures("streams")
def test_rows_that_a_target_rejects(system: System, way: str) -> None:
    events = declare(n="int64", name="string")
    weft.load([{"n": 100, "name": "there"}], target="strict", mode="merge", keys=["n"])
    weft.publish_sync(events, [{"n": None if n in (0, 3, 6) else n, "name": f"row {n}"} for n in range(7)])
    run_once(
        name="strict",
        source=events,
        target_table=(None, "strict"),
        dead_letter_stream="failed",
    )
    assert rows("strict", "n") == sorted([(1,), (100,), (2,), (4,), (5,)], key=repr)
    letters = letters_of_stream()
    assert [json.loads(each["payload"])["name"] for each in letters] == ["row 0", "row 3", "row 6"]
    assert {(each["stage"], each["target"]) for each in letters} == {("store", "strict")}
    assert [each["offset"] for each in letters] == _offsets(events, {0, 3, 6})
    assert rows("strict__quarantine") == []


@pytest.mark.usefixtures("here")
def test_rejected_rows_of_a_batch_whose_events_are_gone(project: Path) -> None:
    """The letters could not be stored, then retention removed the events: what the target put aside still follows."""
    events = declare(n="int64", name="string")
    weft.load([{"n": 100, "name": "there"}], target="strict", mode="merge", keys=["n"])
    pipeline: dict[str, Any] = {
        "name": "strict",
        "source": events,
        "target_table": (None, "strict"),
        "dead_letter_path": "failed",
    }
    weft.publish_sync(events, {"n": 0, "name": "row 0"})
    run_once(**pipeline)
    weft.publish_sync(events, [{"n": n, "name": f"row {n}"} for n in (1, None)])
    (project / "failed").write_text("in the way")
    with pytest.raises(WeftError, match=r"dead letters in .*failed cannot be"):
        run_once(**pipeline)
    (project / "failed").unlink()
    weft.trim_sync(events, max_rows=0)
    run_once(**pipeline)
    assert rows("strict", "n") == [(0,), (1,), (100,)]
    (letter,) = kept_letters("path", project)
    assert json.loads(letter["payload"])["name"] == "row None"


@pytest.mark.usefixtures("here")
def test_rows_that_two_targets_of_one_name_reject(project: Path) -> None:
    """Each has a letter of its own, and the same one however often the batch is tried."""
    events = declare(n="int64", name="string")
    second = weft.SQLiteConnection("second.db", name="second")
    weft.publish_sync(events, [{"n": None, "name": "row"}, {"n": 1, "name": "row"}])
    pipeline: dict[str, Any] = {
        "name": "strict",
        "source": events,
        "targets": [weft.Target(table=(None, "strict")), weft.Target(connection=second, table=(None, "strict"))],
        "mode": "merge",
        "keys": ["n"],
        "dead_letter_path": "failed",
    }
    run_once(**pipeline)
    letters = kept_letters("path", project)
    assert [(each["stage"], each["target"]) for each in letters] == [
        ("store", "strict (default)"),
        ("store", "strict (second)"),
    ]
    put_back = (
        "INSERT INTO strict__quarantine VALUES ('2026-01-31 00:00:00', ?, 'strict', "
        "(SELECT checkpoint_id FROM \"weft.commits\" WHERE pipeline = 'strict'), 0, ?, 'table')"
    )
    with closing(sqlite3.connect("second.db")) as database, database:
        database.execute(put_back, (letters[0]["error"], letters[0]["payload"]))
    forget_last_commit("strict")
    run_once(**pipeline)
    assert kept_letters("path", project) == letters


@pytest.mark.brief("postgres-tasks")
@pytest.mark.usefixtures("streams")
def test_rows_without_a_key(system: System, way: str) -> None:
    events = declare(n="int64", name="string")
    weft.publish_sync(events, [{"n": None if n in (0, 3) else n, "name": f"row {n}"} for n in range(5)])
    pipeline: dict[str, Any] = {"source": events, "mode": "merge", "keys": ["n"]}
    with pytest.raises(WeftError, match="2 of 5 source rows of refused have no key"):
        run_once(name="refused", target_table="refused", **pipeline)
    run_once(name="merged", target_table="merged", dead_letter_stream="failed", **pipeline)
    assert rows("merged", "n") == [(1,), (2,), (4,)]
    letters = letters_of_stream()
    assert [json.loads(each["payload"])["name"] for each in letters] == ["row 0", "row 3"]
    assert {(each["stage"], each["error"]) for each in letters} == {("store", "The row has no key (n is null).")}
    assert [each["offset"] for each in letters] == _offsets(events, {0, 3})


@pytest.mark.brief("database")
@pytest.mark.parametrize("where", ["database", "delta"])
@pytest.mark.usefixtures("spark", "here")
def test_rows_without_an_event_time(project: Path, where: str) -> None:
    """Two of one key are no contradiction, and a row that has no key either is one letter."""
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    events = declare(k="int64", at="timestamp")
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    given = [{"k": 1, "at": noon}, {"k": 1}, {"k": 1}, {"k": 2}, {"at": noon}, {}, {"k": 3, "at": noon}]
    weft.publish_sync(events, [{"k": None, "at": None, **each} for each in given])
    to = {"connection": lake if where == "delta" else "default", "event_timestamp_column": "at", "primary_key": ["k"]}
    pipeline: dict[str, Any] = {"source": events, "mode": "scd2", "transform_sql": "SELECT k, at FROM source"}
    with pytest.raises(WeftError, match="have no"):
        run_once(name="refused", targets=[weft.Target(table="refused", **to)], **pipeline)
    dated = {"name": "dated", "targets": [weft.Target(table="dated", **to)], "dead_letter_stream": "failed"}
    run_once(**dated, **pipeline)
    found = weft.read("dated" if where == "delta" else "SELECT * FROM dated", source=to["connection"]).collect()
    assert sorted(each["k"] for each in found) == [1, 3]
    reasons = sorted(each["error"] for each in letters_of_stream())
    keyless, timeless = "The row has no key (k is null).", "The row has no event time (at is null)."
    assert len(reasons) == 5
    assert {*reasons} == {keyless, timeless}


@pytest.mark.full
@pytest.mark.usefixtures("spark", "here")
def test_rows_without_a_key_of_a_delta_table(project: Path, way: str) -> None:
    lake = weft.DeltaLocalConnection(str(project / "lake"), name="lake")
    events = declare(n="int64", m="string", data="bytes", at="timestamp")
    row = {"m": "x", "data": b"\x00\xff", "at": datetime(2026, 1, 31, 12, 30, 0, 5, UTC)}
    changes = [{"n": None}, {"n": 1}, {"n": 2, "m": None}, {"n": 2}, {"n": None}]
    weft.publish_sync(events, [{**row, **each} for each in changes])
    pipeline: dict[str, Any] = {"source": events, "target": lake, "mode": "merge", "keys": ["n", "m"]}
    with pytest.raises(WeftError, match="3 of 5 source rows of refused have no key"):
        run_once(name="refused", target_table="refused", **pipeline)
    merged = {"name": "merged", "target_table": "merged", "dead_letter_stream": "failed", **pipeline}
    for _ in range(2):
        run_once(**merged)
        assert sorted(each["n"] for each in weft.read("merged", source=lake).collect()) == [1, 2]
        letters = letters_of_stream()
        assert {(each["stage"], each["error"], each["target"]) for each in letters} == {
            ("store", "The row has no key (n, m is null).", "merged")
        }
        assert sorted(each["offset"] for each in letters) == ["1", "3", "5"]
        forget_last_commit("merged")
    assert json.loads(letters[0]["payload"])["data"] == "00ff"
    replayed = replay_all(make(**merged))
    assert (replayed.letters, replayed.again) == (3, 3)
    assert {(each.offset, each.replays) for each in letters_of(make(**merged))} == {("1", 1), ("3", 1), ("5", 1)}


def _offsets(events: Any, numbers: set[int]) -> list[str]:
    found = weft.consume_sync(events, "counter")
    return [str(each["_weft_rowid"]) for number, each in enumerate(found) if number in numbers]


@pytest.mark.brief("sqlite-driver")
@pytest.mark.usefixtures("streams")
def test_where_rejected_rows_are_from_whatever_they_hold(system: System, way: str) -> None:
    """Databases say values in words of their own: the row is found all the same."""
    fields = {
        "n": "int64",
        "text": "string",
        "ratio": "float64",
        "price": "decimal(20,4)",
        "at": "timestamp",
        "day": "date",
        "more": "json",
        "is_on": "bool",
        "data": "bytes",
    }
    events = declare("events", **fields)
    row = {
        "text": '{"b": 1,  "a": [2]} é\\"',
        "ratio": 0.1,
        "price": Decimal("12.5000"),
        "at": datetime(2026, 1, 31, 12, 30, 0, 5, UTC),
        "day": date(2026, 1, 31),
        "more": {"b": 1, "a": [None, "x"]},
        "is_on": True,
        "data": b"\x00\xff",
    }
    weft.load([{"n": 100}], target="strict", mode="merge", keys=["n"])
    # They differ in their prices, and two of them in nothing.
    changes = [{"n": 1}, {}, {"price": Decimal("1E+3")}, {"n": 2}, {"price": Decimal("1E+3")}]
    weft.publish_sync(events, [{"n": None, **row, **each} for each in changes])
    run_once(name="strict", source=events, target_table=(None, "strict"), dead_letter_stream="failed")
    assert len(rows("strict", "n")) == 3
    assert sorted(each["offset"] for each in letters_of_stream()) == _offsets(events, {1, 2, 4})


SQL_OF_ROWS = {
    "all": ("SELECT * FROM source", True),
    "columns": (
        "SELECT extract(YEAR FROM _event_ts) AS year, n, upper(name) AS name FROM source WHERE n IS NULL OR n > 0",
        True,
    ),
    "join": ("SELECT s.n, u.name FROM source s LEFT JOIN people u ON u.name = s.name", True),
    "groups": ("SELECT max(n) AS n, name FROM source GROUP BY name", False),
    "nested": ("SELECT n, name FROM (SELECT n, name FROM source)", False),
}


@pytest.mark.brief("tasks-groups")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("sql", "is_known"), SQL_OF_ROWS.values(), ids=SQL_OF_ROWS)
def test_where_rejected_rows_of_sql_are_from(sql: str, is_known: bool, way: str) -> None:
    """Known as long as a row of the result is a row of the source."""
    events = declare(n="int64", name="string")
    weft.load([{"name": "a"}, {"name": "b"}], target="people")
    weft.load([{"n": 100}], target="strict", mode="merge", keys=["n"])
    weft.publish_sync(events, [{"n": 1, "name": "a"}, {"n": None, "name": "b"}, {"n": 3, "name": "x"}])
    lookups = {"people": weft.Lookup(table="people")} if "people" in sql else {}
    run_once(
        name="strict",
        source=events,
        target_table=(None, "strict"),
        transform_sql=sql,
        lookups=lookups,
        dead_letter_stream="failed",
    )
    (letter,) = letters_of_stream()
    assert (letter["stage"], letter["source"], letter["offset"]) == ("store", "events", "2" if is_known else None)


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_where_messages_and_rows_of_files_are_from(kafka: Any, project: Path, way: str) -> None:
    """One batch of a topic and of files, with a row for each way to fail."""
    broker = weft.KafkaConnection(kafka.bootstrap, name="broker")
    lake = weft.ObjectStoreLocalConnection("lake", name="lake", format="json_lines")
    weft.load([{"n": 100}], target="strict", mode="merge", keys=["n"])
    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1, "text": "1"}', b"{", b'{"n": 2, "text": "x"}', b'{"n": null, "text": "4"}'])
    (project / "lake/raw").mkdir(parents=True)
    for name, text in {"a": '{"n": 5, "text": "5"}\n{"n": 6, "text": "y"}', "b": '{"n": null, "text": "7"}'}.items():
        (project / f"lake/raw/{name}.json").write_text(text)
    run_once(
        name="strict",
        sources=[weft.Source(connection=broker, query=topic), weft.Source(connection=lake, query="raw")],
        target_table=(None, "strict"),
        transform_sql="SELECT n, CAST(text AS INT) AS number FROM source",
        transform_on_error="dlq",
        dead_letter_stream="failed",
    )
    assert rows("strict", "n") == [(1,), (100,), (5,)]
    assert sorted((each["stage"], each["source"], each["offset"]) for each in letters_of_stream()) == sorted(
        [
            ("read", topic, "0:1"),
            ("store", "raw", "raw/b.json"),
            ("store", topic, "0:3"),
            ("transform", "raw", "raw/a.json"),
            ("transform", topic, "0:2"),
        ]
    )


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_where_messages_without_sql_are_from(kafka: Any, way: str) -> None:
    broker = weft.KafkaConnection(kafka.bootstrap, name="broker")
    weft.load([{"n": 100}], target="strict", mode="merge", keys=["n"])
    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1}', b'{"n": null, "x": 0.1}', b'{"n": 2, "x": 1e3}'])
    run_once(
        name="strict", source=broker, source_query=topic, target_table=(None, "strict"), dead_letter_stream="failed"
    )
    (letter,) = letters_of_stream()
    assert (letter["source"], letter["offset"]) == (topic, "0:1")
