"""`weft models list`, `show` and `graph`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weft
from weft.project import Project
from workers import declare_model as declare

if TYPE_CHECKING:
    from click.testing import Result

Call = Callable[..., "Result"]


@pytest.fixture(autouse=True)
def shop(local: Project) -> Iterator[Project]:
    @weft.stream(fields={"id": "int64", "city": "string", "total": "float64"})
    def orders() -> None:
        pass

    @weft.model
    def by_city(orders: Any) -> Any:
        """What each city bought."""
        return orders.group_by("city").aggregate(revenue=orders.total.sum())

    declare(
        "names",
        "-- materialise: merge\n-- key: city\nSELECT upper(o.city) AS city, revenue FROM events.orders o "
        "JOIN default.by_city USING (city)",
    )
    yield local


def publish(total: float = 2.0) -> None:
    weft.publish_sync("orders", {"id": 1, "city": "Oslo", "total": total})


def standing(call: Call) -> dict[str, Any]:
    listed = json.loads(call("models", "list", "--format", "json").stdout)
    return {each["model"]: (each["state"], each["why"], each["rows"]) for each in listed}


def test_list_says_what_is_stale_and_why(call: Call) -> None:
    never = ("stale", "never built", None)
    assert standing(call) == {"by_city": never, "names": never}
    publish()
    call("run", "--all")
    assert standing(call) == {"by_city": ("fresh", None, 1), "names": ("fresh", None, 1)}
    publish()
    why = "events.orders has 1 new event; by_city is stale"
    assert standing(call) == {"by_city": ("stale", "orders has 1 new event", 1), "names": ("stale", why, 1)}
    call("run", "by_city")
    assert standing(call)["names"][1] == "events.orders has 1 new event; default.by_city was built again"
    call("run", "names")
    declare("names", "-- materialise: merge\n-- key: city\nSELECT city FROM orders")
    assert standing(call)["names"][:2] == ("stale", "its code has changed")
    table = call("models", "list").stdout
    assert "by_city  table        by_city  orders  auto" in table and "0 s ago" in table


def test_list_goes_on_where_a_table_is_missing(call: Call) -> None:
    declare("rates", "SELECT * FROM elsewhere.rates")
    Path("weft.toml").write_text('[connections.elsewhere]\nurl = "postgres://127.0.0.1:1/none"\n')
    declare("broken", "-- connection: elsewhere\nSELECT 1 AS one")
    found = standing(call)
    assert found["by_city"][0] == "stale" and found["broken"][0] == "unknown"
    assert "127.0.0.1:1" in found["broken"][1]


def test_show_has_lineage_through_other_models(call: Call) -> None:
    publish()
    call("run", "--all")
    shown = json.loads(call("models", "show", "names", "--format", "json").stdout)
    assert shown["columns"] == [
        {"column": "city", "type": "TEXT", "comes_from": ["events.orders.city"]},
        {"column": "revenue", "type": "REAL", "comes_from": ["events.orders.total"]},
    ]
    read = shown["inputs"][0]["read"]
    assert (shown["inputs"][0]["kind"], read["upto"], read["upto_text"]) == ("stream", 1, "1")
    assert (shown["engine"], shown["options"]["key"], shown["dependents"]) == ("pushdown", ["city"], [])
    assert shown["sql"].startswith("WITH ") and "events_orders" in shown["sql"]
    text = call("models", "show", "by_city").stdout
    for part in ("What each city bought.", "dependents  names", "inside the database", "offset 1", "GROUP BY"):
        assert part in text


def test_show_says_which_values_are_left_out(call: Call) -> None:
    publish()
    weft.publish_sync("orders", {"id": 2, "city": "Oslo", "total": "2.5"})
    ran = call("run", "by_city")
    (line,) = json.loads(call("models", "show", "by_city", "--format", "json").stdout)["left_out"]
    assert line.startswith("orders: 1 event with a value of 'total' that its column has no place for")
    assert f"warning: {line}" in ran.stdout
    assert f"warning: {line}" in call("models", "show", "by_city").stdout
    looked = call(*line.partition("weft ")[2].split(), "--format", "json").stdout.splitlines()
    assert [json.loads(each)["total"] for each in looked] == ["2.5"]


def test_show_of_columns_before_anything_is_built(call: Call) -> None:
    shown = json.loads(call("models", "show", "names", "--format", "json").stdout)
    # The table of by_city is not there, but its query says what it will have.
    assert [each["comes_from"] for each in shown["columns"]] == [["events.orders.city"], ["events.orders.total"]]
    assert shown["problem"] is None


def test_frames_have_no_lineage(call: Call) -> None:
    import polars as pl

    @weft.model(dependencies=["by_city"])
    def top(by_city: pl.DataFrame) -> Any:
        return by_city.head(1)

    publish()
    call("run", "by_city", "top")
    shown = json.loads(call("models", "show", "top", "--format", "json").stdout)
    assert shown["engine"] == "python" and shown["sql"] is None
    assert shown["columns"][0] == {"column": "city", "type": "TEXT", "comes_from": None}
    assert "which has no SQL and no lineage" in call("models", "show", "top").stdout


def test_graph(call: Call) -> None:
    assert call("models", "graph").stdout.splitlines() == [
        "events.orders (stream)",
        "├─ by_city (table)",
        "│  └─ names (merge)",
        "└─ names (merge)",
    ]
    drawn = json.loads(call("models", "graph", "--format", "json").stdout)
    assert [each["name"] for each in drawn["nodes"]] == ["events.orders", "by_city", "names"]
    assert {"from": "by_city", "to": "names"} in drawn["edges"]
    assert call("models", "graph", "--format", "mermaid").stdout.splitlines()[:2] == [
        "graph LR",
        '  n0["events.orders (stream)"]',
    ]
    assert '  n1 [label="by_city (table)"];' in call("models", "graph", "--format", "dot").stdout


def test_no_models(call: Call, shop: Project) -> None:
    shop.pipelines.clear()
    assert "No model is declared." in call("models", "list", code=1).stderr


def test_models_among_pipelines(call: Call) -> None:
    publish()
    assert "by_city   table" in call("list").stdout
    assert "never run" in call("status").stdout
    assert "input orders" in call("validate", "by_city").stdout
    assert "(table, pushdown: inside the database, no Spark)" in call("preview", "by_city").stdout
    call("run", "by_city")
    assert "succeeded" in call("status", "by_city").stdout
    assert "by_city" in call("dry-run", "by_city").stdout


def test_show_says_that_a_table_was_never_loaded(call: Call) -> None:
    weft.pipeline(name="copy", target="rates", source_connection="default")(lambda: "SELECT 1 AS rate")
    declare("doubled", "SELECT rate * 2 AS rate FROM rates")
    shown = call("models", "show", "doubled").stdout
    assert "never loaded" in shown
    assert "The first run of copy creates it: weft run copy" in shown
