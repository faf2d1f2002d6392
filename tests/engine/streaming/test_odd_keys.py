"""Keys of one message that its table cannot have, or too many of them: the message is a dead letter, and the pipeline
goes on. What a row that was put aside has decides nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from engine.streaming.conftest import rows, run_once
from engine.streaming.test_column_types import Topic
from weft.engine.load import open_tables
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Columns
from weft.engine.streaming.dead_letters import stream_of
from weft.errors import DeclarationError, LoadRefusedError
from weft.project import current
from weft.types import BigInt

pytestmark = pytest.mark.usefixtures("spark", "here")

LONG = "k" * 70
MANY, SOME = ({f"k{number}": number for number in range(count)} for count in (2000, 105))
ODD: list[dict[str, Any]] = [SOME, {LONG: 1}, {"ctid": 1}, {"a\0b": 1}]
TOO_MANY = "and more than 100 are new to the table (max_new_columns)"
ZERO = r"a key with the character \u0000"
REASONS: dict[str, list[str | None]] = {
    "postgres": [TOO_MANY, "at most 63 bytes", "a column of its own with this name", ZERO],
    "mysql": [TOO_MANY, "at most 64 characters", None, ZERO],
    **{kind: [TOO_MANY, None, None, ZERO] for kind in ("sqlite", "duckdb", "delta", "parquet")},
}
"""Why each of the odd messages is not stored; `None` where it is."""


class Place:
    """A table `copies` in one of the systems."""

    def __init__(self, kind: str, connection: Any) -> None:
        self.kind, self.connection = kind, connection
        self.is_sql = kind not in ("delta", "parquet")

    @property
    def target(self) -> Any:
        if self.kind == "parquet":
            return weft.Target(connection=self.connection, prefix="copies")
        return weft.Target(connection=self.connection, table=(None, "copies"))

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        if self.is_sql:
            return rows("copies", ", ".join(columns), self.connection)
        found = weft.read("copies", source=self.connection).select(*columns).collect()
        return sorted(map(tuple, found), key=repr)

    @property
    def columns(self) -> list[str]:
        """Those that are of messages."""
        if self.is_sql:
            tables = open_tables(current().connection(self.connection))
            names = tables.describe(f"SELECT * FROM {tables.table(None, 'copies')}").names
            tables.close()
        else:
            names = weft.read("copies", source=self.connection).columns
        return [name for name in names if name != "_event_ts"]


@pytest.fixture(params=["sqlite", "postgres", "mysql", "duckdb", "delta", "parquet"])
def place(
    request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[System]], project: Path
) -> Iterator[Place]:
    if request.param == "duckdb":
        yield Place(request.param, weft.DuckDBConnection(str(project / "copies.duckdb"), name="ducks"))
    elif request.param == "delta":
        yield Place(request.param, weft.DeltaLocalConnection(str(project / "lake"), name="lake"))
    elif request.param == "parquet":
        yield Place(request.param, weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake"))
    else:
        with open_system(request.param) as system:
            yield Place(request.param, system.connection)


def copying(kafka: Any, place: Place, **declared: Any) -> Topic:
    return Topic(kafka, target=place.target, target_table=None, **declared)


class Records(Topic):
    """A stream of Kinesis. The tests of Delta have it, so that the session with the broker of Kafka needs no Delta."""

    def connected(self) -> tuple[Any, str]:
        return weft.KinesisConnection(**self.server.fields(), name="records"), self.server.create_stream()

    def send(self, values: list[bytes]) -> None:
        self.server.put(self.name, values)


def letters() -> list[tuple[str, str | None, dict[str, Any]]]:
    """All dead letters: error, offset and the values of the payload."""
    found = weft.consume_sync(stream_of("failed", None), "me")
    return [
        (
            each["error"],
            each["offset"],
            {
                name: value
                for name, value in json.loads(each["payload"]).items()
                if value is not None and name != "_event_ts"
            },
        )
        for each in found
    ]


def check(found: list[tuple[str, str | None, dict[str, Any]]], sent: list[Any], reasons: list[str | None]) -> None:
    """Each message that cannot be stored is a letter, with its offset."""
    wanted = {f"0:{offset}": each for offset, each in enumerate(sent)}
    expected = [(f"0:{offset}", why) for offset, why in enumerate(reasons) if why is not None]
    by_offset = {offset: (error, payload) for error, offset, payload in found}
    assert len(by_offset) == len(found)
    assert sorted(offset or "" for offset in by_offset) == sorted(offset for offset, _ in expected)
    for offset, why in expected:
        error, payload = by_offset[offset]
        assert why is not None
        assert why in error
        assert payload == wanted[offset]


@pytest.mark.brief("postgres")
def test_an_odd_message_stops_nothing(place: Place, kafka: Any) -> None:
    """Whether the table is there or made with it."""
    topic = copying(kafka, place)
    odd = [{"id": 10 + number, **each} for number, each in enumerate(ODD)]
    reasons = REASONS[place.kind]
    sent = [*odd, *({"id": number} for number in range(6))]
    topic.run(*sent)
    check(letters(), sent, reasons)
    stored = [10 + number for number, why in enumerate(reasons) if why is None]
    assert place.rows("id") == sorted(((number,) for number in (*range(6), *stored)), key=repr)
    assert sorted(place.columns) == sorted(["id", *(name for number in stored for name in ODD[number - 10])])
    topic.run(*odd, {"id": 6})
    assert len(letters()) == 2 * sum(why is not None for why in reasons)
    assert len(place.rows("id")) == 7 + 2 * len(stored)


@pytest.mark.full
def test_an_odd_message_is_the_first(place: Place, kafka: Any) -> None:
    """Nothing is known of the table yet, and the keys of this message are those of most messages."""
    topic = copying(kafka, place)
    topic.run({"id": 0, **MANY})
    assert [offset for _, offset, _ in letters()] == ["0:0"]
    topic.run({"id": 3})
    assert (place.rows("id"), place.columns) == ([(3,)], ["id"])


@pytest.mark.full
def test_a_wide_table(place: Place, kafka: Any) -> None:
    """What most messages have is what the table is about."""
    topic = copying(kafka, place)
    wide = {f"w{number}": number for number in range(120)}
    topic.run({"id": 1, **wide}, {"id": 2, **wide}, {"id": 3, **SOME})
    assert len(place.columns) == 121
    topic.run({"id": 4, **wide})
    assert place.rows("id") == [(1,), (2,), (4,)]
    assert [payload["id"] for _, _, payload in letters()] == [3]


@pytest.mark.brief("postgres")
def test_columns_that_are_added_are_limited(place: Place, kafka: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Over all batches, also of another process: each run here is a new pipeline."""
    caplog.set_level(logging.WARNING, "weft.engine")
    topic = copying(kafka, place, max_new_columns=3)
    topic.run({"id": 1})
    topic.run({"id": 2, "a": 2, "b": 2})
    topic.run({"id": 3, "c": 3}, {"id": 4, "c": 4, "d": 4})
    topic.run({"id": 5, "a": 5, "e": 5})
    assert place.rows("id", "a", "b", "c") == [
        (1, None, None, None),
        (2, 2, 2, None),
        (3, None, None, 3),
        (4, None, None, 4),
        (5, 5, None, None),
    ]
    assert place.columns == ["id", "a", "b", "c"]
    said = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert ["left out: 'd'" in said[0], "left out: 'e'" in said[1], len(said)] == [True, True, 2]
    assert "max_new_columns=3 of copy" in said[0]
    assert letters() == []


