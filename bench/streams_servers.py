"""Streams on PostgreSQL and MariaDB against the same work by hand with their drivers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import servers
import weft
from bench.harness import Case
from bench.processes import in_processes
from bench.streams_sqlite import PUBLISHED, event, fill, fresh_stream, in_project, row

Job = Callable[[], int]
COLUMNS = ("user_id", "action", "amount", "n", "_weft_published_at", "_weft_publish_id")
_databases = count()


def _postgres() -> str:
    server = servers.shared("postgres")
    return server.create_database(f"bench_{next(_databases)}")


def _mysql() -> str:
    server = servers.shared("mysql")
    return server.create_database(f"bench_{next(_databases)}")


POSTGRES_TABLE = (
    "CREATE TABLE raw (user_id text, action text, amount double precision, n bigint, "
    "_weft_rowid bigserial PRIMARY KEY, _weft_published_at timestamptz, _weft_publish_id text, _weft_extra json)"
)
MYSQL_TABLE = (
    "CREATE TABLE raw (user_id LONGTEXT, action LONGTEXT, amount DOUBLE, n BIGINT, "
    "_weft_rowid BIGINT PRIMARY KEY AUTO_INCREMENT, _weft_published_at DATETIME(6), _weft_publish_id VARCHAR(36), "
    "_weft_extra LONGTEXT)"
)


CLIENTS = 8


def _batches(number: int, each: int) -> list[list[dict[str, object]]]:
    return [[event(number * 100_000 + b * 1000 + i) for i in range(1000)] for b in range(each)]


def publisher(url: str, name: str, number: int, each: int) -> Job:
    """Publishes so many batches of 1,000."""
    stream, given = fresh_stream(url, name), _batches(number, each)
    weft.streams.runtime.open_stream(stream)

    def job() -> int:
        for batch in given:
            weft.publish_sync(stream, batch)
        return 1000 * each

    return job


def postgres_client(url: str, number: int, each: int) -> Job:
    """Inserts so many batches of 1,000 rows with a statement each."""
    import psycopg

    driver = psycopg.connect(url)
    insert = f"INSERT INTO raw ({', '.join(COLUMNS)}) VALUES " + ", ".join(["(%s, %s, %s, %s, %s, %s)"] * 1000)
    given = [
        [value for e in batch for value in (e["user_id"], e["action"], e["amount"], e["n"], *PUBLISHED)]
        for batch in _batches(number, each)
    ]

    def job() -> int:
        for values in given:
            driver.execute(insert, values)
            driver.commit()
        return 1000 * each

    return job


def mysql_client(url: str, number: int, each: int) -> Job:
    """Inserts so many batches of 1,000 rows by executemany."""
    import pymysql

    driver = pymysql.connect(**weft.connect(url=url).resolved().parameters())  # type: ignore[attr-defined]
    insert = f"INSERT INTO raw ({', '.join(COLUMNS)}) VALUES (%s, %s, %s, %s, %s, %s)"
    published = ("2026-01-31 12:00:00", PUBLISHED[1])
    given = [
        [(e["user_id"], e["action"], e["amount"], e["n"], *published) for e in batch]
        for batch in _batches(number, each)
    ]

    def job() -> int:
        for rows in given:
            driver.cursor().executemany(insert, rows)
            driver.commit()
        return 1000 * each

    return job


def _publishers(scale: float, url: str, client: Callable[..., Job], in_one: bool) -> tuple[Job, Job]:
    each = max(2, int(10 * scale))
    raw = in_processes(f"bench.streams_servers:{client.__name__}", [(url, number, each) for number in range(CLIENTS)])
    given = [(url, f"bench_{client.__name__}", number, each) for number in range(CLIENTS)]
    if not in_one:
        return in_processes(f"bench.streams_servers:{publisher.__name__}", given), raw
    stream = fresh_stream(url)
    batches = [_batches(number, each) for number in range(CLIENTS)]

    def publish(batches: list[list[dict[str, object]]]) -> None:
        for batch in batches:
            weft.publish_sync(stream, batch)

    def ours() -> int:
        threads = [threading.Thread(target=publish, args=(given,)) for given in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return CLIENTS * each * 1000

    return ours, raw


def postgres_publishers(scale: float, in_one: bool = True) -> tuple[Job, Job]:
    """8 publishers of batches of 1,000, in one process or in 8; 8 clients of multi-row inserts, a process each."""
    import psycopg

    url = _postgres()
    with psycopg.connect(url, autocommit=True) as driver:
        driver.execute(POSTGRES_TABLE)
    return _publishers(scale, url, postgres_client, in_one)


def mysql_publishers(scale: float, in_one: bool = True) -> tuple[Job, Job]:
    """8 publishers of batches of 1,000, in one process or in 8; 8 clients of executemany, a process each."""
    import pymysql

    url = _mysql()
    with pymysql.connect(**weft.connect(url=url).resolved().parameters()) as driver:  # type: ignore[attr-defined]
        driver.cursor().execute(MYSQL_TABLE)
    return _publishers(scale, url, mysql_client, in_one)


def _consume(scale: float, url: str, driver: Any, load: Callable[[int], None]) -> tuple[Job, Job]:
    stream = fresh_stream(url)
    total = max(5_000, int(50_000 * scale))
    fill(stream, total)
    load(total)
    consumers = count()

    def ours() -> int:
        consumer, done = f"c{next(consumers)}", 0
        while events := weft.consume_sync(stream, consumer, 1000):
            weft.ack_sync(stream, consumer, events)
            done += len(events)
        assert done == total, done
        return done

    def raw() -> int:
        last, done = 0, 0
        cursor = driver.cursor()
        while True:
            cursor.execute("SELECT * FROM raw WHERE _weft_rowid > %s ORDER BY _weft_rowid LIMIT 1000", (last,))
            names = [column[0] for column in cursor.description]
            found = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
            if not found:
                return done
            done += len(found)
            last = found[-1]["_weft_rowid"]

    return ours, raw


def postgres_consume(scale: float) -> tuple[Job, Job]:
    """consume + ack; a bare SELECT by psycopg."""
    import psycopg

    url = _postgres()
    driver = psycopg.connect(url, autocommit=True)
    driver.execute(POSTGRES_TABLE)

    def load(total: int) -> None:
        with driver.cursor().copy(f"COPY raw ({', '.join(COLUMNS)}) FROM STDIN") as copy:
            for i in range(total):
                copy.write_row(row(i))

    return _consume(scale, url, driver, load)


def mysql_consume(scale: float) -> tuple[Job, Job]:
    """consume + ack; a bare SELECT by PyMySQL."""
    import pymysql

    connection = weft.connect(url=_mysql())
    driver = pymysql.connect(**connection.resolved().parameters(), autocommit=True)  # type: ignore[attr-defined]
    driver.cursor().execute(MYSQL_TABLE)

    def load(total: int) -> None:
        rows = [(*row(i)[:4], "2026-01-31 12:00:00", PUBLISHED[1]) for i in range(total)]
        driver.cursor().executemany(f"INSERT INTO raw ({', '.join(COLUMNS)}) VALUES (%s, %s, %s, %s, %s, %s)", rows)

    return _consume(scale, connection.url, driver, load)  # type: ignore[attr-defined]


def postgres_arrow(scale: float) -> tuple[Job, Job]:
    """A range as Arrow; ADBC, PostgreSQL's fastest way to the same columns."""
    import adbc_driver_postgresql.dbapi as adbc

    url = _postgres()
    stream = fresh_stream(url)
    total = max(10_000, int(1_000_000 * scale))
    fill(stream, total)
    log = weft.streams.runtime.open_stream(stream).log
    table = log.table  # type: ignore[attr-defined]
    driver = adbc.connect(url)

    def ours() -> int:
        rows = sum(batch.num_rows for batch in log.read_arrow(0, log.head()))
        assert rows == total, rows
        return rows

    def raw() -> int:
        with driver.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table} WHERE _weft_rowid > 0 AND _weft_rowid <= {2**60}")
            rows = int(cursor.fetch_arrow_table().num_rows)
        assert rows == total, rows
        return rows

    return ours, raw


CASES = [
    *(
        Case(
            f"publish batches of 1,000, 8 publishers in {where}, {server}",
            f"raw {statement}, 8 clients in 8 processes",
            0.5,
            in_project(functools.partial(publishers, in_one=in_one)),
            needs=kind,
        )
        for publishers, server, kind, statement in (
            (postgres_publishers, "PostgreSQL", "postgres", "multi-row inserts"),
            (mysql_publishers, "MariaDB", "mysql", "executemany"),
        )
        for where, in_one in (("one process", True), ("8 processes", False))
    ),
    Case(
        "consume + ack 1,000, PostgreSQL",
        "bare SELECT … LIMIT 1000 into dicts",
        0.4,
        in_project(postgres_consume),
        needs="postgres",
    ),
    Case(
        "consume + ack 1,000, MariaDB",
        "bare SELECT … LIMIT 1000 into dicts",
        0.4,
        in_project(mysql_consume),
        needs="mysql",
    ),
    Case(
        "1M events as Arrow, PostgreSQL",
        "ADBC, PostgreSQL's fastest way",
        0.7,
        in_project(postgres_arrow),
        rounds=3,
        needs="postgres",
    ),
]
