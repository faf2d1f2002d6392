"""What a query says of its columns, in each dialect."""

from __future__ import annotations

import pyarrow as pa
import pytest

from weft.engine.models import lineage
from weft.errors import DeclarationError

ORDERS = pa.schema(
    [("id", pa.int64()), ("total", pa.decimal128(10, 2)), ("at", pa.timestamp("us", "UTC")), ("city", pa.string())]
)
SCHEMAS = {"orders": ORDERS, "customers": pa.schema([("id", pa.int64()), ("name", pa.string())])}
DIALECTS = ["spark", "sqlite", "postgres", "mysql", "duckdb"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_columns_come_from(dialect: str) -> None:
    found = lineage.fields(
        """WITH x AS (SELECT o.*, c.name FROM orders o JOIN customers c USING (id))
        SELECT x.id, concat(name, city) AS both_, (SELECT max(total) FROM orders) AS most, 1 AS one,
               row_number() OVER (PARTITION BY city ORDER BY at) AS place
        FROM x UNION ALL SELECT id, city, total, 2, 3 FROM orders""",
        dialect,
        SCHEMAS,
    )
    assert found == {
        "id": [("orders", "id")],
        "both_": [("customers", "name"), ("orders", "city")],
        "most": [("orders", "total")],
        "one": [],
        "place": [("orders", "at"), ("orders", "city")],
    }


@pytest.mark.parametrize("dialect", DIALECTS)
def test_stars_and_recursion(dialect: str) -> None:
    recursive = "WITH RECURSIVE n AS (SELECT id, 1 AS l FROM orders UNION ALL SELECT o.id, n.l + 1 FROM n JOIN orders o"
    found = lineage.fields(f"{recursive} ON o.id = n.id) SELECT * FROM n", dialect, SCHEMAS)
    assert found == {"id": [("orders", "id")], "l": []}
    assert lineage.fields("SELECT * FROM this", dialect, {"this": SCHEMAS["customers"]})["name"] == [("this", "name")]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_result_without_rows(dialect: str) -> None:
    query = lineage.nothing(
        "SELECT id, sum(total) AS t FROM orders WHERE id NOT IN (SELECT id FROM this) GROUP BY id", dialect, SCHEMAS
    )
    assert query.count("CAST(NULL AS ") == 2 and query.endswith("WHERE 1 = 0")


def test_what_cannot_be_parsed() -> None:
    with pytest.raises(DeclarationError, match="cannot be parsed"):
        lineage.fields("SELECT (", "spark", SCHEMAS)
    with pytest.raises(DeclarationError, match="Name the columns in place of"):
        lineage.nothing("SELECT * FROM this", "spark", {})