@pytest.mark.brief("sqlite")
def test_keys_are_left_out_where_drift_is_ignored(place: Place, kafka: Any) -> None:
    topic = copying(kafka, place, on_drift="ignore")
    topic.run({"id": 1})
    topic.run(*({"id": 2 + number, **each} for number, each in enumerate(ODD)))
    assert place.rows("id") == [(1,), (2,), (3,), (4,)]
    assert [payload["id"] for _, _, payload in letters()] == [5]  # no source has a column with a zero in its name


@pytest.mark.full
def test_rows_of_tasks(kafka: Any, way: str) -> None:
    place = Place("sqlite", None)
    topic = Topic(kafka, max_new_columns=2)
    topic.run({"id": 1}, {"id": 2}, {"id": 3, "a": 1}, {"id": 4, **SOME}, {"id": 5, "a": 1, "b": 1, "c": 1})
    topic.run({"id": 6, "d": 1}, {"id": 7, **SOME})
    assert (place.rows("id"), place.columns) == ([(1,), (2,), (3,), (5,), (6,)], ["id", "a", "b"])
    assert [(offset, payload["id"]) for _, offset, payload in letters()] == [("0:3", 4), ("0:6", 7)]


def test_columns_that_the_sql_names(kafka: Any) -> None:
    """They are what its author wants: there is no limit."""
    named = ", ".join(SOME)
    topic = Topic(kafka, transform_sql=f"SELECT id, {named} FROM source", max_new_columns=1)
    topic.run({"id": 1}, {"id": 2}, {"id": 3, **SOME})
    assert rows("copies", "id, k104") == [(1, None), (2, None), (3, 104)]


