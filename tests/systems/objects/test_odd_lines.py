"""Lines of followed files that a reader could take for something else: empty texts, columns without a header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import types as T

from weft import ObjectStoreLocalConnection
from weft.systems.objects.file_stream import read_files
from weft.systems.objects.reading import BAD


def read(
    spark: Any, lake: Any, known: dict[str, T.DataType], declared: tuple[str, ...] = (), *, bad: bool = False
) -> tuple[dict[str, str], list[tuple[Any, ...]]]:
    """The types of the columns of all files, and their rows; of bad lines the text and why."""
    paths = sorted(str(each.resolve()) for each in Path("lake/in").iterdir())
    dated = read_files(spark, lake, "in", paths, known, bad_column=BAD if bad else None, declared=declared)
    assert dated is not None
    rows = dated(False).drop("_event_ts")
    found = [tuple(each) for each in rows.collect()]
    return {each.name: each.dataType.simpleString() for each in rows.schema if each.name != BAD}, found


def file(name: str, text: str) -> None:
    path = Path("lake/in") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_empty_text_of_csv_is_no_null(spark: Any, here: Any) -> None:
    folder = str(Path("lake").resolve())
    for options in ({}, {"csv_escape": "\\"}):
        lake = ObjectStoreLocalConnection(folder, format="csv", **options)
        file("a.csv", 'id,t,n\n1,"",5\n2,,\n3,x,""\n')
        expected = [(1, "", 5), (2, None, None), (3, "x", None)]
        for known in ({}, {"id": T.LongType(), "t": T.StringType(), "n": T.LongType()}):
            for bad in (False, True):
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
