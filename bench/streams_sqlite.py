"""Streams on SQLite against the same work by hand with Python's sqlite3."""

from __future__ import annotations

import asyncio
import importlib.util
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pyarrow as pa

import weft
from bench.disk import SLOW_MILLISECONDS, slow_sync
from bench.harness import Case, SkippedError
from bench.processes import in_processes
from weft.project import Project, use

Job = Callable[[], int]
FIELDS = {"user_id": "string", "action": "string", "amount": "float64", "n": "int64"}
COLUMNS = "user_id, action, amount, n, _weft_published_at, _weft_publish_id"
PUBLISHED = ("2026-01-31T12:00:00.000000+00:00", "a1b2c3d4-a1b2-4a1b-8a1b-a1b2c3d4a1b2")
_numbers = count()
_folder = tempfile.TemporaryDirectory(prefix="weft-bench-", ignore_cleanup_errors=True)


def event(i: int) -> dict[str, object]:
    """A small event of four fields."""
    return {"user_id": f"u_{i % 1000}", "action": "click", "amount": i * 1.37, "n": i}


def row(i: int) -> tuple[object, ...]:
    """The same as the row that a stream stores."""
    return (f"u_{i % 1000}", "click", i * 1.37, i, *PUBLISHED)


def fresh_stream(url: str | None = None, name: str | None = None) -> weft.streams.Stream:
    """A new stream in a project of its own that stays current for the rest of the case."""
    url = url or f"sqlite:///{tempfile.mkdtemp(dir=_folder.name)}/weft.db"
    name = name or f"bench_{next(_numbers)}"
    declared = weft.stream(name=name, connection=weft.connect(url=url), fields=FIELDS)(lambda: None)
    assert isinstance(declared, weft.streams.Stream)
    return declared


CREATE = (
    "CREATE TABLE events (user_id TEXT, action TEXT, amount REAL, n INTEGER, "
    "_weft_rowid INTEGER PRIMARY KEY AUTOINCREMENT, "
    "_weft_published_at TEXT, _weft_publish_id TEXT, _weft_extra TEXT)"
)
INSERT = f"INSERT INTO events ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"


def raw_path() -> Path:
    """Where a new database may be."""
    return Path(tempfile.mkdtemp(dir=_folder.name)) / "raw.db"


def raw_database() -> sqlite3.Connection:
    """A table like a stream's, with the durability of a stream."""
    driver = sqlite3.connect(raw_path(), isolation_level=None, check_same_thread=False, timeout=60)
    driver.execute("PRAGMA journal_mode=WAL")
    driver.execute("PRAGMA synchronous=FULL")
    driver.execute(CREATE)
    return driver


def _single_events(scale: float) -> int:
    return max(640, int(12_800 * scale))


