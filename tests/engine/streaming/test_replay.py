"""Dead letters that are replayed: what is mended arrives once, the rest goes back, and nothing goes round for ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import weft
from conftest import System
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of, pipeline_of, put, replay_all, unread
from weft.engine.readers import open_tables
from weft.engine.streaming import replay
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.replay import Replay, ReplayResult
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import BusyError, DeclarationError, WeftError
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.project import current
from weft.spark_support.folder import LocalFolder
from weft.systems.dead_letter_store import DeadLetter

pytestmark = pytest.mark.spark

Where = Callable[[], dict[str, Any]]


# A busy broker may take longer than the client waits for it.
_TOPIC = pytest.param("topic", marks=pytest.mark.timing)


@pytest.fixture(params=["table", "stream", "redis", "path", _TOPIC, "bucket", "delta", "duckdb"])
def where(request: pytest.FixtureRequest, project: Path, open_system: Any) -> Iterator[Where]:
    """Where letters go."""
    opened = ExitStack()

    def declared() -> dict[str, Any]:
        if request.param == "topic":
            kafka = request.getfixturevalue("kafka")
            broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
            return {"dead_letter_topic": kafka.create_topic(3), "dead_letter_connection": broker}
        if request.param == "bucket":
            bucket = weft.ObjectStoreS3Connection(name="bucket", **request.getfixturevalue("s3").fields())
            return {"dead_letter_path": "bad/rows", "dead_letter_connection": bucket}
        if request.param == "redis":
            redis = opened.enter_context(open_system("redis")).connection
            return {"dead_letter_stream": "failed", "dead_letter_connection": redis}
        if request.param == "duckdb":
            duck = weft.DuckDBConnection(str(project / "letters.duckdb"), name="duck")
            return {"dead_letter_table": "failed", "dead_letter_connection": duck}
        if request.param == "delta":
            request.getfixturevalue("spark")
            delta = weft.DeltaLocalConnection(str(project / "delta"), name="delta")
            return {"dead_letter_table": "failed", "dead_letter_connection": delta}
        return {f"dead_letter_{request.param}": "failed"}

    with opened:
        yield declared


# --------------------------------------------------------------------------------------------------------------- places


@pytest.mark.brief("table", "stream", "redis", "path", "topic", "bucket")
@pytest.mark.usefixtures("here")
def test_letters_in_every_place(where: Where) -> None:
    place = where()
    pipeline, other = pipeline_of(**place), pipeline_of(name="other", **place)
    assert letters_of(pipeline) == []
    put(pipeline, unread(1, 2, 3))
    put(pipeline, unread(1, 2, 3))
    put(pipeline, unread(1), batch=1)
    put(other, unread(7))
    found = letters_of(pipeline)
    assert [json.loads(each.payload)["n"] for each in found] == [1, 1, 2, 3]
    first = found[0]
    assert (first.stage, first.error, first.source, first.offset) == ("read", "No 1", "events", "1")
    assert (first.target, first.pipeline, first.replays) == (None, "copies", 0)
    assert {each.batch for each in found[:2]} == {0, 1}
    assert abs((datetime.now(UTC) - first.failed_at).total_seconds()) < 600

    DeadLetterBox(pipeline).remove([found[2].letter_id, "unknown"])
    assert letters_of(pipeline) == [*found[:2], found[3]]
    done = replay_all(pipeline)
    assert (done.letters, done.again, done.held) == (3, 0, {})
    assert rows("copies", "n, text") == rows("others", "n, text") == [(1, "é1"), (1, "é1"), (3, "é3")]
    assert letters_of(pipeline) == []
    assert replay_all(pipeline) == ReplayResult()
    assert len(letters_of(other)) == 1
    # A letter can come again after all were gone.
    put(pipeline, unread(9))
    assert len(letters_of(pipeline)) == 1


@pytest.mark.usefixtures("streams")
def test_a_table_on_every_system() -> None:
    pipeline = pipeline_of(dead_letter_table="failed")
    put(pipeline, unread(*range(1200)))
    assert replay_all(pipeline).letters == 1200
    assert len(rows("copies")) == 1200
    assert rows("failed") == []


@pytest.mark.brief("table")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["table", "stream", "path"])
def test_letters_without_a_count_of_replays(place: str, project: Path) -> None:
    """As they were written before letters were replayed."""
    pipeline = pipeline_of(**{f"dead_letter_{place}": "failed"})
    old = {
        "failed_at": datetime(2026, 1, 31, tzinfo=UTC),
        **dict.fromkeys(("error", "source"), "?"),
        "letter_id": "a1",
        "pipeline": "copies",
        "batch": 3,
        "stage": "read",
        "payload": "{",
        "offset": "1",
        "target": None,
    }
    if place == "table":
        weft.load([old], target="failed", mode="merge", keys=["letter_id"])
    elif place == "stream":
        fields = dict.fromkeys(old, "string?") | {"failed_at": "timestamp", "batch": "int64"}
        weft.publish_sync(weft.stream(name="failed", fields=fields)(lambda: None), [old])
    else:
        (project / "failed").mkdir()
        text = json.dumps({**old, "failed_at": "2026-01-31T00:00:00+00:00"})
        (project / "failed/part-0.json").write_text(f"{text}\nnobody knows\n[]\n")
    (letter,) = letters_of(pipeline)
    assert (letter.failed_at, letter.batch, letter.replays) == (old["failed_at"], 3, 0)
    assert replay_all(pipeline).again == 1
    (letter,) = letters_of(pipeline)
    assert (letter.batch, letter.offset, letter.replays) == (3, "1", 1)
    assert "JSON" in letter.error
    if place == "path":
        assert (project / "failed/part-0.json").read_text() == "nobody knows\n[]\n"


@pytest.mark.usefixtures("here")
def test_letters_in_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who removes some of them reads the files that have them, not all."""
    pipeline = pipeline_of(dead_letter_path="failed")
    for n in range(5):
        put(pipeline, unread(n, n + 10), n)
    box = DeadLetterBox(pipeline)
    found = {json.loads(each.payload)["n"]: each.letter_id for each in box.letters()}
    opened: list[str] = []
    read = LocalFolder.read
    monkeypatch.setattr(LocalFolder, "read", lambda self, path: opened.append(path) or read(self, path))
    box.remove([found[1], found[11], found[2]])
    assert len(opened) == 2
    # A file that came since then is looked into as well.
    put(pipeline, unread(7), 7)
    (seventh,) = (each.letter_id for each in letters_of(pipeline) if json.loads(each.payload)["n"] == 7)
    box.remove([seventh, found[2]])
    assert sorted(json.loads(each.payload)["n"] for each in letters_of(pipeline)) == [0, 3, 4, 10, 12, 13, 14]


