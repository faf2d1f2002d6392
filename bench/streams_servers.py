"""Streams on PostgreSQL and MariaDB against the same work by hand with their drivers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import weft
from bench.harness import Case
from bench.streams_sqlite import PUBLISHED, event, fill, fresh_stream, in_project, row
from tests import servers

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


def _in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _publishers(scale: float, url: str, raw_client: Callable[[list[list[dict[str, object]]]], None]) -> tuple[Job, Job]:
    stream = fresh_stream(url)
    each = max(2, int(10 * scale))
    given = [[[event(c * 100_000 + b * 1000 + i) for i in range(1000)] for b in range(each)] for c in range(8)]

    def ours() -> int:
        def publisher(batches: list[list[dict[str, object]]]) -> None:
            for batch in batches:
                weft.publish_sync(stream, batch)

        _in_threads([lambda batches=batches: publisher(batches) for batches in given])  # type: ignore[misc]
        return 8 * each * 1000

    def raw() -> int:
        _in_threads([lambda batches=batches: raw_client(batches) for batches in given])  # type: ignore[misc]
        return 8 * each * 1000

    return ours, raw


def _values(batch: list[dict[str, object]]) -> list[object]:
    return [value for e in batch for value in (e["user_id"], e["action"], e["amount"], e["n"], *PUBLISHED)]


def postgres_publishers(scale: float) -> tuple[Job, Job]:
    """8 publishers of batches of 1,000; 8 clients of multi-row inserts."""
    import psycopg

    url = _postgres()
    with psycopg.connect(url, autocommit=True) as driver:
        driver.execute(POSTGRES_TABLE)
    insert = f"INSERT INTO raw ({', '.join(COLUMNS)}) VALUES " + ", ".join(["(%s, %s, %s, %s, %s, %s)"] * 1000)
    idle: list[Any] = []

    def client(batches: list[list[dict[str, object]]]) -> None:
        driver = idle.pop() if idle else psycopg.connect(url)
        for batch in batches:
            driver.execute(insert, _values(batch))
            driver.commit()
        idle.append(driver)

    return _publishers(scale, url, client)


def mysql_publishers(scale: float) -> tuple[Job, Job]:
    """8 publishers of batches of 1,000; 8 clients of executemany."""
    import pymysql

    connection = weft.connect(url=_mysql())
    parameters = connection.resolved().parameters()  # type: ignore[attr-defined]
    driver = pymysql.connect(**parameters)
    driver.cursor().execute(MYSQL_TABLE)
    insert = f"INSERT INTO raw ({', '.join(COLUMNS)}) VALUES (%s, %s, %s, %s, %s, %s)"
    idle: list[Any] = [driver]

    def client(batches: list[list[dict[str, object]]]) -> None:
        driver = idle.pop() if idle else pymysql.connect(**parameters)
        for batch in batches:
            cursor = driver.cursor()
            cursor.executemany(
                insert,
                [(e["user_id"], e["action"], e["amount"], e["n"], "2026-01-31 12:00:00", PUBLISHED[1]) for e in batch],
            )
            driver.commit()
        idle.append(driver)

    return _publishers(scale, connection.url, client)  # type: ignore[attr-defined]


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
    Case(
        "publish batches of 1,000, 8 publishers, PostgreSQL",
        "raw multi-row inserts, 8 clients",
        0.5,
        in_project(postgres_publishers),
        needs="postgres",
    ),
    Case(
        "publish batches of 1,000, 8 publishers, MariaDB",
        "raw executemany, 8 clients",
        0.5,
        in_project(mysql_publishers),
        needs="mysql",
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
