"""Debezium itself, over PostgreSQL and into Kafka: every type, and what goes wrong with it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any

import pytest

import weft
from debezium_process import Debezium
from engine.streaming.conftest import run_once
from servers import PostgresServer, wait_until
from weft import CDC
from weft.engine.readers import open_tables
from weft.engine.streaming.cdc.verify import Difference, Side, compare

pytestmark = [pytest.mark.full, pytest.mark.timing, pytest.mark.spark]

KINDS = """CREATE TABLE kinds (
    id int PRIMARY KEY, small smallint, big bigint, r real, d double precision, b boolean, n numeric(12,3),
    whole numeric(20,0), free numeric, cash money, c char(3), v varchar(20), t text, raw bytea, day date, t0 time(0),
    t3 time(3), t6 time, ts0 timestamp(0), ts3 timestamp(3), ts timestamp, tstz timestamptz, u uuid, j json, jb jsonb,
    x xml, e mood, one bit(1), five bit(5), ip inet, span interval, rng int4range, ints int[], texts text[],
    nums numeric(8,2)[], days date[], times timestamp[], uuids uuid[])"""
ROW = r"""(1, -2, 9007199254740993, 1.5, 0.1, true, 1234.567, 12345678901234567890, -0.00012, 12.34, 'ab', 'vé', 'tëxt',
    '\x00ff10', '2024-02-29', '12:34:56', '12:34:56.789', '12:34:56.789012', '2024-02-29 12:34:56',
    '2024-02-29 12:34:56.789', '2024-02-29 12:34:56.789012', '2024-02-29 12:34:56.789012+02',
    '123e4567-e89b-12d3-a456-426614174000', '{"a": [1, null]}', '{"a": 1.50}', '<a>1</a>', 'ok', B'1', B'10011',
    '10.0.0.0/8', '1 year 2 days 03:00:00.5', '[1,5)', '{1,NULL,3}', '{a,NULL}', '{1.50,-2.25}', '{2024-02-29}',
    '{2024-02-29 12:34:56.789012}', '{123e4567-e89b-12d3-a456-426614174000}')"""


_numbers = itertools.count(1000)


class Mirrored:
    """A table, Debezium, and a pipeline that keeps a mirror of the table."""

    def __init__(self, kafka: Any, registry: str | None = None) -> None:
        self.server, self.kafka = PostgresServer(), kafka
        avro = {"payload_format": "avro", "schema_registry_url": registry}
        self.broker = weft.KafkaConnection(bootstrap_servers=kafka.bootstrap, **(avro if registry else {}))
        self.server.start()
        self.urls = {name: self.server.create_database(name) for name in ("source", "mirror")}
        for each in self.urls:
            self.run("CREATE TYPE mood AS ENUM ('sad', 'ok')", KINDS, database=each)
            if registry is not None:  # in Avro bits are bytes, of which nothing says what they are
                self.run("ALTER TABLE kinds ALTER five TYPE text", database=each)
        self.debezium = Debezium(kafka.bootstrap, registry)
        self.prefix = f"faults{next(_numbers)}"
        self.topic = kafka.create_topic(name=f"{self.prefix}.public.kinds")
        self.capture()

    def capture(self, **properties: str) -> None:
        schemas = {"value.converter.schemas.enable": "true", "interval.handling.mode": "string"}
        self.debezium.capture(self.prefix, self.urls["source"], ["public.kinds"], **schemas, **properties)

    def run(self, *statements: str, database: str = "source") -> None:
        with closing(self.server.connect(database)) as connection:
            for each in statements:
                connection.execute(each)

    def rows(self, database: str) -> list[Any]:
        with closing(self.server.connect(database)) as connection:
            found = connection.execute("SELECT to_json(kinds)::text FROM kinds ORDER BY id").fetchall()
            return [json.loads(text, parse_float=Decimal) for (text,) in found]

    def follow(self) -> None:
        """Wait for all changes so far to be in the topic, and apply them."""
        mark = f"mark {next(_numbers)}"
        self.run(f"INSERT INTO kinds (id, t) VALUES ({next(_numbers)}, '{mark}')")
        wait_until(
            lambda: any(mark.encode() in (each.value() or b"") for each in self.kafka.messages(self.topic)), mark, 120
        )
        run_once(
            name="kinds",
            source=self.broker,
            source_query=self.topic,
            target=weft.PostgresConnection(url=self.urls["mirror"]),
            target_table=("public", "kinds"),
            cdc=CDC(envelope="debezium", key_field="after.id", schema_evolution="evolve"),
        )

    def check(self) -> None:
        self.follow()
        assert self.rows("mirror") == self.rows("source")


@pytest.fixture(params=["json", "avro"])
def mirrored(request: pytest.FixtureRequest, plain_spark: Any, kafka: Any, need_server: Any) -> Iterator[Mirrored]:
    need_server("debezium")
    need_server("postgres")
    made = Mirrored(kafka, request.getfixturevalue("registry").api if request.param == "avro" else None)
    yield made
    made.debezium.kill()
    made.server.kill()


def test_debezium(mirrored: Mirrored) -> None:
    debezium, run = mirrored.debezium, mirrored.run
    run(f"INSERT INTO kinds VALUES {ROW}", "INSERT INTO kinds (id) VALUES (2)")
    debezium.start()
    mirrored.check()
    # A row whose large values an update does not send, a key that is changed, a delete.
    run(
        "INSERT INTO kinds (id, t, raw) VALUES (3, repeat(md5('a'), 9000), decode(repeat('00ff', 9000), 'hex'))",
        "UPDATE kinds SET small = 7 WHERE id = 3",
        "UPDATE kinds SET id = 4 WHERE id = 2",
        "DELETE FROM kinds WHERE id = 4",
    )
    mirrored.check()
    # It is killed, and sends again what its offsets do not have.
    run("UPDATE kinds SET v = 'before' WHERE id = 1")
    debezium.kill()
    run("UPDATE kinds SET v = 'after' WHERE id = 1", "INSERT INTO kinds (id, v) VALUES (5, 'five')")
    debezium.start()
    mirrored.check()
    # The source is restarted.
    mirrored.server.restart()
    run("UPDATE kinds SET v = 'restarted' WHERE id = 1")
    mirrored.check()
    # The table is altered between two changes.
    run(
        "UPDATE kinds SET v = 'narrow' WHERE id = 5",
        "ALTER TABLE kinds ADD COLUMN more numeric(6,2)",
        "UPDATE kinds SET more = 1.25 WHERE id = 5",
    )
    mirrored.check()


@pytest.mark.parametrize("mirrored", ["json"], indirect=True)
def test_a_slot_that_is_dropped(mirrored: Mirrored) -> None:
    debezium, run = mirrored.debezium, mirrored.run
    run("INSERT INTO kinds (id, v) VALUES (1, 'one'), (2, 'two')")
    debezium.start()
    mirrored.check()
    debezium.kill()
    wait_until(lambda: _is_free(mirrored), "the slot to be free")
    run(f"SELECT pg_drop_replication_slot('{mirrored.prefix}')", "UPDATE kinds SET v = 'lost' WHERE id = 1")
    run("DELETE FROM kinds WHERE id = 2")
    # The way back: a new snapshot, which has no deletes; and what is left over is mended.
    mirrored.capture(**{"snapshot.mode": "when_needed"})
    debezium.start()
    mirrored.follow()
    with (
        closing(open_tables(weft.PostgresConnection(url=mirrored.urls["source"]))) as source,
        closing(open_tables(weft.PostgresConnection(url=mirrored.urls["mirror"]))) as mirror,
    ):
        sides = [Side(each, "public", "kinds", ["id"]) for each in (source, mirror)]
        found = compare(*sides, settle_seconds=0, mend=True, wait=lambda _: None)
    assert found.differences == [Difference((2,), "extra")]
    assert mirrored.rows("mirror") == mirrored.rows("source")


def _is_free(mirrored: Mirrored) -> bool:
    with closing(mirrored.server.connect()) as connection:
        query = f"SELECT bool_or(active) FROM pg_replication_slots WHERE slot_name = '{mirrored.prefix}'"
        return not connection.execute(query).fetchone()[0]
