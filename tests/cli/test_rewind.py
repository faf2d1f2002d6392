"""Topics, files and Delta tables: how far behind their pipelines are, and having them read again."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.project import Project

# Each starts Spark several times.

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.usefixtures("local"), pytest.mark.spark]


def rows(table: str = "copies") -> list[int]:
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        return sorted(n for (n,) in database.execute(f"SELECT n FROM {table}"))


def declare(*sources: weft.Source) -> None:
    @weft.streaming_pipeline(sources=list(sources), target="default", target_table="copies")
    def copies() -> None:
        pass


def message(n: int) -> bytes:
    return json.dumps({"n": n}).encode()


def iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


# ---------------------------------------------------------------------------------------------------------------- Kafka


@pytest.fixture
def topic(kafka: Any) -> str:
    weft.register_connection(weft.KafkaConnection(kafka.bootstrap, name="broker", group_id="g"))
    return str(kafka.create_topic())


@pytest.mark.full
def test_a_topic(call: Any, checkpoints: Any, kafka: Any, topic: str) -> None:
    declare(weft.Source(connection="broker", query=topic))
    kafka.produce(topic, map(message, range(5)))
    # Before the first batch all of it waits.
    assert checkpoints("show", "copies")["lag"] == {topic: 5}
    call("consume", "copies", "--once")
    kafka.produce(topic, map(message, range(5, 8)))
    shown = checkpoints("show", "copies")
    assert (shown["offsets"], shown["lag"]) == ({topic: {topic: {"0": 5}}}, {topic: 3})
    lines = call("checkpoints", "show", "copies").stdout.splitlines()
    assert f"offsets:     {topic} 0:5" in lines
    assert f"lag:         {topic} 3 messages" in lines

    would = call("checkpoints", "rewind", "copies", "--to-offset", 3, "--dry-run").stdout
    assert would == f"copies would begin with 0:3 of {topic}; it was at 0:5.\nNothing was done.\n"
    assert checkpoints("show", "copies") == shown
    done = call("checkpoints", "rewind", "copies", "--to-offset", 3)
    assert done.stdout.startswith(
        f"copies begins with 0:3 of {topic}; it was at 0:5.\nTo bring the old checkpoint back"
    )
    assert checkpoints("show", "copies")["lag"] == {topic: 5}
    (line,) = call("consume", "copies", "--once", "--format", "json").stdout.splitlines()
    assert json.loads(line)["lag"] == {topic: 0}
    assert rows() == sorted([*range(8), 3, 4])


@pytest.mark.full
def test_a_topic_of_a_time(call: Any, checkpoints: Any, kafka: Any) -> None:
    """Each partition goes back to its own first message since then; one without any stays."""
    weft.register_connection(weft.KafkaConnection(kafka.bootstrap, name="broker"))
    topic = kafka.create_topic(partitions=3)
    declare(weft.Source(connection="broker", query=topic))
    moment = int(time.time() - 10_000) * 1000  # brokers remove what is a week old
    send(kafka, topic, [(0, 1, moment), (0, 2, moment + 2000), (1, 3, moment), (1, 4, moment + 1000), (2, 5, moment)])
    call("consume", "copies", "--once")
    told = call("checkpoints", "rewind", "copies", "--to-offset", 1, code=1).stderr
    assert f"The topic {topic} has 3 partitions" in told
    assert "Say which: 0:1,1:1,2:1" in told
    moved = checkpoints("rewind", "copies", "--to-time", iso(moment / 1000 + 1))
    assert moved["starts"] == {topic: {"0": 1, "1": 1, "2": 1}}
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 2, 3, 4, 4, 5]
    moved = checkpoints("rewind", "copies", "--to-offset", "2:0,0:1")
    assert moved["starts"] == {topic: {"0": 1, "1": 2, "2": 0}}
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 2, 2, 3, 4, 4, 5, 5]


def send(kafka: Any, topic: str, messages: list[tuple[int, int, int]]) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for partition, n, moment in messages:
        producer.produce(topic, message(n), partition=partition, timestamp=moment)
    producer.flush()


def test_a_topic_whose_messages_are_gone(call: Any, checkpoints: Any, kafka: Any, topic: str) -> None:
    from confluent_kafka import TopicPartition

    declare(weft.Source(connection="broker", query=topic))
    kafka.produce(topic, map(message, range(5)))
    call("consume", "copies", "--once")
    for future in kafka.admin.delete_records([TopicPartition(topic, 0, 2)]).values():
        future.result(30)
    done = call("checkpoints", "rewind", "copies", "--to-offset", 0)
    assert f"note: the brokers removed the messages of {topic} before 0:2." in done.stderr
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(5), 2, 3, 4])


def test_topics_refuse(call: Any, kafka: Any, topic: str) -> None:
    declare(weft.Source(connection="broker", query=topic))
    kafka.produce(topic, map(message, range(5)))
    call("consume", "copies", "--once")
    for option, value, said in (
        ("--to-offset", "6", "is at 0:5, and 0:6 comes after that"),
        ("--to-offset", "1:0", "has no partition 1."),
        ("--to-offset", "0:1,0:2", "names a partition of the topic"),
        ("--to-offset", "soon", "'soon' is not an offset of the topic"),
        ("--to-time", "2100-01-01", "that was read is of 2100-01-01 00:00:00 or later"),
    ):
        assert said in call("checkpoints", "rewind", "copies", option, value, code=1).stderr


# ---------------------------------------------------------------------------------------------------------------- files


def write(name: str, n: int, moment: float) -> None:
    path = Path("in") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"n": n}) + "\n")
    os.utime(path, (moment, moment))


@pytest.fixture
def folder(local: Project) -> weft.Source:
    weft.register_connection(weft.ObjectStoreLocalConnection("in", name="files", format="json_lines"))
    return weft.Source(connection="files", query="/", max_files=1)


@pytest.mark.full
def test_files(call: Any, checkpoints: Any, folder: weft.Source) -> None:
    declare(folder)
    now = time.time() - 10_000
    write("a b.json", 1, now)
    write("sub/é%25.json", 2, now + 100)
    write("sub/c.json", 3, now + 200)
    write("_hidden.json", 9, now)
    write("sub/.hidden.json", 9, now)
    assert checkpoints("show", "copies")["lag"] == {"/": 3}
    call("consume", "copies", "--once")
    write("late.json", 4, now - 100)
    shown = checkpoints("show", "copies")
    assert (shown["offsets"], shown["lag"]) == ({"/": {"logOffset": 2}}, {"/": 1})
    lines = call("checkpoints", "show", "copies").stdout.splitlines()
    assert "offsets:     / 3 files" in lines
    assert "lag:         / 1 file" in lines
    assert "which have no offsets" in call("checkpoints", "rewind", "copies", "--to-offset", 1, code=1).stderr
    assert "has changed since" in call("checkpoints", "rewind", "copies", "--to-time", "1m", code=1).stderr

    done = call("checkpoints", "rewind", "copies", "--to-time", iso(now + 100))
    assert done.stdout.startswith("copies begins with 2 of 3 files of / that were read.\n")
    assert checkpoints("show", "copies")["lag"] == {"/": 3}
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 2, 3, 3, 4]
    assert checkpoints("show", "copies")["lag"] == {"/": 0}


@pytest.mark.full
def test_files_of_a_bucket(call: Any, checkpoints: Any, s3: Any) -> None:
    lake = weft.ObjectStoreS3Connection(**s3.fields(), prefix="in", name="files", format="json_lines")
    weft.register_connection(lake)
    declare(weft.Source(connection="files", query="raw"))

    def put(name: str, n: int) -> None:
        with lake.filesystem().open_output_stream(f"{lake.bucket}/in/raw/{name}") as file:
            file.write(json.dumps({"n": n}).encode() + b"\n")

    put("a b.json", 1)
    call("consume", "copies", "--once")
    put("sub/é.json", 2)
    put("_hidden.json", 3)
    assert checkpoints("show", "copies")["lag"] == {"raw": 1}
    assert checkpoints("rewind", "copies", "--to-time", "1h")["starts"] == {"raw": 1}
    assert checkpoints("show", "copies")["lag"] == {"raw": 2}
    call("consume", "copies", "--once")
    assert rows() == [1, 1, 2]
    assert checkpoints("show", "copies")["lag"] == {"raw": 0}


@pytest.mark.full
def test_many_files(call: Any, checkpoints: Any, folder: weft.Source) -> None:
    """Spark puts ten steps of its log of files into one: nothing is counted twice or forgotten."""
    declare(folder)
    now = time.time() - 10_000
    for n in range(23):
        write(f"{n}.json", n, now + n)
    call("consume", "copies", "--once")
    assert list(Path(".weft/checkpoints/copies/sources/0").glob("*.compact"))
    assert checkpoints("show", "copies")["lag"] == {"/": 0}
    assert checkpoints("rewind", "copies", "--to-time", iso(now + 20))["starts"] == {"/": 3}
    assert checkpoints("show", "copies")["lag"] == {"/": 3}
    call("consume", "copies", "--once")
    assert rows() == sorted([*range(23), 20, 21, 22])


@pytest.mark.full
def test_columns_are_remembered(call: Any, folder: weft.Source) -> None:
    """Also by the checkpoint that a rewind begins; one that is reset takes them along."""

    @weft.streaming_pipeline(
        sources=[folder], target="default", target_table="copies", transform_sql="SELECT n, note FROM source"
    )
    def copies() -> None:
        pass

    Path("in").mkdir()
    Path("in/a.json").write_text('{"n": 1, "note": "x"}\n')
    os.utime("in/a.json", (1_700_000_000, 1_700_000_000))
    call("consume", "copies", "--once")
    Path("in/b.json").write_text('{"n": 2}\n')
    call("consume", "copies", "--once")
    call("checkpoints", "rewind", "copies", "--to-time", iso(1_700_000_001))
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 2]
    reset = json.loads(call("checkpoints", "reset", "copies", "--format", "json").stdout)
    assert Path(reset["moved_to"], "columns.json").exists()
    assert {each.name for each in Path(".weft/checkpoints").iterdir() if each.is_file()} == {"copies~lock"}


# ---------------------------------------------------------------------------------------------------------------- Delta


def commit(n: int) -> None:
    """Another version of the table. Spark would take a second for it."""
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake("lake/numbers", pa.table({"n": [n]}), mode="append")


@pytest.fixture
def table(local: Project) -> weft.Source:
    weft.register_connection(weft.DeltaLocalConnection("lake", name="delta"))
    return weft.Source(connection="delta", query="numbers")


@pytest.mark.full
def test_delta(call: Any, checkpoints: Any, table: weft.Source) -> None:
    declare(table)
    for n in range(3):
        commit(n)
    assert checkpoints("show", "copies")["lag"] == {"numbers": 3}
    call("consume", "copies", "--once")
    commit(3)
    call("consume", "copies", "--once")
    commit(4)
    shown = checkpoints("show", "copies")
    assert shown["lag"] == {"numbers": 1}
    lines = call("checkpoints", "show", "copies").stdout.splitlines()
    assert "offsets:     numbers version 3" in lines
    assert "lag:         numbers 1 version" in lines
    told = call("checkpoints", "rewind", "copies", "--to-offset", 4, code=1).stderr
    assert "numbers is at version 3, and 4 comes after that" in told
    done = call("checkpoints", "rewind", "copies", "--to-offset", 2)
    assert done.stdout.startswith("copies begins with version 2 of numbers; it was at 3.\n")
    assert checkpoints("show", "copies")["lag"] == {"numbers": 3}
    call("consume", "copies", "--once")
    assert rows() == [0, 1, 2, 2, 3, 3, 4]
    assert checkpoints("show", "copies")["lag"] == {"numbers": 0}

    def committed(version: int) -> float:
        lines = Path(f"lake/numbers/_delta_log/{version:020}.json").read_text().splitlines()
        return float(next(json.loads(each)["commitInfo"]["timestamp"] for each in lines if "commitInfo" in each)) / 1000

    assert checkpoints("rewind", "copies", "--to-time", iso(committed(4)))["starts"] == {"numbers": 4}
    assert "has no version of 2100" in call("checkpoints", "rewind", "copies", "--to-time", "2100-01-01", code=1).stderr
    call("consume", "copies", "--once")
    assert rows() == [0, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.full
def test_several_kinds(call: Any, checkpoints: Any, kafka: Any, topic: str, folder: weft.Source) -> None:
    """One is moved, the others go on where they are, whatever they are. Without Delta, which is not beside Kafka."""

    @weft.stream(fields={"n": "int64"})
    def numbers_too() -> None:
        pass

    weft.publish_sync(numbers_too, [{"n": 31}, {"n": 32}])
    declare(weft.Source(connection="broker", query=topic), folder, weft.Source(query=numbers_too))
    kafka.produce(topic, map(message, (1, 2)))
    write("a.json", 11, time.time())
    call("consume", "copies", "--once")
    kafka.produce(topic, [message(3)])
    write("b.json", 12, time.time())
    weft.publish_sync(numbers_too, {"n": 33})
    assert checkpoints("show", "copies")["lag"] == {topic: 1, "/": 1, "numbers_too": 1}
    assert "Whose offset?" in call("checkpoints", "rewind", "copies", "--to-offset", 1, code=2).stderr
    call("checkpoints", "rewind", "copies", "--to-offset", 1, "--source", topic)
    assert checkpoints("show", "copies")["lag"] == {topic: 2, "/": 1, "numbers_too": 1}
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 2, 3, 11, 12, 31, 32, 33]
    call("checkpoints", "rewind", "copies", "--to-offset", 32, "--source", "numbers_too", code=1)
    call("checkpoints", "rewind", "copies", "--to-offset", 3, "--source", "numbers_too")
    call("consume", "copies", "--once")
    assert rows() == [1, 2, 2, 3, 11, 12, 31, 32, 33, 33]