@pytest.mark.usefixtures("here")
def test_letters_among_the_files_that_are_read(project: Path) -> None:
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="json_lines")
    for where in ({"dead_letter_path": "lake/raw/failed"}, {"dead_letter_path": "raw", "dead_letter_connection": lake}):
        pipeline = pipeline_of(source=weft.Source(connection=lake, query="raw/"), **where)
        with pytest.raises(DeclarationError, match="among the files of raw/"):
            letters_of(pipeline)
    assert (
        letters_of(pipeline_of(source=weft.Source(connection=lake, query="raw/"), dead_letter_path="lake/raw2")) == []
    )


@pytest.mark.usefixtures("here")
def test_a_path_of_the_environment(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of(dead_letter_path="${FAILED_ROWS}/copies")
    with pytest.raises(weft.SettingsError, match="FAILED_ROWS is not set, and the dead_letter_path of copies needs it"):
        put(pipeline, unread(1))
    monkeypatch.setenv("FAILED_ROWS", str(project / "failed"))
    put(pipeline, unread(1))
    assert len(letters_of(pipeline)) == 1 and (project / "failed/copies").is_dir()


@pytest.mark.usefixtures("here")
def test_a_pipeline_without_a_place() -> None:
    with pytest.raises(DeclarationError, match="no place") as failure:
        replay_all(pipeline_of())
    assert "dead_letter_table" in str(failure.value.hint)


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.brief("table")
@pytest.mark.usefixtures("plain_spark", "here")
@pytest.mark.parametrize("place", ["table", "stream"])
def test_sql_that_is_mended(place: str) -> None:
    events = declare(n="int64", text="string")
    weft.publish_sync(events, [{"n": n, "text": "x" if n % 2 else str(n)} for n in range(6)])
    declared: dict[str, Any] = {
        "name": "numbers",
        "source": events,
        "target": "default",
        "target_table": "numbers",
        "transform_on_error": "dlq",
        f"dead_letter_{place}": "failed",
    }
    bad = {**declared, "transform_sql": "SELECT n, CAST(text AS INT) AS number, _event_ts, _weft_rowid r FROM source"}
    run_once(**bad)
    before = letters_of(make(**bad))
    done = replay_all(make(**bad))
    assert (done.letters, done.again) == (3, 3)
    after = letters_of(make(**bad))
    assert [each.replays for each in after] == [1, 1, 1]
    kept = ("payload", "source", "offset", "batch", "stage", "target")
    assert [[getattr(each, name) for name in kept] for each in after] == [
        [getattr(each, name) for name in kept] for each in before
    ]
    assert not {each.letter_id for each in before} & {each.letter_id for each in after}
    good = make(**{**bad, "transform_sql": bad["transform_sql"].replace("CAST(text AS INT)", "try_cast(text AS INT)")})
    assert (replay_all(good).again, letters_of(good)) == (0, [])
    assert replay_all(good) == ReplayResult()
    assert rows("numbers", "n, number, r") == [(n, None if n % 2 else n, n + 1) for n in range(6)]
    # When it happened is the moment of the publish, which all share.
    assert len({moment for (moment,) in rows("numbers", "_event_ts")}) == 1


@pytest.mark.usefixtures("plain_spark", "here")
def test_some_rows_of_a_set_fail_again() -> None:
    """Each goes back with its own reason, and the neighbours go on, through lookups and functions too."""

    @weft.udf(args=("Int64",), returns="Int64")
    def twice(numbers: Any) -> Any:
        return pc.multiply(numbers, 2)

    weft.load([{"id": 1, "word": "one"}], target="words")
    pipeline = pipeline_of(
        transform_sql="SELECT twice(n) n, CAST(text AS INT) + 1 AS number, word FROM source LEFT JOIN words ON id = n",
        transform_on_error="dlq",
        lookups={"words": weft.Lookup(connection="default", table="words")},
        udfs=[twice],
        dead_letter_table="failed",
    )
    payloads = ['{"n": 1, "text": "1"}', '{"n": 2, "text": "x"}', "{", '{"n": 4, "text": "4"}', '{"n": 5, "text": "y"}']
    put(pipeline, [DeadLetter("transform", "?", "events", each, str(n)) for n, each in enumerate(payloads)])
    done = replay_all(pipeline)
    assert (done.letters, done.again) == (5, 3)
    assert rows("copies") == rows("others") == [(2, 2, "one"), (8, 5, None)]
    found = {each.offset: each for each in letters_of(pipeline)}
    assert {each: found[each].stage for each in found} == {"1": "transform", "2": "read", "4": "transform"}
    assert "'x'" in found["1"].error
    assert "'y'" in found["4"].error
    assert {each.payload for each in found.values()} == {payloads[1], payloads[2], payloads[4]}


@pytest.mark.usefixtures("plain_spark", "here")
def test_what_only_fails_together_leaves_the_letters_alone() -> None:
    pipeline = pipeline_of(
        transform_sql="SELECT sum(n) AS n FROM source", transform_on_error="dlq", dead_letter_table="failed"
    )
    put(pipeline, [DeadLetter("transform", "?", "events", json.dumps({"n": 2**62}), str(n)) for n in (1, 2)])
    before = letters_of(pipeline)
    with pytest.raises(WeftError, match="overflow"):
        replay_all(pipeline)
    assert letters_of(pipeline) == before
    assert Replay(pipeline, lambda each: each.offset == "1").run().letters == 1
    assert rows("copies") == [(2**62,)]


# -------------------------------------------------------------------------------------------------------- rejected rows


@pytest.mark.brief("sqlite")
@pytest.mark.usefixtures("streams")
def test_rows_that_a_target_takes_once_it_is_mended(system: System) -> None:
    wide: dict[str, Any] = {
        "n": 1,
        "name": "there",
        "d": Decimal("1.5"),
        "at": datetime(2026, 1, 31, tzinfo=UTC),
        "raw": b"\xff",
    }
    _table("strict", system, "n BIGINT NOT NULL")
    kinds = {"n": "int64?", "name": "string", "d": "decimal(10,2)", "at": "timestamp", "raw": "bytes"}
    events = weft.stream(name="events", fields=kinds)(lambda: None)
    weft.publish_sync(events, [wide | {"n": n, "name": f"row {n}"} for n in (None, 2, None)])
    pipeline = make(
        name="strict",
        source=events,
        targets=[weft.Target(table=(None, "strict")), weft.Target(table=(None, "all"))],
        dead_letter_table="failed",
    )
    run_once(name="strict", source=events, targets=pipeline.targets, dead_letter_table="failed")
    assert rows("strict", "n") == [(2,)]
    offsets = sorted(str(each["_weft_rowid"]) for each in weft.consume_sync(events, "me") if each["n"] is None)
    assert sorted(each.offset or "" for each in letters_of(pipeline)) == offsets
    assert replay_all(pipeline).again == 2
    found = letters_of(pipeline)
    assert sorted(each.offset or "" for each in found) == offsets
    assert [(each.stage, each.target, each.replays) for each in found] == [("store", "strict", 1)] * 2
    _table("strict", system, "n BIGINT")
    done = replay_all(pipeline)
    assert (done.letters, done.again, letters_of(pipeline)) == (2, 0, [])
    names = "n, name, d, at, raw"
    at = wide["at"] if system.kind == "postgres" else wide["at"].replace(tzinfo=None)
    assert rows("strict", names) == [(None, "row None", wide["d"], at, b"\xff")] * 2
    assert len(rows("all")) == 3, "what one target refused went to that one alone"


def _table(name: str, system: System, column: str) -> None:
    """Make a table anew: SQLite cannot change a column."""
    tables = open_tables(current().connection(None))
    kinds = {
        "sqlite": "name TEXT, d DECIMAL_TEXT(10,2), at TIMESTAMP, raw BLOB",
        "postgres": "name TEXT, d NUMERIC(10,2), at TIMESTAMPTZ, raw BYTEA",
        "mysql": "name TEXT, d DECIMAL(10,2), at DATETIME(6), raw BLOB",
    }
    try:
        with tables.driver.session("publish") as session:
            session.run(f"DROP TABLE IF EXISTS {name}")
            session.run(f"CREATE TABLE {name} ({column}, {kinds[system.kind]})")
    finally:
        tables.close()


@pytest.mark.brief("sqlite")
@pytest.mark.usefixtures("streams")
def test_two_targets_of_one_table_name(system: System) -> None:
    """Each has counts and letters of its own; a letter goes to the one that rejected it."""
    second = weft.DuckDBConnection("second.duckdb", name="second")
    events = weft.stream(name="events", fields={"n": "int64?", "name": "string"})(lambda: None)
    weft.publish_sync(events, [{"n": None, "name": "a"}, {"n": 2, "name": "b"}, {"n": 3, "name": "c"}])
    _strict(None)
    _strict(second)
    pipeline = make(
        name="strict",
        source=events,
        targets=[
            weft.Target(table=(None, "strict")),
            weft.Target(connection=second, table=(None, "strict")),
        ],
        dead_letter_path="failed",
    )
    reports: list[Report] = []
    listener = RunListener()
    listener.batch = reports.append  # type: ignore[method-assign]
    supervise(SparkEngine(pipeline), Running(once=True), [listener])
    (report,) = reports
    labels = ["strict (default)", "strict (second)"]
    assert (report.written, report.consumed, report.dead) == (dict.fromkeys(labels, 3), 3, 2)
    assert sorted(each.target or "" for each in letters_of(pipeline)) == labels
    _strict(second, "n BIGINT")
    done = replay_all(pipeline)
    assert (done.letters, done.again, done.held) == (2, 1, {})
    assert [each.target for each in letters_of(pipeline)] == ["strict (default)"]
    assert rows("strict", "n, name") == [(2, "b"), (3, "c")]
    assert rows("strict", "n, name", second) == [(None, "a")]


def _strict(connection: Any, column: str = "n BIGINT NOT NULL") -> None:
    tables = open_tables(current().connection(connection))
    try:
        with tables.driver.session("publish") as session:
            session.run("DROP TABLE IF EXISTS strict")
            session.run(f"CREATE TABLE strict ({column}, name TEXT)")
    finally:
        tables.close()


@pytest.mark.usefixtures("here")
def test_a_target_that_is_no_more() -> None:
    pipeline = pipeline_of(dead_letter_table="failed")
    put(pipeline, [DeadLetter("store", "?", "events", '{"n": 1}', target="renamed"), *unread(2)])
    done = replay_all(pipeline)
    assert (done.letters, len(letters_of(pipeline))) == (1, 1)
    assert list(done.held.values()) == ["the pipeline has no target 'renamed'"]


@pytest.mark.usefixtures("here")
def test_rows_of_one_key_in_several_batches() -> None:
    """No load takes a key twice: they are loaded as their batches were, the oldest first."""
    pipeline = pipeline_of(
        targets=[weft.Target(table=(None, "copies"), mode="merge", primary_key=["n"])], dead_letter_table="failed"
    )
    for batch, text in enumerate(["old", "newer", "newest"]):
        payload = json.dumps({"n": 1, "text": text})
        put(pipeline, [DeadLetter("read", "?", "events", payload, str(batch)), *unread(batch + 10)], batch)
    assert replay_all(pipeline).letters == 6
    assert rows("copies", "n, text") == [(1, "newest"), (10, "é10"), (11, "é11"), (12, "é12")]
    put(pipeline, [DeadLetter("read", "?", "events", json.dumps({"n": 1, "text": text}), text) for text in ("a", "b")])
    with pytest.raises(WeftError, match="share a key"):
        replay_all(pipeline)
    before = letters_of(pipeline)
    assert [each.stage for each in before] == ["read", "read"], "nothing is left of what was begun"
    assert Replay(pipeline, lambda each: each.offset == "b").run().letters == 1
    assert Replay(pipeline, lambda each: each.offset == "a").run().letters == 1
    assert rows("copies", "n, text")[0] == (1, "a")


# --------------------------------------------------------------------------------------------------------------- again


@pytest.mark.brief("stream")
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["table", "stream", "path"])
def test_a_letter_that_always_fails(place: str) -> None:
    pipeline = pipeline_of(**{f"dead_letter_{place}": "failed"})
    put(pipeline, [DeadLetter("read", "?", "events", "no JSON", "7"), *unread(1)])
    assert replay_all(pipeline).again == 1
    for replays in (2, 3):
        assert replay_all(pipeline).letters == 1
        assert [each.replays for each in letters_of(pipeline)] == [replays]
    (letter,) = letters_of(pipeline)
    for _ in range(2):
        done = replay_all(pipeline)
        assert (done.letters, done.again, list(done.held)) == (0, 0, [letter.letter_id])
        assert letters_of(pipeline) == [letter]
    assert replay_all(pipeline, max_replays=4).letters == 1
    assert [each.replays for each in letters_of(pipeline)] == [4]


