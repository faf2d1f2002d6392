"""The examples of the page on Redis Streams as DataFrames, as written there with our name in place of theirs, against a
real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import polars as pl
import pytest

import servers
from servers import wait_until

IMPORTS = "import polars as pl\nimport weft as redis\n"

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def url(shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    with shared_server("redis").database() as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    import redis

    with closing(redis.Redis.from_url(url)) as found:
        yield found


@pytest.fixture
def run(url: str) -> Run:
    """Runs an example against our server, and gives the names that it made."""

    def execute(example: str, **names: Any) -> dict[str, Any]:
        names |= {"url": url}
        exec(IMPORTS + example.replace('"redis://localhost"', "url"), names)
        return names

    return execute


@pytest.fixture
def events(client: Any) -> list[str]:
    """A hundred entries, as the page's first frame shows them."""
    ids = [f"{1704067200000 + i}-0" for i in range(100)]
    for i, each in enumerate(ids):
        fields = {"user_id": f"user_{i % 10}", "action": ["click", "view"][i % 2], "value": 10 * (i + 1)}
        client.xadd("events", fields, id=each)
    return ids


def test_reading_stream_entries(run: Run, events: list[str]) -> None:
    df = run("""
# Read all entries from a stream
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    schema={"user_id": pl.Utf8, "action": pl.Utf8, "value": pl.Int64},
)

print(df)
""")["df"]
    assert df.shape == (100, 5)
    assert list(df.schema.items()) == [
        ("_id", pl.String),
        ("_ts", pl.Int64),
        ("user_id", pl.String),
        ("action", pl.String),
        ("value", pl.Int64),
    ]
    assert df.row(0) == ("1704067200000-0", 1704067200000, "user_0", "click", 10)
    assert df.row(1) == ("1704067200001-0", 1704067200001, "user_1", "view", 20)


def test_entry_id_parsing(run: Run, events: list[str]) -> None:
    df = run("""
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    include_id=True,
    include_timestamp=True,
    include_sequence=True,  # Enable sequence column
)
""")["df"]
    assert df.columns[:3] == ["_id", "_ts", "_seq"]
    assert df["_seq"].to_list() == [0] * 100


def test_reading_with_count_limit(run: Run, events: list[str], client: Any) -> None:
    client.xadd("events", {"user_id": "one more"})
    df = run("""
# Read only the first 100 entries
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    count=100,
)
""")["df"]
    assert df["_id"].to_list() == events


def test_reading_an_id_range(run: Run, events: list[str], client: Any) -> None:
    client.xadd("events", {"user_id": "later"}, id="1704067300001-0")
    df = run("""
# Read entries between specific IDs
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    start_id="1704067200000-0",
    end_id="1704067300000-0",
)
""")["df"]
    assert df["_id"].to_list() == events
    df = run("""
# Read from oldest to newest (default)
df = redis.read_stream(url, stream="events", start_id="-", end_id="+")
""")["df"]
    assert df["_id"].to_list() == [*events, "1704067300001-0"]


def test_basic_consumer_group_usage(run: Run, events: list[str], client: Any) -> None:
    df = run("""
# Read as part of a consumer group
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    group="analytics",
    consumer="worker-1",
    auto_ack=True,  # Automatically acknowledge messages
)
""")["df"]
    assert df["_id"].to_list() == events
    assert client.xpending("events", "analytics")["pending"] == 0


MANUAL = """
# Read without auto-acknowledgment
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    group="analytics",
    consumer="worker-1",
    auto_ack=False,
)

# Process entries
try:
    process(df)

    # Acknowledge after successful processing
    entry_ids = df["_id"].to_list()
    redis.ack_entries("redis://localhost", "events", "analytics", entry_ids)
except Exception as e:
    # Messages will be redelivered to another consumer
    log_error(e)
"""


def test_manual_acknowledgment(run: Run, events: list[str], client: Any) -> None:
    frames: list[pl.DataFrame] = []
    run(MANUAL, process=frames.append, log_error=pytest.fail)
    assert frames[0]["_id"].to_list() == events
    assert client.xpending("events", "analytics")["pending"] == 0


def test_manual_acknowledgment_that_fails(run: Run, events: list[str], client: Any) -> None:
    def process(frame: pl.DataFrame) -> None:
        raise RuntimeError("no")

    errors: list[Exception] = []
    run(MANUAL, process=process, log_error=errors.append)
    assert [str(error) for error in errors] == ["no"]
    # To be redelivered, it takes another consumer that claims.
    df = run("""
df = redis.read_stream(
    url, stream="events", group="analytics", consumer="worker-2", claim_idle=0
)
""")["df"]
    assert df["_id"].to_list() == events


def test_multiple_consumers(run: Run, events: list[str], client: Any) -> None:
    client.xadd("events", {"user_id": "one more"})
    made = run("""
# Worker 1
df1 = redis.read_stream(
    url, stream="events",
    group="analytics",
    consumer="worker-1",
    count=100,
    auto_ack=True,
)

# Worker 2 (in another process)
df2 = redis.read_stream(
    url, stream="events",
    group="analytics",
    consumer="worker-2",
    count=100,
    auto_ack=True,
)

# Each worker receives different entries
""")
    assert made["df1"]["_id"].to_list() == events
    assert made["df2"]["user_id"].to_list() == ["one more"]


