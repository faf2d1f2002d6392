"""`weft streams show`: all about one stream, and no secret."""

from __future__ import annotations

import json

import weft
from workers import declare


def test_declared_and_not_yet_stored(local, call) -> None:
    declare("orders", fields={"id": "int64", "note": "string?"}, description="What was bought", tags=["a", "b"])
    shown = call("streams", "show", "orders").stdout
    for line in ("description:      What was bought", "tags:             a, b", "events:           0"):
        assert f"{line}\n" in shown
    assert "id      int64    declared\nnote    string?  declared\n" in shown


def test_columns_events_and_consumers(streams, system, call) -> None:
    declare("orders", fields={"id": "int64"}, retention={"max_rows": 1000}, idempotency_key="id", max_deliveries=5)
    weft.publish_sync("orders", [{"id": n, "total": 1.5} for n in range(10)])
    weft.trim_sync("orders", before=3)
    weft.consume_sync("orders", "billing", batch_size=2, member="m1")
    found = json.loads(call("streams", "show", "orders", "--format", "json").stdout)
    assert found["columns"] == [
        {"column": "id", "type": "int64", "origin": "declared"},
        {"column": "total", "type": "float64", "origin": "inferred"},
    ]
    assert (found["events"], found["floor"]) == (8, 2)
    assert found["head"] >= 10
    assert found["size_bytes"] > 0
    assert found["retention"] == {"max_rows": 1000}
    assert found["idempotency_key"] == {"fields": ["id"], "horizon_days": 30.0}
    assert found["dead_letter"] == "orders__dead_letter"
    (group,) = found["consumers"]
    assert (group["consumer"], group["lag"], group["pending"]) == ("billing", 6, 2)
    shown = call("streams", "show", "orders").stdout
    assert "retention:        1,000 events\n" in shown
    assert "idempotency key:  id (for 30 days)\n" in shown
    assert "billing" in shown


def test_column_that_is_declared_later(local, call) -> None:
    declare("orders", fields={"id": "int64"})
    weft.publish_sync("orders", {"id": 1})
    declare("orders", fields={"id": "int64", "total": "decimal(10,2)"})
    found = json.loads(call("streams", "show", "orders", "--format", "json").stdout)
    assert found["columns"][1] == {"column": "total", "type": "decimal(10,2)", "origin": "not stored yet"}


def test_type_that_is_not_the_stored_one(streams, call) -> None:
    declare("orders", fields={"id": "int64", "at": "timestamp", "total": "decimal(10,2)"})
    weft.publish_sync("orders", {"id": 1})
    declare("orders", fields={"id": "string", "at": "timestamp?", "total": "decimal(12,2)?"})
    shown = call("streams", "show", "orders").stdout
    assert "id      string          declared string, stored as int64\n" in shown
    assert "at      timestamp?      declared\n" in shown
    assert "total   decimal(12,2)?  declared decimal(12,2)?, stored as decimal(10,2)\n" in shown
    found = json.loads(call("streams", "show", "orders", "--format", "json").stdout)
    assert found["columns"][0] == {"column": "id", "type": "string", "origin": "declared", "stored": "int64"}


def test_validation_shows_what_becomes_of_drift(local, call) -> None:
    declare("orders", fields={"id": "int64"}, validate_schema=True)
    assert "on schema drift:  reject (validate_schema)\n" in call("streams", "show", "orders").stdout
    declare("orders", fields={"id": "int64"}, validate_schema=True, on_schema_drift="quarantine")
    assert "on schema drift:  quarantine\n" in call("streams", "show", "orders").stdout


def test_stored_but_not_declared(streams, call) -> None:
    declare("orders", schema="sales", fields={"id": "int64"})
    weft.publish_sync("orders", {"id": 1})
    weft.consume_sync("orders", "billing")
    del streams.streams["orders"]
    done = call("streams", "show", "orders")
    assert "events:           1\n" in done.stdout
    assert "id      int64  stored\n" in done.stdout
    assert "billing" in done.stdout
    assert "schema drift" not in done.stdout
    assert done.stderr.startswith("\norders is not declared here.")
    assert '  @stream(name="orders", schema="sales", fields={"id": "int64"})\n' in done.stderr
    assert json.loads(call("streams", "show", "orders", "--format", "json").stdout)["declared"] is False


def test_no_secret(local, call) -> None:
    declare("orders", auth={"type": "bearer", "token": "hunter2"})
    for output in ("table", "json"):
        shown = call("streams", "show", "orders", "--format", output).stdout
        assert "bearer" in shown
        assert "hunter2" not in shown


def test_unknown_stream(local, call) -> None:
    declare("orders")
    done = call("streams", "show", "ordres", code=1)
    assert done.stdout == ""
    assert done.stderr.startswith("error: There is no stream named 'ordres'.\n  Did you mean 'orders'?")