def single_publishers(events: int) -> Job:
    """64 tasks that publish one event at a time."""
    stream = fresh_stream()

    async def publisher(number: int) -> None:
        for i in range(events // 64):
            await weft.publish(stream, event(number * 1000 + i))

    async def main() -> None:
        await asyncio.gather(*(publisher(number) for number in range(64)))

    def job() -> int:
        asyncio.run(main())
        return events

    return job


def one_client(events: int) -> Job:
    """One client that commits one event at a time."""
    driver = raw_database()

    def job() -> int:
        for i in range(events):
            driver.execute("BEGIN IMMEDIATE")
            driver.execute(INSERT, row(i))
            driver.execute("COMMIT")
        return events

    return job


def publishers_against_one_client(scale: float) -> tuple[Job, Job]:
    """64 tasks that publish one event at a time; one client that commits one event at a time."""
    events = _single_events(scale)
    return single_publishers(events), one_client(events // 4)


def publishers_against_the_defaults(scale: float) -> tuple[Job, Job]:
    """64 tasks that publish one event at a time; one client that does, of a database that nobody has tuned."""
    events = _single_events(scale)
    driver = sqlite3.connect(raw_path())
    driver.execute(CREATE)

    def raw() -> int:
        for i in range(events // 16):
            driver.execute(INSERT, row(i))
            driver.commit()
        return events // 16

    return single_publishers(events), raw


def publishers_on_a_slow_disk(scale: float) -> tuple[Job, Job]:
    """The same on a disk that takes longer to sync, in processes that are told so."""
    events, library = _single_events(scale), slow_sync(_folder.name)
    ours, raw = (f"bench.streams_sqlite:{job.__name__}" for job in (single_publishers, one_client))
    return in_processes(ours, [(events,)], library), in_processes(raw, [(events // 16,)], library)


def publishers_against_64_clients(scale: float) -> tuple[Job, Job]:
    """64 tasks that publish one event at a time; 64 threads that each commit one event at a time."""
    events = _single_events(scale)
    each = max(2, events // 64 // 8)
    driver = raw_database()
    (path,) = [found[2] for found in driver.execute("PRAGMA database_list") if found[1] == "main"]

    def client(number: int) -> None:
        own = sqlite3.connect(path, isolation_level=None, timeout=120)
        own.execute("PRAGMA synchronous=FULL")
        for i in range(each):
            own.execute("BEGIN IMMEDIATE")
            own.execute(INSERT, row(number * 1000 + i))
            own.execute("COMMIT")
        own.close()

    def raw() -> int:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return each * 64

    return single_publishers(events), raw


def batches(scale: float) -> tuple[Job, Job]:
    """Batches of 1,000 dicts; the same rows by executemany, one transaction a batch, from the same dicts."""
    stream = fresh_stream()
    driver = raw_database()
    given = [[event(b * 1000 + i) for i in range(1000)] for b in range(max(5, int(50 * scale)))]

    def ours() -> int:
        for batch in given:
            weft.publish_sync(stream, batch)
        return 1000 * len(given)

    def raw() -> int:
        for batch in given:
            rows = [(e["user_id"], e["action"], e["amount"], e["n"], *PUBLISHED) for e in batch]
            driver.execute("BEGIN IMMEDIATE")
            driver.executemany(INSERT, rows)
            driver.execute("COMMIT")
        return 1000 * len(given)

    return ours, raw


def consume(scale: float) -> tuple[Job, Job]:
    """consume + ack of 1,000 at a time; a bare SELECT of the next 1,000 into dicts."""
    stream = fresh_stream()
    driver = raw_database()
    total = max(5_000, int(100_000 * scale))
    for start in range(0, total, 1000):
        weft.publish_sync(stream, [event(i) for i in range(start, start + 1000)])
    driver.execute("BEGIN")
    driver.executemany(INSERT, (row(i) for i in range(total)))
    driver.execute("COMMIT")
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
        while True:
            cursor = driver.execute("SELECT * FROM events WHERE _weft_rowid > ? LIMIT 1000", (last,))
            names = [column[0] for column in cursor.description]
            found = [dict(zip(names, values, strict=True)) for values in cursor.fetchall()]
            if not found:
                return done
            done += len(found)
            last = found[-1]["_weft_rowid"]

    return ours, raw


def stored_range(scale: float) -> tuple[Job, str, str, int]:
    """A stream whose events are read as Arrow: the job, its database, the query for the same rows, and how many."""
    stream = fresh_stream()
    total = max(10_000, int(1_000_000 * scale))
    fill(stream, total)
    log = weft.streams.runtime.open_stream(stream).log

    def ours() -> int:
        rows = sum(len(batch) for batch in log.read_arrow(0, log.head()))
        assert rows == total, rows
        return rows

    table = log.table  # type: ignore[attr-defined]
    query = f"SELECT * FROM {table} WHERE _weft_rowid > 0 AND _weft_rowid <= {total}"
    return ours, log.store.path, query, total  # type: ignore[attr-defined]


def arrow(scale: float) -> tuple[Job, Job]:
    """A range as Arrow; the ADBC driver, SQLite's fastest way there, in a process of its own that writes nothing."""
    if importlib.util.find_spec("adbc_driver_sqlite") is None:
        raise SkippedError("adbc-driver-sqlite is not installed (pip install adbc-driver-sqlite)")
    ours, *arguments = stored_range(scale)
    # The ADBC driver brings a SQLite of its own and would drop this process's locks: it gets another process.
    return ours, in_processes(f"bench.streams_sqlite:{adbc_client.__name__}", [arguments])


def arrow_by_hand(scale: float) -> tuple[Job, Job]:
    """A range as Arrow; Python's own driver, the only other one that may be open in a process that publishes."""
    ours, path, query, total = stored_range(scale)
    driver = sqlite3.connect(path)
    text = pa.string()
    types = [text, text, pa.float64(), pa.int64(), pa.int64(), text, text, text]

    def raw() -> int:
        cursor, done = driver.execute(query), 0
        names = [column[0] for column in cursor.description]
        while found := cursor.fetchmany(10_000):
            arrays = [pa.array(values, kind) for values, kind in zip(zip(*found, strict=True), types, strict=True)]
            done += len(pa.record_batch(arrays, names))
        assert done == total, done
        return done

    return ours, raw


def adbc_client(path: str, query: str, total: int) -> Job:
    """A query's rows as an Arrow table."""
    import adbc_driver_sqlite.dbapi as adbc

    driver = adbc.connect(path)

    def job() -> int:
        with driver.cursor() as cursor:
            cursor.execute(query)
            rows = int(cursor.fetch_arrow_table().num_rows)
        assert rows == total, rows
        return rows

    return job


def fill(stream: weft.streams.Stream, total: int) -> None:
    """Publish so many events in large batches."""
    for start in range(0, total, 10_000):
        weft.publish_sync(stream, [event(i) for i in range(start, min(total, start + 10_000))])


def depth(scale: float) -> tuple[Job, Job]:
    """Publish, consume and acknowledge 20 batches of 1,000 on top of 10M stored events; the same on top of 100k."""
    deep, shallow = fresh_stream(), fresh_stream()
    fill(deep, max(100_000, int(10_000_000 * scale)))
    fill(shallow, max(1_000, int(100_000 * scale)))
    consumers = count()

    def job(stream: weft.streams.Stream) -> Job:
        def run() -> int:
            consumer = f"c{next(consumers)}"
            weft.reset_sync(stream, consumer, "end")
            for start in range(0, 20_000, 1000):
                weft.publish_sync(stream, [event(i) for i in range(start, start + 1000)])
                events = weft.consume_sync(stream, consumer, 1000)
                assert len(events) == 1000
                weft.ack_sync(stream, consumer, events)
            return 20_000

        return run

    return job(deep), job(shallow)


def in_project(prepare: Callable[[float], tuple[Job, Job]]) -> Callable[[float], tuple[Job, Job]]:
    """Let a case have a project of its own, so that its streams do not meet those of others."""

    def prepared(scale: float) -> tuple[Job, Job]:
        context = use(Project())
        context.__enter__()
        return prepare(scale)

    return prepared


CASES = [
    Case(
        "64 single-event publishers, SQLite",
        "raw SQLite, one client, one event a commit",
        10,
        in_project(publishers_against_one_client),
    ),
    Case(
        "64 single-event publishers, SQLite",
        "raw SQLite as it comes, one client, one event a commit",
        10,
        in_project(publishers_against_the_defaults),
    ),
    Case(
        "64 single-event publishers, SQLite",
        "raw SQLite, 64 clients, one event a commit",
        10,
        in_project(publishers_against_64_clients),
    ),
    Case(
        f"64 single-event publishers, SQLite, a disk that takes {SLOW_MILLISECONDS} ms to sync",
        "raw SQLite, one client, one event a commit, the same disk",
        10,
        in_project(publishers_on_a_slow_disk),
    ),
    Case("publish batches of 1,000, SQLite", "raw executemany, one transaction a batch", 0.5, in_project(batches)),
    Case("consume + ack 1,000, SQLite", "bare SELECT … LIMIT 1000 into dicts", 0.4, in_project(consume)),
    Case("1M events as Arrow, SQLite", "ADBC in a process of its own", 0.7, in_project(arrow)),
    Case("1M events as Arrow, SQLite", "Python's sqlite3, fetchmany", 0.7, in_project(arrow_by_hand)),
    Case("time per event at 10M events, SQLite", "at 100k events", 1.2, in_project(depth), at_most=True),
]
