"""Bad rows alone go to the dead letters, with the reason and where they are from; their neighbours go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from engine.streaming.letters import kept_letters, letters_of, letters_of_stream, replay_all
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
    letters = kept_letters(place, project)
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
    letters = {each["source"]: each for each in letters_of_stream()}
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
    assert sorted(each["stage"] for each in letters_of_stream()) == ["read", "store"]
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
    assert rows("sums") == [] and len(letters_of_stream()) == 2


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
    assert [json.loads(each["payload"])["n"] for each in kept_letters(place, project)] == [1]
    forget_last_commit("numbers")
    run_once(**pipeline, delivery="at_least_once")
    assert sorted(json.loads(each["payload"])["n"] for each in kept_letters(place, project)) == [0, 1]


@pytest.mark.brief("postgres")
@pytest.mark.usefixtures("streams")
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
    ((payload, error),) = rows("failed", "payload, error")
    assert (json.loads(payload), error) == (
        {"n": 2, "body": "\\xff\\xfe"},
        "Column 'body' has a text that is not UTF-8.",
    )


@weft.udf(args=("Int64",), returns="Int64")
def fragile(n):  # type: ignore[no-untyped-def]
    if 2 in n.to_pylist():
        os._exit(3)
    return n


@weft.udf(args=("Int64",), returns="Int64")
def unused(n):  # type: ignore[no-untyped-def]
    return n


@pytest.mark.usefixtures("here")
@pytest.mark.timeout(120)  # a worker of Spark's may wait for good
def test_a_row_that_ends_the_process_of_a_function() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": 1}, {"n": 2}, {"n": 3}])
    options: dict[str, Any] = {"source": events, "transform_sql": "SELECT fragile(n) AS n FROM source"}
    options["udfs"] = [fragile, unused]
    with pytest.raises(WeftError, match=r"batch of failing: the Python process ended that ran the UDF fragile\."):
        run_once(name="failing", target_table=(None, "failing"), **options)
    to = {"target_table": (None, "copies"), "dead_letter_stream": "failed"}
    run_once(name="copies", transform_on_error="dlq", **to, **options)
    assert rows("copies", "n") == [(1,), (3,)]
    (letter,) = letters_of_stream()
    assert json.loads(letter["payload"])["n"] == 2 and "UDF fragile" in letter["error"]
    declared = make(name="copies", target="default", transform_on_error="dlq", **to, **options)
    assert replay_all(declared).again == 1
    (again,) = letters_of(declared)
    assert again.replays == 1 and "UDF fragile" in again.error
