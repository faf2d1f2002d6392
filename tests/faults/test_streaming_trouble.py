"""What a streaming pipeline stands on goes away, is silent or is full: it says so, or waits, and loses nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import servers
import weft
from engine.streaming.conftest import declare, here, rows, run_once  # noqa: F401 - fixture
from faults.test_disk_full import mounted
from operate.test_supervisor import PATIENCE, QUICK, Witness, running, server  # noqa: F401 - fixture
from servers import wait_until
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.query import Query
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.supervisor import Supervisor
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("spark", "here")


class Publishing:
    """A thread that publishes an event every few milliseconds."""

    def __init__(self, stream: Any, event: Callable[[int], dict[str, Any]] = lambda number: {"n": number}) -> None:
        self.stream, self.event, self.published = stream, event, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Publishing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            weft.publish_sync(self.stream, self.event(self.published))
            self.published += 1


class Idle(Witness):
    """Counts the looks that found nothing, too."""

    wants_idle = True

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def idle(self) -> None:
        self.looks += 1


def numbers(table: str, connection: Any = None) -> list[int]:
    return sorted(n for (n,) in rows(table, "n", connection))


# -------------------------------------------------------------------------------------------------------------- targets


def _change(number: int) -> dict[str, Any]:
    return {"op": "c", "after": {"n": number}, "source": {"lsn": number, "ts_ms": 1_770_000_000_000 + number}}


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("is_mirror", [False, True])
def test_the_target_is_down_for_a_minute(
    server: servers.Server,  # noqa: F811
    count: Callable[..., int],
    is_mirror: bool,
) -> None:
    events = declare(op="string", after="json", source="json") if is_mirror else declare(n="int64")
    cdc = weft.CDC(envelope="debezium", key_field="after.n") if is_mirror else None
    target = weft.PostgresConnection(server.create_database("target"), name="target")
    copies: dict[str, Any] = {"source": events, "target": target, "target_table": (None, "copies"), "cdc": cdc}
    pipeline = make(name="copy", **copies)
    witness = Witness()
    with (
        Publishing(events, *([_change] if is_mirror else [])) as publishing,
        running(Supervisor(SparkEngine(pipeline), QUICK, [witness])),
    ):
        wait_until(lambda: bool(witness.batches), "the first batch", PATIENCE)
        server.stop()
        threading.Event().wait(count(60, 2))  # this is how long it is down
        before = len(witness.batches)
        wait_until(lambda: bool(witness.failures), "a failure", PATIENCE)
        server.start()
        wait_until(lambda: len(witness.batches) > before, "a batch", PATIENCE)
    run_once(name="copy", **copies)
    assert numbers("copies", target) == list(range(publishing.published))
    assert all(isinstance(error, weft.ConnectionFailedError) for error, _ in witness.failures)


@pytest.mark.full
def test_the_target_is_down_and_nobody_starts_it_again(server: servers.Server) -> None:  # noqa: F811
    events = declare(n="int64")
    target = weft.PostgresConnection(server.create_database("target"), name="target")
    pipeline: dict[str, Any] = {"name": "copy", "source": events, "target": target, "target_table": (None, "copies")}
    weft.publish_sync(events, [{"n": n} for n in range(5)])
    run_once(**pipeline)
    server.stop()
    weft.publish_sync(events, [{"n": n} for n in range(5, 9)])
    with pytest.raises(weft.ConnectionFailedError, match="Cannot open the connection"):
        run_once(**pipeline)
    server.start()
    run_once(**pipeline)
    assert numbers("copies", target) == list(range(9))


@pytest.mark.timing
def test_two_pipelines_into_one_table() -> None:
    first, second = declare("first", n="int64"), declare("second", n="int64")
    witnesses = [Witness(), Witness()]
    supervisors = [
        Supervisor(
            SparkEngine(make(name=name, source=events, target="default", target_table=(None, "copies"))),
            listeners=[witness],
        )
        for name, events, witness in zip("ab", (first, second), witnesses, strict=True)
    ]
    with running(supervisors[0]), running(supervisors[1]):
        for n in range(0, 100, 10):
            weft.publish_sync(first, [{"n": each} for each in range(n, n + 10)])
            weft.publish_sync(second, [{"n": 1000 + each} for each in range(n, n + 10)])
        wait_until(
            lambda: all(sum(each.consumed for each in witness.batches) == 100 for witness in witnesses),
            "both",
            PATIENCE,
        )
    assert numbers("copies") == [*range(100), *range(1000, 1100)]


def test_the_disk_of_the_checkpoint_is_full(tmp_path: Path) -> None:
    events = declare(n="int64")
    with mounted(tmp_path / "disk", 1) as disk:
        pipeline: dict[str, Any] = {
            "name": "copy",
            "source": events,
            "target_table": (None, "copies"),
            "checkpoint": str(disk.folder / "checkpoint"),
        }
        weft.publish_sync(events, [{"n": n} for n in range(5)])
        run_once(**pipeline)
        weft.publish_sync(events, [{"n": n} for n in range(5, 9)])
        full = rf"The disk of the checkpoint {disk.folder}/checkpoint is full \(No space left on device\)"
        for leave in (0, 8192):  # too little for the lock, and too little for Spark's log
            disk.fill(leave=leave)
            with pytest.raises(weft.StorageError, match=full):
                run_once(**pipeline)
            disk.free()
        run_once(**pipeline)
    assert numbers("copies") == list(range(9))


# -------------------------------------------------------------------------------------------------------------- sources


@pytest.mark.timing
def test_a_source_that_is_silent(count: Callable[..., int]) -> None:
    """Looks ten times a second for a minute, and makes no batch of nothing."""
    events = declare(n="int64")
    witness = Idle()
    pipeline = make(name="copy", source=events, target="default", target_table=(None, "copies"))
    weft.publish_sync(events, {"n": 0})
    with running(Supervisor(SparkEngine(pipeline), listeners=[witness])):
        wait_until(lambda: len(witness.batches) == 1, "the first batch", PATIENCE)
        silent_from = witness.looks
        wait_until(lambda: witness.looks >= silent_from + count(600, 20), "looks", 600)
        assert len(witness.batches) == 1
        weft.publish_sync(events, {"n": 1})
        wait_until(lambda: len(witness.batches) == 2, "the second batch", PATIENCE)
    assert numbers("copies") == [0, 1]


@pytest.mark.timing
def test_the_database_of_the_stream_is_down(server: servers.Server) -> None:  # noqa: F811
    source = weft.PostgresConnection(server.create_database("source"), name="source")
    events = weft.stream(name="events", fields={"n": "int64"}, connection=source)(lambda: None)
    pipeline = make(name="copy", source=events, target="default", target_table=(None, "copies"))
    weft.publish_sync(events, {"n": 0})
    witness = Witness()
    with running(Supervisor(SparkEngine(pipeline), QUICK, [witness])):
        wait_until(lambda: bool(witness.batches), "the first batch", PATIENCE)
        server.stop()
        wait_until(lambda: len(witness.failures) >= 2, "failures", PATIENCE)
        server.start()
        weft.publish_sync(events, {"n": 1})
        wait_until(lambda: len(witness.batches) == 2, "the second batch", PATIENCE)
    assert numbers("copies") == [0, 1]
    for error, _ in witness.failures:
        assert isinstance(error, weft.WeftError)
        assert "Traceback" not in str(error)
    server.stop()
    with pytest.raises(weft.WeftError, match="Cannot open the connection"):
        run_once(name="copy", source=events, target="default", target_table=(None, "copies"))


@pytest.fixture
def query() -> Iterator[Callable[..., Query]]:
    """`query(name=…)` runs a pipeline until the end of the test."""
    started: list[Query] = []

    def start(idle: Callable[[], None] | None = None, **declared: Any) -> Query:
        made = Query(make(target="default", target_table=(None, "copies"), **declared), idle=idle)
        made.start()
        started.append(made)
        return made

    yield start
    for each in started:
        each.stop()
        with suppress(weft.WeftError):  # what a test has been told of already
            each.wait(PATIENCE)


def _begun(kafka: Any, query: Callable[..., Query]) -> tuple[str, Any, Query]:
    """A topic, its broker, and a pipeline that has stored the topic's first message."""
    topic = kafka.create_topic()
    broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
    kafka.produce(topic, [b'{"n": 0}'])
    begun = query(name="copy", source=broker, source_query=topic)
    wait_until(lambda: _has("copies", 1), "the first row", PATIENCE)
    return topic, broker, begun