def test_lines_of_json(project: Path) -> None:
    lake = weft.ObjectStoreLocalConnection(str(project / "in"), name="inbox", format="json_lines")
    lines = [{"id": 1}, {"id": 2}, {"id": 3, **SOME}, {"id": 4, "a": 1}]
    (project / "in" / "new").mkdir(parents=True)
    (project / "in" / "new" / "1.json").write_text("\n".join(map(json.dumps, lines)))
    source = weft.Source(connection=lake, query="new")
    run_once(name="copy", source=source, target_table=(None, "copies"), dead_letter_stream="failed")
    assert rows("copies", "id, a") == [(1, None), (2, None), (4, 1)]
    ((error, offset, payload),) = letters()
    assert TOO_MANY in error
    assert (offset or "").endswith("1.json")
    assert payload["id"] == 3


def test_without_a_place_for_bad_rows(kafka: Any) -> None:
    topic = Topic(kafka, dead_letter_stream=None)
    with pytest.raises(LoadRefusedError, match=r"1 rows of the source of copies .*It has 106 columns") as raised:
        topic.run({"id": 1}, {"id": 2}, {"id": 3}, {"id": 4, **SOME})
    assert "dead_letter_stream" in str(raised.value)


@weft.table
class Copies:
    id: BigInt


@pytest.mark.brief("evolve")
@pytest.mark.parametrize("drift", ["evolve", "ignore"])
def test_a_declared_table(drift: str, kafka: Any, open_system: Callable[..., Any]) -> None:
    with open_system("postgres") as system:
        target = weft.Target(connection=system.connection, table=Copies)
        topic = Topic(kafka, target=target, target_table=None, on_drift=drift, max_new_columns=1)
        sent = [{"id": 1}, *({"id": 2 + number, **each} for number, each in enumerate(ODD))]
        topic.run(*sent)
        topic.run({"id": 8, "a": 1}, {"id": 9, "b": 1})
        place = Place("postgres", system.connection)
        failed = sorted(payload["id"] for _, _, payload in letters())
        if drift == "evolve":
            assert (place.rows("id"), failed) == ([(1,), (8,), (9,)], [2, 3, 4, 5])
            assert place.columns == ["id", "a"]
        else:
            assert (place.rows("id"), failed) == ([(1,), (2,), (3,), (4,), (8,), (9,)], [5])


def test_columns_that_are_not_to_be_written(kafka: Any, open_system: Callable[..., Any]) -> None:
    """Those that scd2 keeps, and those that the database generates."""
    with open_system("postgres") as system:
        place = Place("postgres", system.connection)
        target = weft.Target(connection=system.connection, table=(None, "copies"), mode="scd2", primary_key=["id"])
        topic = Topic(kafka, target=target, target_table=None)
        topic.run({"id": 1}, {"id": 2, "Valid_From": "now"})
        assert place.rows("id") == [(1,)]
        tables = open_tables(system.connection)
        with tables.driver.session("publish") as session:
            session.run("CREATE TABLE made (id BIGINT, twice BIGINT GENERATED ALWAYS AS (2 * id) STORED)")
        tables.close()
        target = weft.Target(connection=system.connection, table=(None, "made"))
        topic = Topic(kafka, name="made", target=target, target_table=None)
        topic.run({"id": 1}, {"id": 2, "twice": 5})
        assert rows("made", "id, twice", system.connection) == [(1, 2)]
        assert [error for error, _, _ in letters()] == [
            "It has the column 'Valid_From': scd2 keeps this column itself.",
            "It has the column 'twice': the database generates this column.",
        ]


@pytest.mark.full
def test_names_that_need_a_mapping_of_delta(kinesis: Any, project: Path) -> None:
    place = Place("delta", weft.DeltaLocalConnection(str(project / "lake"), name="lake"))
    topic = Records(kinesis, target=place.target, target_table=None)
    topic.run({"id": 1})
    topic.run({"id": 2, "a b": 1}, {"id": 3, "c": 1}, {"id": 4, "d": [{"e;": 1}]})
    assert (place.rows("id"), place.columns) == ([(1,), (3,)], ["id", "c"])
    (name, offset, payload), (key, *_) = letters()
    assert (offset, payload) == ("shardId-000000000000:2", {"id": 2, "a b": 1})
    assert "'a b': this Delta table has no column mapping" in name
    assert "'d': this Delta table has no column mapping" in key


