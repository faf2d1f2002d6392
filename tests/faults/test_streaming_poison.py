"""A bad row at every position of a batch: it alone is a dead letter, with the reason and where it is from, and all
others are stored once.

There is a batch for each position. In full the batches have eight rows, else three: the first, one between, the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import weft
from broker_queues import BROKERS, broker_queue
from engine.streaming.conftest import declare, here, rows, run_once, way  # noqa: F401 - fixtures
from faults.streaming_targets import Place, place_of  # noqa: F401 - fixture
from faults.test_streaming_forgotten import forget_last_commit
from weft.engine.streaming.dead_letters import stream_of
from weft.systems.base import system_for
from weft.systems.redis.ids import Keys, to_offset

pytest.importorskip("pyspark")
pytestmark = pytest.mark.usefixtures("here", "spark")


@weft.udf(args=("Utf8",), returns="Int64")
def parsed(texts: Any) -> Any:
    import pyarrow as pa

    return pa.array([int(each) for each in texts.to_pylist()], pa.int64())


@pytest.fixture
def size(pytestconfig: pytest.Config) -> int:
    """How many rows a batch has, and how many batches there are."""
    return 8 if pytestconfig.getoption("--full") else 3


def batches(size: int) -> list[list[tuple[int, bool]]]:
    """Numbers, and whether they are bad: the first of the first batch, the second of the second …"""
    return [[(batch * size + place, place == batch) for place in range(size)] for batch in range(size)]


def good_rows(size: int) -> list[tuple[int]]:
    return [(n,) for each in batches(size) for n, is_bad in each if not is_bad]


def bad_numbers(size: int) -> list[int]:
    return [n for each in batches(size) for n, is_bad in each if is_bad]


def letters() -> list[dict[str, Any]]:
    return sorted(weft.consume_sync(stream_of("failed", None), "me"), key=lambda each: int(each["batch"]))


@pytest.mark.full
@pytest.mark.parametrize(
    "sql",
    ["SELECT n, CAST(text AS INT) AS number FROM source", "SELECT n, parsed(text) AS number FROM source"],
    ids=["sql", "udf"],
)
def test_rows_that_cannot_be_transformed(sql: str, way: str, size: int, project: Path) -> None:  # noqa: F811
    events = declare(n="int64", text="string")
    for each in batches(size):
        weft.publish_sync(events, [{"n": n, "text": "many" if is_bad else str(n)} for n, is_bad in each])
    pipeline: dict[str, Any] = {
        "name": "numbers",
        "source": weft.Source(query=events, max_rows=size),
        "target_table": (None, "numbers"),
        "transform_sql": sql,
        "udfs": [parsed] if "parsed" in sql else [],
        "transform_on_error": "dlq",
        "dead_letter_stream": "failed",
    }
    run_once(**pipeline)
    forget_last_commit(project / ".weft/checkpoints/numbers")
    run_once(**pipeline)
    assert sorted(rows("numbers", "n")) == good_rows(size)
    found = letters()
    payloads = [json.loads(each["payload"]) for each in found]
    assert [(each["n"], each["text"]) for each in payloads] == [(n, "many") for n in bad_numbers(size)]
    assert [each["offset"] for each in found] == [str(n + 1) for n in bad_numbers(size)]
    assert [each["batch"] for each in found] == list(range(size))
    assert all("'many'" in each["error"] for each in found)
    assert {(each["stage"], each["source"]) for each in found} == {("transform", "events")}


@pytest.mark.brief("driver-sqlite-append")
@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql", "duckdb"])
def test_rows_that_do_not_fit(
    kind: str,
    mode: str,
    way: str,  # noqa: F811
    size: int,
    place_of: Callable[[str], Place],  # noqa: F811
    project: Path,
) -> None:
    connection = weft.connect(name="strict", **place_of(kind).connection)
    tables = system_for(connection.kind).load_tables()(connection)
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE strict (n BIGINT PRIMARY KEY, amount BIGINT CHECK (amount < 1000))")
    tables.close()
    events = declare(n="int64", amount="int64")
    for each in batches(size):
        weft.publish_sync(events, [{"n": n, "amount": 1000 if is_bad else n} for n, is_bad in each])
    pipeline: dict[str, Any] = {
        "name": "strict",
        "source": weft.Source(query=events, max_rows=size),
        "target": connection,
        "target_table": (None, "strict"),
        "mode": mode,
        "keys": ["n"] if mode == "merge" else [],
        "dead_letter_stream": "failed",
    }
    run_once(**pipeline)
    forget_last_commit(project / ".weft/checkpoints/strict")
    run_once(**pipeline)
    assert sorted(rows("strict", "n", connection)) == good_rows(size)
    found = letters()
    assert [json.loads(each["payload"])["n"] for each in found] == bad_numbers(size)
    assert [each["offset"] for each in found] == [str(n + 1) for n in bad_numbers(size)]
    assert [each["batch"] for each in found] == list(range(size))
    assert all(each["error"] for each in found)
    assert {(each["stage"], each["source"], each["target"]) for each in found} == {("store", "events", "strict")}
    assert rows("strict__quarantine", "*", connection) == []


@pytest.mark.kafka
@pytest.mark.brief("driver-cut off-kafka")
@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("bad", [b"{", b"\xff", b"[1]"], ids=["cut off", "no text", "no object"])
def test_messages_that_cannot_be_read(
    bad: bytes,
    broker: str,
    way: str,  # noqa: F811
    size: int,
    request: pytest.FixtureRequest,
    project: Path,
) -> None:
    queue = broker_queue(broker, request.getfixturevalue, max_rows=size)
    for each in batches(size):
        queue.put([bad if is_bad else json.dumps({"n": n}).encode() for n, is_bad in each])
    pipeline: dict[str, Any] = {
        "name": "messages",
        "source": queue.source,
        "target_table": (None, "messages"),
        "dead_letter_stream": "failed",
    }
    run_once(**pipeline)
    forget_last_commit(project / ".weft/checkpoints/messages")
    run_once(**pipeline)
    assert sorted(rows("messages", "n")) == good_rows(size)
    found = letters()
    assert [each["offset"] for each in found] == [queue.offset(n) for n in bad_numbers(size)]
    assert [each["batch"] for each in found] == list(range(size))
    assert {each["payload"] for each in found} == {bad.decode(errors="backslashreplace")}
    assert all(each["error"] for each in found)
    assert {(each["stage"], each["source"]) for each in found} == {("read", queue.source.name)}


@pytest.mark.brief("driver-missing-store")
@pytest.mark.parametrize("stage", ["transform", "store"])
@pytest.mark.parametrize(
    "bad",
    [{"text": "x"}, {"n": "many"}, {"n": str(2**80)}, {"n": b"\xff", b"\xfe": "x"}],
    ids=["missing", "no number", "too large", "no text"],
)
def test_entries_of_others(
    bad: dict[Any, Any],
    stage: str,
    way: str,  # noqa: F811
    size: int,
    open_system: Any,
    project: Path,
) -> None:
    """What any client adds to a stream of Redis is a row of it: without a value where the field is missing or holds
    something else, which the letter shows where there is one."""
    weft.load([{"n": -1, "text": "there"}], target="numbers", mode="merge", keys=["n"])
    with open_system("redis") as system, redis.Redis.from_url(system.url) as client:
        events = weft.stream(name="events", connection=system.connection, fields={"n": "int64", "text": "string"})(
            lambda: None
        )
        weft.publish_sync(events, {"n": -2, "text": "ours"})
        key = Keys.of(events.schema, "events").stream
        added = [
            (client.xadd(key, bad if is_bad else {"n": n, "text": f"é{n}"}), is_bad)
            for each in batches(size)
            for n, is_bad in each
        ]
        pipeline: dict[str, Any] = {
            "name": "numbers",
            "source": weft.Source(query=events, max_rows=size),
            "target_table": (None, "numbers"),
            "dead_letter_table": "failed",
            "dead_letter_connection": "default",
        }
        if stage == "transform":
            checked = "SELECT if(n IS NULL, raise_error('no number'), n) AS n, text FROM source"
            pipeline |= {"transform_sql": checked, "transform_on_error": "dlq"}
        run_once(**pipeline)
        forget_last_commit(project / ".weft/checkpoints/numbers")
        run_once(**pipeline)
    assert sorted(rows("numbers", "n")) == [(-2,), (-1,), *good_rows(size)]
    found = rows("failed", 'stage, source, CAST("offset" AS INTEGER), payload, error')
    expected = sorted(to_offset(entry, key) for entry, is_bad in added if is_bad)
    assert sorted(offset for _, _, offset, *_ in found) == expected
    assert {(told, source) for told, source, *_ in found} == {(stage, "events")}
    for _, _, _, payload, error in found:
        shown = json.loads(payload)
        assert error
        # At the stage `store` it is the row as the target was given it.
        if stage == "transform" and "n" in bad:
            assert shown["n"] == ("\\xff" if bad["n"] == b"\xff" else bad["n"])
        else:
            assert shown["n"] is None