@pytest.mark.timing
def test_blocking_reads(run: Run, events: list[str], client: Any) -> None:
    import threading

    def add() -> None:
        wait_until(lambda: client.info("clients")["blocked_clients"] > 0, "the reader to wait")
        client.xadd("events", {"user_id": "new"})

    added = threading.Thread(target=add)
    added.start()
    df = run("""
# Wait up to 5 seconds for new entries
df = redis.read_stream(
    "redis://localhost",
    stream="events",
    start_id="$",  # Only new entries (after current latest)
    block_ms=5000,
    count=100,
)
""")["df"]
    added.join()
    assert df["user_id"].to_list() == ["new"]


def test_synchronous_iterator(run: Run, events: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    made = run(
        """
for batch_df in redis.iter_stream(
    "redis://localhost",
    stream="events",
    batch_size=100,
    block_ms=1000,  # Wait up to 1 second for batch
):
    # Process each batch
    summary = batch_df.group_by("action").len()
    print(f"Batch: {len(batch_df)} entries")

    if should_stop():
        break
""",
        should_stop=lambda: True,
    )
    assert capsys.readouterr().out == "Batch: 100 entries\n"
    assert dict(made["summary"].rows()) == {"click": 50, "view": 50}


class Enough(Exception):
    """Ends an example that goes on for ever."""


def test_iterator_with_consumer_group(run: Run, events: list[str], client: Any) -> None:
    seen: list[str] = []

    def process_batch(frame: pl.DataFrame) -> None:
        seen.extend(frame["_id"].to_list())
        if len(seen) == 100:
            raise Enough

    with pytest.raises(Enough):
        run(
            """
for batch_df in redis.iter_stream(
    "redis://localhost",
    stream="events",
    group="analytics",
    consumer="worker-1",
    batch_size=100,
    auto_ack=True,
):
    process_batch(batch_df)
""",
            process_batch=process_batch,
        )
    assert seen == events


def test_async_iterator(run: Run, events: list[str]) -> None:
    frames: list[pl.DataFrame] = []

    async def process_async(frame: pl.DataFrame) -> None:
        frames.append(frame)

    run(
        """
import asyncio

async def process_stream():
    async for batch_df in redis.iter_stream_async(
        "redis://localhost",
        stream="events",
        batch_size=100,
        batch_timeout_ms=1000,
    ):
        await process_async(batch_df)

        if should_stop():
            break

asyncio.run(process_stream())
""",
        process_async=process_async,
        should_stop=lambda: True,
    )
    assert frames[0]["_id"].to_list() == events


def test_lazy_scanning(run: Run, events: list[str]) -> None:
    made = run("""
# Create LazyFrame (no execution yet)
lf = redis.scan_stream(
    "redis://localhost",
    stream="events",
    schema={"action": pl.Utf8, "value": pl.Float64},
)

# Apply lazy operations
result = (
    lf.filter(pl.col("value") > 100)
    .group_by("action")
    .agg(pl.col("value").mean())
    .collect()
)
""")
    assert isinstance(made["lf"], pl.LazyFrame)
    assert dict(made["result"].rows()) == {"click": 550.0, "view": 560.0}


def test_groups_and_blocking_are_not_lazy(url: str) -> None:
    import weft

    for option in ({"group": "g"}, {"block_ms": 5}):
        with pytest.raises(TypeError, match=next(iter(option))):
            weft.scan_stream(url, "events", **option)  # type: ignore[arg-type]


def test_real_time_analytics_example(run: Run, client: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import weft

    for i in range(2000):
        client.xadd("metrics", {"sensor_id": f"s{i % 2}", "value": i / 2})
    write, calls = weft.write_hashes, []

    def counted(*arguments: Any, **options: Any) -> int:
        calls.append(write(*arguments, **options))
        if len(calls) == 2:
            raise Enough
        return calls[-1]

    # Its loop has no end.
    monkeypatch.setattr(weft, "write_hashes", counted)
    with pytest.raises(Enough):
        run("""
# Continuous aggregation over stream
for batch_df in redis.iter_stream(
    "redis://localhost",
    stream="metrics",
    group="aggregator",
    consumer="worker-1",
    batch_size=1000,
    block_ms=5000,
    schema={
        "sensor_id": pl.Utf8,
        "value": pl.Float64,
    },
    auto_ack=True,
):
    # Aggregate by sensor
    summary = (
        batch_df.group_by("sensor_id")
        .agg([
            pl.col("value").mean().alias("avg"),
            pl.col("value").max().alias("max"),
            pl.len().alias("count"),
        ])
    )

    # Store aggregates
    redis.write_hashes(
        "redis://localhost",
        summary,
        key_column="sensor_id",
        key_prefix="sensor:stats:",
    )
""")
    assert calls == [2, 2]
    found = client.hgetall("sensor:stats:s1")
    assert {name: float(value) for name, value in found.items()} == {b"avg": 750.0, b"max": 999.5, b"count": 500.0}
