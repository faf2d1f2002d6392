"""Builds that are refused, and what they leave: events that are gone, tables of others, results that are no table."""

from __future__ import annotations

import logging
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

import weft
from tests.engine.models.built import ORDERS, build, query, run, why
from weft.engine.missing_tables import creation_hint
from weft.engine.models.inputs import Observer
from weft.engine.models.planning import make_plan
from weft.engine.models.survey import Survey
from weft.engine.readers import open_tables
from weft.engine.run import PipelineRun
from weft.engine.streaming.validate import validate as validate_streaming
from weft.engine.validate import validate
from weft.errors import DeclarationError, EventsLostError, LoadRefusedError, WeftError
from weft.pipelines.models import Model
from weft.project import Project, current


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


def test_a_cursor_that_no_input_has(orders: object) -> None:
    weft.load([{"user": "a", "since": 1}], target="users")

    @weft.model(materialise="incremental", cursor="sinec")
    def mistyped(orders, users):  # type: ignore[no-untyped-def]
        return "SELECT o.order_id, u.since FROM orders o LEFT JOIN users u ON u.user = o.customer"

    @weft.model(materialise="incremental", cursor="order_id")
    def of_a_stream(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    with pytest.raises(DeclarationError, match="The cursor 'sinec' of model 'mistyped' is not a column") as caught:
        build(mistyped)
    assert caught.value.hint == "Did you mean 'since'?"
    with pytest.raises(DeclarationError, match="reads streams alone, which need no cursor"):
        build(of_a_stream)


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


@pytest.mark.brief("sqlite")
def test_the_error_says_what_creates_an_input_that_is_not_there_yet(orders: object) -> None:
    weft.pipeline(name="copy", target="customers", source_connection="default")(lambda: "SELECT 1 AS id")
    weft.streaming_pipeline(name="mirror", source=orders, target="default", target_table="raw.copies")(lambda: None)
    weft.streaming_pipeline(name="far", source=orders, target="nowhere", target_table="distant")(lambda: None)

    @weft.model(schema="staging", trigger="manual")
    def parent(orders):  # type: ignore[no-untyped-def]
        return orders

    hints = {}
    for name in ("customers", "raw.copies", "staging.parent", "custommers"):
        child = weft.model(name=f"over_{name.replace('.', '_')}", dependencies={"it": name})(lambda it: it)
        with pytest.raises(weft.NotFoundError, match=f"There is no table {name}") as caught:
            build(child)
        hints[name] = caught.value.hint
    # Its pipeline has a connection that nobody declared.
    assert creation_hint("distant", current().connection()) is None
    assert hints == {
        "customers": "The first run of copy creates it: weft run copy",
        "raw.copies": "The first run of mirror creates it: weft consume mirror",
        "staging.parent": "The first run of parent creates it: weft run parent",
        "custommers": "Did you mean customers?",
    }


@pytest.mark.every_system
def test_failed_build_leaves_no_table_behind(orders: object) -> None:
    columns = ["order_id", "total"]

    @weft.model(materialise="merge", key="order_id")
    def latest(orders):  # type: ignore[no-untyped-def]
        return orders.select(*columns)

    weft.publish_sync("orders", [*ORDERS, ORDERS[0]])
    for _ in range(2):
        with pytest.raises(WeftError, match=r"of latest share a key"):
            build(latest)
        assert _tables_of("latest") == []
    weft.trim_sync("orders", max_rows=0)
    weft.publish_sync("orders", ORDERS)
    build(latest)
    columns.pop()
    weft.publish_sync("orders", ORDERS)
    # Its columns are others, so it has a table of its own.
    with pytest.raises(WeftError, match=r"of latest share a key"):
        build(latest, full=True)
    assert _tables_of("latest") == ["latest"]
    assert sorted(query("SELECT order_id, total FROM latest")) == [("a", 12.5), ("b", 7.5)]


@pytest.mark.every_system
def test_nobody_sees_a_table_before_the_rows_of_its_first_build(orders: object) -> None:
    @weft.model(schema="marts", materialise="scd2", key="order_id")
    def kept(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id", "total")

    seen: list[bool] = []

    class Looking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "committed":
                with Observer() as observer:
                    seen.append(observer.stored(kept).columns is not None)

    weft.publish_sync("orders", ORDERS)
    logger, handler = logging.getLogger("weft.commit"), Looking()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        build(kept)
        weft.publish_sync("orders", [{"order_id": "a", "total": 1.0}])
        build(kept)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert seen == [False, True]
    with Observer() as observer:
        table = observer.tables(kept.target.connection).table("marts", "kept")
    assert sorted(query(f"SELECT order_id, total FROM {table} WHERE is_current")) == [("a", 1.0), ("b", 7.5)]


def _tables_of(name: str) -> list[str]:
    with closing(open_tables(current().connection())) as tables, tables.driver.session("read") as session:
        return [each for each in tables.names(session, None) if each.startswith(name)]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (5, "Model 'odd' returned what cannot be loaded: A load cannot read a value of type int"),
        ({"id": 1}, "Model 'odd' returned what cannot be loaded: A load takes a list of dicts"),
        ("SELECT 1 AS a; SELECT 2 AS a", "several statements: SELECT 1 AS a; SELECT 2 AS a"),
    ],
)
def test_result_that_is_no_table_in_the_words_of_models(orders: object, result: object, problem: str) -> None:
    @weft.model
    def odd(orders):  # type: ignore[no-untyped-def]
        return result

    with pytest.raises(DeclarationError, match=problem):
        build(odd)


