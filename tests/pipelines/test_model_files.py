"""Models that are `.sql` files: their headers, the inputs that parsing finds, and errors with file and line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from weft.pipelines import model_files
from weft.pipelines.models import Model
from weft.project import Project, use


@pytest.fixture(autouse=True)
def fresh() -> Iterator[Project]:
    with use(Project()) as made:
        yield made


def declare(text: str, name: str = "daily") -> Model:
    file = Path(f"{name}.sql")
    file.write_text(text)
    return model_files.declare(file)


def named(model: Model) -> dict[str, str | None]:
    return {each.name: each.parameter for each in model.inputs}


def test_header_has_the_options() -> None:
    made = declare(
        """-- What came in a day, in €.
-- materialise: merge
-- key: day, city
-- schema: analytics
-- tags: money, daily
-- debounce: 2.5
-- retry: {max_attempts = 3}
-- expectations: not_null("day"), range("revenue", min=0)
-- expectations: unique("day", "city")
-- dependencies: rates

SELECT day, city, sum(total) AS revenue -- all of it
FROM orders GROUP BY day, city; -- and no more
"""
    )
    assert (made.name, made.materialise, made.target.name) == ("daily", "merge", "analytics.daily")
    assert made.target.options["keys"] == ["day", "city"]
    assert (made.tags, made.debounce, made.retry.max_attempts) == (("money", "daily"), 2.5, 3)
    assert [each.kind for each in made.target.expectations] == ["not_null", "range", "unique"]
    assert made.description == "What came in a day, in €."
    assert made.sql is not None and made.sql.startswith("SELECT day") and made.sql.endswith("GROUP BY day, city")
    assert (named(made), made.declared_at) == ({"orders": "orders", "rates": None}, "daily.sql")


@pytest.mark.parametrize(
    ("text", "sql", "inputs"),
    [
        # The name of a table that is one word stays, and so do texts and comments that look like one.
        (
            "SELECT 'é events.orders' AS a /* events.orders */ FROM orders",
            "SELECT 'é events.orders' AS a /* events.orders */ FROM orders",
            {"orders": "orders"},
        ),
        (
            "SELECT 'é', orders.id, events.orders.total FROM events.orders "
            "JOIN warehouse.public.customers c USING (id)",
            "SELECT 'é', orders.id, orders.total FROM events_orders AS orders "
            "JOIN warehouse_public_customers c USING (id)",
            {"events.orders": "events_orders", "warehouse.public.customers": "warehouse_public_customers"},
        ),
        (
            "SELECT a.orders.id, b.orders.id AS other FROM a.orders JOIN b.orders ON a.orders.id = b.orders.id",
            "SELECT a_orders.id, b_orders.id AS other FROM a_orders JOIN b_orders ON a_orders.id = b_orders.id",
            {"a.orders": "a_orders", "b.orders": "b_orders"},
        ),
        (
            "WITH paid AS (SELECT * FROM orders), all_paid AS (SELECT * FROM Paid) "
            "SELECT * FROM all_paid WHERE id IN (SELECT id FROM paid)",
            None,
            {"orders": "orders"},
        ),
        # Inside of an expression of its own name, the name is that of the table.
        (
            "WITH orders AS (SELECT * FROM orders) SELECT * FROM orders",
            "WITH orders AS (SELECT * FROM input_orders AS orders) SELECT * FROM orders",
            {"orders": "input_orders"},
        ),
        (
            "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT * FROM n, range(3)",
            None,
            {},
        ),
        (
            'SELECT * FROM `order` JOIN lake."2024/*.parquet" p USING (id)',
            "SELECT * FROM input_order AS `order` JOIN lake_2024_parquet p USING (id)",
            {"order": "input_order", 'lake."2024/*.parquet"': "lake_2024_parquet"},
        ),
    ],
)
def test_inputs_are_found_by_parsing(text: str, sql: str | None, inputs: dict[str, str]) -> None:
    made = declare(text)
    assert (made.sql, named(made)) == (sql or text, inputs)


def test_this_is_the_last_result() -> None:
    made = declare("-- materialise: incremental\nSELECT * FROM orders WHERE id > (SELECT max(id) FROM this)")
    assert (made.takes_this, named(made)) == (True, {"orders": "orders"})


def test_layout_and_comments_are_no_change() -> None:
    first = declare("-- owner: me\nSELECT id FROM orders").fingerprint
    assert declare("SELECT id\nFROM orders -- now\n;").fingerprint == first
    assert declare("SELECT id FROM orders WHERE id > 1").fingerprint != first


def test_text_of_the_database_is_parsed_too(fresh: Project) -> None:
    weft.register_connection(weft.PostgresConnection(url="postgres://localhost/x", name="warehouse"))
    query = "SELECT id, tags @> ARRAY['a'] AS a FROM public.orders WHERE city ~ '^B'"
    with pytest.raises(weft.DeclarationError, match=r"daily\.sql, line 1: this is not SQL"):
        declare(query)
    assert named(declare(f"-- connection: warehouse\n{query}")) == {"public.orders": "public_orders"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n-- shema: x\nSELECT 1", "daily.sql, line 2 has no option 'shema'.\n  Did you mean 'schema'?"),
        ("-- debounce: soon\nSELECT 1", "daily.sql, line 1: debounce cannot be 'soon'"),
        ("-- schema:\nSELECT 1", "daily.sql, line 1: schema has no value"),
        ("-- owner: a\n-- owner: b\nSELECT 1", "daily.sql, line 2: owner is there twice"),
        ("-- expectations: not_nul('id')\nSELECT 1", "daily.sql, line 1: there is no expectation 'not_nul'"),
        ("-- expectations: 'id'\nSELECT 1", "daily.sql, line 1: 'id' is not an expectation"),
        ("-- materialise: tabel\nSELECT 1", "daily.sql: Model 'daily': materialise is 'tabel'"),
        ("-- schema: a\n\nSELECT a\nFROM WHERE b", "daily.sql, line 4: this is not SQL near 'WHERE'"),
        ("-- schema: a\nDELETE FROM orders", "daily.sql, line 2: the file of a model has one SELECT, not a statement"),
        ("SELECT 1; SELECT 2", "daily.sql, line 1: the file of a model has one SELECT, not 2 statements"),
        ("-- nothing else\n", "the file of a model has one SELECT, not nothing"),
        ("SELECT *\nFROM daily", "daily.sql, line 2: daily reads itself.\n  Call its last result this."),
    ],
)
def test_errors_name_file_and_line(text: str, message: str) -> None:
    with pytest.raises(weft.DeclarationError) as caught:
        declare(text)
    assert message in str(caught.value)


def test_publish_names_the_models_of_the_folders(fresh: Project, caplog: pytest.LogCaptureFixture) -> None:
    """A process that imports its streams alone has not read the folders."""
    Path("weft.toml").write_text('models = ["models"]\n')
    Path("models").mkdir()
    Path("models/clean.sql").write_text("SELECT * FROM orders")
    Path("models/odd.sql").write_text("DROP TABLE orders")
    weft.stream(name="orders")(lambda: None)
    for number in (1, 2):
        assert weft.publish_sync("orders", {"id": number})["triggered_models"] == ["clean"]
    weft.streams.close()
    assert caplog.text.count("models/odd.sql cannot be read") == 1
    fresh.load_modules(failed=lambda name, error: None)
    assert list(fresh.pipelines) == ["clean"]


def test_publish_where_the_folder_of_models_is_gone(fresh: Project) -> None:
    Path("weft.toml").write_text('models = ["models"]\n')
    weft.stream(name="orders")(lambda: None)
    assert weft.publish_sync("orders", {"id": 1})["triggered_models"] == []
    weft.streams.close()


def test_folders_of_the_project(fresh: Project) -> None:
    Path("weft.toml").write_text('models = ["models"]\n')
    with pytest.raises(weft.NotFoundError, match="the folder models, which is not there"):
        fresh.load_modules()
    Path("models/marts").mkdir(parents=True)
    Path("models/clean.sql").write_text("SELECT * FROM orders")
    Path("models/marts/daily.sql").write_text("SELECT * FROM clean")
    fresh.load_modules()
    fresh.load_modules()
    assert list(fresh.pipelines) == ["clean", "daily"]
    assert fresh.pipelines["daily"].depends_on == ("clean",)
    Path("models/daily.sql").write_text("SELECT 1")
    with pytest.raises(weft.DeclarationError, match=r"declared twice: models/marts/daily.sql and models/daily.sql"):
        fresh.load_modules()
    failed: list[str] = []
    fresh.load_modules(failed=lambda name, error: failed.append(name))
    assert failed == ["models/daily.sql"]
    Path("weft.toml").write_text('models = "models"\n')
    with pytest.raises(weft.SettingsError, match="models must be a list of folders"):
        fresh.load_modules()
