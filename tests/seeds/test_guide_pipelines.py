"""The guide's "Surface 1", its examples as written there with our name in place of theirs, against a real server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import servers
import warm_python
import weft
from weft.engine.run import PipelineRun
from weft.operate.runlog import open_run_log
from weft.operate.runner import Outcome, Runner
from weft.project import Project, use
from weft.testing import table_rows

APPEND = """
from typing import Annotated
from weft import weft, pk
from weft.types import BigInt, Text, TimestampTZ

@weft.table(schema="analytics")
class Events:
    event_id: Annotated[BigInt, pk()]
    name: Text | None
    received_at: TimestampTZ

@weft.pipeline(target=Events, schedule="*/5 * * * *", mode="append")
def ingest_events(conn):
    return "SELECT event_id, name, received_at FROM raw.events"
"""

DEPENDENCIES = """
from typing import Annotated
from weft import weft, pk
from weft.types import BigInt, Text, TimestampTZ

@weft.table(schema="analytics")
class Events:
    event_id: Annotated[BigInt, pk()]
    name: Text | None
    received_at: TimestampTZ

@weft.table(schema="analytics")
class DailyRollups:
    d: Annotated[TimestampTZ, pk()]
    n: BigInt

@weft.pipeline(
    target=Events,
    schedule="*/5 * * * *",
    mode="append",
    retry={
        "max_attempts": 5,
        "backoff_seconds": 30,
        "backoff_factor": 2.0,          # 30s, 60s, 120s, 240s, 480s
    },
)
def ingest_events(conn):
    return "SELECT event_id, name, received_at FROM raw.events"

@weft.pipeline(
    target=DailyRollups,
    schedule="0 2 * * *",
    mode="merge",
    depends_on=["ingest_events"],       # waits for today's success
)
def daily_rollups(conn):
    return "SELECT date_trunc('day', received_at) AS d, COUNT(*) AS n " \\
           "FROM analytics.events GROUP BY 1"
"""

SCD2 = """
from typing import Annotated
from weft import weft, pk
from weft.normalize import lower, trim, parse_timestamp
from weft.types import BigInt, String, Text, TimestampTZ

@weft.table(schema="analytics")
class CustomerDim:
    customer_id: Annotated[BigInt, pk()]
    email: Annotated[String[256] | None, lower(), trim()]
    name: Text | None
    updated_at: Annotated[TimestampTZ, parse_timestamp()]

@weft.pipeline(
    target=CustomerDim,
    schedule="0 * * * *",
    mode="scd2",
    compare_columns=["email", "name"],
    event_timestamp_column="updated_at",       # use updated_at as valid_from
    ttl_seconds=86_400 * 30,                   # auto-close versions older than 30d
)
def sync_customers(conn):
    return "SELECT customer_id, email, name, updated_at FROM raw.customers"
"""

CROSS = """
from typing import Annotated
from weft import weft, pk
from weft.normalize import lower, trim, parse_timestamp
from weft.types import BigInt, String, Text, TimestampTZ

@weft.table(schema="analytics")
class CustomerDim:
    customer_id: Annotated[BigInt, pk()]
    email: Annotated[String[256] | None, lower(), trim()]
    name: Text | None
    updated_at: Annotated[TimestampTZ, parse_timestamp()]

@weft.pipeline(
    target=CustomerDim,
    schedule="0 * * * *",
    mode="merge",
    source_connection="raw_db",
    target_connection="warehouse",
)
def sync_customers(conn):
    # `conn` is the SOURCE connection (raw_db).
    return "SELECT customer_id, email, name, updated_at FROM customers"
"""

FAN_OUT = """
from typing import Annotated
from weft import weft, pk
from weft.types import BigInt, Text, TimestampTZ

@weft.table(schema="analytics", connection="warehouse")
class WarehouseEvents:
    event_id: Annotated[BigInt, pk()]
    name: Text | None
    received_at: TimestampTZ

@weft.table(schema="archive", connection="lake")
class DeltaArchive:
    event_id: BigInt
    name: Text | None
    received_at: TimestampTZ

@weft.pipeline(
    targets=[
        weft.target(WarehouseEvents, mode="append"),
        weft.target(DeltaArchive, mode="append"),
    ],
    schedule="*/5 * * * *",
    source_connection="raw_db",
)
def fan_out(conn):
    return "SELECT * FROM raw.events WHERE received_at > $watermark"
