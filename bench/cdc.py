"""Change data capture: changes applied to a mirror, against staging and MERGE by hand."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from itertools import count
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
_GATE = (
    "INSERT INTO gate VALUES ('mirror', %s, %s) ON CONFLICT (pipeline, pk) DO UPDATE "
    "SET last_seen = EXCLUDED.last_seen WHERE gate.last_seen < EXCLUDED.last_seen RETURNING 1"
)
_UPDATE = (
    "INSERT INTO theirs SELECT * FROM jsonb_populate_record(NULL::theirs, %s::jsonb) "
    "ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, amount = EXCLUDED.amount"
)
# So many messages a task reads at once.
_READ = 10_000


def _messages(number: int, rows: int, keys: int, *, step: int = 1) -> Any:
    """The changes of a batch as messages of Debezium are read: every tenth is a delete. The keys are so far apart."""
    import numpy as np
    import pyarrow as pa

    chance = np.random.default_rng(number)
    ids, lsn = chance.integers(0, keys, rows) * step, np.arange(number * rows, (number + 1) * rows)
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


def _flat(messages: Any) -> Any:
    """The same messages as a client of the database has them: a column for each value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    row, source = messages["before"].combine_chunks(), messages["source"].combine_chunks()
    columns = {name: pc.struct_field(row, name) for name in ("id", "name", "amount")}
    return pa.table({"op": messages["op"], **columns, "lsn": pc.struct_field(source, "lsn")})


class _Mirror:
    """A mirror in PostgreSQL that has so many rows, and what applies batches to it as the engine does."""

    def __init__(self, url: str, name: str, rows: int) -> None:
        import psycopg

        from weft.engine.readers import open_tables

        with psycopg.connect(url, autocommit=True) as driver:
            driver.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, name text, amount double precision)")
            driver.execute(f"INSERT INTO {name} SELECT i, i::text, 0 FROM generate_series(0, {rows - 1}) AS i")
            driver.execute(f"VACUUM ANALYZE {name}")
        self.name, self.number, self.tables = name, 0, open_tables(weft.connect(url=url))

    def apply(self, messages: Any, *, is_json: bool = False) -> int:
        """Apply a batch."""
        import pyarrow as pa

        from weft.engine.readers import stored_columns
        from weft.engine.streaming.cdc.applying import ChangeBatch
        from weft.engine.streaming.cdc.envelopes import opened
        from weft.engine.streaming.cdc.json_rows import StoredTable
        from weft.engine.streaming.cdc.newest import newest
        from weft.systems.codecs.json import JsonCodec
        from weft.systems.load import Load
        from weft.systems.sql import commit

        self.number += 1
        rows, cdc = len(messages), weft.CDC(envelope="debezium", key_field="after.id")
        present = {each.name: each for each in stored_columns(self.tables, None, self.name) or ()}
        if is_json:
            decoder = JsonCodec().decoder({"before": pa.json_(), "after": pa.json_()})
            parts = [decoder.parse(messages.slice(at, _READ)).columns for at in range(0, rows, _READ)]
            messages = pa.concat_tables(map(pa.table, parts))
        found = opened(messages, cdc, lambda: [StoredTable({name: each.field for name, each in present.items()})])
        batch = ChangeBatch(cdc, found, newest(found), [], 0)
        load = Load.declare(
            target=self.name, mode="merge", keys=cdc.keys, pipeline=self.name, commit_key=f"{self.number}"
        )
        data, load = batch.planned(load, present)
        commit.prepare(self.tables, load, data.schema)
        commit.commit(self.tables, load, commit.BatchedRows(data.schema, data.batches))
        return rows


def _database() -> str:
    return servers.shared("postgres").create_database(f"bench_{uuid.uuid4().hex}")


def _with_batches(job: Callable[[Any], int], batch: Callable[[int], Any]) -> Job:
    """A job that finds the next batch ready: the time to make it does not count."""
    numbers, ready = count(), [None]

    def run() -> int:
        return job(ready[0])

    def reset() -> None:
        ready[0] = batch(next(numbers))

    run.reset = reset  # type: ignore[attr-defined]
    return run


def mirror_of_json(scale: float) -> tuple[Job, Job]:
    """Read messages and apply them to a mirror that has all keys."""
    return mirror(scale, is_json=True)


def mirror(scale: float, *, is_json: bool = False) -> tuple[Job, Job]:
    """Apply a batch of changes to a mirror that has all keys."""
    import psycopg
    import pyarrow as pa
    import pyarrow.csv

    rows, keys = _size(scale)
    url = _database()
    ours = _Mirror(url, "ours", keys)
    _Mirror(url, "theirs", keys)
    no_header = pyarrow.csv.WriteOptions(include_header=False)

    def by_hand(lines: bytes) -> int:
        with psycopg.connect(url) as driver:
            name = "stage" if not is_json else "messages"
            driver.execute(f"CREATE TEMP TABLE {name} ({'m json' if is_json else _FLAT}) ON COMMIT DROP")
            with driver.cursor().copy(f"COPY {name} FROM STDIN (FORMAT csv)") as copy:
                copy.write(lines)
            if is_json:
                driver.execute(f"CREATE TEMP TABLE stage ON COMMIT DROP AS {_UNPACKED}")
            driver.execute(
                "MERGE INTO theirs AS t USING (SELECT DISTINCT ON (id) * FROM stage ORDER BY id, lsn DESC) AS s "
                "ON t.id = s.id WHEN MATCHED AND s.op = 'd' THEN DELETE "
                "WHEN MATCHED THEN UPDATE SET name = s.name, amount = s.amount "
                "WHEN NOT MATCHED AND s.op <> 'd' THEN INSERT VALUES (s.id, s.name, s.amount)"
            )
        return rows

    def messages(number: int) -> Any:
        made = _messages(number, rows, keys)
        return _as_json(made) if is_json else made

    def lines(number: int) -> bytes:
        made, sink = messages(number), pa.BufferOutputStream()
        made = pa.table({"m": made.cast(pa.string())}) if is_json else _flat(made)
        pyarrow.csv.write_csv(made, sink, no_header)
        found: bytes = sink.getvalue().to_pybytes()
        return found

    return (
        _with_batches(lambda batch: ours.apply(batch, is_json=is_json), messages),
        _with_batches(by_hand, lines),
    )


