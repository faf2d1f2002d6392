"""Streams as targets: each row of a batch is an event."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, forget_last_commit, run_once
from engine.streaming.letters import letters_of, replay_all
from weft.engine.streaming import target_streams
from weft.errors import SchemaError
from weft.pipelines.streaming.declare import make
from weft.project import Project, current
from workers import drain

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


@pytest.mark.brief("tasks-100000")
@pytest.mark.parametrize("size", [100_000, 2])
def test_a_stream_is_cleaned_into_another(size: int, way: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_streams, "_EVENTS", size)
    events, clean = declare(n="int64", name="string"), declare("clean", n="int64", name="string")
    weft.publish_sync(events, [{"n": n, "name": " x "} for n in range(6)])
    pipeline: dict[str, Any] = {
        "name": "clean",
        "source": events,
        "target": clean,
        "transform_sql": "SELECT n, trim(name) AS name, _event_ts FROM source WHERE n <> 3",
    }
    run_once(**pipeline)
    last = max((project / ".weft/checkpoints/clean/commits").glob("[0-9]*"), key=lambda each: int(each.name))
    last.unlink()
    run_once(**pipeline)
    found = weft.consume_sync(clean, "me", batch_size=100)
    assert {each["name"] for each in found} == {"x"}
    stored = sorted(each["n"] for each in found)
    # As one publish it is stored once, else at least once.
    assert stored == sorted([0, 1, 2, 4, 5] * (1 if size > 5 else 2))


def test_a_batch_that_gives_other_values_again(project: Path) -> None:
    """It was published, and Spark did not write that down: its events are there once, as they were first."""
    events, clean = declare(n="int64"), declare("clean", n="int64", at="timestamp")
    weft.publish_sync(events, [{"n": n} for n in range(3)])
    sql = "SELECT n, current_timestamp() AS at, _event_ts FROM source"
    run_once(name="clean", source=events, target=clean, transform_sql=sql)
    first = weft.read_stream("default", clean)["at"].to_list()
    forget_last_commit("clean")
    run_once(name="clean", source=events, target=clean, transform_sql=sql)
    assert weft.read_stream("default", clean)["at"].to_list() == first


@pytest.mark.parametrize("sql", [None, "SELECT n, doc FROM source"])
def test_json_stays_what_it_is(sql: str | None) -> None:
    events, clean = declare(n="int64", doc="json"), declare("clean", n="int64", doc="json")
    documents = [{"a": [1, None, "é"]}, [], "5", 5, "x", True, 2**70, None]
    weft.publish_sync(events, [{"n": n, "doc": doc} for n, doc in enumerate(documents)])
    run_once(name="clean", source=events, target=clean, transform_sql=sql)
    assert [each["doc"] for each in weft.consume_sync(clean, "me")] == documents
    if sql is None:
        run_once(name="copy", source=events, target=weft.stream(name="copies")(lambda: None))
        assert [each["doc"] for each in weft.consume_sync("copies", "me")] == documents


def test_integers_that_became_wider_than_the_field() -> None:
    """One large number among the messages of a batch makes decimals of all: those that fit are integers again."""
    events, clean = declare(n="int64"), declare("clean", n="int64", wide="int64", more="json")
    weft.publish_sync(events, [{"n": n} for n in range(3)])
    wide = "CAST(CASE WHEN n = 2 THEN 1e37 ELSE n END AS DECIMAL(38,0))"
    sql = f"SELECT n, {wide} AS wide, array({wide}, NULL) AS more FROM source"
    run_once(name="clean", source=events, target=clean, transform_sql=sql)
    found = [(each["wide"], each["more"]) for each in weft.consume_sync(clean, "me")]
    assert found == [(0, [0, None]), (1, [1, None]), (10**37, [10**37, None])]


def test_times_that_python_does_not_have() -> None:
    """They are texts, as a field and within a document."""
    events = declare(n="int64")
    clean = declare("clean", n="int64", at="timestamp", doc="json")
    weft.publish_sync(events, [{"n": n} for n in range(3)])
    far = "timestamp_micros(253402300800000000 * {})"
    sql = f"SELECT n, {far.format('(n DIV 2)')} AS at, array(named_struct('at', {far.format('n')})) AS doc FROM source"
    run_once(name="clean", source=events, target=clean, transform_sql=sql)
    found = [(str(each["at"])[:5], each["doc"][0]["at"][:5]) for each in weft.consume_sync(clean, "me")]
    assert found == [("1970-", "1970-"), ("1970-", "10000"), ("10000", "18029")]


@pytest.mark.full
def test_from_redis_to_redis(open_system: Callable[[str], AbstractContextManager[System]], way: str) -> None:
    with open_system("redis") as redis:
        connection = redis.connection
        source = weft.stream(name="clicks", fields={"n": "int64"}, connection=connection)(lambda: None)
        target = weft.stream(name="copies", fields={"n": "int64"}, connection=connection)(lambda: None)
        weft.publish_sync(source, [{"n": n} for n in range(5)])
        run_once(name="copy", source=weft.Source(query=source, max_rows=2), target=target)
        assert [each["n"] for each in weft.consume_sync(target, "me")] == list(range(5))
        weft.streams.close()


def test_from_an_entry_of_redis_on(open_system: Callable[[str], AbstractContextManager[System]]) -> None:
    with open_system("redis") as redis:
        source = weft.stream(name="clicks", fields={"n": "int64"}, connection=redis.connection)(lambda: None)
        for n in range(3):
            weft.publish_sync(source, {"n": n})
        offset = weft.consume_sync(source, "me")[1]["_weft_rowid"]
        start = f"{offset >> 20}-{offset % (1 << 20)}"
        run_once(name="copy", source=weft.Source(query=source, start=start), target=declare("copies", n="int64"))
        assert [each["n"] for each in weft.consume_sync("copies", "me")] == [1, 2]
        weft.streams.close()


@pytest.mark.brief("sqlite", "redis")
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql", "redis"])
def test_rows_that_a_stream_refuses(
    kind: str, open_system: Callable[[str], AbstractContextManager[System]], here: Project
) -> None:
    """They are dead letters by themselves, and are replayed when the stream takes them."""
    events = declare(n="int64", text="string", doc="json")
    weft.publish_sync(
        events,
        [
            {"n": 0, "text": "a"},
            {"n": 1},
            {"n": 2, "text": "c", "more": 5, "doc": {"a": 1}},
            {"n": 3, "text": "d", "doc": {"b": 1}},
            {"n": 4, "text": "e"},
        ],
    )
    declared: dict[str, Any] = {"name": "copy", "source": events, "dead_letter_stream": "failed"}
    # JSON has no NaN.
    odd = "CASE WHEN n = 4 THEN array(CAST('NaN' AS DOUBLE)) END AS list"
    declared["transform_sql"] = f"SELECT n, text, doc, more, {odd} FROM source"
    with open_system(kind) as system:

        def stream(**options: Any) -> Any:
            here.streams.pop("clean", None)
            fields = {"n": "int64", "text": "string", "doc": "json?", "list": "json?"}
            return weft.stream(name="clean", fields=fields, connection=system.connection, **options)(lambda: None)

        strict = stream(validate_schema=True)
        run_once(target=strict, **declared)
        pipeline = make(target=strict, **declared)
        found = {each.offset: (json.loads(each.payload)["n"], each.error) for each in letters_of(pipeline)}
        assert [(offset, n) for offset, (n, _) in sorted(found.items())] == [("2", 1), ("3", 2), ("5", 4)]
        assert "The publish to 'clean': field 'text' is null" in found["2"][1]
        assert "field 'more' = 5: the stream has no such field" in found["3"][1]
        assert "NaN" in found["5"][1]
        weft.streams.close(here)
        clean = stream()
        replay_all(make(target=clean, **declared))
        again = {each["n"]: (each.get("text"), each.get("doc"), each.get("more")) for each in drain(clean)}
        assert again == {
            0: ("a", None, None),
            1: (None, None, None),
            2: ("c", {"a": 1}, 5),
            3: ("d", {"b": 1}, None),
        }
        assert [json.loads(each.payload)["n"] for each in letters_of(pipeline)] == [4]
        weft.streams.close()


def test_rows_that_a_stream_refuses_without_a_place_for_them() -> None:
    events = declare(n="int64", text="string")
    weft.publish_sync(events, [{"n": 0, "text": "a"}, {"n": 1}])
    strict = weft.stream(name="clean", fields={"n": "int64", "text": "string"}, validate_schema=True)(lambda: None)
    with pytest.raises(SchemaError, match="field 'text' is null; it must be string") as raised:
        run_once(name="copy", source=events, target=strict)
    assert "dead_letter_stream" in str(raised.value)


def test_what_a_database_refuses_is_found_by_halves(
    open_system: Callable[[str], AbstractContextManager[System]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes our own checks."""
    monkeypatch.setattr("weft.systems.redis.store._MOST_BYTES", 1000)
    events = declare(n="int64", text="string")
    weft.publish_sync(events, [{"n": n, "text": "x" * (2000 if n == 3 else 300)} for n in range(6)])
    with open_system("redis") as redis:
        clean = weft.stream(name="clean", fields={"n": "int64", "text": "string"}, connection=redis.connection)
        pipeline: dict[str, Any] = {"source": events, "target": clean(lambda: None), "dead_letter_stream": "failed"}
        run_once(name="copy", **pipeline)
        assert sorted(each["n"] for each in drain(current().streams["clean"])) == [0, 1, 2, 4, 5]
        (letter,) = letters_of(make(name="copy", **pipeline))
        assert (letter.offset, json.loads(letter.payload)["n"]) == ("4", 3)
        assert "may have 1,000 bytes" in letter.error
        weft.streams.close()
