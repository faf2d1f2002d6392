"""Models are built of what their inputs have, in the database that has them all."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

import weft
from conftest import System
from tests.engine.models.built import build, query, run, why
from weft.engine.readers import open_tables
from weft.errors import DeclarationError, EventsLostError, LoadRefusedError
from weft.pipelines.models import Model
from weft.project import Project

ORDERS = [{"order_id": "a", "total": 12.5}, {"order_id": "b", "total": 7.5}]


@pytest.fixture
def orders(streams: Project) -> object:
    return weft.stream(name="orders", schema="events", fields={"order_id": "string", "total": "float64"})(lambda: None)


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
    weft.publish_sync("orders", ORDERS)
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


# -------------------------------------------------------------------------------------------------------------- changes


def test_columns_that_change_are_changed_at_once(orders: object) -> None:
    columns = ["order_id", "total"]

    @weft.model
    def chosen(orders):  # type: ignore[no-untyped-def]
        return orders.select(*columns) if len(columns) > 1 else orders.select(order_id=orders.total)

    weft.publish_sync("orders", ORDERS)
    build(chosen)
    columns.pop()
    build(chosen)

    assert sorted(query("SELECT * FROM chosen")) == [(7.5,), (12.5,)]
    assert why(chosen) is None
    columns.append("total")
    build(chosen)
    assert sorted(query("SELECT * FROM chosen")) == [("a", 12.5), ("b", 7.5)]


def test_view_of_a_user_over_a_table_whose_columns_change(orders: object, system: System) -> None:
    """PostgreSQL does not change them; the error names the views. Elsewhere the view reads the new table."""
    columns = ["order_id"]

    @weft.model
    def chosen(orders):  # type: ignore[no-untyped-def]
        return orders.select(*columns)

    @weft.model(materialise="view")
    def ours(chosen):  # type: ignore[no-untyped-def]
        return chosen

    weft.publish_sync("orders", ORDERS)
    build(chosen)
    build(ours)
    run(
        'CREATE VIEW "My view" AS SELECT order_id FROM ours'
        if system.kind == "postgres"
        else "CREATE VIEW my_view AS SELECT order_id FROM chosen"
    )
    columns.append("total")
    if system.kind == "postgres":
        with pytest.raises(LoadRefusedError, match=r'The columns of chosen change.*: "My view"\.') as caught:
            build(chosen)
        assert str(caught.value.hint).startswith('DROP VIEW "My view"; weft run chosen;')
        assert len(query("SELECT order_id FROM chosen")) == 2
        run('DROP VIEW "My view"')
        build(chosen)
    else:
        build(chosen)
        assert sorted(query("SELECT * FROM my_view")) == [("a",), ("b",)]
    assert sorted(query("SELECT order_id, total FROM ours")) == [("a", 12.5), ("b", 7.5)]


def test_readers_see_the_old_rows_or_the_new_ones(orders: object) -> None:
    """A full build in place, and one with other columns."""
    is_wide = False

    @weft.model
    def numbers(orders):  # type: ignore[no-untyped-def]
        made = orders.select(n=orders.total)
        return made.mutate(m=made.n) if is_wide else made

    weft.publish_sync("orders", [{"order_id": "x", "total": 1.0}] * 500)
    build(numbers)
    seen: set[int] = set()
    errors: list[Exception] = []
    stopping = threading.Event()

    def read() -> None:
        with closing(open_tables(weft.get_connection("default"))) as tables:
            while not stopping.is_set():
                try:
                    with tables.driver.session("read") as session:
                        seen.add(int(session.value("SELECT count(*) FROM numbers")))
                except Exception as error:
                    errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(6):
            weft.publish_sync("orders", [{"order_id": "x", "total": 1.0}] * 500)
            is_wide = number % 2 == 1
            build(numbers)
    finally:
        stopping.set()
        reader.join()

    assert errors == []
    assert seen and seen <= {500 * number for number in range(1, 8)}


def test_model_that_becomes_a_view_and_a_table_again(orders: object) -> None:
    def declare(materialise: str) -> object:
        weft.project.current().pipelines.pop("chosen", None)

        @weft.model(name="chosen", materialise=materialise)  # type: ignore[arg-type]
        def chosen(orders):  # type: ignore[no-untyped-def]
            return orders.select("order_id")

        return chosen

    weft.publish_sync("orders", ORDERS)
    for materialise in ("table", "view", "table", "incremental"):
        model = declare(materialise)
        build(model)  # type: ignore[arg-type]
        assert sorted(query("SELECT order_id FROM chosen")) == [("a",), ("b",)]
        assert why(model) is None  # type: ignore[arg-type]


def test_table_of_somebody_else_is_left_alone(orders: object) -> None:
    weft.load([{"order_id": "mine"}], target="taken")

    @weft.model
    def taken(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    with pytest.raises(LoadRefusedError, match="no build of the model taken wrote its rows"):
        build(taken)
    assert query("SELECT order_id FROM taken") == [("mine",)]
    build(taken, full=True)
    assert query("SELECT order_id FROM taken") == []


def test_full_build_of_an_incremental_model(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    weft.publish_sync("orders", ORDERS)
    build(kept, full=True)

    assert len(query("SELECT order_id FROM kept")) == 4


def test_dropped_table_is_built_of_everything(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    run("DROP TABLE kept")
    weft.publish_sync("orders", ORDERS[:1])
    build(kept)

    assert len(query("SELECT order_id FROM kept")) == 3


# --------------------------------------------------------------------------------------------------------------- errors


def test_events_that_retention_removed(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    weft.publish_sync("orders", ORDERS * 3)
    weft.trim_sync("orders", max_rows=1)

    with pytest.raises(EventsLostError, match="weft run kept --full"):
        build(kept)
    build(kept, full=True)
    assert len(query("SELECT order_id FROM kept")) == 1


@pytest.mark.parametrize("materialise", ["incremental", "merge"])
def test_events_that_retention_removes_during_a_build(orders: object, materialise: str) -> None:
    """They are not skipped. A full build reads what is there."""
    options = {"key": "order_id"} if materialise == "merge" else {}

    @weft.model(materialise=materialise, **options)
    def kept(orders):  # type: ignore[no-untyped-def]
        return "SELECT order_id FROM orders"

    def trim() -> None:
        weft.trim_sync("orders", max_rows=1)

    weft.publish_sync("orders", ORDERS)
    build(kept, meanwhile=trim)
    assert query("SELECT order_id FROM kept") == [("b",)]
    weft.publish_sync("orders", [{"order_id": "c"}, {"order_id": "d"}])
    with pytest.raises(EventsLostError, match="lost up to 1 events before kept read them") as caught:
        build(kept, meanwhile=trim)
    assert caught.value.lost == 1 and "weft run kept --full" in str(caught.value.hint)
    assert query("SELECT order_id FROM kept") == [("b",)]
    build(kept, full=True)
    assert query("SELECT order_id FROM kept") == [("d",)]


def test_overtaken_build_changes_nothing(orders: object) -> None:
    is_first = True

    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        nonlocal is_first
        if is_first:
            is_first = False
            build(kept)
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    with pytest.raises(LoadRefusedError, match="Another run of kept"):
        build(kept)
    assert len(query("SELECT order_id FROM kept")) == 2


def test_incremental_of_a_table_needs_a_cursor(streams: Project) -> None:
    weft.load([{"id": 0, "name": "a"}], target="items")
    run("DELETE FROM items")

    @weft.model(materialise="incremental")
    def all_again(items):  # type: ignore[no-untyped-def]
        return items

    @weft.model(materialise="incremental", cursor="id")
    def kept(items):  # type: ignore[no-untyped-def]
        return items

    with pytest.raises(DeclarationError, match="each build would append all rows again"):
        build(all_again)
    for number in (1, 2, 3):
        build(kept)
        weft.load([{"id": number, "name": "b"}], target="items")
    build(kept)
    assert sorted(query("SELECT id FROM kept")) == [(1,), (2,), (3,)]
    assert build(kept).engine == "none"


def test_stream_that_is_deleted_and_created_again(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    @weft.model
    def everything(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    build(everything)
    weft.delete_stream_sync("orders")
    weft.publish_sync("orders", [{"order_id": "x"}, {"order_id": "y"}])

    with pytest.raises(DeclarationError, match="deleted and created again"):
        build(kept)
    assert why(everything) == "orders was deleted and created again"
    build(everything)
    build(kept, full=True)
    assert sorted(query("SELECT order_id FROM kept")) == sorted(query("SELECT order_id FROM everything"))


def redeclare(name: str, **options: Any) -> Model:
    weft.project.current().pipelines.pop(name, None)

    def model(orders):  # type: ignore[no-untyped-def]
        return orders.group_by("order_id").aggregate(total=orders.total.max())

    return weft.model(name=name, **options)(model)


def test_other_name_of_the_same_stream_reads_nothing_twice(orders: object) -> None:
    weft.publish_sync("orders", ORDERS)
    build(redeclare("kept", materialise="incremental", dependencies=["orders"]))
    weft.publish_sync("orders", [{"order_id": "c", "total": 1.0}])
    build(redeclare("kept", materialise="incremental", dependencies=["events.orders"]))

    assert sorted(query("SELECT order_id FROM kept")) == [("a",), ("b",), ("c",)]


def test_key_that_changes_needs_a_full_build(orders: object) -> None:
    weft.publish_sync("orders", ORDERS)
    build(redeclare("kept", materialise="merge", key="order_id"))
    changed = redeclare("kept", materialise="merge", key=["order_id", "total"])
    weft.publish_sync("orders", [{"order_id": "a", "total": 99.0}])

    with pytest.raises(DeclarationError, match="The key of kept was order_id"):
        build(changed)
    build(changed, full=True)
    weft.publish_sync("orders", [{"order_id": "a", "total": 100.0}])
    build(changed)
    assert len(query("SELECT order_id FROM kept")) == 3


@pytest.mark.parametrize("after", ["incremental", "scd2", "table"])
def test_merge_that_becomes_something_else(orders: object, after: str) -> None:
    weft.publish_sync("orders", ORDERS)
    build(redeclare("kept", materialise="merge", key="order_id"))
    changed = redeclare("kept", materialise=after, **({"key": "order_id"} if after == "scd2" else {}))
    for total in (50.0, 60.0):
        weft.publish_sync("orders", [{"order_id": "a", "total": total}])
        build(changed)

    rows = {"incremental": 3, "scd2": 3, "table": 2}
    assert len(query("SELECT order_id FROM kept")) == rows[after]


def test_rows_that_are_none(orders: object) -> None:
    rows: list[dict[str, Any]] = []

    @weft.model
    def made(orders):  # type: ignore[no-untyped-def]
        return rows

    weft.publish_sync("orders", ORDERS)
    with pytest.raises(DeclarationError, match="knows no columns"):
        build(made)
    rows.append({"n": 1})
    build(made)
    rows.clear()
    build(made)

    assert query("SELECT n FROM made") == []
    assert why(made) is None


def test_dropped_table_and_view_are_seen(orders: object) -> None:
    @weft.model
    def made(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    @weft.model(materialise="view")
    def seen(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    for model, kind in ((made, "TABLE"), (seen, "VIEW")):
        build(model)
        run(f"DROP {kind} {model.name}")
        assert why(model) == "its table is gone"
        build(model)
        assert len(query(f"SELECT order_id FROM {model.name}")) == 2


def test_new_field_reaches_a_view(orders: object) -> None:
    @weft.model(materialise="view")
    def seen(orders):  # type: ignore[no-untyped-def]
        return "SELECT * FROM orders"

    weft.publish_sync("orders", ORDERS)
    build(seen)
    weft.publish_sync("orders", [{"order_id": "c", "city": "Bern"}])
    build(seen)

    assert query("SELECT city FROM seen WHERE order_id = 'c'") == [("Bern",)]


def test_killed_replacement_leaves_nothing(orders: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DDL commits (MySQL), a build that dies in between is followed by a full one."""
    columns = ["order_id", "total"]

    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select(*columns)

    weft.publish_sync("orders", ORDERS)
    build(kept)
    columns.pop()
    weft.publish_sync("orders", ORDERS[:1])

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    tables = type(open_tables(weft.get_connection("default")))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tables, "replace_table", die)
        build(kept, full=True)
    weft.publish_sync("orders", ORDERS[:1])
    build(kept, full=True)
    weft.publish_sync("orders", ORDERS[:1])
    build(kept)

    assert len(query("SELECT order_id FROM kept")) == 5
    with closing(open_tables(weft.get_connection("default"))) as opened, opened.driver.session("read") as session:
        assert [name for name in opened.names(session, None) if "__weft_new" in name] == []


@pytest.mark.parametrize("value", [None, "orders", 7])
def test_result_that_is_no_table(orders: object, value: object) -> None:
    @weft.model
    def odd(orders):  # type: ignore[no-untyped-def]
        return value

    with pytest.raises(DeclarationError):
        build(odd)


def test_input_that_is_not_there(orders: object) -> None:
    weft.publish_sync("orders", ORDERS)

    @weft.model
    def lost(ordres):  # type: ignore[no-untyped-def]
        return ordres

    with pytest.raises(weft.NotFoundError, match="ordres"):
        build(lost)