def test_table_that_a_pipeline_writes_too(orders: object) -> None:
    is_sqlite = current().connection().kind == "sqlite"

    @weft.model(schema="main" if is_sqlite else None, name="daily")
    def built(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    @weft.pipeline(target="daily")
    def loaded() -> Any:
        return [{"order_id": "mine"}]

    other: Any = weft.streaming_pipeline(
        name="followed", source=current().streams["orders"], target="default", target_table="daily"
    )(lambda: None)
    for declared, checks in ((built, validate(built)), (loaded, validate(loaded)), (other, validate_streaming(other))):
        (problem,) = [each.problem for each in checks if each.problem is not None and "write one table" in each.problem]
        assert "the model 'daily'" in problem and "the pipeline '" in problem, declared.name
    with pytest.raises(DeclarationError, match="the model 'daily' and the pipeline 'loaded' write one table"):
        build(built, full=True)
    with pytest.raises(DeclarationError, match="the pipeline 'loaded' and the model 'daily' write one table, "):
        PipelineRun(loaded, "key", datetime.now(UTC)).execute()
    with Observer() as observer, pytest.raises(DeclarationError, match="write one table"):
        make_plan(Survey(observer))


@pytest.mark.every_system
def test_names_that_differ_in_case_alone(orders: object) -> None:
    """SQLite has one table for both, which each would build again after the other."""

    @weft.model(name="daily")
    def first(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    @weft.model(name="Daily")
    def second(orders):  # type: ignore[no-untyped-def]
        return orders.select("total")

    weft.publish_sync("orders", ORDERS)
    weft.model(name="Orders", schema="events", dependencies=["orders"])(first.function)
    of_stream = current().pipelines.pop("Orders")
    assert isinstance(of_stream, Model)
    if current().connection().kind == "sqlite":
        with pytest.raises(DeclarationError, match="'Orders' would write the table of the stream 'orders'"):
            build(of_stream)
        with pytest.raises(DeclarationError, match="the model 'daily' and the model 'Daily' write one table"):
            build(first)
        return
    build(of_stream)
    build(first)
    build(second)
    assert why(first) is None and sorted(query("SELECT * FROM daily")) == [("a",), ("b",)]


def test_table_of_the_same_name_elsewhere(orders: object) -> None:
    weft.register_connection(weft.SQLiteConnection("other.db", name="other"))

    @weft.model
    def daily(orders):  # type: ignore[no-untyped-def]
        return orders.select("order_id")

    @weft.pipeline(target="daily", target_connection="other")
    def loaded() -> Any:
        return [{"order_id": "mine"}]

    @weft.pipeline(target="old.daily")
    def archived() -> Any:
        return [{"order_id": "mine"}]

    build(daily)
