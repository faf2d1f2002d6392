"""What the query of an incremental pipeline may be: where `$watermark` stands, and what leaves rows out."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import weft
from pipelines.conftest import Database
from weft import DeclarationError, WeftError
from weft.engine import incremental
from weft.engine.validate import validate
from weft.systems.sql import tokens


def test_what_is_told_of_a_query_that_cannot_be() -> None:
    with pytest.raises(DeclarationError, match=r"column that \$watermark is compared with"):
        incremental.watermark_column("SELECT * FROM t WHERE f(a) > $watermark", "postgres")
    with pytest.raises(DeclarationError, match=r"column that \$watermark is compared with"):
        incremental.watermark_column("SELECT * FROM t WHERE a < $watermark", "postgres")
    assert incremental.watermark_column('SELECT * FROM t AS x WHERE $watermark < x."At"', "postgres") == "At"


EVERYWHERE = ["postgres", "mysql", "sqlite", "duckdb"]


@pytest.mark.parametrize(
    ("sql", "dialects"),
    [
        ("SELECT TOKEN + 1, (TOKEN)", EVERYWHERE),
        ("SELECT 'token', \"token\", 'it''s token' /* token */ + TOKEN", EVERYWHERE),
        ('SELECT "say ""token"" ", TOKEN -- token \'\nWHERE TOKEN /* \' token \n -- */ = TOKEN', EVERYWHERE),
        ("SELECT `token`, TOKEN", ["mysql", "sqlite"]),
        ("SELECT [it's token], TOKEN", ["sqlite"]),
        ("SELECT list[TOKEN]", ["postgres", "duckdb"]),
        ("SELECT '\\', TOKEN, '\\'", ["postgres", "sqlite", "duckdb"]),
        (r"""SELECT 'it\'s token', "a \" token", TOKEN""", ["mysql"]),
        (r"SELECT E'it\'s token', TOKEN", ["postgres", "duckdb"]),
        ("SELECT $$ token ' $$, $a$ token $$ token $a$, TOKEN", ["postgres", "duckdb"]),
        ("SELECT 1 # token '\n, 5--TOKEN -- token", ["mysql"]),
        ("SELECT /* a /* token */ token */ TOKEN", ["postgres"]),
    ],
)
def test_binding(sql: str, dialects: list[str]) -> None:
    """Only what is code: small tokens are in a text, a quoted name or a comment."""
    for dialect in dialects:
        for mark in ("$watermark", "?"):
            given = sql.replace("TOKEN", mark).replace("token", mark)
            bound = sql.replace("TOKEN", "42").replace("token", mark)
            pattern = r"\$watermark\b" if mark != "?" else r"\?"
            assert tokens.replaced(given, pattern, "42", dialect) == bound
            assert tokens.has(given, pattern, dialect)
            assert not tokens.has(bound, pattern, dialect)
        assert incremental.bind("SELECT $watermarks, $watermark", "1", dialect) == "SELECT $watermarks, 1"


def test_a_question_mark_in_a_text(database: Database) -> None:
    """Where values are bound in the same statement, too."""
    with database.tables.driver.session("publish") as session:
        assert session.row("SELECT 'really? 100%', ? -- sure?\n, 'it''s ?'", (7,)) == ("really? 100%", 7, "it's ?")


LEAST = {
    "DATE": ("DATE '0001-01-01'", "'0001-01-01'"),
    "TIMESTAMP": ("TIMESTAMP '0001-01-01 00:00:00'", "'0001-01-01T00:00:00.000000'"),
    "DECIMAL(38, 18)": ("-9.5", "'-9.5'"),
    "UUID": ("'00000000-0000-0000-0000-000000000001'",) * 2,
}


@pytest.mark.every_system
def test_the_first_watermark_is_below_all_values(database: Database) -> None:
    kind, dialect = type(database.tables).__name__, database.tables.dialect
    for number, (column, values) in enumerate(LEAST.items()):
        column = "DATETIME(6)" if dialect == "mysql" and column == "TIMESTAMP" else column
        database.run(f"CREATE TABLE raw_{number} (seen {column})")
        database.run(f"INSERT INTO raw_{number} VALUES ({values[dialect == 'sqlite']})")

        @weft.pipeline(target=f"copy_{number}", name=f"copy{number}")
        def copy(number: int = number) -> str:
            return f"SELECT seen FROM raw_{number} WHERE seen > $watermark"

        assert database.execute(copy)[0].counts.inserted == 1, (kind, column)
        assert database.execute(copy)[0].counts.inserted == 0, (kind, column)


@pytest.mark.brief("mysql")
def test_a_time_of_day_is_no_watermark(database: Database) -> None:
    """MariaDB would compare it with a text that is none, and find nothing."""
    database.run("CREATE TABLE raw_events (at TIME)", "INSERT INTO raw_events VALUES ('12:00:00')")

    @weft.pipeline(target="copies")
    def copy() -> str:
        return "SELECT at FROM raw_events WHERE at > $watermark"

    if database.tables.dialect != "sqlite":
        with pytest.raises(DeclarationError, match=r"'at' is of type time[\s\S]*numbers, dates, timestamps or texts"):
            database.execute(copy)


@pytest.mark.brief("sqlite")
def test_a_limit_is_refused(database: Database) -> None:
    """Refused before the table is made, with and without $watermark."""
    database.run("CREATE TABLE raw_events (id BIGINT)")
    for number, query in enumerate(("SELECT id FROM raw_events WHERE id > $watermark", "SELECT id FROM raw_events")):

        @weft.pipeline(target="copies", name=f"copy{number}", incremental_column="id")
        def copy(query: str = query) -> str:
            return f"{query} ORDER BY id DESC LIMIT 1"

        with pytest.raises(DeclarationError, match=r"LIMIT[\s\S]*never be read[\s\S]*Leave it out"):
            database.execute(copy)
        *_, checked = validate(copy)
        assert "LIMIT" in str(checked.problem)
    with pytest.raises(WeftError, match="copies"):
        database.rows("copies")


LIMITED = [
    "SELECT id FROM t ORDER BY id LIMIT 3",
    "(SELECT id FROM t LIMIT 3)",
    "SELECT id FROM t UNION ALL SELECT id FROM u LIMIT 3",
    "SELECT id FROM (SELECT no AS id FROM t LIMIT 3) AS q WHERE id > $watermark",
    "WITH q AS (SELECT * FROM t LIMIT 3) SELECT q.*, r.rate FROM q JOIN r ON r.at = q.at",
    "SELECT * FROM t JOIN (SELECT id, rate FROM r LIMIT 1) AS r ON r.at = t.at",
    "SELECT id FROM t UNION ALL SELECT no FROM (SELECT no FROM u LIMIT 3) AS q",
]


WHOLE = [
    "SELECT id, 'limit 3' AS \"limit\" FROM t -- limit 3",
    "SELECT id, (SELECT rate FROM r ORDER BY at DESC LIMIT 1) AS rate FROM t",
    "SELECT id FROM t WHERE EXISTS (SELECT 1 FROM r LIMIT 1) AND id > $watermark",
    "SELECT t.id, r.rate FROM t CROSS JOIN (SELECT * FROM r ORDER BY at DESC LIMIT 1) AS r",
    "WITH q AS (SELECT rate FROM r LIMIT 1) SELECT id, rate FROM t, q",
]


OF_ONE_DATABASE = [
    ("postgres", "SELECT id FROM t OFFSET 3 FETCH FIRST 3 ROWS ONLY", True),
    ("postgres", "SELECT id FROM t TABLESAMPLE SYSTEM (10)", True),
    ("postgres", "SELECT t.id, l.v FROM t, LATERAL (SELECT v FROM u WHERE u.id = t.id LIMIT 1) AS l", False),
    ("duckdb", "FROM t LIMIT 3", True),
    ("duckdb", "SELECT id FROM t USING SAMPLE 10%", True),
]


@pytest.mark.parametrize(
    ("dialect", "sql", "refused"),
    [
        *((dialect, sql, True) for dialect in ("postgres", "mysql", "sqlite", "duckdb") for sql in LIMITED),
        *((dialect, sql, False) for dialect in ("postgres", "mysql", "sqlite", "duckdb") for sql in WHOLE),
        *OF_ONE_DATABASE,
    ],
)
def test_which_limits_leave_rows_out(dialect: str, sql: str, refused: bool) -> None:
    with pytest.raises(DeclarationError) if refused else nullcontext():
        incremental.refuse_limit(sql, "id", dialect)
