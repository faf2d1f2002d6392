"""Models are built of what their inputs have, in the database that has them all."""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
import pytest

import weft
from conftest import System
from tests.engine.models.built import ORDERS, build, query, why
from weft.pipelines.models import Model
from weft.streams.runtime import open_stream


def test_table_is_built_of_all_events(orders: object) -> None:
    @weft.model(dependencies=["orders"])
    def revenue(orders):  # type: ignore[no-untyped-def]
        return orders.group_by("order_id").aggregate(revenue=orders.total.sum(), orders=orders.count())

    weft.publish_sync("orders", ORDERS)
    first = build(revenue)
    weft.publish_sync("orders", ORDERS[:1])
    second = build(revenue)

    assert (first.engine, first.counts.inserted) == ("pushdown", 2)
    assert (second.counts.deleted, second.counts.inserted) == (2, 2)
    assert sorted(query("SELECT order_id, revenue, orders FROM revenue")) == [("a", 25.0, 2), ("b", 7.5, 1)]


def test_table_of_a_stream_without_events_is_empty(orders: object) -> None:
    @weft.model
    def everything(orders):  # type: ignore[no-untyped-def]
        return orders

    build(everything)

    assert query("SELECT order_id FROM everything") == []


def test_incremental_reads_each_event_once(orders: object) -> None:
    @weft.model(materialise="incremental")
    def large(orders):  # type: ignore[no-untyped-def]
        return "SELECT order_id, total FROM orders WHERE total > 10"

    weft.publish_sync("orders", ORDERS)
    build(large)
    weft.publish_sync("orders", [{"order_id": "c", "total": 99.0}])
    second = build(large)
    third = build(large)

    assert (second.counts.rows_read, second.counts.inserted) == (1, 1)
    assert (third.engine, third.counts.inserted) == ("none", 0)
    assert sorted(query("SELECT order_id FROM large")) == [("a",), ("c",)]


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_incremental_beside_a_publisher_that_registers_late(system: System, orders: object) -> None:
    """The head is lower for a moment: no event is read twice, and the stream is not taken for an older copy."""

    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    log: Any = open_stream("orders").log
    with psycopg.connect(system.url) as publisher:
        publisher.execute("SELECT pg_advisory_xact_lock_shared((%s::bigint << 44) | 1)", (log.number,))
        assert log.head() == 1
        assert build(kept).engine == "none"
    weft.publish_sync("orders", [{"order_id": "c"}])
    build(kept)
    assert sorted(query("SELECT order_id FROM kept")) == [("a",), ("b",), ("c",)]


def test_same_key_again_loads_nothing_twice(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept, key="run")
    weft.publish_sync("orders", ORDERS[:1])
    again = build(kept, key="run")

    assert again.counts.replayed
    assert len(query("SELECT order_id FROM kept")) == 2
    assert why(kept) == "orders has 1 new event"
    build(kept)
    assert len(query("SELECT order_id FROM kept")) == 3


def test_merge_keeps_the_last_of_each_key(orders: object) -> None:
    @weft.model(materialise="merge", key="order_id")
    def latest(orders):  # type: ignore[no-untyped-def]
        return orders.group_by("order_id").aggregate(total=orders.total.max())

    weft.publish_sync("orders", ORDERS)
    build(latest)
    weft.publish_sync("orders", [{"order_id": "b", "total": 70.0}, {"order_id": "c", "total": 1.0}])
    second = build(latest)

    assert (second.counts.inserted, second.counts.updated) == (1, 1)
    assert sorted(query("SELECT order_id, total FROM latest")) == [("a", 12.5), ("b", 70.0), ("c", 1.0)]


def test_this_is_the_last_result(orders: object) -> None:
    @weft.model(materialise="merge", key="order_id")
    def sums(orders, this):  # type: ignore[no-untyped-def]
        new = orders.group_by("order_id").aggregate(total=orders.total.sum())
        if this is None:
            return new
        return new.union(this.semi_join(new, "order_id")).group_by("order_id").aggregate(total=lambda t: t.total.sum())

    for _ in range(3):
        weft.publish_sync("orders", ORDERS)
        build(sums)

    assert sorted(query("SELECT order_id, total FROM sums")) == [("a", 37.5), ("b", 22.5)]


