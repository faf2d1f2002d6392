"""`weft cdc verify`: names the keys in which a mirror differs from its source, and mends them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

PIPELINE = """
pipeline_name = "mirror"
source_query = "dbz.main.people"

[source]
kind = "kafka"
bootstrap_servers = "localhost:1"

[target]
kind = "sqlite"
url = "sqlite:///mirror.db"

[target.table]
name = "people"

[transform.cdc]
envelope = "debezium"
key_field = "after.id"
"""


def execute(database: str, *statements: str) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        for each in statements:
            connection.execute(each)


@pytest.fixture
def mirror(project: Path) -> str:
    table = "(id INTEGER PRIMARY KEY, name TEXT)"
    execute("source.db", f"CREATE TABLE people {table}", "INSERT INTO people VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    execute("mirror.db", f"CREATE TABLE people {table}", "INSERT INTO people VALUES (1, 'a'), (2, 'x'), (4, 'd')")
    Path("weft.toml").write_text('[connections.shop]\nkind = "sqlite"\nurl = "sqlite:///source.db"\n')
    Path("mirror.toml").write_text(PIPELINE)
    return "mirror.toml"


def test_keys_that_differ_are_named_and_mended(run: Any, mirror: str) -> None:
    given = ("cdc", "verify", mirror, "--source", "shop", "--table", "people", "--settle", "0")
    checkpoint = Path(".weft", "checkpoints", "mirror")
    checkpoint.mkdir(parents=True)
    done = run(*given)
    assert done.returncode == 1
    assert not any(checkpoint.iterdir())  # it never ran
    (checkpoint / "metadata").write_text('{"id": "1"}')
    assert "id=2  different  name" in done.stdout
    assert "id=3  missing" in done.stdout and "id=4  extra" in done.stdout
    assert done.stderr == "3 rows compared, 3 differ.\n"
    found = json.loads(run(*given, "--format", "json").stdout)
    assert found["differences"][0] == {"key": {"id": 2}, "in_mirror": "different", "columns": ["name"]}
    noted = json.loads((checkpoint / "verified.json").read_text())["people"]
    assert {name: noted[name] for name in ("rows", "differ", "mended")} == {"rows": 3, "differ": 3, "mended": 0}
    assert run(*given, "--mend").returncode == 2  # nobody can answer
    done = run(*given, "--mend", "--yes")
    assert (done.returncode, done.stderr) == (0, "3 rows compared, 3 differ, 3 of them mended.\n")
    assert run(*given).stderr == "3 rows compared, 0 differ.\n"


def test_one_table_of_several(run: Any, mirror: str) -> None:
    execute("mirror.db", "CREATE TABLE other (id INTEGER PRIMARY KEY)")
    routes = PIPELINE.replace('[target.table]\nname = "people"\n', "").replace('key_field = "after.id"\n', "")
    Path("routes.toml").write_text(f'{routes}[transform.cdc.route]\n"people" = "people"\n"others" = "other"\n')
    given = ("cdc", "verify", "routes.toml", "--source", "shop", "--settle", "0")
    assert "Name one with --target: people, other." in run(*given).stderr
    assert run(*given, "--target", "people").stderr == "3 rows compared, 3 differ.\n"


@pytest.mark.full
def test_what_cannot_be_compared_is_said(run: Any, mirror: str) -> None:
    other = ("--source", "shop", "--table", "nobody")
    assert "There is no table nobody of the connection 'shop'" in run("cdc", "verify", mirror, *other).stderr
    assert "--source" in run("cdc", "verify", mirror).stderr
    plain = PIPELINE.partition("[transform.cdc]")[0]
    Path("plain.toml").write_text(plain)
    assert "has no cdc" in run("cdc", "verify", "plain.toml", "--source", "shop").stderr
    Path("sql.toml").write_text(f'{PIPELINE}row_sql = "SELECT upper(name) AS name FROM source"\n')
    assert "what row_sql makes" in run("cdc", "verify", "sql.toml", "--source", "shop", "--mend", "--yes").stderr
