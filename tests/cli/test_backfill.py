"""`weft backfill`: a range of time is built again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import weft
from weft.project import Project
from weft.testing import Clock, table_rows
from workers import declare_model as declare

if TYPE_CHECKING:
    from click.testing import Result

Call = Callable[..., "Result"]
MERGE = "-- materialise: merge\n-- key: id\n"


@pytest.fixture(autouse=True)
def shop(local: Project) -> Clock:
    local.clock = clock = Clock()

    @weft.stream(fields={"id": "int64", "total": "float64"})
    def orders() -> None:
        pass

    for day in range(1, 4):
        weft.publish_sync("orders", {"id": day, "total": 1.0})
        clock.move(days=1)
    return clock


def totals() -> list[Any]:
    return [each["total"] for each in table_rows("sums")]


def test_range_is_merged_again(call: Call) -> None:
    declare("sums", f"{MERGE}SELECT id, total FROM orders")
    call("run", "sums")
    weft.publish_sync("orders", {"id": 4, "total": 1.0})
    declare("sums", f"{MERGE}SELECT id, total * 10 AS total FROM orders")
    done = call("backfill", "sums", "--since", "2026-01-02", "--until", "2026-01-03")
    assert "sums: 1 read, 1 updated" in done.stdout
    assert totals() == [1.0, 10.0, 1.0]
    # What was not read yet is not a part of it, and the next build reads it.
    call("backfill", "sums", "--since", "2026-01-03")
    assert totals() == [1.0, 10.0, 10.0]
    call("run", "sums")
    assert totals() == [1.0, 10.0, 10.0, 10.0]
    assert "0 read" in call("backfill", "sums", "--since", "2027-01-01").stdout
    # The oldest row is of the code before.
    assert "~ changed   sums" in call("plan").stdout


def test_older_rows_of_a_range_do_not_replace_newer_ones(call: Call) -> None:
    declare("sums", f"{MERGE}-- deduplicate_by: _weft_rowid\nSELECT id, total, _weft_rowid FROM orders")
    weft.publish_sync("orders", {"id": 1, "total": 2.0})
    call("run", "sums")
    refused = call("backfill", "sums", "--since", "2026-01-01", "--until", "2026-01-02", code=1)
    assert "its rows would replace theirs" in refused.stderr
    assert "0 read" in call("backfill", "sums", "--since", "2025-01-01", "--until", "2025-01-02").stdout
    declare("sums", f"{MERGE}-- deduplicate_by: _weft_rowid\nSELECT id, total * 10 AS total, _weft_rowid FROM orders")
    call("backfill", "sums", "--since", "2026-01-01")
    assert totals() == [20.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SELECT id FROM orders", "is built of all rows"),
        ("-- materialise: view\nSELECT id FROM orders", "has no rows of its own"),
        ("-- materialise: incremental\nSELECT id FROM orders", "those of the range would be doubled"),
        ("-- materialise: scd2\n-- key: id\nSELECT id FROM orders", "keeps a history"),
        (f"{MERGE}SELECT id FROM orders LEFT JOIN this USING (id)", "reads its last result"),
        (f"{MERGE}SELECT 1 AS id", "reads no stream"),
    ],
)
def test_what_has_no_backfill(call: Call, text: str, message: str) -> None:
    declare("sums", text)
    call("run", "sums")
    before = table_rows("sums")
    assert message in call("backfill", "sums", "--since", "2026-01-01", code=1).stderr
    assert table_rows("sums") == before


def test_wrong_uses(call: Call) -> None:
    declare("sums", f"{MERGE}SELECT id FROM orders")
    assert "was never built" in call("backfill", "sums", "--since", "2d", code=1).stderr
    assert "is not a time" in call("backfill", "sums", "--since", "17", code=2).stderr
    assert "must be after" in call("backfill", "sums", "--since", "1d", "--until", "2d", code=2).stderr
    assert "Did you mean 'sums'?" in call("backfill", "sum", "--since", "1d", code=1).stderr