def test_merge_keeps_the_newest_event_of_each_key(orders: object) -> None:
    @weft.model(materialise="merge", key="order_id", deduplicate_by="_weft_rowid")
    def newest(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id", "total", "_weft_rowid")

    weft.publish_sync("orders", [*ORDERS, {"order_id": "a", "total": 1.0}])
    build(newest)

    assert sorted(query("SELECT order_id, total FROM newest")) == [("a", 1.0), ("b", 7.5)]


def test_number_and_column_of_ibis_are_tables(orders: object) -> None:
    @weft.model
    def total(orders):  # type: ignore[no-untyped-def]
        return orders.total.sum().name("total")

    @weft.model
    def ids(orders):  # type: ignore[no-untyped-def]
        return orders.order_id

    weft.publish_sync("orders", ORDERS)
    build(total)
    build(ids)

    assert query("SELECT total FROM total") == [(20.0,)]
    assert sorted(query("SELECT order_id FROM ids")) == [("a",), ("b",)]


def test_this_as_a_frame(orders: object) -> None:
    import polars as pl

    @weft.model
    def builds(orders: pl.DataFrame, this: pl.DataFrame):  # type: ignore[no-untyped-def]
        return pl.DataFrame({"orders": [len(orders)], "before": [None if this is None else this["orders"][0]]})

    @weft.model(materialise="incremental")
    def numbered(orders: pl.DataFrame, this: pl.DataFrame):  # type: ignore[no-untyped-def]
        return pl.DataFrame({"build": [0 if this is None else len(this)]})

    for _ in range(3):
        weft.publish_sync("orders", ORDERS)
        build(numbered)

    assert sorted(query("SELECT build FROM numbered")) == [(0,), (1,), (2,)]


def test_changed_code_of_an_incremental_model_is_said(orders: object) -> None:
    def declare(column: str) -> Model:
        weft.project.current().pipelines.pop("kept", None)
        sql = f"SELECT {column} FROM orders"
        made = weft.model(name="kept", materialise="incremental")(eval(f"lambda orders: {sql!r}"))
        object.__setattr__(made, "sql", sql)
        weft.project.current().pipelines["kept"] = made
        return made

    weft.publish_sync("orders", ORDERS)
    assert build(declare("order_id")).counts.warnings == ()
    changed = declare("order_id AS order_id")
    for events in ([], ORDERS):
        weft.publish_sync("orders", events)
        (warning,) = build(changed).counts.warnings
        assert "weft run kept --full" in warning
    assert build(changed, full=True).counts.warnings == ()
    weft.publish_sync("orders", ORDERS)
    assert build(changed).counts.warnings == ()


def test_scd2_keeps_the_history(orders: object) -> None:
    @weft.model(materialise="scd2", key="order_id")
    def history(orders):  # type: ignore[no-untyped-def]
        return orders.group_by("order_id").aggregate(total=orders.total.max())

    weft.publish_sync("orders", ORDERS)
    build(history)
    weft.publish_sync("orders", [{"order_id": "a", "total": 80.0}])
    build(history)

    assert sorted(query("SELECT order_id, total FROM history")) == [("a", 12.5), ("a", 80.0), ("b", 7.5)]
    assert len(query("SELECT order_id FROM history WHERE valid_to IS NULL")) == 2


def test_view_follows_its_inputs(orders: object) -> None:
    @weft.model(materialise="view")
    def paid(orders):  # type: ignore[no-untyped-def]
        return orders.filter(orders.total > 10).select("order_id")

    build(paid)
    weft.publish_sync("orders", ORDERS)

    assert query("SELECT order_id FROM paid") == [("a",)]
    assert why(paid) is None


def test_model_of_a_model(orders: object) -> None:
    @weft.model
    def revenue(orders):  # type: ignore[no-untyped-def]
        return orders.group_by("order_id").aggregate(total=orders.total.sum())

    @weft.model
    def best(revenue):  # type: ignore[no-untyped-def]
        return "SELECT max(total) AS best FROM revenue"

    weft.publish_sync("orders", ORDERS)
    build(revenue)
    build(best)

    assert best.depends_on == ("revenue",)
    assert why(best) is None
    weft.publish_sync("orders", ORDERS)
    build(revenue)
    assert why(best) == "revenue was built again"
    build(best)
    assert query("SELECT best FROM best") == [(25.0,)]


def test_frames_and_rows(orders: object) -> None:
    import pandas as pd
    import polars as pl

    @weft.model
    def by_polars(orders: pl.DataFrame):  # type: ignore[no-untyped-def]
        return orders.group_by("order_id").agg(pl.col("total").sum())

    @weft.model
    def by_pandas(orders: pd.DataFrame):  # type: ignore[no-untyped-def]
        return orders[["order_id", "total"]]

    @weft.model(materialise="incremental")
    def by_arrow(orders: pa.Table):  # type: ignore[no-untyped-def]
        return [{"rows": orders.num_rows}]

    weft.publish_sync("orders", ORDERS)
    for model in (by_polars, by_pandas, by_arrow):
        assert build(model).engine == "pushdown"
    weft.publish_sync("orders", ORDERS[:1])
    build(by_arrow)

    assert sorted(query("SELECT order_id, total FROM by_polars")) == [("a", 12.5), ("b", 7.5)]
    assert sorted(query("SELECT order_id, total FROM by_pandas")) == [("a", 12.5), ("b", 7.5)]
    assert sorted(query("SELECT * FROM by_arrow")) == [(1,), (2,)]


@pytest.mark.brief("sqlite")
def test_columns_of_a_first_build_without_events_are_numbers(orders: object) -> None:
    @weft.model(materialise="merge", key="order_id")
    def latest(orders):  # type: ignore[no-untyped-def]
        return "SELECT order_id, max(total) AS total, count(*) AS n FROM orders GROUP BY order_id"

    @weft.model
    def large(latest):  # type: ignore[no-untyped-def]
        return latest.filter(latest.total > 10)

    build(latest)
    build(large)
    weft.publish_sync("orders", ORDERS)
    build(latest)
    build(large)
    assert query("SELECT order_id, total, n FROM large") == [("a", 12.5, 1)]