def mirror_against_events(scale: float) -> tuple[Job, Job]:
    """Apply a batch of changes, against the gate and a statement for each event, in one transaction: fewer events, of
    which each takes as long."""
    import psycopg

    rows, keys = _size(scale)
    url, events = _database(), max(1000, rows // 50)
    ours = _Mirror(url, "ours", keys)
    _Mirror(url, "theirs", keys)
    with psycopg.connect(url) as driver:
        driver.execute("CREATE TABLE gate (pipeline text, pk text, last_seen bigint, PRIMARY KEY (pipeline, pk))")

    def by_events(changes: list[tuple[str, int, str, int]]) -> int:
        with psycopg.connect(url) as driver:
            for op, key, row, lsn in changes:
                is_new = driver.execute(_GATE, (f"{key}", lsn)).fetchone()
                if is_new and op == "d":
                    driver.execute("DELETE FROM theirs WHERE id = %s", (key,))
                elif is_new:
                    driver.execute(_UPDATE, (row,))
        return len(changes)

    def changes(number: int) -> list[tuple[str, int, str, int]]:
        found = _flat(_messages(number, events, keys)).to_pylist()
        return [(each["op"], each["id"], json.dumps(each), each["lsn"]) for each in found]

    return _with_batches(ours.apply, lambda number: _messages(number, rows, keys)), _with_batches(by_events, changes)


def mirror_by_size(scale: float) -> tuple[Job, Job]:
    """Apply a batch of changes to a mirror of 10M rows, against one of 1M; the keys are all over each."""
    rows, keys = _size(scale)
    url = _database()
    many, few = (_Mirror(url, f"mirror_{times}", keys * times) for times in (100, 10))
    return (
        _with_batches(many.apply, lambda number: _messages(number, rows, keys, step=100)),
        _with_batches(few.apply, lambda number: _messages(number, rows, keys, step=10)),
    )


def _size(scale: float) -> tuple[int, int]:
    """So many changes, and keys."""
    return max(10_000, round(CHANGES * scale)), max(1000, round(KEYS * scale))


def delta(scale: float) -> tuple[Job, Job]:
    """Apply a batch of changes to a Delta table that has all keys."""
    import tempfile

    from weft.engine import connectors, session
    from weft.engine.load import Job as LoadJob
    from weft.engine.streaming.cdc.applying import ChangeBatch
    from weft.engine.streaming.cdc.envelopes import opened
    from weft.engine.streaming.cdc.newest import newest
    from weft.systems.load import Load

    rows, keys = _size(scale)
    lake = weft.DeltaLocalConnection(path=tempfile.mkdtemp())
    spark = connectors.ready(session.spark(), lake)
    cdc = weft.CDC(envelope="debezium", key_field="after.id")
    for name in ("ours", "theirs"):
        start = spark.range(keys).selectExpr("id", "CAST(id AS string) AS name", "0d AS amount")
        start.write.format("delta").save(f"{lake.path}/{name}")
    numbers = count(1)

    def ours(messages: Any) -> int:
        found = opened(messages, cdc)
        batch = ChangeBatch(cdc, found, newest(found), [], 0)
        load = Load.declare(target="ours", mode="merge", keys=cdc.keys, commit_key="bench", batch_id=next(numbers))
        data, load = batch.planned(load, {})
        LoadJob(load, lake).run(data)
        return rows

    def by_hand(messages: Any) -> int:
        spark.createDataFrame(messages).createOrReplaceTempView("stage")
        spark.sql(
            f"MERGE INTO delta.`{lake.path}/theirs` AS t "
            "USING (SELECT max_by(struct(*), lsn) AS c FROM stage GROUP BY id) AS s "
            "ON t.id = s.c.id WHEN MATCHED AND s.c.op = 'd' THEN DELETE "
            "WHEN MATCHED THEN UPDATE SET name = s.c.name, amount = s.c.amount "
            "WHEN NOT MATCHED AND s.c.op <> 'd' THEN INSERT (id, name, amount) VALUES (s.c.id, s.c.name, s.c.amount)"
        ).collect()
        return rows

    return (
        _with_batches(ours, lambda number: _messages(number, rows, keys)),
        _with_batches(by_hand, lambda number: _flat(_messages(number, rows, keys))),
    )


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
    Case("1M changes, PostgreSQL", "a statement an event", 10, mirror_against_events, needs="postgres"),
    Case("1M changes, 10M rows in PostgreSQL", "1M rows", 1.3, mirror_by_size, at_most=True, needs="postgres"),
    Case("1M messages in JSON, PostgreSQL", "COPY + SQL + MERGE by hand", 0.6, mirror_of_json, needs="postgres"),
    Case("1M changes over 100k keys, Delta", "one MERGE by hand", 0.7, delta),
]
