"""Columns of one name in several sources: one type that holds every value exactly, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as T

import weft
from engine.streaming.conftest import declare, rows, run_once
from weft.engine.streaming import batch as batches
from weft.engine.streaming import fan_in
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.batch_reader import BatchReader
from weft.engine.streaming.checkpoint_files import Columns
from weft.errors import DeclarationError, WeftError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.stream_source import FrameRows, UntypedRows

LONG, INT, DOUBLE, TEXT = T.LongType(), T.IntegerType(), T.DoubleType(), T.StringType()


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (LONG, LONG, "bigint"),
        (INT, LONG, "bigint"),
        (INT, DOUBLE, "double"),
        (T.FloatType(), DOUBLE, "double"),
        (LONG, T.DecimalType(38, 10), "decimal(38,10)"),
        (T.DecimalType(10, 2), T.DecimalType(12, 5), "decimal(13,5)"),
        (T.NullType(), TEXT, "string"),
        (T.ArrayType(INT), T.ArrayType(LONG), "array<bigint>"),
        (T.StructType().add("a", INT), T.StructType().add("a", LONG).add("b", TEXT), "struct<a:bigint,b:string>"),
        (LONG, DOUBLE, None),
        (INT, T.FloatType(), None),
        (LONG, TEXT, None),
        (LONG, T.BooleanType(), None),
        (LONG, T.TimestampType(), None),
        (T.DateType(), T.TimestampType(), None),
        (T.TimestampType(), T.TimestampNTZType(), None),
        (T.DecimalType(38, 10), DOUBLE, None),
        (LONG, T.DecimalType(38, 20), None),
        (TEXT, T.BinaryType(), None),
        (T.StructType().add("a", LONG), T.StructType().add("a", DOUBLE), None),
    ],
)
def test_the_type_that_holds_the_values_of_two(one: Any, other: Any, both: str | None) -> None:
    for pair in ((one, other), (other, one)):
        found = fan_in.united(*pair)
        assert (None if found is None else found.simpleString()) == both


def test_a_clash_is_refused_where_its_column_is_read() -> None:
    schemas = [("a", {"id": LONG, "v": LONG}), ("b", {"id": INT, "V": TEXT})]
    with pytest.raises(DeclarationError, match=r"'V' is int64 in a and string in b") as error:
        fan_in.refuse_clashes(schemas, fan_in.read_by(None))
    assert 'columns={"V": …}' in str(error.value)
    # A column that drift brought into a stream can be given no other type.
    assert "leave this one out" in str(error.value)
    for sql in ("SELECT * FROM source", "SELECT id, v FROM source", "SELECT s.* FROM source s"):
        with pytest.raises(DeclarationError):
            fan_in.refuse_clashes(schemas, fan_in.read_by(sql))
    assert fan_in.refuse_clashes(schemas, fan_in.read_by("SELECT count(*) AS n, id FROM source GROUP BY id")) == ["V"]


@pytest.mark.parametrize(
    "sql",
    [
        "TABLE source",
        "SELECT id FROM (TABLE source)",
        "SELECT id FROM source NATURAL JOIN lookup",
        "SELECT id, `a``b` FROM source",
    ],
)
def test_sql_reads_columns_that_it_does_not_name(sql: str) -> None:
    assert fan_in.read_by(sql)("v")
    assert fan_in.read_by(sql)("a`b")
    assert not fan_in.read_by("SELECT id FROM source JOIN lookup USING (id)")("v")


def test_values_are_read_under_the_type_of_another_source() -> None:
    fixed = {"a": {"v": LONG}, "b": {}}
    assert fan_in.settled({"a": {"v": LONG}, "b": {"v": DOUBLE}}, fixed, widens=True) == {"b": {"v": LONG}}
    # Of two whose values decide, an integer and a fraction are doubles, as in one source.
    assert fan_in.settled({"a": {"v": LONG}, "b": {"v": DOUBLE}}, {}, widens=True) == {"a": {"v": DOUBLE}}
    assert fan_in.settled({"a": {"v": LONG}, "b": {"v": DOUBLE}}, {}, widens=False) == {"b": {"v": LONG}}
    assert fan_in.settled({"a": {"v": TEXT}, "b": {"V": LONG}}, {}, widens=True) == {"b": {"V": TEXT}}
    assert fan_in.missing("b", [{"v": INT, "w": TEXT, "_event_ts": TEXT}], {"b": {"W": LONG}}) == {"v": LONG}


def test_which_source_decides_about_a_column() -> None:
    def found(
        types: Any, declared: Any = None, before: Any = None, sql: str | None = None
    ) -> list[tuple[str, list[str]]]:
        refused = fan_in.refused(types, declared or {}, before or {}, fan_in.read_by(sql))
        return [(source, list(columns)) for source, columns in refused.items()]

    types = {"a": {"v": LONG, "w": TEXT}, "b": {"V": TEXT, "w": TEXT}, "c": {"v": INT}}
    assert found(types) == [("b", ["V"])]
    assert found(types, before={"b": ["v"]}) == [("a", ["v"]), ("c", ["v"])]
    assert found(types, declared={"c": ["v"]}, before={"b": ["v"]}) == [("b", ["V"])]
    assert found(types, sql="SELECT w FROM source") == []
    (why,) = fan_in.refused(types, {}, {}, fan_in.read_by(None))["b"].values()
    assert why == "'V' is string, and in a it is int64: no type holds the values of both exactly."


class Lines(UntypedRows):
    """Numbers in files: of JSON under the type that is known, of Parquet under their own."""

    def __init__(self, source: str, *lines: str, own: Any = None) -> None:
        super().__init__(source, ())
        self.lines, self.own = lines, own

    def kind(self, known: Mapping[str, Any], widens: bool) -> Any:
        found = DOUBLE if "1.5" in self.lines else LONG
        before = known.get("v", found)
        return self.own or (DOUBLE if widens and {before.simpleString(), "double"} == {"bigint", "double"} else before)

    def rows(self, kind: Any, *bad: str) -> FrameRows:
        letters = tuple(DeadLetter("read", "", self.source, each, "") for each in bad)
        return FrameRows(self.source, None, bad=letters, found=T.StructType().add("v", kind))

    def unfit(self, kind: Any) -> list[str]:
        return [each for each in self.lines if each == "no JSON" or (each == "1.5" and kind == LONG)]

    def read(self, known: Mapping[str, Any], *, widens: bool, again: bool = False) -> FrameRows:
        return self.rows(self.kind(known, widens and "1.5" in self.lines))

    def split(self, known: Mapping[str, Any], *, widens: bool, grows: bool) -> FrameRows:
        kind = self.kind(known, widens and "1.5" in self.lines)
        return self.rows(kind, *self.unfit(kind))


def columns() -> Columns:
    nothing: Any = SimpleNamespace(at=lambda name: SimpleNamespace(read=lambda: None))
    return Columns(nothing)


def reader(kept: Columns) -> BatchReader:
    return BatchReader(StreamingPipeline(name="p", sources=(), targets=()), kept)


@pytest.mark.parametrize("is_first", [True, False])
def test_types_of_files_that_have_their_own_decide_in_any_order(is_first: bool) -> None:
    parquet, lines = Lines("history", own=T.DecimalType(10, 2)), Lines("lines", "1", "1.5")
    parts = [parquet, lines] if is_first else [lines, parquet]
    found = [fan_in.types_of_rows(rows)["v"].simpleString() for rows in reader(columns()).read(parts, "q")]
    assert found == ["decimal(10,2)"] * 2


def test_a_line_that_is_no_json_next_to_a_fraction_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put apart by itself, the fraction makes the column a double, which clashes with the stream; then it is put apart
    too."""
    stream = FrameRows("stream", None, found=T.StructType().add("v", LONG))
    lines = Lines("lines", "1", "1.5", "no JSON")
    stub: Any = object.__new__(batches.Batches)
    stub._columns = columns()
    stub._reader = reader(stub._columns)
    stub._box = SimpleNamespace(put_ids=set())
    stub._written = SimpleNamespace(
        withdrawn=lambda _: 0, note_letters=print, superseded=lambda _: set(), supersede=lambda *_: None
    )
    stub.sources = [SimpleNamespace(take=lambda _, part=part: part) for part in (stream, lines)]

    def run(parts: Any, spark: Any, batch: Any) -> Any:
        stub._columns.begin()
        typed = list(stub._reader.read(parts, batch.query_id))
        fan_in.refuse_clashes([(each.source, fan_in.types_of_rows(each)) for each in typed], fan_in.read_by(None))
        if lines in parts:
            raise WeftError("MALFORMED_RECORD")
        return [each.payload for each in typed[1].bad]

    monkeypatch.setattr(stub, "_run", run)
    monkeypatch.setattr(stub, "_is_stored", lambda *_, **__: False)
    monkeypatch.setattr(stub, "_supersede_letters", lambda _: None)
    monkeypatch.setattr(batches, "split", lambda *_: [None, None])
    assert stub._attempted(SimpleNamespace(sparkSession=None), BatchId("q", 1)) == ["1.5", "no JSON"]


