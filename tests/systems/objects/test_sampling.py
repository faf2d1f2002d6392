"""First rows that fit the types of before are read as Spark would have inferred them."""

from __future__ import annotations

import csv
import io
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as T

from weft.systems.objects.options import FileOptions
from weft.systems.objects.reading import read_format
from weft.systems.objects.sampling import Head, known_schema

TYPES = [
    T.StringType(),
    T.IntegerType(),
    T.LongType(),
    T.DoubleType(),
    T.BooleanType(),
    T.DateType(),
    T.TimestampType(),
    T.DecimalType(20, 2),
]
TEXTS = [
    *("", "a, b", "NaN", "null", " 1", "1 ", "٣", "1d", "0x1F", "1_000"),
    *("0", "-0", "+7", "007", "123456789", "2147483648", "-999999999999999999", "9223372036854775808"),
    *(
        "1.5",
        "1.",
        ".5",
        "-.5e-3",
        "1e5",
        "5e0",
        "5e-0",
        "5e-1",
        "50.0e-2",
        "1.5e1",
        "10.0",
        "1E400",
        "12345678901234567890",
        "12345678901234567890.5",
    ),
    *("true", "False", "TRUE", "yes", "2026-01-02", "2026-02-30", "2026-1-2", "0001-01-01", "9999-12-31"),
    *("2026-01-02 03:04:05", "2026-01-02T03:04:05.123456Z", "2026-01-02T03:04:05+05:30", "2026-01-02T03:04"),
    *(
        "2026-01-02T25:00:00",
        "2026-01-02 03:04:05.1234567",
        "2026-01-02T03:04:05-23:59",
        "2026-01-02T03:04:05+17:59",
        "12:30:00",
    ),
]


def text_of(names: list[str], *rows: list[str]) -> bytes:
    made = io.StringIO()
    csv.writer(made, lineterminator="\n").writerows([names, *rows])
    return made.getvalue().encode()


def looked_at(*heads: Head | None, known: dict[str, Any], most: int = 3, **read: Any) -> Any:
    return known_schema(heads, {"has_header": True, "delimiter": ",", "quote": '"', **read}, "", known, most)


def test_what_fits_is_what_spark_would_have_inferred(spark: Any) -> None:
    fits = {}
    for number, (kind, text) in enumerate(product(TYPES, TEXTS)):
        name = f"c{number}"
        if looked_at(Head(text_of([name], [text]), True), known={name: kind}) is not None:
            fits[name] = (kind, text)
    assert {kind for kind, _ in fits.values()} == set(TYPES[:-1])
    head = text_of(list(fits), [text for _, text in fits.values()])
    Path("lake").mkdir()
    Path("lake/a.csv").write_bytes(head)
    known = {name: kind for name, (kind, _) in fits.items()}
    path = [Path("lake/a.csv").absolute().as_uri()]
    inferred = read_format(spark, path, FileOptions(format="csv"), known=known)
    direct = read_format(spark, path, FileOptions(format="csv"), known=known, heads=[Head(head, True)])
    assert {each.name: (each.dataType, fits[each.name][1]) for each in inferred.schema} == fits
    assert direct.schema == inferred.schema
    assert repr(direct.collect()) == repr(inferred.collect())


def test_what_must_be_seen() -> None:
    known = {"id": T.LongType(), "name": T.StringType()}
    schema = T.StructType([T.StructField(*each) for each in known.items()])
    head = text_of(["id", "name"], *([str(n), "x\ny"] for n in range(5)))
    assert looked_at(Head(head, True), known=known) == schema
    assert looked_at(Head(head, True), known=known, most=100) == schema
    assert looked_at(Head(head, False), known=known) == schema
    assert looked_at(Head(head, False), None, known=known) == schema
    assert looked_at(Head(text_of(["id", "name"]), True), known=known) == schema
    assert looked_at(*[Head(head, True)] * 40, known=known, most=10) == schema
    # Too little, or not of all files.
    assert looked_at(known=known) is looked_at(None, known=known) is None
    assert looked_at(Head(head, False), known=known, most=5) is None
    assert looked_at(Head(head, True), None, known=known, most=100) is None
    # What is cut off is not looked at: the number of this row may be longer.
    assert looked_at(Head(b"id,name\n1,a\n2,b\n3,c\n4", False), known=known, most=2) == schema
    assert looked_at(Head(b"id,name\n1,a\n2,b\n3,c\n4", True), known=known, most=10) is None


@pytest.mark.parametrize(
    "text",
    [
        b"id\n1\n2\n3\n4\nx\n",
        b"id,new\n1,1\n",
        b"id,ID\n1,1\n",
        b"id,name\n1\n",
        b"id,name\n1,2,3\n",
        b'id,name\n1,"a\n',
        b"id,name\n1,\xff\n",
        b"\xef\xbb\xbfid,name\n1,a\n",
        b"",
        b"\n\n",
    ],
)
def test_what_is_left_to_spark(text: bytes) -> None:
    known = {"id": T.LongType(), "ID": T.LongType(), "name": T.StringType()}
    assert looked_at(Head(text, True), known=known, most=10) is None


def test_how_files_are_read_counts() -> None:
    known = {"id": T.LongType(), "name": T.StringType()}
    assert looked_at(Head(b"id;name\n1;'a;'';b'\n", True), known=known, delimiter=";", quote="'") is not None
    assert looked_at(Head(b'id,name\n1,"a\\",b"\n', True), known=known, escape="\\") is not None
    assert looked_at(Head(b"#\nid,name\n1,a\n", True), known=known, comment="#") is None
    assert looked_at(Head(b"id,name\n1,a\n", True), known=known, null_regex="^$") is None
    assert looked_at(Head(b"id,name\n1,a\n", True), known=known, truncated_rows_ok=True) is None
