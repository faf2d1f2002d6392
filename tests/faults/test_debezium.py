"""Debezium itself, over PostgreSQL and MariaDB and into Kafka: every type, and what goes wrong with it."""

from __future__ import annotations

import functools
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
from servers import MariaDBServer, PostgresServer, wait_until
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


TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, state varchar(20), price numeric(8,2))",
    "CREATE TABLE items (order_id int, line int, note varchar(20), PRIMARY KEY (order_id, line))",
)


class Shop:
    """Two tables of one database, and Debezium, which sends the changes of each to a topic of its own."""

    def __init__(self, kafka: Any, **properties: str) -> None:
        self.kafka, self.server = kafka, PostgresServer()
        self.server.start()
        self.source, self.mirror = (
            weft.connect(name=each, url=self.server.create_database(each)) for each in ("shop", "copy")
        )
        self.run(*TABLES)
        self.prefix, self.debezium = f"faults{next(_numbers)}", Debezium(kafka.bootstrap)
        self.tables = ["public.orders", "public.items"]
        self.topics = [kafka.create_topic(name=f"{self.prefix}.{each}") for each in self.tables]
        self.debezium.capture(self.prefix, self.source.url, self.tables, **properties)

    def run(self, *statements: str, where: Any = None) -> None:
        with closing(open_tables(where or self.source)) as tables, tables.driver.session("publish") as session:
            for each in statements:
                session.run(each)

    def rows(self, connection: Any, table: str) -> list[tuple[Any, ...]]:
        with closing(open_tables(connection)) as tables, tables.driver.session("read") as session:
            return sorted(session.rows(f"SELECT * FROM {tables.table(None, table)}"))

    def wait(self) -> None:
        """Wait for all changes of both tables so far to be in the topics."""
        number = next(_numbers)
        self.run(f"INSERT INTO orders VALUES ({number}, 'mark', 0)", f"INSERT INTO items VALUES ({number}, 0, 'mark')")
        for topic in self.topics:
            wait_until(functools.partial(self._has, topic, b"%d" % number), f"{number} in {topic}", 120)

    def _has(self, topic: str, mark: bytes) -> bool:
        return any(mark in (each.value() or b"") for each in self.kafka.messages(topic))

    def follow(self, **options: Any) -> None:
        broker = weft.KafkaConnection(bootstrap_servers=self.kafka.bootstrap)
        cdc = CDC(
            envelope="debezium",
            route=dict(zip(self.tables, ("orders", "items"), strict=True)),
            key_field={self.tables[0]: "id", self.tables[1]: ["order_id", "line"]},
            **options,
        )
        sources = [weft.Source(connection=broker, query=each) for each in self.topics]
        run_once(name="shop", sources=sources, target=self.mirror, cdc=cdc)

    def check(self) -> None:
        for table in ("orders", "items"):
            assert self.rows(self.mirror, table) == self.rows(self.source, table)


CHANGES = (
    "UPDATE orders SET state = 'paid', price = 2.75 WHERE id = 1",
    "INSERT INTO items VALUES (1, 2, 'cup')",
    "UPDATE items SET line = 3 WHERE line = 1",
    "DELETE FROM orders WHERE id = 2",
    "INSERT INTO orders VALUES (3, NULL, 3.00)",
)


@pytest.mark.parametrize("snapshot", ["debezium", "copy"])
def test_two_tables_by_a_route(plain_spark: Any, kafka: Any, need_server: Any, snapshot: str) -> None:
    """The rows that were there come by Debezium itself, or by a copy while it goes on."""
    need_server("debezium")
    need_server("postgres")
    is_copied = snapshot == "copy"
    mode = {"snapshot.mode": "no_data" if is_copied else "initial", "decimal.handling.mode": "string"}
    shop = Shop(kafka, **mode)
    try:
        shop.run("INSERT INTO orders VALUES (1, 'new', 1.50), (2, 'new', 2.00)")
        shop.run("INSERT INTO items VALUES (1, 1, 'tea')")
        if not is_copied:
            shop.run(*TABLES, where=shop.mirror)
        options = {"snapshot": "copy", "snapshot_connection": shop.source} if is_copied else {}
        shop.debezium.start()
        # Without a snapshot it sends what comes after its slot is made.
        wait_until(lambda: _is_used(shop), "the slot", 120)
        for changes in ((), CHANGES):
            shop.run(*changes)
            shop.wait()
            shop.follow(**options)
            shop.check()
        # What was sent already comes again.
        shop.debezium.kill()
        shop.run("UPDATE orders SET state = 'sent' WHERE id = 1")
        shop.debezium.start()
        shop.wait()
        shop.follow(**options)
        shop.check()
    finally:
        shop.debezium.kill()
        shop.server.kill()


