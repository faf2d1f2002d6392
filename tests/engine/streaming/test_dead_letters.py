"""Bad rows alone go to the dead letters, with the reason and where they are from; their neighbours go on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from engine.streaming.letters import letters_of, replay_all
from weft.engine.streaming.dead_letters import stream_of
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import WeftError
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report

pytestmark = pytest.mark.usefixtures("plain_spark")

# Each place and each system once, and both ways of the rows.

SQL = "SELECT n, CAST(text AS INT) AS number FROM source"
EVENTS = [{"n": n, "text": "x" if n in (0, 3, 6) else str(n)} for n in range(7)]
GOOD = [(n, n) for n in (1, 2, 4, 5)]


@pytest.mark.brief("driver-stream")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["stream", "table", "path"])
def test_rows_that_cannot_be_transformed(place: str, way: str, project: Path) -> None:
    events = declare(n="int64", text="string")
    weft.publish_sync(events, EVENTS)
    where = {"stream": "failed", "table": (None, "failed"), "path": str(project / "failed")}
    pipeline: dict[str, Any] = {
        "name": "numbers",
        "source": events,
        "target_table": (None, "numbers"),
        "transform_sql": SQL,
        "transform_on_error": "dlq",
        f"dead_letter_{place}": where[place],
    }
    if place == "table":
        pipeline["dead_letter_connection"] = "default"
    run_once(**pipeline)
    forget_last_commit("numbers")
    run_once(**pipeline)
    assert rows("numbers") == GOOD
    letters = _letters(place, project)
    assert [(each["offset"], json.loads(each["payload"])["n"]) for each in letters] == [("1", 0), ("4", 3), ("7", 6)]
    for each in letters:
        assert (each["pipeline"], each["stage"], each["source"]) == ("numbers", "transform", "events")
        assert "'x'" in each["error"] and "at org.apache" not in each["error"]


@pytest.mark.usefixtures("here")
def test_letters_name_the_source_that_they_are_of() -> None:
    one, other = declare("one", n="int64", text="string"), declare("other", text="string", m="int64")
    weft.publish_sync(one, [{"n": 1, "text": "1"}, {"n": 2, "text": "x"}])
    weft.publish_sync(other, [{"m": 3, "text": "y"}, {"m": 4, "text": "4"}])
    run_once(
        name="numbers",
        sources=[weft.Source(query=one), weft.Source(query=other)],
        target_table=(None, "numbers"),
        transform_sql="SELECT *, CAST(text AS INT) AS number FROM source",
        transform_on_error="dlq",
        dead_letter_stream="failed",
    )
    assert rows("numbers", "n, m, number") == [(1, None, 1), (None, 4, 4)]
    letters = {each["source"]: each for each in _of_stream()}
    assert {name: (each["offset"], json.loads(each["payload"])["text"]) for name, each in letters.items()} == {
        "one": ("2", "x"),
        "other": ("1", "y"),
    }


@pytest.mark.brief("driver-redis")
@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql", "redis"], indirect=True)
def test_values_that_do_not_fit_the_fields_of_a_stream(streams: Any, way: str) -> None:
    """They are kept beside the columns, which have a null in their place."""
    del streams
    events = declare(n="int64", price="decimal(10,2)", more="json")
    odd = [{"n": "two", "more": {"a": 2}}, {"n": 3, "price": 1.005, "🦀": 2**70}]
    for event in ({"n": 1, "more": {"a": [1]}}, *odd):
        weft.publish_sync(events, event)
    offsets = [str(each["_weft_rowid"]) for each in weft.consume_sync(events, "me")]
    lake = weft.SQLiteConnection("copies.db", name="copies")
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "target": lake, "target_table": (None, "copies")}
    with pytest.raises(
        WeftError, match=r"2 events of events cannot be parsed, .* 'n' is \"two\", which does not fit int64"
    ):
        run_once(**pipeline)
    pipeline |= {"dead_letter_table": "failed"}
    run_once(**pipeline)
    run_once(**pipeline)
    assert rows("copies", "n", lake) == [(1,)]
    letters = sorted(letters_of(make(**pipeline)), key=lambda each: str(each.offset))
    assert [(each.stage, each.offset) for each in letters] == [("read", offset) for offset in offsets[1:]]
    payloads = [json.loads(each.payload) for each in letters]
    assert [{name: each[name] for name in sent} for each, sent in zip(payloads, odd, strict=True)] == odd
    # SQL that asks for them has them.
    sql = "SELECT coalesce(n, 0) AS n, get_json_object(_weft_extra, '$.n') AS word FROM source"
    run_once(**{**pipeline, "name": "words", "transform_sql": sql, "target_table": (None, "words")})
    assert rows("words", "n, word", lake) == [(0, "two"), (1, None), (3, None)]


@pytest.mark.usefixtures("here")
def test_values_that_came_before_their_column(way: str) -> None:
    """A publish adds no more than 20 columns; the next one adds those that were left."""
    events = declare(n="int64", f="float64")
    many = {f"k{number:02}": number for number in range(25)}
    weft.publish_sync(events, {"n": 1, "f": -0.0, **many})
    weft.publish_sync(events, {"n": 2, "f": 0.5, **many})
    run_once(name="copy", source=events, target_table=(None, "copies"))
    assert rows("copies", "n, f, k03, k24") == [(1, 0.0, 3, 24), (2, 0.5, 3, 24)]


@pytest.mark.usefixtures("here")
def test_rows_may_be_dropped_or_fail_the_batch() -> None:
    events = declare(n="int64", text="string")
    weft.publish_sync(events, EVENTS)
    pipeline: dict[str, Any] = {"source": events, "transform_sql": SQL}
    with pytest.raises(WeftError, match="'x'"):
        run_once(name="fail", target_table=(None, "failing"), **pipeline)
    run_once(name="drop", target_table=(None, "dropping"), transform_on_error="drop", **pipeline)
    assert rows("dropping") == GOOD


@pytest.mark.usefixtures("here")
def test_rows_that_are_dropped_beside_a_place(project: Path) -> None:
    """What SQL fails for is dropped, as the pipeline says; other bad rows go to the place that it names."""
    (project / "lake/raw").mkdir(parents=True)
    lines = [{"n": 1, "text": "1"}, {"n": 2, "text": "x"}, {"n": None, "text": "3"}, ["no", "object"]]
    (project / "lake/raw/a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reports: list[Report] = []
    listener = RunListener()
    listener.batch = reports.append  # type: ignore[method-assign]
    pipeline = make(
        name="numbers",
        source=weft.ObjectStoreLocalConnection("lake", name="lake"),
        source_query="raw",
        target="default",
        target_table="numbers",
        mode="merge",
        keys=["n"],
        transform_sql=SQL,
        transform_on_error="drop",
        dead_letter_stream="failed",
    )
    supervise(SparkEngine(pipeline), Running(once=True), [listener])
    assert rows("numbers", "n, number") == [(1, 1)]
    assert sorted(each["stage"] for each in _of_stream()) == ["read", "store"]
    assert [each.dead for each in reports] == [3]


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_nothing_is_made_of_no_rows() -> None:
    events = declare(text="string")
    weft.publish_sync(events, [{"text": "x"}, {"text": "y"}])
    run_once(
        name="sums",
        source=events,
        target_table="sums",
        transform_sql="SELECT sum(CAST(text AS INT)) AS total FROM source",
        transform_on_error="dlq",
        dead_letter_stream="failed",
    )
    assert rows("sums") == [] and len(_of_stream()) == 2


@pytest.mark.usefixtures("here")
def test_a_batch_that_only_fails_together_is_an_error() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": 2**62}, {"n": 2**62}])
    with pytest.raises(WeftError, match="overflow"):
        run_once(
            name="sums",
            source=events,
            target_table=(None, "sums"),
            transform_sql="SELECT sum(n) AS n FROM source",
            transform_on_error="drop",
        )


@pytest.mark.brief("table")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["stream", "table"])
def test_other_letters_of_the_same_batch_are_not_taken_for_those(place: str, project: Path) -> None:
    """SQL was changed between two tries of a batch: what is bad now is another row, and the first one stays. It is a
    letter where the target does not say that it has the batch."""
    events = declare(n="int64", text="string")
    weft.publish_sync(events, [{"n": 0, "text": "1"}, {"n": 1, "text": "x"}])
    pipeline: dict[str, Any] = {
        "name": "numbers",
        "source": events,
        "target_table": (None, "numbers"),
        "transform_on_error": "dlq",
        f"dead_letter_{place}": "failed",
    }
    run_once(**pipeline, transform_sql=SQL)
    forget_last_commit("numbers")
    pipeline["transform_sql"] = "SELECT n, 1 DIV n AS number FROM source"
    run_once(**pipeline)
    assert [json.loads(each["payload"])["n"] for each in _letters(place, project)] == [1]
    forget_last_commit("numbers")
    run_once(**pipeline, delivery="at_least_once")
    assert sorted(json.loads(each["payload"])["n"] for each in _letters(place, project)) == [0, 1]


@pytest.mark.brief("sqlite-driver", "mysql-driver")
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
    letters = _of_stream()
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
    (letter,) = _letters("path", project)
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
    letters = _letters("path", project)
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
    assert _letters("path", project) == letters


@pytest.mark.brief("sqlite-driver", "postgres-tasks")
@pytest.mark.usefixtures("streams")
def test_rows_without_a_key(system: System, way: str) -> None:
    events = declare(n="int64", name="string")
    weft.publish_sync(events, [{"n": None if n in (0, 3) else n, "name": f"row {n}"} for n in range(5)])
    pipeline: dict[str, Any] = {"source": events, "mode": "merge", "keys": ["n"]}
    with pytest.raises(WeftError, match="2 of 5 source rows of refused have no key"):
        run_once(name="refused", target_table="refused", **pipeline)
    run_once(name="merged", target_table="merged", dead_letter_stream="failed", **pipeline)
    assert rows("merged", "n") == [(1,), (2,), (4,)]
    letters = _of_stream()
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
    reasons = sorted(each["error"] for each in _of_stream())
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
        letters = _of_stream()
        assert {(each["stage"], each["error"], each["target"]) for each in letters} == {
            ("store", "The row has no key (n, m is null).", "merged")
        }
        assert sorted(each["offset"] for each in letters) == ["1", "3", "5"]
        forget_last_commit("merged")
    assert json.loads(letters[0]["payload"])["data"] == "00ff"
    replayed = replay_all(make(**merged))
    assert (replayed.letters, replayed.again) == (3, 3)
    assert {(each.offset, each.replays) for each in letters_of(make(**merged))} == {("1", 1), ("3", 1), ("5", 1)}


@pytest.mark.usefixtures("here")
def test_lines_of_files_that_are_no_rows(project: Path, count: Callable[..., int]) -> None:
    lake = weft.ObjectStoreLocalConnection("lake", name="lake")
    files = {
        "json/a.json": b'{"n": 1}\n[2]\n{"n": 3, "text": "\xff"}\n{"n": 4, "te',
        "json/b.json": b'{"n": 5, "text": "x"}\n',
        "bad/a.json": b"nothing\n\n5\n",
        "csv/a.csv": b"n,text\n1,x\n2,x,y\n3\n" + b"".join(b"%d,x\n" % n for n in range(4, 1100)) + b"many,x\n",
    }
    for name, data in files.items():
        (project / "lake" / name).parent.mkdir(parents=True, exist_ok=True)
        (project / "lake" / name).write_bytes(data)
    pipeline: dict[str, Any] = {"source": lake, "dead_letter_path": "failed"}
    is_full = count(2, 1) > 1
    for prefix in ("json", "bad", "csv"):
        if is_full or prefix == "csv":
            with pytest.raises(WeftError, match=rf"lines of {prefix} cannot be parsed, the first at {prefix}/a\."):
                run_once(name=f"{prefix} alone", source=lake, source_query=prefix, target_table="none")
        run_once(name=prefix, source_query=prefix, target_table=prefix, **pipeline)
        if is_full or prefix == "csv":
            forget_last_commit(prefix)
            run_once(name=prefix, source_query=prefix, target_table=prefix, **pipeline)
    assert rows("json", "n, text") == [(1, None), (5, "x")]
    assert len(rows("csv", "n")) == 1097
    found = {(each["pipeline"], each["offset"], each["payload"]) for each in _letters("path", project)}
    assert len(found) == len(_letters("path", project))
    assert {each["error"] for each in _letters("path", project)} == {
        "It is not a JSON object.",
        "It cannot be parsed as a row of these columns: n bigint, text string.",
    }
    assert {each[2] for each in found if each[0] == "bad"} == {"nothing", "5"}
    assert {each[2].strip() for each in found if each[0] == "csv"} == {"2,x,y", "3", "many,x"}
    assert {each[1:] for each in found if each[0] == "json"} == {
        ("json/a.json", "[2]"),
        ("json/a.json", '{"n": 3, "text": "\\xff"}'),
        ("json/a.json", '{"n": 4, "te'),
    }
    tried = replay_all(make(name="csv", source_query="csv", target="default", target_table="csv", **pipeline))
    assert tried.letters == 0 and len(tried.held) == 3
    assert {*tried.held.values()} == {"it is a line of csv: put it, mended, into a new file of csv"}
    run_once(
        name="dropping",
        source=lake,
        source_query="json",
        target_table="dropping",
        transform_sql="SELECT n FROM source",
        transform_on_error="drop",
    )
    assert rows("dropping") == [(1,), (5,)]
    # What could not be read leaves no column behind.
    (project / "lake/json/c.json").write_bytes(b'{"n": 6}\n')
    run_once(name="json", source_query="json", target_table="json", **pipeline)
    assert rows("json", "*")[-1][:2] == (6, None) and len(rows("json", "*")[0]) == 3


CSV_OPTIONS = [
    ({"null_regex": "^-$"}, 3, {"2,x,y", "3", "4,x,y,z", '-,"a, b",', 'many,"-, "'}),
    ({"truncated_rows_ok": True}, 3, {"2,x,y", "4,x,y,z", "-,x", '-,"a, b",', 'many,"-, "'}),
    ({"null_regex": "^-$", "truncated_rows_ok": True}, 5, {"2,x,y", "4,x,y,z", 'many,"-, "'}),
]


@pytest.mark.full
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("options", "good", "bad"), CSV_OPTIONS)
def test_rows_of_files_that_are_read_as_texts_first(
    options: dict[str, Any], good: int, bad: set[str], project: Path, count: Callable[..., int]
) -> None:
    many = "".join(f"{n},x\n" for n in range(10, 1010))
    (project / "lake/raw").mkdir(parents=True)
    (project / "lake/raw/a.csv").write_text(f'n,text\n{many}1,x\n2,x,y\n3\n-,x\n-,"a, b",\nmany,"-, "\n')
    (project / "lake/raw/b.csv").write_text("n,text\n1,-\n4,x,y,z\n")
    lake = weft.ObjectStoreLocalConnection("lake", name="lake", format="csv", csv_read_options=options)
    pipeline: dict[str, Any] = {"source": lake, "source_query": "raw", "target_table": "copies"}
    with pytest.raises(WeftError, match=r"lines of raw cannot be parsed, the first at raw/[ab]\.csv"):
        run_once(name="alone", **pipeline)
    for _ in range(count(2, 1)):
        run_once(name="numbers", dead_letter_path="failed", **pipeline)
        assert len(rows("copies")) == 1000 + good
        letters = _letters("path", project)
        assert len(letters) == len(bad)
        forget_last_commit("numbers")
    assert {each["payload"].strip() for each in letters} == bad
    assert {each["error"] for each in letters} == {
        "It cannot be parsed as a row of these columns: n bigint, text string."
    }


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
    assert sorted(each["offset"] for each in _of_stream()) == _offsets(events, {1, 2, 4})


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
    (letter,) = _of_stream()
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
    assert sorted((each["stage"], each["source"], each["offset"]) for each in _of_stream()) == sorted(
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
    (letter,) = _of_stream()
    assert (letter["source"], letter["offset"]) == (topic, "0:1")


def _letters(place: str, project: Path) -> list[dict[str, Any]]:
    if place == "stream":
        return _of_stream()
    if place == "table":
        names = ("offset", "payload", "pipeline", "stage", "source", "error")
        return [
            dict(zip(names, row, strict=True))
            for row in rows("failed", '"offset", payload, pipeline, stage, source, error')
        ]
    frame = weft.read("failed", source=weft.ObjectStoreLocalConnection(str(project), name="project"))
    return sorted(frame.toArrow().to_pylist(), key=lambda each: each["offset"])


def _of_stream() -> list[dict[str, Any]]:
    return list(weft.consume_sync(stream_of("failed", None), "me"))


@pytest.mark.brief("sqlite", "postgres")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_bytes_that_are_no_text() -> None:
    """Spark casts any bytes to a text, also those that are not UTF-8."""
    events = declare(n="int64", body="bytes")
    weft.publish_sync(events, [{"n": 1, "body": b"good"}, {"n": 2, "body": b"\xff\xfe"}, {"n": 3, "body": b"fine"}])
    sql = "SELECT n, CAST(body AS STRING) AS body FROM source"
    with pytest.raises(WeftError, match=r"UTF-?8|Incorrect string value"):
        run_once(name="failing", source=events, target_table=(None, "failing"), transform_sql=sql)
    options: dict[str, Any] = {
        "source": events,
        "target_table": (None, "copies"),
        "dead_letter_table": (None, "failed"),
    }
    run_once(name="copies", transform_sql=sql, **options)
    assert rows("copies", "n, body") == [(1, "good"), (3, "fine")]
    assert [json.loads(payload) for (payload,) in rows("failed", "payload")] == [{"n": 2, "body": "\\xff\\xfe"}]
