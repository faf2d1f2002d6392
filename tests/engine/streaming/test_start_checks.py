"""What would fail every batch is found when a pipeline starts, before any row comes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, open_lake, rows, run_once
from weft.engine.streaming.query import Query
from weft.engine.streaming.start_checks import _named_columns
from weft.normalize import derive
from weft.pipelines.streaming.declare import make
from weft.spark_support.sessions import java_class
from weft.types import BigInt, Text

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


@weft.udf(args=("Float64", "Float64"), returns="Float64")
def spread(bid: Any, ask: Any) -> Any:
    return pa.array([0.0] * len(bid), pa.float64())


@pytest.fixture(params=["stream", "files"])
def source(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A source without rows: of known columns, and of ones that rows bring."""
    if request.param == "stream":
        return {"source": declare(id="int64", price="float64")}
    Path("lake/raw").mkdir(parents=True)
    return {"source": weft.ObjectStoreLocalConnection("lake", format="json_lines"), "source_query": "raw/"}


def start(**declared: Any) -> None:
    """Start a pipeline over no rows, and end it."""
    query = Query(make(**{"name": "copies", "target": "default", "target_table": "copies", **declared}), once=True)
    query.start()
    query.wait()


SQL = "SELECT id, price FROM source"
JOIN = "SELECT s.id, u.name FROM source s JOIN users u ON s.id = u.id"
WINDOW = weft.Window(
    kind="tumbling",
    duration_ms=60_000,
    group_by="id",
    event_time_column="price",
    aggregations=[weft.Aggregation(agg="count", column="pric", as_="n")],
)
MERGE = {"transform_sql": SQL, "mode": "merge"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"transform_sql": JOIN, "lookups": {"users": weft.Lookup(table="user")}},
            "There is no table user on .*\n.*Did you mean 'users'",
        ),
        ({"transform_sql": JOIN, "lookups": {"users": weft.Lookup(query="SELECT * FROM nobody")}}, "nobody"),
        (
            {"transform_sql": JOIN, "lookups": {"user": weft.Lookup(table="users")}},
            "reads a table that is not there: `users`.\n.*Did you mean 'user'",
        ),
        (
            {"transform_sql": "SELECT id,\nSpread(price) AS s FROM source", "udfs": [spread]},
            r"line 2: spread takes 2 arguments \(Float64, Float64\), not 1",
        ),
        (
            {"transform_sql": "SELECT id, spred(price, price) AS s FROM source", "udfs": [spread]},
            "a function that is not there: spred.\n.*Did you mean 'spread'",
        ),
        ({"transform_sql": "SELECT id FORM source"}, "FORM|Syntax error"),
        ({**MERGE, "keys": ["ID"]}, "The key 'ID' is not a column of the rows.\n.*Did you mean 'id'"),
        ({**MERGE, "target_primary_key": ["pric"]}, "The key 'pric' is not a column of the rows.\n.*mean 'price'"),
        ({**MERGE, "keys": ["id"], "deduplicate_by": "pric"}, "The deduplicate_by 'pric' is not a column of the rows"),
        ({"transform_sql": SQL, "window": WINDOW}, "aggregated column 'pric' is not.*\n.*Have transform_sql select"),
        ({"transform_sql": SQL, "target_primary_key": ["idd"]}, "The key 'idd' is not a column of the rows"),
        (
            {**MERGE, "transform_sql": "SELECT * FROM source", "keys": ["naem"], "target_table": "users"},
            "The key 'naem' is not a column of the (rows|table users)",
        ),
    ],
)
def test_what_cannot_be(source: dict[str, Any], options: dict[str, Any], says: str) -> None:
    weft.load([{"id": 1, "name": "Ann"}], target="users")
    with pytest.raises(weft.WeftError, match=says):
        start(**source, **options)


def test_nothing_is_refused_that_rows_may_bring(source: dict[str, Any], plain_spark: Any) -> None:
    """Streams take columns that they do not declare, and files have whatever is in them. The thread's session stays
    the same: Spark would not register another package's data source that it has already."""
    from pyspark.sql import SparkSession

    java = java_class(plain_spark, "org.apache.spark.sql.SparkSession")
    before = java.getActiveSession(), SparkSession.getActiveSession()
    start(**source, transform_sql="SELECT other, upper(more) AS more FROM source", mode="merge", keys=["other"])
    assert (java.getActiveSession(), SparkSession.getActiveSession()) == before


def test_a_key_that_a_stream_may_get_is_not_refused() -> None:
    """The producer that first sends it may come after the pipeline."""
    start(source=declare(id="int64", price="float64"), mode="merge", keys=["customer"])


def test_keys_of_a_source_without_columns() -> None:
    """Its events bring them."""
    events = declare()
    start(source=events, mode="merge", keys=["id"])
    weft.publish_sync(events, {"id": 1, "n": 2})
    run_once(name="copies", source=events, target_table="copies", mode="merge", keys=["id"])
    assert rows("copies", "id, n") == [(1, 2)]


def test_a_key_that_the_table_derives() -> None:
    @weft.table(name="copies")
    class Copies:
        key: Annotated[Text, weft.pk(), derive("cast(id AS text)")]
        id: BigInt

    events = declare(id="int64")
    weft.publish_sync(events, {"id": 1})
    run_once(name="copies", source=events, target=Copies, mode="merge")
    assert rows("copies", "key, id") == [("1", 1)]


def test_a_lookup_that_is_away_is_left_to_the_batches() -> None:
    """It may be back when rows come."""
    away = weft.PostgresConnection("postgresql://weft@127.0.0.1:1/x", name="away")
    lookups = {"users": weft.Lookup(connection=away, table="users")}
    start(source=declare(id="int64"), transform_sql=JOIN, lookups=lookups)
    with pytest.raises(weft.DeclarationError, match="The key 'nam'"):
        start(source=declare(id="int64"), transform_sql=JOIN, lookups=lookups, mode="merge", keys=["nam"])


def test_a_key_of_a_delta_table(spark: Any, request: pytest.FixtureRequest) -> None:
    lake = open_lake(request, "local")
    weft.load([{"id": 1, "name": "a"}], target="users", connection=lake("delta"))
    Path("lake/raw").mkdir(parents=True)
    with pytest.raises(weft.DeclarationError, match=r"The key 'naem' is not a column of the table users\.\n.*'name'"):
        start(
            source=lake(format="json_lines"),
            source_query="raw/",
            targets=[weft.Target(connection=lake("delta"), table="users", mode="merge", primary_key="naem")],
            target=None,
            target_table=None,
        )


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT id, price * 2 AS `twice`, s.data.at FROM source s", ["id", "twice", "at"]),
        ("WITH a AS (SELECT * FROM source) SELECT a.id FROM a UNION ALL SELECT 1", ["id"]),
        ("SELECT *, 1 AS one FROM source", None),
        ("SELECT s.* FROM source s", None),
        ("SELECT id, explode(list) FROM source", None),
        ("SELECT posexplode(list) AS (at, value) FROM source", ["at", "value"]),
        ("SELECT id FORM source WHERE (", None),
    ],
)
def test_columns_that_sql_names(sql: str, names: list[str] | None) -> None:
    assert _named_columns(sql) == names