@pytest.mark.usefixtures("here")
def test_many_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_SET", 2)
    monkeypatch.setattr(replay, "_LETTERS", 5)
    pipeline = pipeline_of(dead_letter_stream="failed")
    put(pipeline, [*unread(*range(9)), DeadLetter("read", "?", "events", "{", "99")])
    done = replay_all(pipeline)
    assert (done.letters, done.again, done.finished) == (10, 1, 0)
    assert sorted(rows("copies", "n")) == [(n,) for n in range(9)]
    assert [each.replays for each in letters_of(pipeline)] == [1]


@pytest.mark.usefixtures("here")
def test_one_at_a_time() -> None:
    pipeline = pipeline_of(dead_letter_table="failed")
    put(pipeline, unread(1))
    with replay.alone(pipeline), pytest.raises(BusyError, match="another process"):
        replay_all(pipeline)
    assert replay_all(pipeline).letters == 1


# --------------------------------------------------------------------------------------------------------------- Kafka


@pytest.mark.usefixtures("plain_spark", "here")
def test_messages_of_kafka(kafka: Any) -> None:
    """Their values are of the types that their columns have."""
    broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
    topic = kafka.create_topic()
    declared: dict[str, Any] = {
        "name": "events",
        "source": broker,
        "source_query": topic,
        "target": "default",
        "target_table": "copies",
        "transform_on_error": "dlq",
        "dead_letter_topic": kafka.create_topic(2),
    }
    bad = {**declared, "transform_sql": "SELECT id, CAST(amount AS INT) AS amount, other, _event_ts FROM source"}
    kafka.produce(topic, [b'{"id": 1, "amount": "x", "other": 1.5}', b'{"id": 2, "amount": "2"}', b"{"])
    run_once(**bad)
    kafka.produce(topic, [b'{"id": 3, "amount": "3"}', b'{"id": 4, "amount": 4}'])
    run_once(**bad)
    assert [each.stage for each in letters_of(make(**bad))] == ["read", "transform", "read"]
    mended = make(
        **{**bad, "transform_sql": "SELECT id, try_cast(amount AS INT) AS amount, other, _event_ts FROM source"}
    )
    done = replay_all(mended)
    assert (done.letters, done.again) == (3, 2)
    assert rows("copies", "id, amount, other") == [(1, None, 1.5), (2, 2, None), (3, 3, None)]
    assert all(moment is not None for (moment,) in rows("copies", "_event_ts"))
    assert sorted((each.payload, each.offset, each.replays) for each in letters_of(mended)) == [
        ("{", "0:2", 1),
        ('{"id": 4, "amount": 4}', "0:4", 1),
    ]