"""

NOW = datetime(2026, 3, 10, 12, 0, tzinfo=UTC)


@pytest.fixture
def guide(
    project: Path, shared_server: Callable[[str], servers.Server], monkeypatch: Any
) -> Iterator[psycopg.Connection[Any]]:
    """A project on PostgreSQL; the connection is another client's."""
    with shared_server("postgres").database() as url, use(Project()), psycopg.connect(url, autocommit=True) as client:
        monkeypatch.setenv("WEFT_DSN", url)
        client.execute("CREATE SCHEMA raw")
        client.execute("CREATE TABLE raw.events (event_id bigint, name text, received_at timestamptz)")
        client.execute("INSERT INTO raw.events VALUES (1, 'a', '2026-03-09 10:00Z'), (2, NULL, '2026-03-10 11:00Z')")
        yield client


def module(text: str, name: str = "my_pipelines") -> Any:
    Path(f"{name}.py").write_text(text)
    sys.modules.pop(name, None)
    weft.project.current().load_modules([name])
    return sys.modules[name]


def run_weft(*arguments: str, code: int = 0) -> str:
    done = warm_python.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_a_5_line_append_pipeline(guide: psycopg.Connection[Any]) -> None:
    Path("my_pipelines.py").write_text(APPEND)
    assert "0 read" not in run_weft("preview", "--module", "my_pipelines", "ingest_events")
    assert "ok" in run_weft("validate", "--module", "my_pipelines", "ingest_events")
    assert guide.execute("SELECT to_regclass('analytics.events')").fetchone() == (None,)
    assert "2 inserted (pushdown)" in run_weft("run-due", "--module", "my_pipelines")
    assert "succeeded" in run_weft("status", "--module", "my_pipelines")
    assert guide.execute("SELECT event_id, name FROM analytics.events ORDER BY 1").fetchall() == [(1, "a"), (2, None)]


def test_the_5_line_append_pipeline_at_two_slots(guide: psycopg.Connection[Any]) -> None:
    def next_slot(declaration: str) -> Outcome:
        nonlocal now
        now += timedelta(minutes=5)
        project = Project()
        with use(project), open_run_log("sqlite:///runs.db") as log:
            module(declaration)
            project.clock = now.timestamp
            (outcome,) = Runner(log, PipelineRun).run_due()
            return outcome

    now = datetime.now(UTC)
    assert next_slot(APPEND).status == "succeeded"
    guide.execute("INSERT INTO raw.events VALUES (3, 'c', '2026-03-10 12:00Z')")
    error = next_slot(APPEND).error
    # It inserts every row of its query again, and its table has a primary key.
    assert isinstance(error, weft.LoadRefusedError)
    assert "rejected 2 rows, and nothing was written:\n    event_id=1, " in error.what
    hint = str(error.hint)
    assert -1 < hint.index("incremental_column") < hint.index('mode="merge"') < hint.index("on_bad_rows")
    # Both ways that it names are right.
    assert next_slot(APPEND.replace('mode="append"', 'mode="merge"')).status == "succeeded"
    guide.execute("TRUNCATE analytics.events")
    incremental = APPEND.replace('mode="append"', 'mode="append", incremental_column="received_at"')
    assert [next_slot(incremental).status for _ in range(2)] == ["succeeded", "succeeded"]
    assert guide.execute("SELECT event_id FROM analytics.events ORDER BY 1").fetchall() == [(1,), (2,), (3,)]


def test_dependencies_and_retry(guide: psycopg.Connection[Any]) -> None:
    found = module(DEPENDENCIES)
    assert [found.ingest_events.retry.delay(attempt) for attempt in range(1, 6)] == [30, 60, 120, 240, 480]
    project = weft.project.current()
    with open_run_log("memory://") as log:
        now = NOW
        project.clock = lambda: now.timestamp()
        runner = Runner(log, PipelineRun)
        guide.execute("ALTER TABLE raw.events RENAME TO away")
        outcomes = {each.pipeline: each for each in runner.run_due()}
        assert outcomes["ingest_events"].status == "failed"
        assert outcomes["daily_rollups"].status == "skipped"
        assert outcomes["daily_rollups"].reason == "waiting on upstream: ingest_events"
        (due,) = runner.due(["daily_rollups"])
        assert due.why == "waiting on upstream: ingest_events"
        guide.execute("ALTER TABLE raw.away RENAME TO events")
        outcomes = {each.pipeline: each for each in runner.run_due()}
        # Its retry is not due yet.
        assert list(outcomes) == ["daily_rollups"]
        now = datetime.now(UTC) + timedelta(minutes=5)
        outcomes = {each.pipeline: each for each in runner.run_due()}
        assert {name: each.status for name, each in outcomes.items()} == {
            "ingest_events": "succeeded",
            "daily_rollups": "succeeded",
        }
    assert guide.execute("SELECT n FROM analytics.daily_rollups ORDER BY d").fetchall() == [(1,), (1,)]


