"""The history of the streams in a table: a point a minute, written once by many services, removed when old."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from weft.project import Project
from weft.server.history_table import STREAMS, HistoryTable, Values
from workers import declare

on_each = pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
START = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def minutes(table: HistoryTable, name: str, since: datetime = START - timedelta(days=30)) -> list[tuple[int, int]]:
    """The stored points of a stream: minutes after the start, and events published."""
    found = table.read(name, since)
    return [(round((at - START.timestamp()) / 60), values.published) for at, values in found]


def at(number: int) -> datetime:
    return START + timedelta(minutes=number)


@on_each
def test_what_changed_is_stored_with_the_point_before(streams: Project) -> None:
    table = HistoryTable(STREAMS, 7)
    assert table.read("orders", START) == []
    for number, published in enumerate([5, 5, 5, 5, 9, 9]):
        table.write(at(number), {"orders": Values(published, 2**62, None, 3), "idle": Values(0, 0, None, None)})
    assert minutes(table, "orders") == [(0, 5), (3, 5), (4, 9)]
    assert minutes(table, "idle") == [(0, 0)]
    assert table.read("orders", at(4))[0][1] == Values(9, 2**62, None, 3)


@on_each
def test_services_take_turns(streams: Project) -> None:
    """Of one project each minute is stored once. Another project may have streams of the same names."""
    tables = [HistoryTable(STREAMS, 7) for _ in range(4)]
    tables[0].write(at(0), {"orders": Values(1, 0, None, None)})

    def write(table: HistoryTable) -> Any:
        try:
            table.write(at(1), {"orders": Values(2, 0, None, None)})
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(4) as pool:
        failed = [each for each in pool.map(write, tables) if each is not None]
    assert len(failed) < 4
    assert minutes(tables[0], "orders") == [(0, 1), (1, 2)]
    tables[1].write(at(1), {"orders": Values(7, 0, None, None), "clicks": Values(3, 0, None, None)})
    assert minutes(tables[0], "orders") == [(0, 1), (1, 2)]
    assert minutes(tables[0], "clicks") == [(1, 3)]


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_what_another_service_stored_is_not_forgotten(streams: Project) -> None:
    """The other one has one turn, at which the number was another: what follows is stored again."""
    one, other = HistoryTable(STREAMS, 7), HistoryTable(STREAMS, 7)
    for number, published in enumerate([5, 9, 5, 5, 5]):
        for table in (other, one) if number == 1 else (one, other):
            table.write(at(number), {"orders": Values(published, 0, None, None), "idle": Values(0, 0, None, None)})
    assert minutes(one, "orders") == [(0, 5), (1, 9), (2, 5)]
    assert minutes(one, "idle") == [(0, 0)]


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_what_was_stored_while_this_one_was_silent(streams: Project) -> None:
    one, other = HistoryTable(STREAMS, 7), HistoryTable(STREAMS, 7)
    for number, table, published in ((0, one, 5), (1, other, 9), (2, one, 5)):
        table.write(at(number), {"orders": Values(published, 0, None, None)})
    assert minutes(one, "orders") == [(0, 5), (1, 9), (2, 5)]


@on_each
def test_what_is_old_is_removed(streams: Project) -> None:
    table = HistoryTable(STREAMS, 1)
    table.write(at(0), {"orders": Values(1, 0, None, None)})
    later = 60 * 24 + 2
    table.write(at(later), {"orders": Values(2, 0, None, None)})
    assert minutes(table, "orders") == [(later, 2)]


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_it_is_shown_over_http(streams: Project, http: Any) -> None:
    declare("orders")
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    table = HistoryTable(STREAMS, 7)
    table.write(now - timedelta(hours=3), {"orders": Values(1, 0, None, None)})
    table.write(now - timedelta(hours=1), {"orders": Values(5, 4, None, None)})
    points = http.get("/api/v1/streams/orders/history?hours=2").json()["points"]
    # The last one before the change, and what this process sampled since.
    assert [each[1:3] for each in points][:1] == [[5, 4]]
    assert points[0][0] == (now - timedelta(hours=1)).timestamp()
    assert http.get("/api/v1/streams/orders/history?hours=0").status_code == 422
    assert http.get("/api/v1/streams/order/history").status_code == 404
