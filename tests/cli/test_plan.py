"""`weft plan`, `weft apply` and `weft run --full`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weft
from weft.project import Project
from weft.testing import table_rows
from workers import declare_model as declare

if TYPE_CHECKING:
    from click.testing import Result

Call = Callable[..., "Result"]
MERGE = "-- materialise: merge\n-- key: city\n"


@pytest.fixture(autouse=True)
def shop(local: Project) -> None:
    @weft.stream(fields={"id": "int64", "city": "string", "total": "float64"})
    def orders() -> None:
        pass

    declare("cities", f"{MERGE}SELECT city, sum(total) AS revenue FROM orders GROUP BY city")
    declare("first", "SELECT * FROM cities")
    weft.publish_sync("orders", [{"id": 1, "city": "Oslo", "total": 2.0}, {"id": 2, "city": "Rome", "total": 3.0}])


def planned(call: Call, *options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("plan", "--format", "json", *options).stdout)
    return found


def test_from_nothing_to_nothing(call: Call) -> None:
    found = planned(call)
    assert [(each["model"], each["change"], each["full"]) for each in found] == [
        ("cities", "new", False),
        ("first", "new", False),
    ]
    # Of a model that is not built yet, the columns of its query are known.
    assert found[1]["added"] == {"city": "TEXT", "revenue": "REAL"}
    assert "1 read" not in call("plan").stdout
    assert call("plan", "--exit-code", code=2).stdout.endswith("2 new\n")
    call("apply")
    assert table_rows("first") == [{"city": "Oslo", "revenue": 2.0}, {"city": "Rome", "revenue": 3.0}]
    assert planned(call, "--exit-code") == []
    # New events are no change of the declarations.
    weft.publish_sync("orders", {"id": 3, "city": "Bern", "total": 1.0})
    assert "Nothing has changed" in call("apply").stdout


def test_change_of_an_incremental_model(call: Call) -> None:
    call("apply")
    declare("cities", f"{MERGE}SELECT city, count(*) AS revenue, max(id) AS last FROM orders GROUP BY city")
    (cities, first) = planned(call, "--sample", "1")
    assert (cities["change"], cities["full"], cities["rows"]) == ("changed", True, 2)
    assert (cities["added"], cities["dropped"], cities["retyped"]) == (
        {"last": "INTEGER"},
        [],
        {"revenue": ["REAL", "INTEGER"]},
    )
    assert cities["before"] == [{"city": "Oslo", "revenue": 2.0}]
    assert cities["after"] == [{"city": "Oslo", "revenue": 1, "last": 1}]
    # What reads it has the new columns too, as if it were built already.
    assert (first["change"], first["because"], first["added"]) == ("dependent", ["cities"], {"last": "INTEGER"})
    assert first["after"] == cities["after"]
    refused = call("apply", code=2).stderr
    assert "Build cities (merge, 2 rows) again from the beginning?" in refused and "--yes" in refused
    assert table_rows("cities")[0] == {"city": "Oslo", "revenue": 2.0}
    text = call("apply", "--yes").stdout
    for part in (
        "~ changed   cities (merge, 2 rows): built again from the beginning",
        "    + last INTEGER",
        "    ~ revenue REAL → INTEGER",
        "first (table, 2 rows): built again, because cities changes",
    ):
        assert part in text
    assert table_rows("first")[0] == {"city": "Oslo", "revenue": 1, "last": 1}
    assert planned(call) == []


def test_removed_models(call: Call, local: Project) -> None:
    declare("seen", "-- materialise: view\nSELECT * FROM first")
    call("apply")
    del local.pipelines["first"]
    (step,) = planned(call)
    assert (step["change"], step["rows"], step["because"]) == ("removed", 2, ["seen"])
    # It is read by a model that is declared.
    assert "The table first stays: seen reads it." in call("apply", "--drop-removed", "--yes", code=1).stderr
    del local.pipelines["seen"]
    assert "its table stays without --drop-removed" in call("apply").stdout
    assert "Drop seen (view); drop first (2 rows)?" in call("apply", "--drop-removed", code=2).stderr
    assert "dropped seen\ndropped first\n" in call("apply", "--drop-removed", "--yes").stdout
    assert planned(call) == []
    with pytest.raises(weft.WeftError, match="no such table"):
        table_rows("first")


def test_what_cannot_be_built(call: Call) -> None:
    weft.load([{"a": 1}], target="mine")
    declare("mine", "SELECT 1 AS one")
    declare("wrong", "SELECT no_column FROM orders")
    found = {each["model"]: each["problem"] for each in planned(call)}
    assert "The table mine exists, and no build of the model mine wrote its rows." in found["mine"]
    assert "no such column: no_column" in found["wrong"]
    assert "Nothing was built" in call("apply", code=1).stderr
    assert found["cities"] is None and planned(call)[0]["change"] == "new"


def test_run_full(call: Call) -> None:
    @weft.table
    class Copy:
        id: weft.types.BigInt

    @weft.pipeline(target=Copy)
    def copied() -> str:
        return "SELECT 1 AS id"

    call("run", "cities")
    weft.publish_sync("orders", {"id": 3, "city": "Oslo", "total": 4.0})
    call("run", "cities")
    # Merged by its key, the new sum has replaced the old one.
    assert table_rows("cities")[0] == {"city": "Oslo", "revenue": 4.0}
    call("run", "cities", "--full")
    assert table_rows("cities")[0] == {"city": "Oslo", "revenue": 6.0}
    assert "'copied' is a pipeline" in call("run", "cities", "copied", "--full", code=1).stderr
    assert "'copied' is a pipeline" in call("run", "--all", "--full", code=1).stderr


def test_it_asks_on_a_terminal(on_a_terminal: Any, local: Project) -> None:
    Path("weft.toml").write_text('models = ["models"]\n')
    Path("models").mkdir()
    file = Path("models/counts.sql")
    file.write_text("-- materialise: merge\n-- key: n\nSELECT 1 AS n")
    assert on_a_terminal("apply")[0] == 0
    file.write_text("-- materialise: merge\n-- key: n\nSELECT 2 AS n")
    code, screen = on_a_terminal("apply", typed="n\n")
    assert code == 1 and "Build counts (merge, 1 row) again from the beginning? [y/N]" in screen
    assert on_a_terminal("apply", typed="y\n")[0] == 0
    assert table_rows("counts") == [{"n": 2}]


def test_columns_that_only_a_build_shows(call: Call) -> None:
    import polars as pl

    @weft.model(dependencies=["orders"])
    def frame(orders: pl.DataFrame) -> Any:
        return orders.head(1)

    declare("loud", "-- engine: spark\nSELECT upper(city) AS city FROM orders")
    declare("above", "SELECT city FROM loud")
    found = {each["model"]: each for each in planned(call)}
    assert found["frame"]["unknown"] == "its function makes a frame: the build shows its columns"
    assert found["loud"]["unknown"] == "its query runs on Spark: the build shows its columns"
    # What reads it cannot be checked before it is built, which is no reason not to build it.
    assert found["above"]["problem"] is None and "loud" in found["above"]["unknown"]
