"""Models whose columns, options or tables change: readers see the old rows or the new ones, and no event twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

import weft
from conftest import System
from tests.engine.models.built import ORDERS, build, query, run, why
from weft.engine.models.inputs import Observer
from weft.engine.models.planning import make_plan
from weft.engine.models.survey import Survey
from weft.engine.readers import open_tables
from weft.errors import DeclarationError, LoadRefusedError
from weft.pipelines.models import Model


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


def test_full_build_of_an_incremental_model(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    weft.publish_sync("orders", ORDERS)
    build(kept, full=True)

    assert len(query("SELECT order_id FROM kept")) == 4


def test_change_of_code_that_was_undone_leaves_rows_of_it(orders: object) -> None:
    def a(orders):  # type: ignore[no-untyped-def]
        return "SELECT 'a' AS made_by FROM orders"

    def b(orders):  # type: ignore[no-untyped-def]
        return "SELECT 'b' AS made_by FROM orders"

    def c(orders):  # type: ignore[no-untyped-def]
        return "SELECT 'c' AS made_by FROM orders"

    def declared(function: Callable[..., str]) -> Model:
        weft.project.current().pipelines.pop("kept", None)
        return weft.model(name="kept", materialise="incremental")(function)

    def is_mixed(function: Callable[..., str]) -> bool:
        weft.publish_sync("orders", ORDERS[:1])
        return any("other code" in each for each in build(declared(function)).counts.warnings)

    def planned() -> list[str]:
        with Observer() as observer:
            return [each.change for each in make_plan(Survey(observer))]

    assert [is_mixed(each) for each in (a, a, b, a, b, c, b)] == [False, False, *[True] * 5]
    assert planned() == ["changed"]
    build(declared(b), full=True)
    assert not is_mixed(b)
    assert planned() == []


def test_value_that_no_column_takes_says_what_a_model_can_do(orders: object, system: System) -> None:
    weft.publish_sync("orders", ORDERS)
    build(redeclare("kept", materialise="incremental"))
    weft.project.current().pipelines.pop("kept")

    @weft.model(materialise="incremental")
    def kept(orders):  # type: ignore[no-untyped-def]
        return "SELECT order_id, 'x' AS total FROM orders"

    weft.publish_sync("orders", ORDERS[:1])
    with pytest.raises(LoadRefusedError, match=r"rejected 1 row(.|\n)*weft run kept --full") as caught:
        build(kept)
    assert "on_bad_rows" not in str(caught.value)
    build(kept, full=True)
    assert query("SELECT DISTINCT total FROM kept") == [("x",)]

    @weft.model
    def replaced(orders):  # type: ignore[no-untyped-def]
        return [{"number": float("nan")}]

    if system.kind == "sqlite":  # which has no NaN
        with pytest.raises(
            LoadRefusedError, match=r"rejected 1 row(.|\n)*Change what the model makes of them\."
        ) as caught:
            build(replaced)
        assert "--full" not in str(caught.value)


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
