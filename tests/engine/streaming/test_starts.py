"""Where a new checkpoint begins, and how a pipeline is tuned, in each way to say it."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from servers import wait_until
from weft.engine.streaming import batch
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.progress import SourceLag, listen
from weft.engine.streaming.query import Query
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import Project

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


def test_offsets_of_a_topic(kafka: Any) -> None:
    from confluent_kafka import Producer

    broker = weft.KafkaConnection(kafka.bootstrap, name="broker")
    one, two = kafka.create_topic(), kafka.create_topic(partitions=2)
    kafka.produce(one, [json.dumps({"n": n}).encode() for n in range(5)])
    run_once(name="one", sources=[weft.Source(connection=broker, query=one, start=3)], target_table=(None, "copies"))
    assert rows("copies", "n") == [(3,), (4,)]
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for n in range(10):
        producer.produce(two, json.dumps({"n": n}).encode(), partition=n % 2)
    producer.flush()
    # A partition that is not named begins with the earliest.
    run_once(
        name="two", sources=[weft.Source(connection=broker, query=two, start="0:3")], target_table=(None, "second")
    )
    assert [n for (n,) in rows("second", "n")] == [1, 3, 5, 6, 7, 8, 9]
    with pytest.raises(weft.DeclarationError, match=r"has 2 partitions.*\n.*Say which: 0:3,1:3"):
        run_once(
            name="three", sources=[weft.Source(connection=broker, query=two, start=3)], target_table=(None, "third")
        )


@pytest.mark.full
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(("start", "expected"), [("latest", [3]), (1, [1, 2, 3])])
def test_versions_of_delta(start: Any, expected: list[int]) -> None:
    delta = weft.DeltaLocalConnection("lake", name="delta")
    for n in range(3):
        weft.load([{"n": n}], target="numbers", connection=delta)
    source = weft.Source(connection=delta, query="numbers", start=start)
    idle = threading.Event()
    pipeline = make(name="copy", sources=[source], target="default", target_table="copies")
    written: list[int] = []
    query = Query(pipeline, idle=idle.set, written=lambda done: written.append(done.counts["copies"].rows_read))
    query.start()
    try:
        assert idle.wait(120)  # it has seen what is there
        weft.load([{"n": 3}], target="numbers", connection=delta)
        wait_until(lambda: sum(written) == len(expected), "the rows", 120)
    finally:
        query.stop()
        query.wait(60)
    assert [n for (n,) in rows("copies", "n")] == expected


@pytest.mark.brief("topic")
@pytest.mark.timing
@pytest.mark.parametrize("kind", ["stream", "topic", "delta"])
def test_the_end_is_remembered(kind: str, request: pytest.FixtureRequest, project: Path) -> None:
    """A pipeline that saw nothing, and was ended before Spark wrote down where it began, begins there again."""
    if kind == "topic":
        kafka = request.getfixturevalue("kafka")
        query, connection = kafka.create_topic(partitions=2), weft.KafkaConnection(kafka.bootstrap, name="broker")
    else:
        query = declare(n="int64") if kind == "stream" else "numbers"
        connection = weft.DeltaLocalConnection("lake", name="delta") if kind == "delta" else None

    def add(n: int) -> None:
        if kind == "stream":
            weft.publish_sync(query, {"n": n})
        elif kind == "topic":
            kafka.produce(query, [json.dumps({"n": n}).encode()])
        else:
            weft.load([{"n": n}], target=query, connection=connection)

    source = weft.Source(connection=connection, query=query, start="latest")
    checkpoint = project / ".weft/checkpoints/copy"

    def start_and_end() -> None:
        started = Query(make(name="copy", source=source, target="default", target_table="copies"))
        started.start()
        started.stop()
        started.wait(60)
        for log in ("offsets", "commits", "sources"):
            shutil.rmtree(checkpoint / log, ignore_errors=True)

    add(0)
    start_and_end()
    add(1)
    start_and_end()
    add(2)
    lag = SourceLag([source], Checkpoint("copy"))
    assert lag.now() == {source.name: 2}
    run_once(name="copy", source=source, target_table="copies")
    assert rows("copies", "n") == [(1,), (2,)]
    # Forgotten with the checkpoint.
    Checkpoint("copy").reset()
    start_and_end()
    add(3)
    run_once(name="copy", source=source, target_table="copies")
    assert rows("copies", "n") == [(1,), (2,), (3,)]


@pytest.mark.usefixtures("spark")
def test_a_version_that_is_far_away() -> None:
    delta = weft.DeltaLocalConnection("lake", name="delta")
    weft.load([{"n": 0}], target="numbers", connection=delta)
    with pytest.raises(weft.WeftError, match="version"):
        run_once(name="copy", sources=[weft.Source(connection=delta, query="numbers", start=99)], target_table="copies")


FILE = """
pipeline_name = "fast"
profile = "low_latency"
source_query = "events"
[source]
connection = "default"
[target]
connection = "default"
[target.table]
name = "copies"
"""


@pytest.mark.parametrize("way", ["call", "decorator", "file"])
def test_the_low_latency_profile(way: str, here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of batches are not compiled, however it was said."""
    from weft.operate.supervisor import supervise

    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    seen: list[str] = []
    run = batch.Batches.run

    def watch(self: Any, frame: Any, *others: Any) -> Any:
        seen.append(frame.sparkSession.conf.get("spark.sql.codegen.wholeStage"))
        return run(self, frame, *others)

    monkeypatch.setattr(batch.Batches, "run", watch)
    options: dict[str, Any] = {
        "source": events,
        "target": "default",
        "target_table": "copies",
        "profile": "low_latency",
    }
    if way == "call":
        weft.run_streaming_pipeline(name="fast", **options, once=True)
    elif way == "file":
        Path("pipeline.toml").write_text(FILE)
        weft.run_pipeline("pipeline.toml", once=True)
    else:
        made: StreamingPipeline = weft.streaming_pipeline(name="fast", **options)(lambda: None)
        from weft.engine.streaming.spark_engine import SparkEngine
        from weft.operate.run_options import Running

        supervise(SparkEngine(made), Running(once=True))
    assert seen == ["false"]
    assert rows("copies", "n") == [(1,)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: weft.run_pipeline("x.toml", onec=True), "run_pipeline has no option 'onec'.\n.*'once'"),
        (lambda: weft.run_pipeline("x.toml", metrics_port="many"), "metrics_port must be a port"),
        (lambda: weft.run_streaming_pipeline(name="x", metric_port=1), "no option 'metric_port'.\n.*'metrics_port'"),
        (lambda: weft.run_streaming_pipeline(name="x", profil="low_latency"), "no option 'profil'.\n.*'profile'"),
    ],
)
def test_names_of_options(call: Any, said: str) -> None:
    with pytest.raises(weft.WeftError, match=said):
        call()