def _is_used(shop: Shop) -> bool:
    with closing(shop.server.connect()) as connection:
        query = f"SELECT bool_or(active) FROM pg_replication_slots WHERE slot_name = '{shop.prefix}'"
        return bool(connection.execute(query).fetchone()[0])


MARIADB = """CREATE TABLE kinds (
    id int PRIMARY KEY, small smallint, big bigint unsigned, f float, d double, b boolean, n decimal(30,12),
    v varchar(20), t text, raw blob, day date, clock time(6), ts datetime(6), at timestamp(6) NULL,
    e enum('sad', 'ok'), j json, y year)"""
MARIADB_ROW = r"""(1, -2, 18446744073709551615, 1.5, 0.1, true, -123456789012345678.123456789012, 'vé', 'tëxt',
    x'00ff10', '2024-02-29', '-12:34:56.789012', '2024-02-29 12:34:56.789012', '2024-02-29 12:34:56.789012', 'ok',
    '{"a":[1,null,0.12345678901234567890]}', 2024)"""


class MariaMirrored:
    """A table of MariaDB, Debezium, and a pipeline that keeps a mirror of the table in the same server."""

    def __init__(self, kafka: Any) -> None:
        self.kafka, self.server, self.debezium = kafka, MariaDBServer(), Debezium(kafka.bootstrap)
        self.server.start()
        self.urls = {name: self.server.create_database(name) for name in ("source", "mirror")}
        for each in self.urls:
            self.run(MARIADB, database=each)
        self.prefix = f"faults{next(_numbers)}"
        self.topic = kafka.create_topic(name=f"{self.prefix}.source.kinds")
        schemas = {"value.converter.schemas.enable": "true", "bigint.unsigned.handling.mode": "precise"}
        self.debezium.capture(self.prefix, self.urls["source"], ["source.kinds"], **schemas)

    def run(self, *statements: str, database: str = "source") -> None:
        with closing(self.server.connect(database)) as connection, connection.cursor() as cursor:
            for each in statements:
                cursor.execute(each)

    def rows(self, database: str) -> Any:
        with closing(self.server.connect(database)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT * FROM kinds ORDER BY id")
            return cursor.fetchall()

    def check(self) -> None:
        """Wait for all changes so far to be in the topic, apply them, and compare."""
        mark = f"mark {next(_numbers)}"
        self.run(f"INSERT INTO kinds (id, v) VALUES ({next(_numbers)}, '{mark}')")
        wait_until(
            lambda: any(mark.encode() in (each.value() or b"") for each in self.kafka.messages(self.topic)), mark, 120
        )
        run_once(
            name="kinds",
            source=weft.KafkaConnection(bootstrap_servers=self.kafka.bootstrap),
            source_query=self.topic,
            target=weft.connect(url=self.urls["mirror"]),
            target_table=("mirror", "kinds"),
            cdc=CDC(envelope="debezium", key_field="after.id", schema_evolution="evolve"),
        )
        assert self.rows("mirror") == self.rows("source")


def test_debezium_of_mariadb(plain_spark: Any, kafka: Any, need_server: Any) -> None:
    need_server("debezium")
    need_server("mysql")
    mirrored = MariaMirrored(kafka)
    debezium, run = mirrored.debezium, mirrored.run
    try:
        run(f"INSERT INTO kinds VALUES {MARIADB_ROW}", "INSERT INTO kinds (id) VALUES (2)")
        debezium.start()
        mirrored.check()
        run(
            f"INSERT INTO kinds VALUES {MARIADB_ROW.replace('1', '3', 1)}",
            "UPDATE kinds SET n = 0.000000000001 WHERE id = 1",
            "UPDATE kinds SET id = 4 WHERE id = 2",
            "DELETE FROM kinds WHERE id = 4",
        )
        mirrored.check()
        # It is killed, and sends again what its offsets do not have. The source is restarted, and altered.
        run("UPDATE kinds SET v = 'before' WHERE id = 1")
        debezium.kill()
        run("UPDATE kinds SET v = 'after' WHERE id = 1")
        debezium.start()
        mirrored.check()
        mirrored.server.restart()
        run("UPDATE kinds SET v = 'restarted' WHERE id = 1", "ALTER TABLE kinds ADD COLUMN more decimal(6,2)")
        run("UPDATE kinds SET more = 1.25 WHERE id = 1")
        mirrored.check()
    finally:
        debezium.kill()
        mirrored.server.kill()
