"""Models that are `.sql` files, built in each database and on Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import weft
from weft.engine.models.build import ModelRun
from weft.pipelines import model_files
from weft.pipelines.execution import Loaded
from weft.pipelines.models import Model
from weft.project import Project
from weft.testing import table_rows


@pytest.fixture(autouse=True)
def orders(streams: Project) -> None:
    @weft.stream(fields={"id": "int64", "city": "string", "total": "float64"})
    def orders() -> None:
        pass

    publish(1, "Oslo", 2.0)
    publish(2, "Rome", 3.0)


def publish(number: int, city: str, total: float) -> None:
    weft.publish_sync("orders", {"id": number, "city": city, "total": total})


def declare(text: str, name: str = "daily") -> Model:
    file = Path(f"{name}.sql")
    file.write_text(text)
    return model_files.declare(file)


def build(model: Model, **options: Any) -> Loaded:
    run = ModelRun(model, f"test {uuid4()}", datetime.now(UTC), **options)
    run.execute()
    return run.loaded[0]


def rows(name: str) -> list[tuple[Any, ...]]:
    return [tuple(each.values()) for each in table_rows(name)]


CITIES = "SELECT city, sum(total) AS revenue FROM {} GROUP BY city"


@pytest.mark.parametrize("name", ["orders", "events.orders", "default.events.orders"])
def test_names_of_one_and_of_several_parts(name: str) -> None:
    assert build(declare(CITIES.format(name))).engine == "pushdown"
    # Of a model, with and without its schema. Databases of one server share the schemas of MySQL.
    mart = f"mart_{uuid4().hex}"
    build(declare(f"-- schema: {mart}\nSELECT orders.city FROM {name} JOIN daily USING (city)", "cities"))
    build(
        declare(f"-- materialise: view\nSELECT {mart}.cities.city FROM {mart}.cities WHERE cities.city > 'P'", "last")
    )
    assert rows("daily") == [("Oslo", 2.0), ("Rome", 3.0)]
    assert (rows(f"{mart}.cities"), rows("last")) == ([("Oslo",), ("Rome",)], [("Rome",)])


def test_last_result_has_no_rows_at_first() -> None:
    model = declare(
        """-- materialise: incremental
        SELECT o.id, o.city, o.total FROM events.orders AS o
        WHERE NOT EXISTS (SELECT 1 FROM this WHERE this.id = o.id AND city = o.city)"""
    )
    build(model)
    publish(2, "Rome", 9.0)
    publish(3, "Oslo", 1.0)
    build(model)
    assert rows("daily") == [(1, "Oslo", 2.0), (2, "Rome", 3.0), (3, "Oslo", 1.0)]
    # Built again as a whole, the last result is not there either.
    build(model, full=True)
    assert rows("daily") == [(1, "Oslo", 2.0), (2, "Rome", 3.0), (2, "Rome", 9.0), (3, "Oslo", 1.0)]


@pytest.mark.spark
@pytest.mark.brief("sqlite")
def test_on_spark(streams: Project) -> None:
    weft.register_connection(weft.DuckDBConnection("other.duckdb", name="other"))
    weft.load([{"city": "Oslo", "country": "Norway"}], target="cities", connection="other")
    model = declare(
        """-- engine: spark
        -- materialise: merge
        -- key: id
        SELECT orders.id, c.country, coalesce(t.total, 0) + events.orders.total AS total
        FROM events.orders LEFT JOIN other.cities c USING (city) LEFT JOIN this AS t USING (id)"""
    )
    assert build(model).engine == "spark"
    publish(1, "Oslo", 5.0)
    build(model)
    assert rows("daily") == [(1, "Norway", 7.0), (2, None, 3.0)]


@pytest.mark.every_system
def test_sum_that_is_added_to_its_last_value() -> None:
    model = declare(
        "-- materialise: merge\n-- key: city\nSELECT o.city, coalesce(max(t.total), 0) + sum(o.total) AS total, "
        "coalesce(max(t.n), 0) + count(*) AS n FROM events.orders o LEFT JOIN this t ON t.city = o.city GROUP BY o.city"
    )
    build(model)
    publish(3, "Oslo", 4.5)
    build(model)
    assert rows("daily") == [("Oslo", 6.5, 2), ("Rome", 3.0, 1)]
