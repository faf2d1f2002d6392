"""Change data capture: changes applied to a mirror, against staging and MERGE by hand."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import servers
import weft
from bench.engine_loads import Job, Pair
from bench.harness import Case

CHANGES, KEYS = 1_000_000, 100_000
_BEGAN = 1_770_000_000_000
Published = tuple[dict[str, Any], Callable[[int], None]]
"""What is said of the source of a pipeline, and what sends it a number."""
_FLAT = "op text, id bigint, name text, amount double precision, lsn bigint"

_UNPACKED = (
    "SELECT m->>'op' AS op, (row->>'id')::bigint AS id, row->>'name' AS name, (row->>'amount')::float8 AS amount, "
    "(m->'source'->>'lsn')::bigint AS lsn FROM (SELECT m, coalesce(nullif(m->>'after', ''), m->>'before')::json AS row "
    "FROM messages) AS found"
)
# So many messages a task reads at once.
_READ = 10_000


def _messages(number: int, rows: int, keys: int) -> Any:
    """The changes of a batch as messages of Debezium are read: every tenth is a delete."""
    import numpy as np
    import pyarrow as pa

    chance = np.random.default_rng(number)
    ids, lsn = chance.integers(0, keys, rows), np.arange(number * rows, (number + 1) * rows)
    is_delete = np.arange(rows) % 10 == 9
    columns = [pa.array(ids), pa.array(ids.astype(str)), pa.array(chance.random(rows))]
    row = pa.StructArray.from_arrays(columns, ["id", "name", "amount"])
    after = pa.StructArray.from_arrays(columns, ["id", "name", "amount"], mask=pa.array(is_delete))
    source = pa.StructArray.from_arrays([pa.array(lsn), pa.array(_BEGAN + lsn // 100)], ["lsn", "ts_ms"])
    op = pa.array(np.where(is_delete, "d", "u"))
    return pa.table({"op": op, "before": row, "after": after, "source": source})


def _as_json(messages: Any) -> Any:
    """The same messages as a topic has them."""
    import msgspec
    import pyarrow as pa

    return pa.array([msgspec.json.encode(each) for each in messages.to_pylist()], pa.binary())


def mirror_of_json(scale: float) -> tuple[Job, Job]:
    """Read messages and apply them to a mirror that has all keys."""
    return mirror(scale, is_json=True)


def mirror(scale: float, *, is_json: bool = False) -> tuple[Job, Job]:
    """Apply a batch of changes to a mirror that has all keys."""
    import psycopg
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv

    from weft.engine.readers import open_tables, stored_columns
    from weft.engine.streaming.cdc.applying import ChangeBatch
    from weft.engine.streaming.cdc.envelopes import opened
    from weft.engine.streaming.cdc.json_rows import StoredTable
    from weft.engine.streaming.cdc.newest import newest
    from weft.systems.codecs.json import JsonCodec
    from weft.systems.load import Load
    from weft.systems.sql import commit

    rows, keys = max(10_000, round(CHANGES * scale)), max(1000, round(KEYS * scale))
    url = servers.shared("postgres").create_database(f"bench_{uuid.uuid4().hex}")
    tables = open_tables(weft.connect(url=url))
    cdc = weft.CDC(envelope="debezium", key_field="after.id")
    with psycopg.connect(url) as driver:
        for name in ("ours", "theirs"):
            driver.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, name text, amount double precision)")
            driver.execute(f"INSERT INTO {name} SELECT i, i::text, 0 FROM generate_series(0, {keys - 1}) AS i")
    numbers, no_header = {"ours": 0, "theirs": 0}, pyarrow.csv.WriteOptions(include_header=False)

    def ours() -> int:
        number, numbers["ours"] = numbers["ours"], numbers["ours"] + 1
        messages = batches["ours"]
        present = {each.name: each for each in stored_columns(tables, None, "ours") or ()}
        if is_json:
            decoder = JsonCodec().decoder({"before": pa.json_(), "after": pa.json_()})
            parts = [decoder.parse(messages.slice(at, _READ)).columns for at in range(0, rows, _READ)]
            messages = pa.concat_tables(map(pa.table, parts))
        found = opened(messages, cdc, lambda: [StoredTable({name: each.field for name, each in present.items()})])
        batch = ChangeBatch(cdc, found, newest(found), [], 0)
        load = Load.declare(target="ours", mode="merge", keys=cdc.keys, pipeline="bench", commit_key=f"{number}")
        data, load = batch.planned(load, present)
        commit.prepare(tables, load, data.schema)
        commit.commit(tables, load, commit.BatchedRows(data.schema, data.batches))
        return rows

    def by_hand() -> int:
        numbers["theirs"] += 1
        with psycopg.connect(url) as driver:
            name = "stage" if not is_json else "messages"
            driver.execute(f"CREATE TEMP TABLE {name} ({'m json' if is_json else _FLAT}) ON COMMIT DROP")
            with driver.cursor().copy(f"COPY {name} FROM STDIN (FORMAT csv)") as copy:
                copy.write(batches["theirs"])
            if is_json:
                driver.execute(f"CREATE TEMP TABLE stage ON COMMIT DROP AS {_UNPACKED}")
            driver.execute(
                "MERGE INTO theirs AS t USING (SELECT DISTINCT ON (id) * FROM stage ORDER BY id, lsn DESC) AS s "
                "ON t.id = s.id WHEN MATCHED AND s.op = 'd' THEN DELETE "
                "WHEN MATCHED THEN UPDATE SET name = s.name, amount = s.amount "
                "WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT VALUES (s.id, s.name, s.amount)"
            )
        return rows

    batches: dict[str, Any] = {}

    def ready(who: str) -> None:
        messages = _messages(numbers[who], rows, keys)
        if is_json:
            messages = _as_json(messages)
        if who == "theirs" and is_json:
            sink = pa.BufferOutputStream()
            pyarrow.csv.write_csv(pa.table({"m": messages.cast(pa.string())}), sink, no_header)
            messages = sink.getvalue().to_pybytes()
        elif who == "theirs":
            row, sink = messages["before"].combine_chunks(), pa.BufferOutputStream()
            flat = pa.table(
                {
                    "op": messages["op"],
                    **{name: pc.struct_field(row, name) for name in ("id", "name", "amount")},
                    "lsn": pc.struct_field(messages["source"].combine_chunks(), "lsn"),
                }
            )
            pyarrow.csv.write_csv(flat, sink, no_header)
            messages = sink.getvalue().to_pybytes()
        batches[who] = messages

    ours.reset = lambda: ready("ours")  # type: ignore[attr-defined]
    by_hand.reset = lambda: ready("theirs")  # type: ignore[attr-defined]
    return ours, by_hand


def delta(scale: float) -> tuple[Job, Job]:
    """Apply a batch of changes to a Delta table that has all keys."""
    import tempfile

    import pyarrow as pa
    import pyarrow.compute as pc

    from weft.engine import connectors, session
    from weft.engine.load import Job as LoadJob
    from weft.engine.streaming.cdc.applying import ChangeBatch
    from weft.engine.streaming.cdc.envelopes import opened
    from weft.engine.streaming.cdc.newest import newest
    from weft.systems.load import Load

    rows, keys = max(10_000, round(CHANGES * scale)), max(1000, round(KEYS * scale))
    lake = weft.DeltaLocalConnection(path=tempfile.mkdtemp())
    spark = connectors.ready(session.spark(), lake)
    cdc = weft.CDC(envelope="debezium", key_field="after.id")
    for name in ("ours", "theirs"):
        start = spark.range(keys).selectExpr("id", "CAST(id AS string) AS name", "0d AS amount")
        start.write.format("delta").save(f"{lake.path}/{name}")
    numbers = {"ours": 0, "theirs": 0}
    batches: dict[str, Any] = {}

    def ours() -> int:
        numbers["ours"] += 1
        found = opened(batches["ours"], cdc)
        batch = ChangeBatch(cdc, found, newest(found), [], 0)
        load = Load.declare(target="ours", mode="merge", keys=cdc.keys, commit_key="bench", batch_id=numbers["ours"])
        data, load = batch.planned(load, {})
        LoadJob(load, lake).run(data)
        return rows

    def by_hand() -> int:
        numbers["theirs"] += 1
        spark.createDataFrame(batches["theirs"]).createOrReplaceTempView("stage")
        spark.sql(
            f"MERGE INTO delta.`{lake.path}/theirs` AS t "
            "USING (SELECT max_by(struct(*), lsn) AS c FROM stage GROUP BY id) AS s "
            "ON t.id = s.c.id WHEN MATCHED AND s.c.op = 'd' THEN DELETE "
            "WHEN MATCHED THEN UPDATE SET name = s.c.name, amount = s.c.amount "
            "WHEN NOT MATCHED AND s.c.op <> 'd' THEN INSERT (id, name, amount) VALUES (s.c.id, s.c.name, s.c.amount)"
        ).collect()
        return rows

    def ready(who: str) -> None:
        messages = _messages(numbers[who], rows, keys)
        if who == "theirs":
            row, source = messages["before"].combine_chunks(), messages["source"].combine_chunks()
            columns = {name: pc.struct_field(row, name) for name in ("id", "name", "amount")}
            messages = pa.table({"op": messages["op"], **columns, "lsn": pc.struct_field(source, "lsn")})
        batches[who] = messages

    ours.reset = lambda: ready("ours")  # type: ignore[attr-defined]
    by_hand.reset = lambda: ready("theirs")  # type: ignore[attr-defined]
    return ours, by_hand


def topic_of_changes(pair: Pair) -> Published:
    """A topic of changes as the source of a pipeline, and what sends a change."""
    import psycopg

    with psycopg.connect(pair.there) as driver:
        driver.execute("CREATE TABLE public.clicks (id bigint PRIMARY KEY, name text)")
    source, send = _topic()

    def change(number: int) -> None:
        place = {"schema": "public", "table": "clicks", "lsn": number + 2, "ts_ms": time.time_ns() // 1_000_000}
        send({"op": "c", "before": None, "after": {"id": number, "name": f"{number}"}, "source": place})

    return {**source, "cdc": weft.CDC(envelope="debezium", key_field="after.id")}, change


def topic_of_messages(pair: Pair) -> Published:
    """A topic of rows as the source of a pipeline, and what sends a row."""
    source, send = _topic()
    return source, lambda number: send({"id": number, "name": f"{number}"})


def _topic() -> tuple[dict[str, Any], Callable[[Any], None]]:
    """A topic as the source of a pipeline, and what sends a message."""
    from confluent_kafka import Producer

    import kafka_server  # noqa: F401 - so that there is a server of Kafka

    kafka: Any = servers.shared("kafka")
    topic, producer = kafka.create_topic(), Producer({"bootstrap.servers": kafka.bootstrap, "linger.ms": 0})

    def send(message: Any) -> None:
        producer.produce(topic, value=json.dumps(message).encode())
        producer.flush(60)

    broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
    return {"source": broker, "source_query": topic}, send


CASES = [
    Case("1M changes over 100k keys, PostgreSQL", "COPY + MERGE by hand", 0.6, mirror, needs="postgres"),
    Case("1M messages in JSON, PostgreSQL", "COPY + SQL + MERGE by hand", 0.6, mirror_of_json, needs="postgres"),
    Case("1M changes over 100k keys, Delta", "one MERGE by hand", 0.7, delta),
]
