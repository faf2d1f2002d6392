"""Models whose result is a Delta table or files: the commit of the rows has what was read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import weft
import weft.streams
from tests.engine.models.built import build, why
from weft.engine.models.build import ModelRun
from weft.engine.models.inputs import Observer
from weft.engine.models.planning import make_plan
from weft.engine.models.survey import Survey
from weft.engine.preview import preview
from weft.engine.run import PipelineRun
from weft.errors import DeclarationError, LoadRefusedError
from weft.project import Project, use

pytestmark = [pytest.mark.spark, pytest.mark.delta]

ORDERS = [{"id": 1, "shop": "Bern", "total": 2.5}, {"id": 2, "shop": "Uri", "total": 1.0}]
KINDS = {
    "delta": "delta_local",
    "files": "object_store_local",
    "delta_s3": "delta_s3",
    "files_s3": "object_store_s3",
}


@pytest.fixture
def here(project: Path, spark: Any) -> Iterator[Project]:
    fresh = Project()
    with use(fresh):
        weft.stream(name="orders", fields={"id": "int64", "shop": "string", "total": "float64"})(lambda: None)
        yield fresh
        weft.streams.close(fresh)


@pytest.fixture(params=KINDS)
def lake(request: pytest.FixtureRequest, here: Project, project: Path) -> Any:
    is_bucket = request.param.endswith("s3")
    fields = request.getfixturevalue("s3").fields() if is_bucket else {"path": str(project / "lake")}
    return weft.connect(kind=KINDS[request.param], name="lake", **fields)


@pytest.fixture
def delta(here: Project, project: Path) -> Any:
    return weft.connect(kind="delta_local", path=str(project / "lake"), name="lake")


def rows(name: str, *columns: str) -> list[tuple[Any, ...]]:
    found = weft.read(name, source="lake").select(*columns).collect()
    return sorted(tuple(each) for each in found)


@pytest.mark.brief("files")
def test_table_and_a_model_that_reads_it(lake: Any) -> None:
    @weft.model(connection="lake", schema="sales", dependencies=["orders"])
    def revenue(orders: Any) -> Any:
        return orders.group_by("shop").aggregate(revenue=orders.total.sum())

    @weft.model(connection="lake")
    def shops(revenue: Any) -> Any:
        return "SELECT count(*) AS shops FROM revenue"

    assert why(revenue) == "never built"
    weft.publish_sync("orders", ORDERS)
    first = build(revenue)
    assert (first.engine, first.counts.inserted, first.counts.deleted) == ("spark", 2, 0)
    build(shops)
    assert (why(revenue), why(shops)) == (None, None)
    weft.publish_sync("orders", [{"id": 3, "shop": "Bern", "total": 1.0}])
    assert why(revenue) == "orders has 1 new event"
    second = build(revenue)
    assert (second.counts.inserted, second.counts.deleted) == (2, 2)
    assert why(shops) == "revenue was built again"
    assert rows("sales/revenue", "shop", "revenue") == [("Bern", 3.5), ("Uri", 1.0)]
    assert rows("shops", "shops") == [(2,)]


@pytest.mark.brief("delta")
def test_columns_of_a_table_change_with_its_code(lake: Any, here: Project) -> None:
    @weft.model(name="all_orders", connection="lake", dependencies=["orders"])
    def before(orders: Any) -> Any:
        return orders.select("id", "shop")

    weft.publish_sync("orders", ORDERS)
    build(before)
    here.pipelines.pop("all_orders")

    @weft.model(name="all_orders", connection="lake", dependencies=["orders"])
    def after(orders: Any) -> Any:
        return orders.select("total", id=orders.id.cast("string"))

    with Observer() as observer:
        (step,) = make_plan(Survey(observer), sample=1)
    assert (step.change, step.added, step.dropped) == ("changed", {"total": "double"}, ["shop"])
    assert step.retyped == {"id": ("bigint", "string")}
    assert step.before and step.after and (set(step.before[0]), set(step.after[0])) == ({"id", "shop"}, {"id", "total"})
    shown = preview(after, after.target, datetime.now(UTC))
    assert shown.refused is None and shown.counts is not None and shown.counts.deleted == 2
    build(after)
    assert rows("all_orders", "id", "total") == [("1", 2.5), ("2", 1.0)]
    assert sorted(weft.read("all_orders", source="lake").columns) == ["id", "total"]
    with Observer() as observer:
        assert make_plan(Survey(observer)) == []


@pytest.mark.brief("files")
def test_incremental_reads_each_event_once(lake: Any) -> None:
    @weft.model(connection="lake", materialise="incremental")
    def large(orders: Any, this: Any) -> Any:
        before = "SELECT 0" if this is None else "SELECT count(*) FROM this"
        return f"SELECT id, ({before}) AS known FROM orders WHERE total > 2"

    weft.publish_sync("orders", ORDERS)
    build(large, key="one")
    assert build(large, key="one").counts.replayed
    weft.publish_sync("orders", [{"id": 3, "shop": "Bern", "total": 9.0}])
    assert build(large).counts.inserted == 1
    weft.publish_sync("orders", [{"id": 4, "shop": "Bern", "total": 0.0}])
    assert why(large) == "orders has 1 new event"
    assert build(large).counts.inserted == 0
    # No row was added, and it is known that there was none.
    assert why(large) is None
    assert build(large).engine == "none"
    assert rows("large", "id", "known") == [(1, 0), (3, 1)]
    assert build(large, full=True).counts.deleted == 2
    assert rows("large", "id", "known") == [(1, 0), (3, 0)]


@pytest.mark.brief("files")
def test_load_without_new_rows_is_noted(lake: Any) -> None:
    @weft.pipeline(target="prices", mode="truncate")
    def load_prices() -> Any:
        return [{"id": 1}, {"id": 2}]

    @weft.model(connection="lake", materialise="incremental", cursor="id")
    def seen(prices: Any) -> Any:
        return prices.select("id")

    for number in range(2):
        PipelineRun(load_prices, f"load {number}", datetime.now(UTC)).execute()
        assert why(seen) == ("prices was loaded" if number else "never built")
        build(seen)
        assert why(seen) is None
    assert rows("seen", "id") == [(1,), (2,)]


@pytest.mark.brief("files")
def test_of_two_builds_at_once_one_is_refused(lake: Any) -> None:
    @weft.model(connection="lake", materialise="incremental")
    def kept(orders: Any) -> Any:
        return orders.select("id")

    weft.publish_sync("orders", ORDERS)
    with pytest.raises(LoadRefusedError, match="Another run of kept has loaded kept meanwhile"):
        build(kept, meanwhile=lambda: build(kept))
    weft.publish_sync("orders", [{"id": 3, "shop": "Bern", "total": 9.0}])
    with pytest.raises(LoadRefusedError, match="Another run"):
        build(kept, meanwhile=lambda: build(kept))
    assert rows("kept", "id") == [(1,), (2,), (3,)]
    assert why(kept) is None


class Killed(BaseException):
    pass


class _KillAt(logging.Handler):
    """Ends a load where it has reached a step."""

    def __init__(self, step: str) -> None:
        super().__init__(logging.DEBUG)
        self.step = step

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self.step:
            raise Killed(self.step)


@pytest.mark.parametrize("step", ["begun", "staged", "recorded", "moved", "committed"])
@pytest.mark.brief("files-recorded")
def test_build_that_ends_at_a_step_is_there_whole_or_not_at_all(lake: Any, step: str) -> None:
    @weft.model(connection="lake", materialise="incremental")
    def kept(orders: Any) -> Any:
        return orders.select("id")

    weft.publish_sync("orders", ORDERS)
    build(kept)
    weft.publish_sync("orders", [{"id": 3, "shop": "Bern", "total": 9.0}])
    steps, handler = logging.getLogger("weft.commit"), _KillAt(step)
    level = steps.level
    steps.addHandler(handler)
    steps.setLevel(logging.DEBUG)
    try:
        build(kept)
    except Killed:
        pass
    finally:
        steps.removeHandler(handler)
        steps.setLevel(level)
    build(kept)
    assert rows("kept", "id") == [(1,), (2,), (3,)]
    assert why(kept) is None


@pytest.mark.brief("files")
def test_table_of_somebody_else_is_left_alone(lake: Any) -> None:
    weft.load([{"id": 7}], target="taken", connection="lake")

    @weft.model(connection="lake")
    def taken(orders: Any) -> Any:
        return orders.select("shop")

    weft.publish_sync("orders", ORDERS)
    with pytest.raises(LoadRefusedError, match="no build of the model taken wrote its rows"):
        build(taken)
    assert rows("taken", "id") == [(7,)]
    build(taken, full=True)
    assert rows("taken", "shop") == [("Bern",), ("Uri",)]


@pytest.mark.brief("files")
def test_load_into_a_table_makes_a_model_stale(lake: Any) -> None:
    weft.load([{"id": 1}], target="raw.reviews", connection="lake")

    @weft.model(dependencies={"reviews": "lake.raw.reviews"}, connection="lake")
    def reviewed(reviews: Any) -> Any:
        return reviews.aggregate(n=reviews.count())

    build(reviewed)
    assert why(reviewed) is None
    weft.load([{"id": 2}], target="raw.reviews", connection="lake")
    assert why(reviewed) == "lake.raw.reviews was loaded"
    build(reviewed)
    assert rows("reviewed", "n") == [(2,)]


@pytest.mark.full
def test_merge_and_history_in_delta(delta: Any, count: Callable[..., int]) -> None:
    @weft.model(connection="lake", materialise="merge", key="shop")
    def newest(orders: Any) -> Any:
        return orders.group_by("shop").aggregate(id=orders.id.max())

    @weft.model(connection="lake", materialise="scd2", key="shop")
    def history(orders: Any) -> Any:
        return orders.group_by("shop").aggregate(id=orders.id.max())

    weft.publish_sync("orders", ORDERS)
    for each in (newest, history):
        assert build(each).counts.inserted == 2
    weft.publish_sync("orders", [{"id": 3, "shop": "Bern", "total": 9.0}])
    for each in (newest, history):
        assert build(each).counts.updated == 1
        assert why(each) is None
    assert rows("newest", "shop", "id") == [("Bern", 3), ("Uri", 2)]
    assert rows("history", "shop", "id", "is_current") == [("Bern", 1, False), ("Bern", 3, True), ("Uri", 2, True)]
    if count(2, 1) == 1:
        return
    for each in (newest, history):
        build(each, full=True)
    assert rows("newest", "shop", "id") == [("Bern", 3), ("Uri", 2)]
    assert rows("history", "shop", "id", "is_current") == [("Bern", 3, True), ("Uri", 2, True)]


@pytest.mark.full
def test_delta_removes_old_commits_from_its_log(delta: Any, spark: Any, project: Path) -> None:
    @weft.model(connection="lake", materialise="incremental")
    def kept(orders: Any) -> Any:
        return orders.select("id")

    def build_next(number: int) -> None:
        weft.publish_sync("orders", [{"id": number, "shop": "Bern", "total": 9.0}])
        build(kept)

    def alter() -> None:
        spark.sql(f"ALTER TABLE delta.`{project}/lake/kept` SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")

    log = project / "lake" / "kept" / "_delta_log"
    build_next(1)
    alter()
    build_next(2)
    assert list(log.glob("*.checkpoint*.parquet"))
    commits = sorted(log.glob("*.json"))
    for each in commits[:-1]:
        each.unlink()
    assert why(kept) is None
    build_next(3)
    assert rows("kept", "id") == [(1,), (2,), (3,)]
    alter()
    for each in sorted(log.glob("*.json"))[:-1]:
        each.unlink()
    with pytest.raises(LoadRefusedError, match="does not say any more what the model kept has read"):
        build(kept)
    build(kept, full=True)
    assert rows("kept", "id") == [(1,), (2,), (3,)]
    assert why(kept) is None


@pytest.mark.full
def test_expectation_keeps_the_old_rows(delta: Any) -> None:
    @weft.model(connection="lake", expectations=[weft.expectations.range("total", max=5)])
    def small(orders: Any) -> Any:
        return orders.select("id", "total")

    weft.publish_sync("orders", ORDERS)
    build(small)
    weft.publish_sync("orders", [{"id": 3, "shop": "Bern", "total": 9.0}])
    with pytest.raises(LoadRefusedError, match="1 of 3 rows"):
        build(small)
    assert rows("small", "id") == [(1,), (2,)]


@pytest.mark.parametrize("materialise", ["view", "merge", "scd2"])
def test_what_files_cannot_be_is_refused_by_name(here: Project, project: Path, materialise: Any) -> None:
    weft.connect(kind="object_store_local", path=str(project / "lake"), name="lake")
    key = {} if materialise == "view" else {"key": "id"}

    @weft.model(connection="lake", materialise=materialise, **key)
    def odd(orders: Any) -> Any:
        return orders

    with pytest.raises(DeclarationError, match=f"Model 'odd' cannot be .*{materialise}"):
        ModelRun(odd, uuid4().hex, datetime.now(UTC)).execute()
