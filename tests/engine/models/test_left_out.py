"""Values that a column has no place for are null in a model: each build says how many there are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from conftest import System
from tests.engine.models.built import build, query
from weft.engine.models.build import ModelRun
from weft.engine.models.inputs import Observer
from weft.engine.models.survey import Survey
from weft.pipelines.models import Model
from weft.project import Project

both = pytest.mark.parametrize("system", ["sqlite", "postgres"], indirect=True)
FITS, ODD = {"order_id": "a", "total": 12.5}, {"order_id": "b", "total": "10.5"}


def shown(model: Model) -> list[str]:
    with Observer() as observer:
        return Survey(observer).status(model).left_out


def said(events: str, first: int) -> str:
    return (
        f"orders: {events} with a value of 'total' that its column has no place for: it is null here. "
        f"Look: weft streams tail orders --since {first - 1}"
    )


@both
def test_table_says_what_its_sum_leaves_out(orders: object, caplog: pytest.LogCaptureFixture) -> None:
    @weft.model(dependencies=["orders"])
    def revenue(orders: Any) -> Any:
        return orders.aggregate(revenue=orders.total.sum())

    weft.publish_sync("orders", [FITS])
    assert build(revenue).counts.warnings == ()
    assert shown(revenue) == []

    weft.publish_sync("orders", [ODD, FITS, ODD])
    with caplog.at_level(logging.WARNING, "weft.engine"):
        built = build(revenue)
        assert built.counts.warnings == (said("2 events", 2),)
        assert build(revenue).counts.warnings == built.counts.warnings
    # Once: the table reads the same events with each build.
    assert caplog.messages == [f"revenue: {said('2 events', 2)}"]
    assert built.engine == "pushdown"
    assert query("SELECT revenue FROM revenue") == [(25.0,)]
    assert shown(revenue) == [said("2 events", 2)]


@both
def test_incremental_counts_the_events_that_it_reads(orders: object) -> None:
    @weft.model(materialise="incremental")
    def kept(orders: Any) -> Any:
        return orders.select("order_id", "total")

    weft.publish_sync("orders", [FITS, ODD])
    assert build(kept, key="run").counts.warnings == (said("1 event", 2),)
    weft.publish_sync("orders", [ODD, ODD])
    assert build(kept, key="run").counts.warnings == ()  # done already: it reads nothing
    assert build(kept).counts.warnings == (said("2 events", 3),)
    assert build(kept).counts.warnings == ()
    assert shown(kept) == [said("3 events", 2)]
    weft.publish_sync("orders", [FITS])
    assert build(kept).counts.warnings == ()
    assert shown(kept) == [said("3 events", 2)]
    assert build(kept, full=True).counts.warnings == (said("3 events", 2),)
    assert shown(kept) == [said("3 events", 2)]


@both
def test_range_that_is_built_again_counts_once(orders: object) -> None:
    @weft.model(materialise="merge", key="order_id")
    def latest(orders: Any) -> Any:
        return orders.select("order_id", "total")

    weft.publish_sync("orders", [FITS, ODD])
    build(latest)
    now = datetime.now(UTC)
    again = ModelRun(latest, "again", now, span=(now - timedelta(days=1), now + timedelta(days=1)))
    again.execute()

    assert again.loaded[0].counts.warnings == (said("1 event", 2),)
    assert shown(latest) == [said("1 event", 2)]


@both
def test_column_of_an_undeclared_field(streams: Project) -> None:
    """A null, and a key that has no column, leave nothing out: no model can name it."""
    weft.stream(name="orders", schema="events", max_new_columns=1)(lambda: None)

    @weft.model(materialise="view")
    def totals(orders: Any) -> Any:
        return orders.select("total")

    weft.publish_sync("orders", [{"total": 10}])
    weft.publish_sync("orders", [{"total": 10.5, "colour": "red"}, {"total": None, "colour": "blue"}])

    assert build(totals).counts.warnings == (said("1 event", 2),)


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_function_that_is_given_a_frame(
    streams: Project, open_system: Callable[[str], AbstractContextManager[System]], kind: str
) -> None:
    with open_system(kind) as there:
        weft.connect(url=there.url, name="there")
        weft.stream(name="orders", connection="there", fields={"order_id": "string", "total": "float64"})(lambda: None)

        @weft.model
        def copied(orders: pa.Table) -> Any:
            return orders.select(["order_id", "total"])

        weft.publish_sync("orders", [{**ODD, "total": [10.5]}, FITS])

        (warning,) = build(copied).counts.warnings
        assert warning.startswith(said("1 event", 1).rpartition(" ")[0])