def test_the_checkpoint_of_other_sources_is_refused() -> None:
    """Spark's log tells sources by their order alone: it would go on in one at the place of another."""
    one, two = declare("one", n="int64"), declare("two", n="int64")
    for stream, numbers in ((one, range(3)), (two, range(10, 15))):
        weft.publish_sync(stream, [{"n": n} for n in numbers])
    run_once(name="copy", source=one, target_table="copies")
    for sources, said in (
        ([two], r"is of one \(sqlite\), and now the pipeline reads two \(sqlite\)"),
        ([one, two], r"is of one \(sqlite\), and now the pipeline reads one \(sqlite\), two \(sqlite\)"),
        ([weft.Source(connection=weft.ObjectStoreLocalConnection(".", name="lake"), query="one")], r"one \(object_st"),
    ):
        with pytest.raises(weft.DeclarationError, match=said):
            run_once(name="copy", sources=sources, target_table="copies")
    Checkpoint("copy").reset()
    run_once(name="copy", source=two, target_table="copies")
    assert rows("copies", "n") == [(0,), (1,), (10,), (11,), (12,), (13,), (14,), (2,)]
    run_once(name="both", sources=[one, two], target_table="all")
    with pytest.raises(weft.DeclarationError, match=r"reads two \(sqlite\), one \(sqlite\)\. It would go on"):
        run_once(name="both", sources=[two, one], target_table="all")