def test_cycles_are_caught_when_the_module_loads(guide: psycopg.Connection[Any]) -> None:
    ring = DEPENDENCIES.replace('    mode="append",\n', '    mode="append",\n    depends_on=["daily_rollups"],\n')
    with pytest.raises(weft.DeclarationError, match="ingest_events → daily_rollups → ingest_events") as caught:
        module(ring)
    assert isinstance(caught.value.__cause__, weft.CycleError)


def test_scd2_with_event_time(guide: psycopg.Connection[Any]) -> None:
    guide.execute("CREATE TABLE raw.customers (customer_id bigint, email text, name text, updated_at timestamptz)")
    guide.execute("INSERT INTO raw.customers VALUES (1, ' Ann@X.org', 'Ann', '2026-11-01 00:00Z')")
    found = module(SCD2)
    moment = datetime(2026, 11, 10, tzinfo=UTC)
    PipelineRun(found.sync_customers, "1", moment).execute()
    guide.execute("UPDATE raw.customers SET name = 'Anna', updated_at = '2026-11-02 00:00Z'")
    PipelineRun(found.sync_customers, "2", moment).execute()
    PipelineRun(found.sync_customers, "3", moment).execute()
    rows = guide.execute(
        "SELECT email, name, valid_from, valid_to, is_current, row_hash IS NOT NULL "
        "FROM analytics.customer_dim ORDER BY 3"
    ).fetchall()
    first, second = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 2, tzinfo=UTC)
    assert rows == [
        ("ann@x.org", "Ann", first, second, False, True),
        ("ann@x.org", "Anna", second, None, True, True),
    ]


@pytest.mark.spark
def test_cross_database_loads(
    guide: psycopg.Connection[Any], shared_server: Callable[[str], servers.Server], monkeypatch: Any
) -> None:
    with shared_server("postgres").database() as url, psycopg.connect(url, autocommit=True) as other:
        monkeypatch.setenv("WEFT_DSN_RAW_DB", url)
        monkeypatch.setenv("WEFT_DSN_WAREHOUSE", guide.info.dsn and _url(guide))
        other.execute("CREATE TABLE customers (customer_id bigint, email text, name text, updated_at timestamptz)")
        other.execute("INSERT INTO customers VALUES (1, 'A@X.ORG ', 'Ann', '2026-11-01 00:00Z')")
        found = module(CROSS)
        run = PipelineRun(found.sync_customers, "1", NOW)
        run.execute()
        assert run.loaded[0].engine == "spark"
    assert guide.execute("SELECT email FROM analytics.customer_dim").fetchall() == [("a@x.org",)]


def test_multi_target_fan_out(guide: psycopg.Connection[Any], spark: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_DSN_RAW_DB", _url(guide))
    monkeypatch.setenv("WEFT_DSN_WAREHOUSE", _url(guide))
    weft.register_connection(weft.DeltaLocalConnection(name="lake", path=str(tmp_path / "lake")))
    found = module(FAN_OUT)
    for key in ("1", "2"):
        PipelineRun(found.fan_out, key, NOW).execute()
    guide.execute("INSERT INTO raw.events VALUES (3, 'c', '2026-03-10 12:00Z')")
    run = PipelineRun(found.fan_out, "3", NOW)
    run.execute()
    assert [each.counts.inserted for each in run.loaded] == [1, 1]
    assert sorted(row["event_id"] for row in table_rows("analytics.warehouse_events", connection="warehouse")) == [
        1,
        2,
        3,
    ]
    archived = weft.read("archive/delta_archive", source="lake").toArrow().to_pylist()
    assert sorted(row["event_id"] for row in archived) == [1, 2, 3]


def _url(client: psycopg.Connection[Any]) -> str:
    import os

    return os.environ["WEFT_DSN"]
