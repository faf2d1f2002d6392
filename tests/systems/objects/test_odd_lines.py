"""Lines of followed files that a reader could take for something else: keys that are one column, texts that are empty,
columns without a header."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

from weft import ObjectStoreLocalConnection
from weft.errors import StorageError
from weft.systems.objects.file_stream import read_files
from weft.systems.objects.json_keys import TWICE, one_key_each, spellings
from weft.systems.objects.reading import BAD
from weft.systems.stream_source import EVENT_TIME, OFFSET


def test_how_a_column_of_several_keys_is_spelled() -> None:
    assert spellings(["a", "A", "b", "C"], ["B", "c"]) == {"a": "A"}
    assert spellings(["a", "A"], ["a"]) == {"a": "a"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"a": 1, "b": 2.50}', ['{"a": 1, "b": 2.50}']),
        ('{"A": 12345678901234567890.10, "b": "ü\\u0041"}', ['{"a":12345678901234567890.10,"b":"ü\\u0041"}']),
        ('{"a": 1, "A": 2}', None),
        ('{"a": 1, "a": 1}', None),
        ('{"b": [{"c": 1, "c": 2}]}', None),
        ('[{"a": 1}, {"A": 2}]', ['{"a": 1}', '{"a":2}']),
        ('[{"a": 1}, {"a": 2, "a": 3}]', None),
        ("[]", []),
        ("[1]", ["[1]"]),
        ("{", ["{"]),
        ('{"a": 1}{"a": 2}', None),
        ('{"a": 1} {"a": 2}', None),
        ('{"a": "}{"}', ['{"a": "}{"}']),
        ('{"a": 1},', ['{"a": 1},']),
        ('{"A": NaN}', ['{"A": NaN}']),
    ],
)
def test_a_line_with_one_key_for_each_column(line: str, expected: list[str] | None) -> None:
    assert one_key_each({"a": "a"}, False, line) == expected


def read(
    spark: Any, lake: Any, known: dict[str, T.DataType], declared: tuple[str, ...] = (), *, bad: bool = False
) -> tuple[dict[str, str], list[tuple[Any, ...]]]:
    """The types of the columns of all files, and their rows; of bad lines the text and why."""
    paths = sorted(str(each.resolve()) for each in Path("lake/in").iterdir())
    column = BAD if bad else None
    dated = read_files(spark, lake, "in", paths, known, bad_column=column, declared=declared, with_offsets=True)
    assert dated is not None
    rows = dated(True)
    assert all(each[EVENT_TIME] and each[OFFSET].startswith("in/") for each in rows.collect())
    rows = rows.drop(EVENT_TIME, OFFSET)
    found = [tuple(each) for each in rows.collect()]
    return {each.name: each.dataType.simpleString() for each in rows.schema if each.name != BAD}, found


def file(name: str, text: str) -> None:
    path = Path("lake/in") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.full
def test_keys_of_json_lines_that_are_one_column(spark: Any, here: Any) -> None:
    lake = ObjectStoreLocalConnection(str(Path("lake").resolve()), format="json_lines")
    twice, inside = '{"id": 10, "id": 11}', '{"id": 12, "o": {"x": 1, "x": 2}}'
    others = '{"id": 3, "a": "x"}\nno json\n[{"id": 4}, {"id": 5}]\n'
    file("a.jsonl", f'{{"id": 1, "a": 1}}\n{twice}\n{{"id": 2, "A": 2}}\n\n{inside}\n{others}')
    for known, name in (({}, "A"), ({"a": T.LongType()}, "a")):
        types, found = read(spark, lake, known, bad=True)
        assert types == {name: "bigint", "id": "bigint"}
        good = sorted((row[1], row[0]) for row in found if row[-1] is None)
        assert good == [(1, 1), (2, 2), (4, None), (5, None)]
        bad = {row[-1].payload: row[-1].error for row in found if row[-1] is not None}
        assert [bad.pop(twice), bad.pop(inside)] == [TWICE, TWICE]
        assert bad.pop("no json") == "It is not a JSON object."
        assert [*bad] == ['{"id": 3, "a": "x"}']
    # Of more than one object Spark would take the first. What looks so in a text is none.
    file("a.jsonl", '{"id": 1, "t": "}{"}\n{"id": 2}{"id": 3}\n')
    types, found = read(spark, lake, {}, bad=True)
    assert (types, {tuple(row) for row in found}) == (
        {"id": "bigint", "t": "string"},
        {(1, "}{", None), (None, None, ('{"id": 2}{"id": 3}', TWICE))},
    )
    with pytest.raises(StorageError, match="more than one object"):
        read(spark, lake, {})
    file("a.jsonl", f"{twice}\n{{'id': 1, 'id': 2}}\n")  # which Spark takes for JSON, and Python does not
    _, found = read(spark, lake, {}, bad=True)
    assert sorted(row[-1] for row in found) == [(twice, TWICE), ("{'id': 1, 'id': 2}", TWICE)]
    with pytest.raises(StorageError, match="has a key twice"):
        read(spark, lake, {})
    file("a.jsonl", '{"id": 1, "a": 1, "A": 2}\n{"id": 2, "a": 2}\n')
    with pytest.raises(Exception, match="two keys that are one column"):
        read(spark, lake, {})
    file("a.jsonl", '{"id": 1, "A": 1}\n')
    file("b.jsonl", '{"id": 2, "a": 2}\n')
    assert read(spark, lake, {}) == ({"A": "bigint", "id": "bigint"}, [(1, 1), (2, 2)])
    # A column in another case than before, alone.
    Path("lake/in/b.jsonl").unlink()
    assert read(spark, lake, {"a": T.LongType()}) == ({"a": "bigint", "id": "bigint"}, [(1, 1)])


def test_an_empty_text_of_csv_is_no_null(spark: Any, here: Any, count: Callable[..., int]) -> None:
    folder = str(Path("lake").resolve())
    for options in ({}, {"csv_escape": "\\"}):
        lake = ObjectStoreLocalConnection(folder, format="csv", **options)
        file("a.csv", 'id,t,n\n1,"",5\n2,,\n3,x,""\n')
        expected = [(1, "", 5), (2, None, None), (3, "x", None)]
        for known in ({}, {"id": T.LongType(), "t": T.StringType(), "n": T.LongType()}):
            for bad in (False, True):
                # Each two of the three together, in half of the reads.
                if count(2, 1) == 1 and (bool(options) + bool(known) + bad) % 2:
                    continue
                types, found = read(spark, lake, known, bad=bad)
                assert types == {"id": "bigint", "t": "string", "n": "bigint"}
                assert [row[:3] for row in found] == expected


def test_declared_columns_name_those_of_csv_without_a_header(spark: Any, here: Any) -> None:
    lake = ObjectStoreLocalConnection(str(Path("lake").resolve()), format="csv", csv_header=False)
    file("a.csv", "1,007,x\n2,a,y\n")
    known = {"id": T.LongType(), "t": T.StringType()}
    types, found = read(spark, lake, known, ("id", "t"))
    assert types == {"id": "bigint", "t": "string", "_c2": "string"}
    assert found == [(1, "007", "x"), (2, "a", "y")]