def test_the_checkpoint_of_another_pipeline_is_refused() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    options: dict[str, Any] = {"source": events, "target_table": "copies", "checkpoint": "${HOME_OF_TESTS}/shared"}
    with pytest.raises(weft.WeftError, match="HOME_OF_TESTS is not set, and the checkpoint of one needs it"):
        run_once(name="one", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME_OF_TESTS", "kept")
        run_once(name="one", **options)
        weft.publish_sync(events, {"n": 2})
        with pytest.raises(weft.DeclarationError, match=r"of two is that of the pipeline one[\s\S]*sources\.json"):
            run_once(name="two", **options)
        # Renamed: it goes on.
        Path("kept/shared/sources.json").unlink()
        run_once(name="two", **options)
        assert rows("copies", "n") == [(1,), (2,)]
        with pytest.raises(weft.DeclarationError, match="of one is that of the pipeline two"):
            run_once(name="one", **options)


def test_targets_that_are_found_to_be_ours_when_it_starts(here: Project) -> None:
    """Streams and connections may be declared after the pipelines that name them."""
    own = make(name="own", source="later", source_query="events", target="later", target_table=("events", "events"))
    ours = make(name="ours", source="later", source_query="events", target="later", target_table="weft.streams")
    here.register(weft.SQLiteConnection("later.db", name="later"))
    events = weft.stream(name="events", connection="later", fields={"n": "int64"})(lambda: None)
    weft.publish_sync(events, {"n": 1})
    for pipeline, said in ((own, "it would read what it writes"), (ours, r"weft\.streams cannot be written")):
        with pytest.raises(weft.DeclarationError, match=said):
            Query(pipeline, once=True).start()
    assert len(weft.consume_sync(events, "me")) == 1


def test_sources_that_were_noted_without_a_pipeline() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, {"n": 1})
    run_once(name="copy", source=events, target_table="copies")
    noted = Path(".weft/checkpoints/copy/sources.json")
    noted.write_text(json.dumps(json.loads(noted.read_text())["sources"]))
    weft.publish_sync(events, {"n": 2})
    run_once(name="copy", source=events, target_table="copies")
    assert json.loads(noted.read_text()) == {"pipeline": "copy", "sources": [["sqlite", "events"]]}


def test_a_message_that_is_not_there_yet(kafka: Any) -> None:
    broker = weft.KafkaConnection(kafka.bootstrap, name="broker")
    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1}', b'{"n": 2}'])
    source = weft.Source(connection=broker, query=topic, start=3)
    with pytest.raises(
        weft.DeclarationError, match=f"The topic '{topic}' cannot start at 0:3: its next message is 0:2"
    ):
        run_once(name="copy", sources=[source], target_table="copies")
    run_once(name="copy", sources=[weft.Source(connection=broker, query=topic, start=1)], target_table="copies")
    assert rows("copies", "n") == [(2,)]


def test_an_event_that_is_not_there_yet() -> None:
    events = declare(n="int64")
    weft.publish_sync(events, [{"n": n} for n in range(3)])
    with pytest.raises(weft.WeftError, match=r"The stream 'events' cannot start at 9: its last event is 3\."):
        run_once(name="copy", sources=[weft.Source(query=events, start=9)], target_table="copies")


def test_a_batch_is_reported_by_few_calls(plain_spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from py4j.clientserver import ClientServerConnection

    calls: Counter[int] = Counter()
    reported: list[tuple[int, list[Any]]] = []
    ended = threading.Event()
    send = ClientServerConnection.send_command

    def counting(connection: Any, command: str) -> Any:
        calls[threading.get_ident()] += 1
        return send(connection, command)

    monkeypatch.setattr(ClientServerConnection, "send_command", counting)
    rates = plain_spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    query = rates.writeStream.foreachBatch(lambda *_: ended.wait(60)).start()
    try:
        listen(plain_spark, query.runId, lambda: None, lambda at: reported.append((threading.get_ident(), at)))
        calls.clear()
        ended.set()
        wait_until(lambda: len(reported) >= 3, "three batches")
    finally:
        query.stop()
    (thread,) = {each for each, _ in reported}
    assert [at["offset"] for _, (at,) in reported] == [5 * (n + 1) for n in range(len(reported))]
    assert calls[thread] < 20 * len(reported)