@pytest.mark.timing
def test_the_topic_is_deleted(kafka: Any, query: Callable[..., Query]) -> None:
    topic, broker, running_query = _begun(kafka, query)
    kafka.admin.delete_topics([topic])[topic].result(30)
    said = rf"The topic '{topic}' of the connection 'broker' is gone, and copy reads it.\n.*weft checkpoints reset copy"
    with pytest.raises(weft.NotFoundError, match=said):
        running_query.wait(PATIENCE)
    assert numbers("copies") == [0]
    # A new start says so too, and after it was made again as the error says, it goes on.
    with pytest.raises(weft.NotFoundError, match=f"There is no topic .*'{topic}'") as refused:
        query(name="copy", source=broker, source_query=topic)
    assert refused.value.__notes__ == ["pipeline copy"]
    kafka.create_topic(name=topic)
    kafka.produce(topic, [b'{"n": 1}'])
    Checkpoint("copy").reset()
    query(name="copy", source=broker, source_query=topic)
    wait_until(lambda: _has("copies", 2), "the second row", PATIENCE)


def test_the_topic_is_made_anew(kafka: Any, query: Callable[..., Query]) -> None:
    """While the pipeline is away: what it has not read of the old one is lost, and it does not go on as if not."""
    topic, broker, first = _begun(kafka, query)
    first.stop()
    first.wait(PATIENCE)
    kafka.admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in kafka.admin.list_topics(timeout=10).topics, "the topic to be gone")
    kafka.create_topic(name=topic)
    with pytest.raises(
        weft.StorageError, match=f"'{topic}'.* no longer has what copy .*\n.*weft checkpoints reset copy"
    ):
        query(name="copy", source=broker, source_query=topic).wait(PATIENCE)


@pytest.mark.full
@pytest.mark.timing
def test_the_folder_is_removed(project: Path, query: Callable[..., Query]) -> None:
    """What was read is stored; a folder that comes back is followed again."""
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="csv")
    folder = project / "lake" / "raw"
    folder.mkdir(parents=True)
    (folder / "0.csv").write_text("n\n0\n")
    looks: list[None] = []
    running_query = query(name="copy", source=lake, source_query="raw", idle=lambda: looks.append(None))
    wait_until(lambda: _has("copies", 1), "the first row", PATIENCE)
    shutil.rmtree(folder)
    before = len(looks)
    # The first one may have begun before the folder was gone.
    wait_until(lambda: len(looks) >= before + 3, "looks for a folder that is gone", PATIENCE)
    assert running_query.wait(0.1) is False
    folder.mkdir()
    (folder / "1.csv").write_text("n\n1\n")
    wait_until(lambda: _has("copies", 2), "the second row", PATIENCE)
    assert numbers("copies") == [0, 1]


def _has(table: str, count: int) -> bool:
    try:
        return len(rows(table, "n")) >= count
    except weft.WeftError:  # it is not there yet
        return False
