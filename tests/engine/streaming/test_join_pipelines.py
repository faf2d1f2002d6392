"""Pipelines with a join, from two streams to a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of
from weft.errors import DeclarationError
from weft.pipelines.streaming import toml, toml_text
from weft.pipelines.streaming.declare import make

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
JOIN: dict[str, Any] = {
    "left_source": "orders",
    "right_source": "payments",
    "left_keys": "id",
    "right_keys": "order_id",
    "left_event_time_column": "at",
    "right_event_time_column": "at",
    "time_window_ms": 60_000,
}


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def declared(**join: Any) -> dict[str, Any]:
    """Return a pipeline that joins orders with payments."""
    orders = declare("orders", id="int64", item="string", at="timestamp")
    payments = declare("payments", order_id="int64", amount="decimal(10,2)", at="timestamp")
    return {
        "name": "paid",
        "sources": [weft.Source(query=orders), weft.Source(query=payments)],
        "target_table": "paid",
        "join": weft.Join(**{**JOIN, **join}),
    }


def order(number: Any, second: float, **more: Any) -> None:
    weft.publish_sync("orders", [{"id": number, "at": at(second), **more}])


def payment(number: Any, second: float, **more: Any) -> None:
    weft.publish_sync("payments", [{"order_id": number, "at": at(second), **more}])


def joined(columns: str = "left_id, right_order_id") -> list[tuple[Any, ...]]:
    return rows("paid", columns)


@pytest.mark.brief("mysql")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_payment_finds_its_order_in_a_later_batch() -> None:
    options = declared()
    order(1, 0, item="book")
    order(2, 0)
    run_once(**options)
    payment(1, 60, amount="9.50")
    payment(2, 61)
    run_once(**options)
    order(1, 1, item="pen")
    run_once(**options)
    found = [(*row[:3], str(row[3])) for row in joined("left_id, left_item, right_order_id, right_amount")]
    assert found == [(1, "book", 1, "9.50"), (1, "pen", 1, "9.50")]


@pytest.mark.brief("postgres")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_row_without_a_partner() -> None:
    options = declared(kind="full_outer")
    order(1, 0)
    order(None, 1)
    payment(7, 2)
    run_once(**options)
    order(8, 100)
    payment(8, 100)
    run_once(**options)
    assert joined() == [(1, None), (8, 8), (None, 7), (None, None)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_late_rows_are_dead_letters() -> None:
    options = {**declared(late_data="dlq"), "dead_letter_table": "failed"}
    order(1, 0)
    payment(1, 0)
    run_once(**options)
    order(2, -1)
    payment(2, 0)
    weft.publish_sync("orders", [{"id": 3}])
    run_once(**options)
    assert joined() == [(1, 1)]
    letters = letters_of(make(target="default", **options))
    assert sorted((json.loads(each.payload)["id"], each.error) for each in letters) == [
        (2, "The row is late: its time is before the watermark."),
        (3, "The row has no event time."),
    ]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_late_row_within_allowed_lateness() -> None:
    options = declared(late_data="reopen", allowed_lateness_ms=30_000)
    order(1, 0)
    order(9, 100)
    payment(9, 100)
    run_once(**options)
    payment(1, 59)  # 41 seconds late
    order(2, 75)
    payment(2, 75)
    run_once(**options)
    assert joined() == [(2, 2), (9, 9)]


class Files:
    """Two folders of JSON lines, joined by `id` and `order_id`."""

    def __init__(self, project: Path, **options: Any) -> None:
        self._folder, self._count = project / "in", 0
        lake = weft.ObjectStoreLocalConnection(str(self._folder), format="json_lines")
        self.options = {
            **declared(),
            "sources": [weft.Source(connection=lake, query=name) for name in ("orders", "payments")],
            "transform_sql": "SELECT * EXCEPT (at), CAST(at AS timestamp) AS at FROM source",
            "checkpoint": str(project / "cp"),
            **options,
        }

    def write(self, name: str, *rows: dict[str, Any]) -> None:
        self._count += 1
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"at": START.isoformat(), **row}) for row in rows]
        (self._folder / name / f"{self._count}.json").write_text("\n".join(lines) + "\n")


@pytest.mark.usefixtures("plain_spark", "here")
def test_files_of_both_sides_with_columns_that_come_later(project: Path) -> None:
    files = Files(project)
    files.write("orders", {"id": 1, "note": None, "tags": ["a", "b"]})
    files.write("payments", {"order_id": "1", "fee": 1.5})
    run_once(**files.options)
    files.write("orders", {"id": 2, "note": 5, "place": {"city": "Bern"}})
    files.write("payments", {"order_id": "2", "fee": 2})
    run_once(**files.options)
    found = joined("left_id, left_note, left_tags, left_place, right_order_id, right_fee")
    loaded = [tuple(json.loads(each) if str(each)[:1] in "[{" else each for each in row) for row in found]
    assert loaded == [
        (1, None, ["a", "b"], None, "1", 1.5),
        (2, 5, None, {"city": "Bern"}, "2", 2.0),
    ]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_message_with_odd_keys_stops_nothing(project: Path, count: Callable[..., int]) -> None:
    files = Files(project, dead_letter_table="failed")
    files.write("orders", {"id": 1})
    files.write("payments", {"order_id": 0})
    run_once(**files.options)
    # More than a pipeline adds to a table; in full more than a table can have, which takes ten seconds more.
    wide = {f"key{number}": 1 for number in range(count(2000, 105))}
    files.write("orders", {"id": 2, **wide}, {"id": 3, "k" * 70: 1}, {"id": 4, "\0": 1}, {"id": 5, "new": "\0 and NaN"})
    files.write("payments", *({"order_id": number} for number in range(1, 6)))
    run_once(**files.options)
    assert [row[0] for row in joined("left_id")] == [1]
    files.write("orders", {"id": 6})
    files.write("payments", {"order_id": 6})
    run_once(**files.options)
    assert [row[0] for row in joined("left_id")] == [1, 6]
    letters = letters_of(make(target="default", **files.options))
    found = {json.loads(each.payload).get("left_id", json.loads(each.payload).get("id")) for each in letters}
    assert {2, 3, 4} <= found


@pytest.mark.usefixtures("plain_spark", "here")
def test_keys_of_different_types_are_compared_by_value() -> None:
    declare("a", n="int64", text="string", at="timestamp")
    declare("b", n="float64", text="decimal(10,2)", at="timestamp")
    keys = {"left_keys": ("n", "text"), "right_keys": ("n", "text"), "left_source": "a", "right_source": "b"}
    options = {"name": "both", "sources": [weft.Source(query="a"), weft.Source(query="b")], "target_table": "paid"}
    options["join"] = weft.Join(**{**JOIN, **keys})
    pairs = [(-3, "1.5"), (0, "2"), (10**15, "100"), (2**60, "0.01")]
    weft.publish_sync("a", [{"n": n, "text": text, "at": START} for n, text in pairs])
    weft.publish_sync(
        "b", [{"n": float(n), "text": text, "at": START} for n, text in pairs] + [{"n": 0.5, "at": START}]
    )
    run_once(**options)
    assert sorted(row[0] for row in joined("left_n")) == [-3, 0, 10**15, 2**60]


@pytest.mark.full
@pytest.mark.parametrize("system", ["postgres"], indirect=True)  # whose tables have NaN
@pytest.mark.usefixtures("plain_spark", "streams")
def test_keys_that_are_nan_null_or_a_megabyte() -> None:
    options = declared(kind="full_outer", left_keys=("f", "big"), right_keys=("f", "big"))
    options["transform_sql"] = (
        "SELECT *, CASE item WHEN 'nan' THEN double('NaN') WHEN 'zero' THEN -0D END AS f, "
        "repeat('x', 1000000) AS big FROM source"
    )
    options["sources"][1] = weft.Source(query=declare("payments", order_id="int64", item="string", at="timestamp"))
    for number, item in enumerate(("nan", "zero", "null")):
        order(number, 0, item=item)
    run_once(**options)
    for number, item in enumerate(("nan", "zero", "null")):
        payment(10 + number, 1, item=item)
    order(9, 200)
    payment(9, 200)
    run_once(**options)
    assert joined() == [(0, 10), (1, 11), (2, None), (None, 12)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_time_that_no_database_gives_back() -> None:
    options = {**declared(), "dead_letter_table": "failed"}
    options["transform_sql"] = (
        "SELECT *, CASE WHEN item = 'old' THEN timestamp_micros(-70000000000000000) END AS t, x'ff' AS b FROM source"
    )
    options["sources"][1] = weft.Source(query=declare("payments", order_id="int64", item="string", at="timestamp"))
    order(1, 0, item="new")
    order(2, 0, item="old")
    for number in (1, 2):
        payment(number, 0)
    run_once(**options)
    assert joined() == [(1, 1)]
    (letter,) = letters_of(make(target="default", **options))
    assert "outside of the years 1 to 9999" in letter.error
    shown = json.loads(letter.payload)
    assert (shown["left_id"], shown["left_b"], shown["left_t"][:5]) == (2, "ff", "-0249")


@pytest.mark.usefixtures("here")
def test_what_does_not_go_together() -> None:
    for change, message in [
        ({"right_source": "orders"}, "left_source and right_source are the same"),
        ({"right_keys": ("order_id", "amount")}, "left_keys are 1, and right_keys 2"),
        ({"time_window_ms": None}, "needs time_window_ms, or both min_delta_ms and max_delta_ms"),
        ({"min_delta_ms": 0}, "has time_window_ms, or min_delta_ms and max_delta_ms"),
        ({"time_window_ms": None, "min_delta_ms": 5, "max_delta_ms": 4}, "is greater than max_delta_ms"),
        ({"late_data": "reopen"}, 'late_data = "reopen" requires allowed_lateness_ms'),
        ({"allowed_lateness_ms": 5}, 'allowed_lateness_ms is for late_data = "reopen"'),
        ({"right_prefix": "left_"}, "one prefix begins with the other"),
        ({"kind": "outer"}, "kind"),
        ({"keys": "id"}, "keys"),
    ]:
        with pytest.raises(DeclarationError, match=message):
            weft.Join(**{**JOIN, **change})
    options = declared()
    window = weft.Window(kind="tumbling", duration_ms=1, aggregations=[weft.Aggregation(agg="count")])
    for change, message in [
        ({"window": window}, "window and join are mutually exclusive"),
        ({"sources": options["sources"][:1]}, "join requires two sources, and there is one"),
        ({"join": weft.Join(**{**JOIN, "left_source": "order"})}, "left_source is 'order', which is no source"),
        ({"join": weft.Join(**{**JOIN, "late_data": "dlq"})}, "no place for dead letters"),
        ({"transform_sql": "SELECT id, max(at) AS at FROM source GROUP BY id"}, "depends on several rows"),
    ]:
        with pytest.raises(DeclarationError, match=message):
            make(target="default", **{**options, **change})


@pytest.mark.usefixtures("plain_spark", "here")
def test_columns_that_a_side_does_not_have() -> None:
    options = declared()
    order(1, 0)
    for change, message in [
        ({"left_keys": "idd"}, "left_keys of the join: 'idd' is not a column of the rows of orders"),
        ({"left_keys": "order_id"}, r"the rows have no column 'order_id' \(left_keys\)"),
        ({"right_event_time_column": "att"}, "right_event_time_column of the join 'att' is not a column"),
        ({"left_event_time_column": "item"}, "needs a time, and the column 'item' is string"),
    ]:
        with pytest.raises(DeclarationError, match=message):
            run_once(**{**options, "join": weft.Join(**{**JOIN, **change})})


@pytest.mark.usefixtures("here")
def test_a_file_holds_the_join(project: Path) -> None:
    pipeline = make(
        target="default", **declared(kind="left_outer", min_delta_ms=-5, max_delta_ms=7, time_window_ms=None)
    )
    (project / "paid.toml").write_text(toml_text.to_toml(pipeline))
    assert toml.read(project / "paid.toml").join == pipeline.join


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_join_that_was_changed() -> None:
    options = declared()
    order(1, 0)
    run_once(**options)
    order(2, 0)
    with pytest.raises(DeclarationError, match=r"The join of paid is another one than that of its state"):
        run_once(**{**options, "join": weft.Join(**{**JOIN, "time_window_ms": 30_000})})
