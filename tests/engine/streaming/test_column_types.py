"""The types of a source's columns: declared, those of earlier batches, or those of most values. A value that does not
fit makes its own row a bad one, and decides nothing."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import rows, run_once
from weft.engine.load import open_tables
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Columns
from weft.engine.streaming.dead_letters import stream_of
from weft.errors import DeclarationError, WeftError
from weft.project import current

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


class Topic:
    """A topic, and a pipeline that copies it."""

    def __init__(self, server: Any, **declared: Any) -> None:
        self.server = server
        broker, self.name = self.connected()
        columns = declared.pop("columns", None)
        self.declared: dict[str, Any] = {
            "name": "copy",
            "source": weft.Source(connection=broker, query=self.name, columns=columns),
            "target_table": (None, "copies"),
            "dead_letter_stream": "failed",
            **declared,
        }

    def connected(self) -> tuple[Any, str]:
        """A connection, and the name of what is made there."""
        broker = weft.KafkaConnection(name="broker", bootstrap_servers=self.server.bootstrap)
        return broker, self.server.create_topic()

    def send(self, values: list[bytes]) -> None:
        self.server.produce(self.name, values)

    def run(self, *values: Any) -> None:
        """Send messages, and carry out one batch."""
        self.send([json.dumps(value).encode() for value in values])
        run_once(**self.declared)


def letters() -> list[tuple[str, Any]]:
    """The new dead letters: error and payload."""
    return [(each["error"], json.loads(each["payload"])) for each in weft.consume_sync(stream_of("failed", None), "me")]


@pytest.mark.full
@pytest.mark.parametrize("on_error", ["dlq", "drop", "fail"])
def test_an_odd_message_stops_nothing(on_error: str, kafka: Any) -> None:
    sql = "SELECT user_id FROM source WHERE valid"
    topic = Topic(kafka, transform_sql=sql, transform_on_error=on_error)
    odd = {"user_id": 4, "valid": "maybe"}
    topic.run({"user_id": 1, "valid": True}, odd, {"user_id": 2, "valid": False}, {"user_id": 3, "valid": True})
    topic.run(odd)
    topic.run({"user_id": 5, "valid": True}, odd)
    assert rows("copies") == [(1,), (3,), (5,)]
    found = letters()
    assert [payload for _, payload in found] == [odd] * 3
    assert {error for error, _ in found} == {"'valid' is \"maybe\", a string, which does not fit bool."}


@pytest.mark.brief("tasks")
def test_a_row_that_was_put_aside_decides_nothing(kafka: Any, way: str) -> None:
    topic = Topic(kafka)
    topic.run({"amount": 5}, {"amount": "abc", "other": 1}, {"amount": 7})
    assert rows("copies", "amount") == [(5,), (7,)]
    with pytest.raises(WeftError, match="other"):
        rows("copies", "other")
    topic.run({"amount": [1]}, {"amount": 9})
    assert rows("copies", "amount") == [(5,), (7,), (9,)]
    assert [payload for _, payload in letters()] == [{"amount": "abc", "other": 1}, {"amount": [1]}]


def test_a_declared_column_is_a_contract(kafka: Any) -> None:
    columns = {"id": "int64", "valid": "bool", "price": "decimal(10,2)", "at": "timestamp", "any": "json"}
    topic = Topic(kafka, columns=columns, transform_sql="SELECT id, price, any FROM source WHERE coalesce(valid, true)")
    bad = [{"id": 1.5}, {"id": "1"}, {"id": 2, "valid": "maybe"}, {"id": 3, "price": 1.005}, {"id": 4, "at": "soon"}]
    # Also where these are the first messages of all, and a key is in none.
    topic.run(*bad)
    assert [payload for _, payload in letters()] == bad
    topic.run({"id": 1, "price": 1.25, "any": [1]}, {"id": 2, "price": "2.50", "any": "x", "at": "2026-01-31"})
    found = [(number, str(price), any_) for number, price, any_ in rows("copies")]
    assert found == [(1, "1.25", "[1]"), (2, "2.50", '"x"')]


def test_without_a_place_for_bad_rows(kafka: Any) -> None:
    topic = Topic(kafka, dead_letter_stream=None)
    with pytest.raises(WeftError) as raised:
        topic.run({"valid": True}, {"valid": True}, {"valid": "maybe"})
    error = str(raised.value)
    for words in ("0:2", "'valid'", '"maybe"', "a string", "bool", "columns", "dead_letter_stream"):
        assert words in error


def test_sql_names_a_column_that_no_message_has_had(kafka: Any) -> None:
    topic = Topic(kafka, transform_sql="SELECT s.id, s.later FROM source AS s")
    with pytest.raises(DeclarationError, match=rf"names the column 'later', which no row of {topic.name}") as caught:
        topic.run({"id": 0})
    assert "There are: id" in str(caught.value) and 'weft.Source(…, columns={"later": …})' in str(caught.value)
    # The offsets of the batch are recorded: what comes later does not help.
    with pytest.raises(DeclarationError, match="'later'"):
        topic.run({"id": 1, "later": 5})
    with pytest.raises(DeclarationError, match=r"(?s)In double quotes is a name.* columns="):
        run_once(**{**topic.declared, "transform_sql": 'SELECT id, "later" FROM source'})
    source = weft.Source(connection=topic.declared["source"].connection, query=topic.name, columns={"later": "int64"})
    # To declare it would not help; and the parser of sqlglot does not know all of Spark's SQL.
    for sql in ("WITH w AS (SELECT id FROM source) SELECT w.later FROM w", "SELECT s.later FROM source s |> DROP id"):
        with pytest.raises(WeftError, match="UNRESOLVED_COLUMN"):
            run_once(**{**topic.declared, "transform_sql": sql})
    run_once(**{**topic.declared, "source": source})
    assert rows("copies", "id, later") == [(0, None), (1, 5)]


def test_parts_without_a_type_yet(kafka: Any) -> None:
    """Empty arrays and objects do not decide what comes later."""
    topic = Topic(kafka, transform_sql="SELECT to_json(struct(tags, o)) AS text FROM source")
    topic.run({"tags": [], "o": {"inner": {}}})
    topic.run({"tags": [1, 2], "o": {"inner": {"a": True}}})
    topic.run({"tags": [3], "o": {"inner": {"a": False, "b": "x"}, "c": 1}}, {"tags": ["x"]})
    assert [json.loads(text) for (text,) in rows("copies")] == [
        {"tags": [1, 2], "o": {"inner": {"a": True}}},
        {"tags": [3], "o": {"inner": {"a": False, "b": "x"}, "c": 1}},
        {"tags": [], "o": {"inner": "{}"}},
    ]
    assert [payload for _, payload in letters()] == [{"tags": ["x"]}]


@pytest.mark.full
@pytest.mark.parametrize("drift", ["evolve", "ignore"])
def test_integers_that_become_wider(drift: str, kafka: Any) -> None:
    topic = Topic(
        kafka, on_drift=drift, transform_sql="SELECT CAST(id AS DOUBLE) AS id, typeof(id) AS kind FROM source"
    )
    topic.run({"id": 1})
    topic.run({"id": 2}, {"id": 2.5})
    topic.run({"id": 3})
    kinds = [kind for _, kind in rows("copies")]
    assert kinds == (["bigint", "double", "double", "double"] if drift == "evolve" else ["bigint"] * 3)
    assert [payload for _, payload in letters()] == ([] if drift == "evolve" else [{"id": 2.5}])


@pytest.mark.full
def test_a_number_that_makes_the_sql_wrong_is_a_bad_row(kafka: Any) -> None:
    """A float has no bits."""
    topic = Topic(kafka, transform_sql="SELECT flags & 1 AS bit FROM source")
    topic.run({"flags": 3})
    topic.run({"flags": 4}, {"flags": 1.5})
    topic.run({"flags": 5})
    assert rows("copies") == [(0,), (1,), (1,)]
    assert [payload for _, payload in letters()] == [{"flags": 1.5}]


def test_a_number_that_files_do_not_take_is_a_bad_row(kafka: Any, project: Path) -> None:
    """Files keep the type of a column: no target has it wider."""
    lake = weft.ObjectStoreLocalConnection(str(project / "out"), name="out", format="parquet")
    topic = Topic(kafka, target=weft.Target(connection=lake, prefix="copies"), target_table=None)
    topic.run({"qty": 1})
    topic.run({"qty": 2}, {"qty": 1.5})
    topic.run({"qty": 3})
    assert sorted(row["qty"] for row in weft.read("copies", source=lake).collect()) == [1, 2, 3]
    assert [payload for _, payload in letters()] == [{"qty": 1.5}]


def test_a_missing_key_takes_the_default_of_its_column(kafka: Any) -> None:
    """Whatever keys the other messages of the batch have."""
    tables = open_tables(current().connection(None))
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE orders (id BIGINT, status TEXT NOT NULL DEFAULT 'new')")
    tables.close()
    topic = Topic(kafka, target_table=(None, "orders"))
    topic.run({"id": 1}, {"id": 2, "status": "paid"})
    topic.run({"id": 3})
    assert rows("orders", "id, status") == [(1, "new"), (2, "paid"), (3, "new")]


class Folder:
    """A folder of files, and a pipeline that copies them."""

    def __init__(self, project: Path, ending: str, **declared: Any) -> None:
        self._folder, self._ending, self._count = project / "lake/raw", ending, 0
        self._folder.mkdir(parents=True)
        lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake")
        self.declared: dict[str, Any] = {
            "name": "copy",
            "source": weft.Source(connection=lake, query="raw", columns=declared.pop("columns", None)),
            "target_table": (None, "copies"),
            "dead_letter_stream": "failed",
            **declared,
        }

    def run(self, *lines: str) -> None:
        """Add a file, and carry out one batch."""
        self._count += 1
        (self._folder / f"{self._count}.{self._ending}").write_text("".join(f"{line}\n" for line in lines))
        run_once(**self.declared)


def payloads() -> list[str]:
    """The texts of the new dead letters."""
    return sorted(each["payload"] for each in weft.consume_sync(stream_of("failed", None), "me"))


@pytest.mark.full
def test_odd_lines_of_json_stop_nothing(project: Path) -> None:
    folder = Folder(project, "jsonl", transform_sql="SELECT id, flags & 1 AS bit FROM source WHERE valid")
    odd = '{"id": 4, "Valid": "maybe", "flags": 1}'
    folder.run('{"id": 1, "Valid": true, "flags": 1}', odd, '{"id": 2, "Valid": true, "flags": 2}')
    folder.run(odd)
    folder.run('{"id": 3, "Valid": true, "flags": 3}', '{"id": 5, "Valid": true, "flags": 1.5}', odd)
    assert rows("copies") == [(1, 1), (2, 0), (3, 1)]
    assert payloads() == [odd, odd, odd, '{"id": 5, "Valid": true, "flags": 1.5}']


@pytest.mark.full
def test_odd_lines_of_csv_stop_nothing(project: Path) -> None:
    folder = Folder(project, "csv", transform_sql="SELECT id, year(day) AS year FROM source WHERE valid")
    folder.run("id,valid,day", "1,true,2026-01-31")
    folder.run("id,valid,day", "2,maybe,2026-01-31", "3,true,2025-01-31", "4,true,soon")
    folder.run("id,valid,day", "x,true,2026-01-31")
    assert rows("copies") == [(1, 2026), (3, 2025)]
    assert payloads() == ["2,maybe,2026-01-31", "4,true,soon", "x,true,2026-01-31"]


@pytest.mark.brief("jsonl")
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_declared_columns_of_files(ending: str, project: Path) -> None:
    columns = {"id": "int32", "valid": "bool", "at": "timestamp"}
    folder = Folder(project, ending, columns=columns, transform_sql="SELECT id, code FROM source WHERE valid")
    names = ["id", "valid", "code", "at"]
    values = [["1", "true", "007", "2026-01-31T12:00:00Z"], ["2", "maybe", "a", ""], ["3000000000", "true", "b", ""]]
    if ending == "csv":
        lines = [",".join(each) for each in values]
        folder.run(",".join(names), *lines)
    else:
        lines = [
            f'{{"id": {each[0]}, "valid": {"true" if each[1] == "true" else json.dumps(each[1])}, "code": "{each[2]}"}}'
            for each in values
        ]
        folder.run(*lines)
    assert rows("copies", "id, CAST(code AS TEXT) AS code") == [(1, "007")]
    assert payloads() == sorted(lines[1:])


@pytest.mark.brief("csv")
@pytest.mark.parametrize("ending", ["csv", "csv with texts", "jsonl"])
def test_declared_decimals_of_files_are_not_rounded(ending: str, project: Path) -> None:
    folder = Folder(project, ending.split()[0], columns={"id": "int64", "price": "decimal(10,2)"})
    good = ["1.50", "0.250000", "1.25e2", "-3", "12345678.9"]
    bad = ["1.005", "1.005e0", "123456789"]
    if ending == "jsonl":
        folder.run(*(f'{{"id": {n}, "price": {price}}}' for n, price in enumerate([*good, *bad])))
    else:
        note = '""' if ending == "csv with texts" else "x"
        folder.run("id,price,note", *(f"{n},{price},{note}" for n, price in enumerate([*good, *bad])))
    assert [(n, Decimal(price)) for n, price in rows("copies", "id, price")] == [
        (n, Decimal(price)) for n, price in enumerate(good)
    ]
    assert [price in payload for price, payload in zip(bad, payloads(), strict=True)] == [True] * 3


def kept(topic: Topic) -> dict[str, str]:
    """The columns of the topic that later batches know."""
    columns = Columns(Checkpoint("copy").home).kept(topic.name)
    return {each.name: str(each.type) for each in columns if each.name != "_event_ts"}


@pytest.mark.full
@pytest.mark.parametrize("sql", [None, "SELECT n FROM source"])
def test_a_row_that_a_target_rejected_decides_nothing(sql: str | None, kafka: Any) -> None:
    topic = Topic(kafka, transform_sql=sql)
    topic.run({"n": 1})
    topic.run({"n": 2}, {"n": 12345678901234567890, "other": "text"}, {"n": 3, "more": 1})
    assert [payload["n"] for _, payload in letters()] == ["12345678901234567890"]
    assert rows("copies", "n") == [(1,), (2,), (3,)]
    assert kept(topic) == {"n": "int64", "more": "int64"}


def test_a_row_that_the_sql_rejected_decides_nothing(kafka: Any) -> None:
    topic = Topic(kafka, transform_sql="SELECT CAST(n AS INT) AS n FROM source", transform_on_error="dlq")
    topic.run({"n": 1})
    topic.run({"n": 2}, {"n": 12345678901234567890, "other": "text"}, {"n": 3, "more": 1})
    assert len(letters()) == 1
    assert kept(topic) == {"n": "int64", "more": "int64"}


@pytest.mark.full
def test_what_later_batches_know_is_limited(kafka: Any) -> None:
    """SQL is given a null for each column that the topic ever had."""
    topic = Topic(kafka, transform_sql="SELECT id FROM source")
    topic.run({"id": 1})
    topic.run({"id": 2, **{f"k{number}": 1 for number in range(2000)}})
    topic.run({"id": 3})
    assert rows("copies", "id") == [(1,), (2,), (3,)]
    assert len(kept(topic)) == 1000


def test_without_origins_columns_keep_their_types(kafka: Any) -> None:
    """Of a group it is unknown which messages are in it."""
    topic = Topic(kafka, transform_sql="SELECT max(n) AS n FROM source GROUP BY id")
    topic.run({"id": 1, "n": 1})
    topic.run({"id": 1, "n": 12345678901234567890}, {"id": 2, "n": 3, "more": 1})
    assert len(letters()) == 1
    assert kept(topic) == {"id": "int64", "n": "int64", "more": "int64"}
