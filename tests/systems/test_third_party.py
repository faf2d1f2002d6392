"""A broker that Weft has never heard of: the package in tests/third_party/weft_spool, installed by its entry point."""

from __future__ import annotations

import json
import sqlite3
import sys
import tomllib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

import warm_python
import weft
from servers import wait_until
from weft.cli import cli
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.query import Query
from weft.pipelines.streaming.declare import find
from weft.pipelines.streaming.endpoints import delivery_to
from weft.pipelines.streaming.json_schema import schema
from weft.pipelines.streaming.toml import parse
from weft.systems.dead_letter_store import DeadLetter

pytest.importorskip("pyspark")

FILE = """
pipeline_name = "copies"
source_query = "orders"
dead_letter_topic = "failed"
[source]
kind = "spool"
path = "queues"
[target]
kind = "spool"
path = "queues"
stream = "copies"
"""


@pytest.fixture
def call() -> Callable[..., Result]:
    def call_weft(*arguments: object, code: int = 0) -> Result:
        done = CliRunner().invoke(cli, [str(each) for each in arguments], prog_name="weft")
        assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr, done.exception)
        return done

    return call_weft


def rows(columns: str = "n", table: str = "copies") -> list[Any]:
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        return sorted(database.execute(f"SELECT {columns} FROM {table}"))


def message(n: int) -> bytes:
    return json.dumps({"n": n, "text": "é"}).encode()


def shown(call: Any, *arguments: object) -> Any:
    return json.loads(call(*arguments, "--format", "json").stdout)


# -------------------------------------------------------------------------------------------------------- without Spark


def test_the_json_schema_knows_its_kind(spool: Any) -> None:
    known = schema()
    assert known["$defs"]["spool_connection"]["properties"]["path"] == {"type": "string"}
    for table in ("source", "target"):
        assert "spool" in known["$defs"][table]["properties"]["kind"]["enum"]
    jsonschema.validate(tomllib.loads(FILE), known)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(FILE.replace("path", "pth")), known)


def test_a_pipeline_in_a_file(spool: Any, call: Any) -> None:
    Path("copies.toml").write_text(FILE)
    pipeline = parse(FILE)
    assert pipeline.sources[0].connection == weft.connect(kind="spool", path="queues")
    assert delivery_to(pipeline, pipeline.targets[0]) == "at_least_once"
    (finding, *_) = json.loads(call("validate", "copies.toml", "--format", "json", code=1).stdout)
    assert (finding["check"], "no queue 'orders'" in finding["problem"]) == ("source orders", True)
    spool.queue("orders").append([message(1)])
    findings = {each["check"]: each for each in shown(call, "validate", "copies.toml")}
    assert findings["source orders"]["detail"].endswith("(spool), 1 message")
    assert findings["target copies"]["delivery"] == "at_least_once"
    assert set(findings) == {"source orders", "target copies", "dead letters"}


def test_commands_of_another_process(spool: Any, project: Path) -> None:
    Path("weft.toml").write_text(f'[connections.shop]\nkind = "spool"\npath = "{project}/queues"\n')
    spool.queue("orders").append([message(1)])

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "weft", *arguments]
        return warm_python.run(command, capture_output=True, text=True, check=True).stdout

    checked = json.loads(run("connections", "check", "shop", "--format", "json"))
    assert (checked["kind"], checked["server"], checked["queues"]) == ("spool", "spool", 1)
    findings = {each["what"]: each for each in json.loads(run("doctor", "--format", "json"))}
    assert findings["connection shop"]["result"] == "ok"
    assert findings["connection shop"]["detail"].startswith("spool, ")


def test_a_line_that_a_dead_process_left(spool: Any) -> None:
    queue = spool.queue("orders")
    queue.append([b"1", b"2"])
    with queue.file.open("ab") as file:
        file.write(b"2026-01-31T12:00")
    assert [each.value for each in queue.read()] == [b"1", b"2"]
    queue.append([b"3"])
    assert [(each.line, each.value) for each in queue.read(after=1)] == [(2, b"2"), (3, b"3")]


def test_what_it_cannot_hold(spool: Any) -> None:
    with pytest.raises(weft.DeclarationError, match="a spool connection holds no dead_letter_table"):
        declare(spool, dead_letter_topic=None, dead_letter_table="failed", dead_letter_connection=spool)
    with pytest.raises(weft.DeclarationError, match="dead letters cannot go to orders, which it reads"):
        declare(spool, dead_letter_topic="orders")
    with pytest.raises(weft.DeclarationError, match=r"0:3.*a spool connection"):
        weft.Source(connection=spool, query="orders", start="0:3")