@pytest.mark.usefixtures("spark", "here")
def test_streams_of_several_types_are_refused_at_the_start() -> None:
    one, other = declare("one", v="int64"), declare("other", v="float64")
    with pytest.raises(DeclarationError, match="'v' is int64 in one and float64 in other"):
        run_once(name="both", sources=[one, other], target_table=(None, "copies"))


@pytest.mark.usefixtures("spark", "here")
def test_lines_have_the_types_of_the_stream_next_to_them(project: Path) -> None:
    stream = declare("numbers", id="int64", v="int64")
    weft.publish_sync(stream, [{"id": 1, "v": 9007199254740993}])
    folder = project / "files" / "in"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"id": 2, "v": 5}\n{"id": 3, "v": "007"}\n{"id": 4, "v": 1.5}\n')
    lake = weft.ObjectStoreLocalConnection("files", name="files", format="json_lines")
    run_once(
        name="both",
        sources=[weft.Source(query=stream), weft.Source(connection=lake, query="in")],
        target_table=(None, "copies"),
        dead_letter_table="letters",
    )
    assert rows("copies", "id, v") == [(1, 9007199254740993), (2, 5)]
    assert [json.loads(each)["id"] for (each,) in rows("letters", "payload")] == [3, 4]


@pytest.mark.usefixtures("spark", "here")
def test_an_event_that_adds_a_column_of_another_type_stops_nothing() -> None:
    """Its row is put aside, whichever of the streams have events in a batch, and after a restart."""
    one, other = declare("one", id="int64"), declare("other", id="int64")
    declared: dict[str, Any] = {
        "name": "both",
        "sources": [one, other],
        "target_table": (None, "copies"),
        "dead_letter_table": "letters",
    }
    weft.publish_sync(other, [{"id": 1, "v": 10}, {"id": 2}])
    run_once(**declared)
    # The column of the first stream is new, so that the second decides, which has no events now.
    weft.publish_sync(one, [{"id": 3, "v": "x"}, {"id": 4}])
    run_once(**declared)
    weft.publish_sync(one, {"id": 5, "v": 7})
    weft.publish_sync(other, {"id": 6, "v": 60})
    run_once(**declared)
    assert rows("copies", "id, v") == [(1, 10), (2, None), (4, None), (6, 60)]
    letters = sorted(rows("letters", "payload, error"))
    assert [json.loads(payload)["v"] for payload, _ in letters] == ["x", 7]
    assert all("'v' is string, and in other it is int64" in error for _, error in letters)
