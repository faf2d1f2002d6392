"""A project with one of everything that the page shows, and runs of its pipelines."""

from __future__ import annotations

import json
from typing import Annotated, Any

import weft
from weft import pk
from weft.operate.runlog import RunLog
from weft.server.keys import key_table
from weft.types import BigInt
from workers import declare, next_millisecond


def declare_project() -> None:
    orders = declare("orders", fields={"id": "int64"})

    @weft.table
    class Customers:
        id: Annotated[BigInt, pk()]

    @weft.table
    class Totals:
        id: Annotated[BigInt, pk()]

    @weft.pipeline(target=Customers, mode="append", name="customers")
    def customers(conn: Any) -> str:
        return "SELECT 1 AS id"

    @weft.pipeline(
        target=Totals, mode="merge", schedule="0 2 * * *", depends_on=["customers"], name="nightly", tags=["daily"]
    )
    def nightly(conn: Any) -> str:
        return "SELECT 2 AS id"

    @weft.model(name="revenue", dependencies=["orders", "totals"])
    def revenue(orders: Any, totals: Any) -> str:
        return "SELECT count(*) AS n FROM orders"

    @weft.streaming_pipeline(
        name="loader", source=orders, target="default", target_table="clean", transform_sql="SELECT id FROM source"
    )
    def loader() -> None: ...


def run_once(log: RunLog, pipeline: str, status: str = "succeeded", **ended: Any) -> str:
    next_millisecond()  # runs are listed by when they began
    claimed: Any = log.claim(pipeline, resume=False)
    log.finish(claimed, status, **ended)
    return str(claimed.run_id)


def make_key(*scopes: Any, name: str = "ops", streams: tuple[str, ...] = ()) -> dict[str, str]:
    """The header of a new key."""
    with key_table() as table:
        return {"authorization": f"Bearer {table.create(name=name, scopes=scopes, streams=streams)[1]}"}


def failed_activity(error: str) -> str:
    """What a streaming pipeline that failed has said of itself."""
    counts = dict.fromkeys(("batches", "rows_in", "rows_out", "busy_ms", "dead_letters"), 1)
    at = "2026-01-01T00:00:00+00:00"
    failure = {"at": at, "error": error, "since": "2025-12-31T00:00:00+00:00", "times": 3}
    before = {"at": "2025-12-31T23:59:50+00:00", "rows_in": 0, "rows_out": 0}
    nothing = {"lag": {}, "last": None, "windows": None, "cdc": None}
    return json.dumps(counts | nothing | {"at": at, "failure": failure, "before": before})
