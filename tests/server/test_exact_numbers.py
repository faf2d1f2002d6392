"""Numbers of a body are the numbers that are stored, or the body is refused."""

from __future__ import annotations

from typing import Any

import pytest

from weft.project import Project
from workers import declare, log_of, start

DIGITS = "12345678901234567890.123456789012345678"
LINES = {"content-type": "application/x-ndjson"}
JSON = {"content-type": "application/json"}


@pytest.fixture
def orders(streams: Project, http: Any) -> Any:
    declare("orders", fields={"id": "int64", "amount": "decimal(38,18)", "price": "decimal(10,2)", "x": "float64"})
    return http


def stored(http: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = http.get("/api/v1/streams/orders/events").json()["events"]
    return events


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (f'{{"id": 1, "amount": {DIGITS}}}', JSON),
        (f'[{{"amount": 1.5, "x": 0.1}}, {{"id": 1, "amount": {DIGITS}}}]', JSON),
        (f'{{"amount": 1e0}}\n\n{{"id": 1, "amount":   {DIGITS} , "price": 1.25}}\n', LINES),
        (f'{{"id": 1, "amount": "{DIGITS}"}}', JSON),
    ],
)
def test_decimals_keep_their_digits(orders: Any, body: str, headers: dict[str, str]) -> None:
    assert orders.post("/api/v1/streams/orders", content=body, headers=headers).status_code == 202
    last = stored(orders)[-1]
    assert (last["id"], last["amount"]) == (1, DIGITS)


def test_decimals_of_a_column_that_another_process_added(orders: Any) -> None:
    orders.post("/api/v1/streams/orders", json={"id": 1})
    known = start("""
        from decimal import Decimal
        declare("orders", fields={"id": "int64"})
        answer(weft.publish_sync("orders", {"total": Decimal("1.5")}))
    """)
    known.answer()
    body = f'{{"total": {DIGITS}}}'
    assert orders.post("/api/v1/streams/orders", content=body, headers=JSON).status_code == 202
    assert stored(orders)[-1]["total"] == DIGITS


def test_the_columns_are_read_once_a_publish(orders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a key has no column, and gets none."""
    declare("narrow", fields={"id": "int64"}, max_new_columns=0)
    orders.post("/api/v1/streams/narrow", json={"id": 1})
    log = log_of("narrow")
    read, looks = log.fields, []

    def fields(*, fresh: bool = False) -> Any:
        looks.append(fresh)
        return read(fresh=fresh)

    monkeypatch.setattr(log, "fields", fields)
    assert orders.post("/api/v1/streams/narrow", json={"id": 2, "other": 1.5}).status_code == 202
    assert looks.count(True) == 1


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        ("100.00", "100.00"),
        ("1.25e2", "125.00"),
        ("99999999.99", "99999999.99"),
        ("12345678.900000000000000000", "12345678.90"),
        ("0.001", 0.001),  # fits no decimal(10,2), and comes back as it was sent
        ("12345678.90000000000000001", None),
        ("1.000000000000000000001", None),
        ("1e-400", None),
        ("1e-99999999999999999999", None),
    ],
)
def test_decimals_that_do_not_fit(orders: Any, number: str, kept: Any) -> None:
    done = orders.post("/api/v1/streams/orders", content=f'[{{"id": 1}}, {{"price": {number}}}]', headers=JSON)
    if kept is None:
        assert done.status_code == 422
        assert (done.json()["index"], done.json()["field"]) == (1, "price")
        assert "it must be decimal(10,2), but" in done.json()["detail"]
        assert stored(orders) == []
    else:
        assert done.status_code == 202
        assert stored(orders)[1]["price"] == kept