@pytest.mark.parametrize("drift", ["evolve", "ignore"])
@pytest.mark.full
def test_keys_of_objects_in_delta(drift: str, kinesis: Any, project: Path) -> None:
    """Delta and files have them in the type of the column, which stays."""
    place = Place("delta", weft.DeltaLocalConnection(str(project / "lake"), name="lake"))
    topic = Records(kinesis, target=place.target, target_table=None, on_drift=drift)
    topic.run({"id": 1, "o": {"a b": 1}})
    topic.run({"id": 2, "o": {"a b": 2, "c": 1}}, {"id": 3, "o": {"a b": 3}})
    assert place.rows("id", "o.`a b`") == [(1, 1), (3, 3)]
    ((error, offset, _),) = letters()
    assert offset == "shardId-000000000000:2"
    assert "the key 'c' is new" in error


@pytest.mark.parametrize("drift", ["evolve", "ignore"])
@pytest.mark.full
def test_keys_of_objects_in_lines_of_json(drift: str, project: Path) -> None:
    place = Place("delta", weft.DeltaLocalConnection(str(project / "lake"), name="lake"))
    inbox = weft.ObjectStoreLocalConnection(str(project / "in"), name="inbox", format="json_lines")
    source = weft.Source(connection=inbox, query="new")
    files = [
        ['{"id": 1, "o": {"a b": 1, "l": [{"n": 1.5}]}}'],
        ['{"id": 2, "o": {"a b": 2, "c": 1}}', '{"id": 3, "o": {"a b": 3, "l": [{"n": 2.5}]}}', '{"id": 4}', "{"],
        ['{"id": 5, "o": {"l": [{"n": 1}, {"n": 2, "m": 1}]}}', '{"id": 6, "o": {"a b": null, "l": []}}'],
    ]
    (project / "in/new").mkdir(parents=True)
    for number, lines in enumerate(files):
        (project / f"in/new/{number}.json").write_text("\n".join(lines))
        run_once(name="copy", source=source, targets=[place.target], dead_letter_stream="failed", on_drift=drift)
    assert place.rows("id", "o.`a b`", "o.l.n") == [
        (1, 1, [1.5]),
        (3, 3, [2.5]),
        (4, None, None),
        (6, None, []),
    ]
    found = weft.consume_sync(stream_of("failed", None), "me")
    payloads = sorted((each["payload"] for each in found), key=len)
    assert payloads[0] == "{"
    assert [json.loads(each) for each in payloads[1:]] == [json.loads(files[1][0]), json.loads(files[2][0])]
    assert all("A value does not fit its column" in each["error"] for each in found if each["payload"] != "{")


@pytest.mark.full
def test_later_batches_have_no_columns_that_no_target_gets(kafka: Any, project: Path) -> None:
    """Each of them would be looked at as a column of nulls."""

    def known(pipeline: str, source: str) -> list[str]:
        return [each.name for each in Columns(Checkpoint(pipeline).home).kept(source) if each.name != "_event_ts"]

    topic = Topic(kafka, max_new_columns=1)
    topic.run({"id": 1})
    topic.run({"id": 2, "a": 1, "b": 1}, {"id": 3, **SOME})
    assert known("copy", topic.name) == ["id", "a"]
    inbox = weft.ObjectStoreLocalConnection(str(project / "in"), name="inbox", format="json_lines")
    (project / "in/new").mkdir(parents=True)
    lines = [{"id": 1}, {"id": 2}, {"id": 3, **SOME}]
    (project / "in/new/1.json").write_text("\n".join(map(json.dumps, lines)))
    source = weft.Source(connection=inbox, query="new")
    run_once(name="lines", source=source, target_table=(None, "lines"), dead_letter_stream="failed")
    assert known("lines", "new") == ["id"]


@pytest.mark.full
def test_a_row_or_a_key_that_is_too_large_for_a_page(kafka: Any, open_system: Callable[..., Any]) -> None:
    """PostgreSQL takes such a table, and not such a row."""
    with open_system("postgres") as system:
        place = Place("postgres", system.connection)
        target = weft.Target(connection=system.connection, table=(None, "copies"), mode="merge", primary_key=["id"])
        topic = Topic(kafka, target=target, target_table=None, max_new_columns=500)
        large = {f"k{number}": "x" * 22 for number in range(400)}  # too short to be kept outside of the page
        topic.run({"id": "a", **dict.fromkeys(large, "")}, {"id": "b", **large}, {"id": "c"})
        incompressible = "".join(chr(0x4E00 + number * 7919 % 20000) for number in range(4000))
        topic.run({"id": incompressible}, {"id": "d"})
        assert place.rows("id") == [("a",), ("c",), ("d",)]
        assert [payload["id"] for _, _, payload in letters()] == ["b", incompressible]


@pytest.mark.parametrize("wrong", [0, 1001, 1.5, True, "3"])
def test_the_option(wrong: Any, kafka: Any) -> None:
    with pytest.raises(DeclarationError, match="max_new_columns must be a whole number from 1 to 1,000"):
        Topic(kafka, max_new_columns=wrong).run()
