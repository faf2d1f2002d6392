"""Columns of one name in several sources: one type that holds every value exactly, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

import weft
from engine.streaming.conftest import declare, rows, run_once
from weft.engine.streaming import fan_in
from weft.errors import DeclarationError

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
    for sql in ("SELECT * FROM source", "SELECT id, v FROM source", "SELECT s.* FROM source s"):
        with pytest.raises(DeclarationError):
            fan_in.refuse_clashes(schemas, fan_in.read_by(sql))
    assert fan_in.refuse_clashes(schemas, fan_in.read_by("SELECT count(*) AS n, id FROM source GROUP BY id")) == ["V"]


def test_values_are_read_under_the_type_of_another_source() -> None:
    fixed = {"a": {"v": LONG}, "b": {}}
    assert fan_in.settled({"a": {"v": LONG}, "b": {"v": DOUBLE}}, fixed, widens=True) == {"b": {"v": LONG}}
    # Of two whose values decide, an integer and a fraction are doubles, as in one source.
    assert fan_in.settled({"a": {"v": LONG}, "b": {"v": DOUBLE}}, {}, widens=True) == {"a": {"v": DOUBLE}}
    assert fan_in.settled({"a": {"v": LONG}, "b": {"v": DOUBLE}}, {}, widens=False) == {"b": {"v": LONG}}
    assert fan_in.settled({"a": {"v": TEXT}, "b": {"V": LONG}}, {}, widens=True) == {"b": {"V": TEXT}}
    assert fan_in.missing("b", [{"v": INT, "w": TEXT, "_event_ts": TEXT}], {"b": {"W": LONG}}) == {"v": LONG}


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
