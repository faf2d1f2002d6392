"""Streaming pipelines into PostgreSQL: from files, brokers and Redis, against the same work by hand."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import queue
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

import weft
from bench.engine_loads import Job, Pair, _folder, _rows, _with_reset
from bench.harness import Case
from weft.engine.streaming.batch import BatchResult
from weft.engine.streaming.query import Query
from weft.pipelines.streaming.declare import make
from weft.streaming import Source
from weft.systems.kafka import options

FILES = 10
BATCH = 10_000
# So many times before it counts: what a JVM runs it compiles for its first half minute, and starts are not measured.
_WARM_UP = 8
COLUMNS = "id bigint, name text, amount double precision, n integer"


def _row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"customer {number % 1000}", "amount": number * 1.37, "n": number % 100}


class Target:
    """An empty table of a database, made anew before each round."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.pair = Pair(10)
        self.url = self.pair.there

    def job(self, table: str, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Job:
        """A job that finds its table empty, and must fill it. What comes before it is not measured."""

        def run() -> int:
            work()
            return self.rows

        def reset() -> None:
            self._reset(table)
            before()

        return _with_reset(run, reset)

    def _reset(self, table: str) -> None:
        self.pair.execute(f"DROP TABLE IF EXISTS {table}", f"CREATE TABLE {table} ({COLUMNS})")

    def run(self, source: Any, query: str, table: str, **options: Any) -> None:
        """Our pipeline over what is there, from the beginning."""
        weft.run_streaming_pipeline(
            name=f"bench {uuid.uuid4().hex}",
            source=source,
            source_query=query,
            target=weft.connect(url=self.url),
            target_table=("public", table),
            once=True,
            **options,
        )

    def copy(self, path: Path, table: str) -> None:
        """`psql \\copy` of a CSV file."""
        command = f"\\copy {table} FROM '{path}' WITH (FORMAT csv, HEADER)"
        subprocess.run(["psql", "-q", "-X", "-v", "ON_ERROR_STOP=1", self.url, "-c", command], check=True)


# ---------------------------------------------------------------------------------------------------------------- files


@cache
def _written(rows: int, files: int = FILES) -> Path:
    """A folder with the rows as Parquet and as CSV, in some files each, and as one CSV file."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    folder = Path(tempfile.mkdtemp(dir=_folder.name))
    each = rows // files
    tables = [pa.Table.from_pylist([_row(n) for n in range(at, at + each)]) for at in range(0, rows, each)]
    for kind in ("parquet", "csv"):
        (folder / kind).mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, folder / "parquet" / f"{number}.parquet")
        pc.write_csv(table, folder / "csv" / f"{number}.csv")
    pc.write_csv(pa.concat_tables(tables), folder / "all.csv")
    return folder


class Running:
    """A pipeline that runs, into a table."""

    def __init__(self, target: Target, source: Source, table: str, **options: Any) -> None:
        self._rows, self._news = 0, threading.Condition()
        pipeline = make(
            name=f"bench {uuid.uuid4().hex}",
            sources=[source],
            target=weft.connect(url=target.url),
            target_table=("public", table),
            idle_pause_ms=50,
            **{"transform_sql": "SELECT id, name, amount, n FROM source WHERE n >= 0", **options},
        )
        self._query = Query(pipeline, written=self._written)
        self._query.start()
        atexit.register(self._query.stop)

    def _written(self, written: BatchResult) -> None:
        with self._news:
            self._rows += sum(each.rows_read for each in written.counts.values())
            self._news.notify()

    def take(self, rows: int, send: Callable[[], object]) -> None:
        """Send so many rows, and wait until they are in the table."""
        wanted = self._rows + rows
        send()
        with self._news:
            while self._rows < wanted:
                if not self._news.wait(1.0):
                    self._query.wait(0.001)  # which raises what made it fail


class Inbox(Running):
    """A folder for a pipeline to watch: files that come there all at once are rows of a table."""

    def __init__(self, target: Target, kind: str, table: str, max_files: int | None = None, **options: Any) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=_folder.name))
        (self._folder / "inbox").mkdir()
        lake = weft.ObjectStoreLocalConnection(str(self._folder), name="lake", format=kind)
        super().__init__(target, Source(connection=lake, query="inbox", max_files=max_files), table, **options)

    def fill(self, files: Path, rows: int) -> None:
        """Put files there, and wait until their rows are in the table."""
        batch = self._folder / uuid.uuid4().hex
        batch.mkdir()
        for each in files.iterdir():
            (batch / f"{batch.name}-{each.name}").hardlink_to(each)
        self.take(rows, lambda: batch.rename(self._folder / "inbox" / batch.name))


def _files(kind: str) -> Callable[[float], tuple[Job, Job]]:
    def prepare(scale: float) -> tuple[Job, Job]:
        target = Target(_rows(scale))
        folder = _written(target.rows)
        inbox = Inbox(target, kind, "ours")
        for _ in range(_WARM_UP):
            inbox.fill(folder / kind, target.rows)
        return (
            target.job("ours", lambda: inbox.fill(folder / kind, target.rows)),
            target.job("theirs", lambda: target.copy(folder / "all.csv", "theirs")),
        )

    return prepare


def _delivery(scale: float) -> tuple[Job, Job]:
    target = Target(_rows(scale))
    folder = _written(target.rows)
    exactly = Inbox(target, "parquet", "ours", 1, delivery="exactly_once")
    at_least = Inbox(target, "parquet", "theirs", 1, delivery="at_least_once")
    return (
        target.job("ours", lambda: exactly.fill(folder / "parquet", target.rows)),
        target.job("theirs", lambda: at_least.fill(folder / "parquet", target.rows)),
    )


def _ten_times(scale: float) -> tuple[Job, Job]:
    """Ten times the rows, in batches of the same size."""
    target, more = Target(_rows(scale)), Target(10 * _rows(scale))
    few, many = _written(target.rows), _written(more.rows, FILES * 10)
    of_few = Inbox(target, "parquet", "theirs", FILES)
    of_many = Inbox(more, "parquet", "ours", FILES)
    return (
        more.job("ours", lambda: of_many.fill(many / "parquet", more.rows)),
        target.job("theirs", lambda: of_few.fill(few / "parquet", target.rows)),
    )


# ---------------------------------------------------------------------------------------------------------------- Kafka


@cache
def _topic(rows: int) -> tuple[Any, str]:
    """A broker with a topic of so many messages in four partitions."""
    from kafka_server import KafkaServer

    server: Any = KafkaServer()
    server.start()
    topic = server.create_topic(4)
    for partition in range(4):
        server.produce(topic, (json.dumps(_row(n)).encode() for n in range(partition, rows, 4)), partition)
    return server, topic


def _from_kafka(scale: float) -> tuple[Job, Job]:
    import orjson

    target = Target(_rows(scale))
    server, topic = _topic(target.rows)
    broker = weft.KafkaConnection(name="broker", bootstrap_servers=server.bootstrap, group_id="bench")

    def fields(message: bytes) -> tuple[Any, ...]:
        row = orjson.loads(message)
        return row["id"], row["name"], row["amount"], row["n"]

    ours = target.job("ours", lambda: target.run(broker, topic, "ours"))
    return ours, target.job("theirs", lambda: _by_hand(target, server, topic, fields))


def _by_hand(target: Target, server: Any, topic: str, fields: Callable[[bytes], tuple[Any, ...]]) -> None:
    """What confluent-kafka and COPY do, where somebody says what the fields of a message are."""
    import psycopg
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": server.bootstrap,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    done = 0
    with psycopg.connect(target.url) as driver:
        while done < target.rows:
            rows = [fields(message.value()) for message in consumer.consume(BATCH, 1.0)]
            with driver.cursor().copy("COPY theirs FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
            driver.commit()
            done += len(rows)
    consumer.close()


# -------------------------------------------------------------------------------------------------------------- Kinesis


@cache
def _records(rows: int) -> tuple[Any, str]:
    """A server that speaks Kinesis, with a stream of so many records in two shards."""
    from kinesis_streams import Kinesis
    from servers import MotoServer

    server = MotoServer()
    server.start()
    kinesis = Kinesis(server)
    stream = kinesis.create_stream(2)
    for shard, key in enumerate("ab"):
        kinesis.put(stream, [json.dumps(_row(n)).encode() for n in range(shard, rows, 2)], key)
    return kinesis, stream


def _from_kinesis(scale: float) -> tuple[Job, Job]:
    target = Target(_rows(scale) // 5)  # the server is slow
    kinesis, stream = _records(target.rows)
    connection = weft.KinesisConnection(name="kinesis", **kinesis.fields())

    def by_hand() -> None:
        import orjson
        import psycopg

        client = kinesis.client
        with psycopg.connect(target.url) as driver:
            for shard in client.list_shards(StreamName=stream)["Shards"]:
                where = {"StreamName": stream, "ShardId": shard["ShardId"], "ShardIteratorType": "TRIM_HORIZON"}
                iterator = client.get_shard_iterator(**where)["ShardIterator"]
                while found := (page := client.get_records(ShardIterator=iterator, Limit=BATCH))["Records"]:
                    iterator = page["NextShardIterator"]
                    rows = [orjson.loads(each["Data"]) for each in found]
                    with driver.cursor().copy("COPY theirs FROM STDIN") as copy:
                        for row in rows:
                            copy.write_row((row["id"], row["name"], row["amount"], row["n"]))
                    driver.commit()

    return target.job("ours", lambda: target.run(connection, stream, "ours")), target.job("theirs", by_hand)


# ------------------------------------------------------------------------------------------------------------- RabbitMQ


def _from_rabbitmq(scale: float) -> tuple[Job, Job]:
    import pika

    from rabbitmq_server import RabbitMQServer

    target, broker = Target(_rows(scale) // 5), RabbitMQServer()
    broker.start()
    connection = weft.RabbitMQConnection(broker.url(), name="broker", received_log=weft.connect(url=target.url))
    queues: list[str] = []

    def fill() -> None:
        """Make a queue with the rows: what is consumed is gone."""
        queues.append(broker.create_queue())
        with contextlib.closing(broker.connect()) as opened:
            channel = opened.channel()
            for n in range(target.rows):
                properties = pika.BasicProperties(message_id=str(n), delivery_mode=2)
                channel.basic_publish("", queues[-1], json.dumps(_row(n)).encode(), properties)
            channel.queue_declare(queues[-1], passive=True)

    def by_hand() -> None:
        import orjson
        import psycopg

        with psycopg.connect(target.url) as driver, contextlib.closing(broker.connect()) as opened:
            channel, rows = opened.channel(), []
            channel.basic_qos(prefetch_count=5_000)
            for number, (method, _, body) in enumerate(channel.consume(queues[-1]), 1):
                rows.append(orjson.loads(body))
                if number % 1000 == 0 or number == target.rows:
                    with driver.cursor().copy("COPY theirs FROM STDIN") as copy:
                        for row in rows:
                            copy.write_row((row["id"], row["name"], row["amount"], row["n"]))
                    driver.commit()
                    channel.basic_ack(method.delivery_tag, multiple=True)
                    rows.clear()
                if number == target.rows:
                    break

    ours = target.job("ours", lambda: target.run(connection, queues[-1], "ours"), fill)
    return ours, target.job("theirs", by_hand, fill)


# -------------------------------------------------------------------------------------------------------------- Pub/Sub


def _from_pubsub(scale: float) -> tuple[Job, Job]:
    from pubsub_server import PROJECT, PubSubServer

    target, server = Target(_rows(scale) // 25), PubSubServer()  # the emulator is slow
    server.start()
    connection = weft.PubSubConnection(name="events", **server.fields(), received_log=weft.connect(url=target.url))
    names: list[str] = []

    def fill() -> None:
        """Make a subscription with the rows: what is acknowledged is gone."""
        topic, subscription = server.create_queue()
        server.publish(topic, [json.dumps(_row(n)).encode() for n in range(target.rows)])
        names.append(subscription)

    def by_hand() -> None:
        import orjson
        import psycopg
        from google.cloud import pubsub_v1

        taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
        path, left = f"projects/{PROJECT}/subscriptions/{names[-1]}", target.rows
        client: Any = pubsub_v1.SubscriberClient(transport=server.subscriber.transport)
        with psycopg.connect(target.url) as driver:
            flow = pubsub_v1.types.FlowControl(max_messages=2 * BATCH)
            following = client.subscribe(path, taken.put, flow_control=flow)
            while left:
                found = [taken.get() for _ in range(min(BATCH, left))]
                with driver.cursor().copy("COPY theirs FROM STDIN") as copy:
                    for row in (orjson.loads(each.data) for each in found):
                        copy.write_row((row["id"], row["name"], row["amount"], row["n"]))
                driver.commit()
                for each in found:
                    each.ack()
                left -= len(found)
            following.cancel()
            following.result()

    ours = target.job("ours", lambda: target.run(connection, names[-1], "ours"), fill)
    return ours, target.job("theirs", by_hand, fill)


# ----------------------------------------------------------------------------------------- Kafka with a schema registry


class Registered:
    """A topic of messages in a format with a schema registry."""

    def __init__(self, server: Any, payload_format: str) -> None:
        from registry_server import RegistryServer

        self.server, self.topic = server, server.create_topic(4)
        registry: Any = RegistryServer()
        registry.start()
        self.fields = {
            "bootstrap_servers": server.bootstrap,
            "payload_format": payload_format,
            "schema_registry_url": registry.api,
        }
        self.connection = weft.KafkaConnection(**self.fields)
        self._kinds = pa.struct(
            [("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64()), ("n", pa.int32())]
        )
        codec: Any = options.codec(self.connection, self.topic)
        self.schema: str = codec.schema_of(pa.schema(list(self._kinds)), "Row")
        schemas = options.registry_of(self.connection)
        self._codec = codec.writing(self.schema, schemas.register(f"{self.topic}-value", codec.kind, self.schema))

    def produce(self, rows: int) -> None:
        for at in range(0, rows, BATCH):
            values = pa.array([_row(n) for n in range(at, min(at + BATCH, rows))], self._kinds)
            self.server.produce(self.topic, self._codec.encode(values).to_pylist(), at // BATCH % 4)


@cache
def _registered(rows: int, payload_format: str) -> Registered:
    made = Registered(_topic(rows)[0], payload_format)
    made.produce(rows)
    return made


def _against_json(payload_format: str) -> Callable[[float], tuple[Job, Job]]:
    """Our pipelines over the same rows, in a format with a schema registry and in JSON."""

    def prepare(scale: float) -> tuple[Job, Job]:
        target = Target(_rows(scale))
        registered, (server, json_topic) = _registered(target.rows, payload_format), _topic(target.rows)
        plain = weft.KafkaConnection(bootstrap_servers=server.bootstrap)
        return (
            target.job("ours", lambda: target.run(registered.connection, registered.topic, "ours")),
            target.job("theirs", lambda: target.run(plain, json_topic, "theirs")),
        )

    return prepare


def _against_clients(payload_format: str) -> Callable[[float], tuple[Job, Job]]:
    def prepare(scale: float) -> tuple[Job, Job]:
        target = Target(_rows(scale))
        registered = _registered(target.rows, payload_format)
        fields = _avro_fields(registered.schema) if payload_format == "avro" else _protobuf_fields()
        return (
            target.job("ours", lambda: target.run(registered.connection, registered.topic, "ours")),
            target.job("theirs", lambda: _by_hand(target, registered.server, registered.topic, fields)),
        )

    return prepare


def _avro_fields(schema: str) -> Callable[[bytes], tuple[Any, ...]]:
    import fastavro

    parsed = fastavro.parse_schema(json.loads(schema))

    def fields(message: bytes) -> tuple[Any, ...]:
        row: Any = fastavro.schemaless_reader(io.BytesIO(message[5:]), parsed, None)
        return row["id"], row["name"], row["amount"], row["n"]

    return fields


def _protobuf_fields() -> Callable[[bytes], tuple[Any, ...]]:
    from google_messages import message_class

    read = message_class("Row", id="int64", name="string", amount="double", n="int32").FromString

    def fields(message: bytes) -> tuple[Any, ...]:
        row = read(message[6:])
        return row.id, row.name, row.amount, row.n

    return fields


# ---------------------------------------------------------------------------------------------------------------- Redis


@cache
def _stream(rows: int) -> tuple[Any, Any]:
    """A Redis that keeps nothing on disk, with a stream of so many events."""
    from redis_server import RedisServer

    server = RedisServer()
    server.start()
    client = server.connect()
    client.config_set("appendonly", "no")
    client.close()
    connection = weft.connect(url=server.url())
    fields = {"id": "int64", "name": "string", "amount": "float64", "n": "int32"}
    stream = weft.stream(name="orders", connection=connection, fields=fields)(lambda: None)
    for at in range(0, rows, BATCH):
        weft.publish_sync(stream, [_row(n) for n in range(at, at + BATCH)])
    return server, stream


def _from_redis(scale: float) -> tuple[Job, Job]:
    import pyarrow.csv as pc

    target = Target(_rows(scale))
    _, stream = _stream(target.rows)
    path = Path(tempfile.mkdtemp(dir=_folder.name)) / "drained.csv"

    def by_hand() -> None:
        schema = {"id": "int64", "name": "string", "amount": "float64", "n": "int32"}
        table = weft.read_stream(stream.connection, stream, schema=schema, to="arrow")
        pc.write_csv(table.select(list(schema)), path)
        target.copy(path, "theirs")

    def ours() -> None:
        weft.run_streaming_pipeline(
            name=f"bench {uuid.uuid4().hex}",
            source=stream,
            target=weft.connect(url=target.url),
            target_table=("public", "ours"),
            once=True,
        )

    return target.job("ours", ours), target.job("theirs", by_hand)


CASES = [
    Case("Parquet files → filter → PostgreSQL", "psql \\copy", 0.5, _files("parquet"), needs="postgres"),
    Case("CSV files → filter → PostgreSQL", "psql \\copy", 0.5, _files("csv"), needs="postgres"),
    Case("exactly once, ten batches of 100,000 rows", "at least once", 0.85, _delivery, needs="postgres"),
    Case(
        "10M rows from Parquet files (time)",
        "1M rows (time)",
        1.2,
        _ten_times,
        needs="postgres",
        at_most=True,
        rounds=3,
    ),
    Case(
        "Kafka JSON → PostgreSQL",
        "confluent-kafka, orjson, COPY in batches",
        1.5,
        _from_kafka,
        needs="postgres",
        rounds=3,
    ),
    Case(
        "Kinesis JSON → PostgreSQL",
        "boto3, orjson, COPY in batches",
        0.8,
        _from_kinesis,
        needs="postgres",
        rounds=3,
    ),
    Case(
        "RabbitMQ JSON → PostgreSQL",
        "pika, orjson, COPY and acknowledged by the thousand",
        0.7,
        _from_rabbitmq,
        needs="postgres",
        rounds=3,
    ),
    Case(
        "Pub/Sub JSON → PostgreSQL",
        "Google's client by callbacks, orjson, COPY in batches",
        0.8,
        _from_pubsub,
        needs="postgres",
        rounds=3,
    ),
    *(
        Case(
            f"Kafka {name} → PostgreSQL", "our Kafka JSON", 0.6, _against_json(name.lower()), needs="postgres", rounds=3
        )
        for name in ("Avro", "Protobuf")
    ),
    Case(
        "Kafka Avro → PostgreSQL",
        "confluent-kafka, fastavro, COPY in batches",
        1.5,
        _against_clients("avro"),
        needs="postgres",
        rounds=3,
    ),
    Case(
        "Kafka Protobuf → PostgreSQL",
        "confluent-kafka, Google's classes, COPY in batches",
        2.0,
        _against_clients("protobuf"),
        needs="postgres",
        rounds=3,
    ),
    Case("Redis stream → PostgreSQL", "drained to Arrow, then psql \\copy", 0.6, _from_redis, needs="postgres"),
]
