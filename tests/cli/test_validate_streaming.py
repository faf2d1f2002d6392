"""`weft validate` of streaming pipelines: declared and in files, with what is true of the delivery to each target."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.project import Project

pytest.importorskip("pyspark")
pytestmark = [pytest.mark.usefixtures("local"), pytest.mark.spark]


@pytest.fixture
def clicks(local: Project) -> Any:
    @weft.stream(fields={"user_id": "string", "amount": "float64"})
    def clicks() -> None:
        pass

    return clicks


def found(call: Any, *arguments: object, code: int = 0) -> dict[str, dict[str, Any]]:
    told = json.loads(call("validate", *arguments, "--format", "json", code=code).stdout)
    return {each["check"]: each for each in told}


def test_delivery(call: Any, clicks: Any, local: Project) -> None:
    @weft.stream(fields={"user_id": "string", "total": "float64"})
    def totals() -> None:
        pass

    lake = weft.ObjectStoreLocalConnection("lake", name="lake")
    delta = weft.DeltaLocalConnection("delta", name="delta")

    @weft.streaming_pipeline(
        source=clicks,
        mode="merge",
        keys=["user_id"],
        transform_sql="SELECT user_id, sum(amount) AS total FROM source GROUP BY user_id",
        dead_letter_path="failed",
        targets=[
            weft.Target(table="sums"),
            weft.Target(connection=delta, table="in_delta"),
            weft.Target(connection=lake, prefix="raw", mode="append"),
            weft.Target(stream=totals, mode="append"),
        ],
    )
    def fan_out() -> None:
        pass

    told = found(call, "fan_out")
    assert {name: each["delivery"] for name, each in told.items()} == {
        "source clicks": None,
        "sql": None,
        "target sums": "exactly_once",
        "target in_delta": "exactly_once",
        "target raw": "exactly_once",
        "target totals": "at_least_once",
        "dead letters": None,
    }
    assert told["dead letters"]["detail"] == f"path {Path('failed').absolute()}"
    assert told["sql"]["detail"] == "columns user_id, total"
    assert told["target sums"]["detail"].endswith("may have each key once (else say deduplicate_by); creates the table")
    lines = [" ".join(line.split()) for line in call("validate").stdout.splitlines()]
    assert lines[0] == "pipeline check result delivery detail"
    assert any(line.startswith("fan_out target totals ok at least once ") for line in lines)
    # Nothing was made.
    assert not Path(".weft/weft.db").exists() or not tables()
    assert not Path("lake").exists()


def tables() -> list[str]:
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        return [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


@weft.udf(args=("Float64",), returns="Float64")
def double_it(numbers: Any) -> Any:
    return numbers


@pytest.mark.parametrize(
    ("options", "check", "said"),
    [
        ({"transform_sql": "SELECT user_id, amont FROM source"}, "sql", "`amont` cannot be resolved"),
        ({"transform_sql": "SELECT user_id FORM source"}, "sql", "Syntax error at or near"),
        (
            {"transform_sql": "SELECT user_id FROM clicks"},
            "sql",
            "a table that is not there: `clicks`.\n  It can read: source.",
        ),
        ({"mode": "merge", "keys": ["usr_id"]}, "target copies", "The key 'usr_id' is not a column of the rows"),
        (
            {"mode": "merge", "keys": ["id"], "transform_sql": "SELECT user_id AS ID FROM source"},
            "target copies",
            "The key 'id' is not a column of the rows.\n  Did you mean 'ID'?",
        ),
        (
            {"mode": "merge", "keys": ["user_id"], "deduplicate_by": "at"},
            "target copies",
            "The deduplicate_by 'at' is not a column of the rows",
        ),
        (
            {"transform_sql": "SELECT * FROM source", "lookups": {"users": weft.Lookup(table="nobody")}},
            "lookup users",
            "Cannot read the connection 'default'",
        ),
        (
            {"transform_sql": "SELECT upper(user_id) AS u, double_it(amount, 2) AS d FROM source", "udfs": [double_it]},
            "sql",
            "transform_sql, line 1: double_it takes 1 argument (Float64), not 2.",
        ),
        (
            {"transform_sql": "SELECT doubleit(amount) AS d FROM source", "udfs": [double_it]},
            "sql",
            "calls a function that is not there: doubleit.\n  Did you mean 'double_it'?",
        ),
        ({"target_primary_key": ["usr_id"]}, "target copies", "The key 'usr_id' is not a column of the rows"),
    ],
)
def test_problems(call: Any, clicks: Any, options: dict[str, Any], check: str, said: str) -> None:
    weft.streaming_pipeline(name="copies", source=clicks, target="default", target_table="copies", **options)(
        lambda: None
    )
    told = found(call, "copies", code=1)
    assert said in told[check]["problem"]
    assert told["source clicks"]["problem"] is None
    shown = call("validate", "copies", code=1)
    assert [name for name, each in told.items() if each["problem"]] == [check]
    assert shown.stderr.count(f"problem: copies: {told[check]['problem'].splitlines()[0]}") == 1


def test_a_folder_that_is_not_there(call: Any, tmp_path: Path) -> None:
    lake = weft.ObjectStoreLocalConnection(str(tmp_path), name="lake", format="csv")
    weft.streaming_pipeline(name="copies", source=lake, source_query="raw/", target="default", target_table="copies")(
        lambda: None
    )
    assert "There is nothing at" in found(call, "copies", code=1)["source raw/"]["problem"]
    (tmp_path / "raw").mkdir()
    assert found(call, "copies")["source raw/"]["problem"] is None


def test_one_server_that_is_away(call: Any) -> None:
    """It is the problem of the source and of the target, and told once."""
    away = weft.PostgresConnection("postgresql://weft@127.0.0.1:1/x", name="away")
    events = weft.stream(name="events", connection=away, fields={"n": "int64"})(lambda: None)
    weft.streaming_pipeline(
        name="copies", source=events, target=away, target_table="copies", transform_sql="SELECT n FROM source"
    )(lambda: None)
    told = found(call, "copies", code=1)
    assert [name for name, each in told.items() if each["problem"]] == ["source events", "target copies"]
    assert told["sql"]["detail"] == "it can be parsed"
    assert call("validate", "copies", code=1).stderr.count("problem: copies: ") == 1


def test_a_table_without_its_key(call: Any, clicks: Any) -> None:
    Path(".weft").mkdir()
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        database.execute("CREATE TABLE copies (userid TEXT)")
    weft.streaming_pipeline(source=clicks, target="default", target_table="copies", mode="merge", keys=["user_id"])(
        copies
    )
    told = found(call, "copies", code=1)
    assert "The key 'user_id' is not a column of the table copies" in told["target copies"]["problem"]


def test_a_lookup_and_columns_that_rows_bring(call: Any, tmp_path: Path) -> None:
    """What the SQL names is known before."""
    Path(".weft").mkdir()
    with closing(sqlite3.connect(".weft/weft.db")) as database:
        database.execute("CREATE TABLE people (id INTEGER, name TEXT)")
    (tmp_path / "raw").mkdir()
    lake = weft.ObjectStoreLocalConnection(str(tmp_path), name="lake", format="json_lines")
    for name, table, key in (("one", "peple", "id"), ("two", "people", "nmae"), ("three", "people", "name")):
        weft.streaming_pipeline(
            name=name,
            source=lake,
            source_query="raw/",
            target="default",
            target_table="copies",
            mode="merge",
            keys=[key],
            transform_sql="SELECT s.id, p.name, s.amount * 2 AS twice FROM source s JOIN people p ON s.id = p.id",
            lookups={"people": weft.Lookup(table=table)},
        )(lambda: None)
    assert "Did you mean 'people'?" in found(call, "one", code=1)["lookup people"]["problem"]
    assert "Did you mean 'name'?" in found(call, "two", code=1)["target copies"]["problem"]
    told = found(call, "three")
    assert (told["lookup people"]["problem"], told["sql"]["detail"]) == (None, "columns id, name, twice")


def copies() -> None:
    """Stands for a declared function."""


def test_a_file(call: Any, clicks: Any) -> None:
    Path("pipeline.toml").write_text(
        'pipeline_name = "by-file"\nsource_query = "clicks"\n[source]\nconnection = "default"\n'
        '[target]\nconnection = "default"\n[target.table]\nname = "copies"\n'
    )
    told = found(call, "pipeline.toml")
    assert {each["pipeline"] for each in told.values()} == {"by-file"}
    assert told["target copies"]["delivery"] == "exactly_once"
    Path("pipeline.toml").write_text('pipeline_name = "by-file"\nsorce_query = "clicks"\n')
    assert "pipeline.toml: unknown key 'sorce_query'" in call("validate", "pipeline.toml", code=1).stderr


def test_topics(call: Any, kafka: Any) -> None:
    weft.register_connection(weft.KafkaConnection(kafka.bootstrap, name="broker"))
    topic = kafka.create_topic(partitions=2)
    out = kafka.create_topic()

    @weft.streaming_pipeline(
        source="broker",
        source_query=topic,
        transform_sql="SELECT id FROM source",
        targets=[weft.Target(connection="broker", stream=out), weft.Target(table="copies")],
    )
    def pass_on() -> None:
        pass

    told = found(call, "pass_on")
    assert told[f"source {topic}"]["detail"].endswith("2 partitions")
    assert told["sql"]["detail"] == "columns id"
    assert [told[f"target {name}"]["delivery"] for name in (out, "copies")] == ["at_least_once", "exactly_once"]
    weft.streaming_pipeline(
        name="keyed",
        source="broker",
        source_query=topic,
        transform_sql="SELECT user_id FROM source",
        target=weft.Target(connection="broker", stream=out, primary_key="user"),
    )(lambda: None)
    assert "Did you mean 'user_id'?" in found(call, "keyed", code=1)[f"target {out}"]["problem"]
    weft.streaming_pipeline(name="lost", source="broker", source_query=f"{topic}x", target="default", target_table="t")(
        lambda: None
    )
    assert f"Did you mean '{topic}'" in found(call, "lost", code=1)[f"source {topic}x"]["problem"]


def test_beside_other_pipelines(call: Any, clicks: Any) -> None:
    """All of both kinds, or those that are named; a wrong name is answered with the nearest of both."""

    @weft.pipeline(target="numbers")
    def numbers() -> str:
        return "SELECT 1 AS n"

    weft.streaming_pipeline(name="copies", source=clicks, target="default", target_table="copies")(lambda: None)
    told = json.loads(call("validate", "--format", "json").stdout)
    assert {each["pipeline"] for each in told} == {"numbers", "copies"}
    assert {each["pipeline"] for each in json.loads(call("validate", "copies", "--format", "json").stdout)} == {
        "copies"
    }
    assert "Did you mean 'copies'?" in call("validate", "copis", code=1).stderr
    assert "delivery" not in call("validate", "numbers").stdout


def test_a_lookup_that_is_not_there_is_no_stream(call: Any, clicks: Any) -> None:
    """That the database has streams does not say that this was to be one."""
    weft.publish_sync(clicks, {"user_id": "a", "amount": 1.0})
    weft.streaming_pipeline(
        name="joined",
        source=clicks,
        target="default",
        target_table="joined",
        transform_sql="SELECT s.* FROM source s JOIN users",
        lookups={"users": weft.Lookup(table="people")},
    )(lambda: None)
    told = call("validate", "joined", code=1).stderr
    assert "There is no table people on the connection 'default'.\n  Its tables: events.clicks.\n" in told