# ----------------------------------------------------------------------------------------------------------- with Spark


def declare(spool: Any, **options: Any) -> Any:
    options = {"target": "default", "target_table": "copies", "dead_letter_topic": "failed", **options}
    return weft.streaming_pipeline(name="orders", source=spool, source_query="orders", **options)(lambda: None)


@pytest.mark.spark
def test_a_source_and_its_dead_letters(spool: Any, call: Any) -> None:
    queue = spool.queue("orders")
    queue.append([message(1), b"{ no JSON", message(2)])
    declare(spool)
    assert shown(call, "checkpoints", "show", "orders")["lag"] == {"orders": 3}
    call("consume", "orders", "--once")
    assert rows("n, text") == [(1, "é"), (2, "é")]

    # Only new messages are read by the next run.
    queue.append([message(3), message(4)])
    state = shown(call, "checkpoints", "show", "orders")
    assert (state["offsets"], state["lag"]) == ({"orders": {"line": 3}}, {"orders": 2})
    lines = call("checkpoints", "show", "orders").stdout.splitlines()
    assert "offsets:     orders line 3" in lines
    assert "lag:         orders 2 messages" in lines
    call("consume", "orders", "--once")
    assert rows() == [(1,), (2,), (3,), (4,)]

    # The bad message is a dead letter. One that can be parsed by now is loaded by a replay.
    (letter,) = shown(call, "dlq", "list", "orders")
    assert (letter["stage"], letter["source"], letter["offset"]) == ("read", "orders", "2")
    assert letter["payload"] == "{ no JSON"
    (box,) = shown(call, "dlq", "list")
    assert box["place"] == "queue failed of the connection 'spool'"
    letter = DeadLetter("read", "Once bad.", "orders", '{"n": 9}', "2")
    DeadLetterBox(find("orders")).put([letter], BatchId("query", 7), "read")
    call("dlq", "replay", "orders", "--all")
    assert rows()[-1] == (9,)
    (letter,) = shown(call, "dlq", "list", "orders")
    assert (letter["payload"], letter["replays"]) == ("{ no JSON", 1)
    call("dlq", "purge", "orders", "--all", "--yes")
    assert shown(call, "dlq", "list", "orders") == []

    # Rewinding reads messages again, and a reset all of them.
    would = call("checkpoints", "rewind", "orders", "--to-time", "1h", "--dry-run").stdout
    assert would == "orders would begin with line 1 of orders; it was at line 5.\nNothing was done.\n"
    call("checkpoints", "rewind", "orders", "--to-offset", 5)
    assert shown(call, "checkpoints", "show", "orders")["lag"] == {"orders": 1}
    call("consume", "orders", "--once")
    assert rows() == [(1,), (2,), (3,), (4,), (4,), (9,)]
    call("checkpoints", "reset", "orders")
    assert shown(call, "checkpoints", "show", "orders")["lag"] == {"orders": 5}


@pytest.mark.spark
def test_a_target(spool: Any, call: Any) -> None:
    spool.queue("orders").append(map(message, range(5)))
    # In several batches, and of two sources, so that a batch may have none of the queue's rows.
    numbers = weft.stream(name="numbers", fields={"n": "int64"})(lambda: None)
    weft.publish_sync(numbers, [{"n": 5}])
    weft.streaming_pipeline(
        name="doubles",
        sources=[weft.Source(connection=spool, query="orders", max_rows=2), weft.Source(query=numbers)],
        transform_sql="SELECT n, 2 * n AS twice FROM source WHERE n <> 3",
        target=weft.Target(connection=spool, stream="doubles"),
    )(lambda: None)
    call("consume", "doubles", "--once")
    values = sorted((json.loads(each.value) for each in spool.queue("doubles").read()), key=lambda each: each["n"])
    assert values == [{"n": n, "twice": 2 * n} for n in (0, 1, 2, 4, 5)]


@pytest.mark.spark
def test_a_run_that_follows_the_queue(spool: Any) -> None:
    queue = spool.queue("orders")
    queue.append([message(1)])
    source = weft.Source(connection=spool, query="orders", start="latest")
    pipeline = weft.streaming_pipeline(name="orders", source=source, target="default", target_table="copies")(
        lambda: None
    )
    written: list[Any] = []
    query = Query(pipeline, written=written.append)
    query.start()
    try:
        for n in (2, 3):
            queue.append([message(n)])
            wait_until(lambda n=n: len(written) == n - 1, f"batch {n - 2}")
    finally:
        query.stop()
    query.wait()
    assert rows() == [(2,), (3,)]
