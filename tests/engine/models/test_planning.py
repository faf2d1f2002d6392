"""The plan of changes on each database, with types as it has them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

import weft
from weft.engine.models.build import ModelRun
from weft.engine.models.inputs import Observer
from weft.engine.models.planning import PlannedStep, drop, make_plan
from weft.engine.models.survey import Survey
from weft.pipelines.models import models
from weft.project import Project
from weft.testing import table_rows
from workers import declare_model as declare


@pytest.fixture(autouse=True)
def orders(streams: Project) -> None:
    @weft.stream(fields={"id": "int64", "city": "string", "total": "float64", "at": "timestamp"})
    def orders() -> None:
        pass

    weft.publish_sync("orders", {"id": 1, "city": "Oslo", "total": 2.5, "at": datetime(2026, 1, 1, tzinfo=UTC)})


def plan(sample: int = 0) -> list[PlannedStep]:
    with Observer() as observer:
        return make_plan(Survey(observer), sample=sample)


def apply() -> None:
    for step in plan():
        ModelRun(models()[step.model], f"test {uuid4()}", datetime.now(UTC), full=step.full).execute()


def test_plan_and_apply(streams: Project) -> None:
    @weft.model(dependencies=["orders"])
    def daily(orders: Any) -> Any:
        return orders.group_by("city").aggregate(n=orders.count(), last=orders["at"].max())

    declare("shown", "SELECT city, n FROM daily")
    declare("history", "-- materialise: scd2\n-- key: city\nSELECT * FROM daily")
    assert [(each.model, each.change) for each in plan(1)] == [("daily", "new"), ("shown", "new"), ("history", "new")]
    apply()
    assert plan() == []
    streams.pipelines.pop("daily")

    @weft.model(name="daily", dependencies=["orders"])
    def changed(orders: Any) -> Any:
        return orders.group_by("city").aggregate(n=orders.id.max().cast("string"))

    found = plan(1)
    assert [(each.model, each.change, each.full) for each in found] == [
        ("daily", "changed", False),
        ("shown", "dependent", False),
        ("history", "dependent", False),
    ]
    daily_step, shown_step, history_step = found
    assert daily_step.dropped == ["last"] and list(daily_step.retyped) == ["n"]
    assert list(shown_step.retyped) == ["n"] and history_step.dropped == ["last"]
    assert daily_step.after == [{"city": "Oslo", "n": "1"}] == shown_step.after
    apply()
    assert table_rows("shown") == [{"city": "Oslo", "n": "1"}]
    assert plan() == []


def test_view_over_a_model_that_changes() -> None:
    declare("base", "SELECT id, city FROM orders")
    declare("seen", "-- materialise: view\nSELECT id FROM base")
    apply()
    declare("base", "SELECT id, total FROM orders")
    apply()
    assert [each["id"] for each in table_rows("seen")] == [1]
    assert plan() == []


def test_removed_model_is_dropped(streams: Project) -> None:
    declare("base", "SELECT id, city FROM orders")
    declare("seen", "-- materialise: view\nSELECT id FROM base")
    apply()
    streams.pipelines.clear()
    found = plan()
    assert [(each.model, each.change, each.rows) for each in found] == [
        ("seen", "removed", None),
        ("base", "removed", 1),
    ]
    with Observer() as observer:
        for step in found:
            drop(Survey(observer), step)
    assert plan() == []


@pytest.mark.every_system
def test_a_table_that_another_pipeline_writes_by_now_is_not_dropped(streams: Project) -> None:
    declare("base", "SELECT id FROM orders")
    declare("more", "SELECT id FROM orders")
    declare("gone", "SELECT id FROM orders")
    apply()
    streams.pipelines.clear()
    broker = weft.KafkaConnection(name="broker", bootstrap_servers="nowhere:9092")
    with Observer() as observer:
        tables = observer.tables(None)
        with tables.driver.session("read") as session:
            schema = session.value(f"SELECT {tables.current_schema}") if tables.driver.has_schemas else None
    weft.streaming_pipeline(
        name="mirror",
        source=broker,
        source_query="orders",
        # Pipelines may not name the schema weft, which is the one of the user weft.
        targets=[
            weft.Target(table=(None if schema == "weft" else schema, "base")),
            weft.Target(table=("other", "gone")),
        ],
    )(lambda: None)
    weft.pipeline(name="loads", target="more", source_table="orders")(lambda: None)
    assert [each.table for each in plan()] == ["gone"]


@pytest.mark.spark
@pytest.mark.brief("sqlite")
def test_sample_of_a_query_on_spark() -> None:
    declare("loud", "-- engine: spark\n-- materialise: merge\n-- key: id\nSELECT id, upper(city) AS city FROM orders")
    (step,) = plan(1)
    assert (step.before, step.after) == (None, [{"id": 1, "city": "OSLO"}])
    apply()
    declare("loud", "-- engine: spark\n-- materialise: merge\n-- key: id\nSELECT id, lower(city) AS city FROM orders")
    (step,) = plan(1)
    assert (step.before, step.after) == ([{"id": 1, "city": "OSLO"}], [{"id": 1, "city": "oslo"}])


@pytest.mark.brief("sqlite")
def test_function_that_raises_is_a_problem_of_its_model_alone() -> None:
    @weft.model
    def wrong(orders):  # type: ignore[no-untyped-def]
        return orders.filter(orders.city > 5)

    declare("revenue", "SELECT sum(total) AS revenue FROM orders")
    with Observer() as observer:
        survey = Survey(observer)
        problems = {each.model: each.problem for each in make_plan(survey)}
        described = survey.described(wrong)["problem"]
    assert problems["revenue"] is None
    for problem in (problems["wrong"], described):
        assert problem.startswith("Model 'wrong' cannot be understood: IbisTypeError: Arguments city:string and ")
        assert "Look at" in problem and "test_planning.py, line " in problem


@pytest.mark.brief("postgres")
def test_uuids_and_json_of_a_query_that_spark_will_run() -> None:
    weft.stream(name="things", fields={"u": "uuid", "j": "json", "s": "string"})(lambda: None)

    @weft.model
    def lower(things):  # type: ignore[no-untyped-def]
        some = things.select("u", "j", s=things.s.lower())
        return some.union(things.select("u", "s", j="s").select("u", "j", "s"))

    with Observer() as observer:
        columns = {each["column"]: each["type"] for each in Survey(observer).described(lower)["columns"]}
    assert columns == {"u": "uuid", "j": "text", "s": "text"}
