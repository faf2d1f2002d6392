"""Files that somebody else wrote are read as the options say; what does not fit is an error, never another value."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from weft import NotFoundError, ObjectStoreLocalConnection, ObjectStoreS3Connection
from weft.systems.objects import source


def lake(format: str | None = None, **options: Any) -> ObjectStoreLocalConnection:
    return ObjectStoreLocalConnection("lake", format=format, **options)


def file(name: str, text: str) -> str:
    path = Path("lake") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return name


def rows(spark: Any, connection: Any, path: str) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, source.read(spark, connection, path).collect()), key=repr)


def types(spark: Any, connection: Any, path: str) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in source.read(spark, connection, path).schema}


def test_the_name_says_the_format(spark: Any) -> None:
    file("a.csv.gz", "id,name\n1,a\n")
    file("a.tsv", "id\tname\n1\ta,b\n")
    file("logs/a.ndjson", '{"id": 1, "name": "a"}\n')
    assert rows(spark, lake(), "a.csv.gz") == [(1, "a")]
    assert rows(spark, lake(), "a.tsv") == [(1, "a,b")]
    assert rows(spark, lake(), "logs") == [(1, "a")]
    assert rows(spark, lake(), "logs/*.ndjson") == [(1, "a")]
    with pytest.raises(NotFoundError, match=r"no parquet files at .*/lake/nothing"):
        source.read(spark, lake(), "nothing")


def test_every_csv_option(spark: Any) -> None:
    file("a", "# a comment\n1;'x;y';NA\n2;'it\\'s';5\n3;NULL;6\n")
    options = {
        "has_header": False,
        "delimiter": ";",
        "quote": "'",
        "escape": "\\",
        "comment": "#",
        "null_regex": r"^(NA|NULL|\\N)$",
        "schema_infer_max_records": 4096,
    }
    found = lake("csv", csv_read_options=options)
    assert rows(spark, found, "a") == [(1, "x;y", None), (2, "it's", 5), (3, None, 6)]
    assert list(types(spark, found, "a").values()) == ["int", "string", "int"]


def test_rows_that_are_cut_off(spark: Any) -> None:
    file("a.csv", "id,name,n\n1,a,2\n2\n")
    file("b.csv", "id,name\n1,a,extra\n")
    with pytest.raises(Exception, match=r"MALFORMED|FAILED_READ_FILE"):
        rows(spark, lake("csv"), "a.csv")
    with pytest.raises(Exception, match=r"MALFORMED|FAILED_READ_FILE"):
        rows(spark, lake("csv"), "b.csv")
    forgiving = lake("csv", csv_read_options={"truncated_rows_ok": True})
    assert rows(spark, forgiving, "a.csv") == [(1, "a", 2), (2, None, None)]
    with pytest.raises(Exception, match="A row has more than 2 values"):
        rows(spark, forgiving, "b.csv")


@pytest.mark.brief("json_lines")
@pytest.mark.parametrize("format", ["csv", "json_lines"])
def test_types_are_told_from_the_first_rows(spark: Any, format: str) -> None:
    lines = [*range(20), "x"] if format == "csv" else [*range(20), '"x"']
    text = "id\n" + "\n".join(map(str, lines)) if format == "csv" else "\n".join(f'{{"id": {each}}}' for each in lines)
    file("a", text + "\n")
    option = "csv_read_options" if format == "csv" else "json_read_options"
    few = lake(format, **{option: {"schema_infer_max_records": 5}})
    many = lake(format, **{option: {"schema_infer_max_records": 50}})
    assert types(spark, few, "a")["id"] in ("int", "bigint")
    with pytest.raises(Exception, match=r"MALFORMED|FAILED_READ_FILE|CANNOT_PARSE"):
        rows(spark, few, "a")
    assert types(spark, many, "a") == {"id": "string"}
    assert len(rows(spark, many, "a")) == 21


def test_values_of_several_lines(spark: Any) -> None:
    file("a.csv", 'id,name\n1,"two\r\nlines"\n2,"a ""quoted"" word"\n3,\n')
    assert rows(spark, lake(), "a.csv") == [(1, "two\r\nlines"), (2, 'a "quoted" word'), (3, None)]


def test_partitions_are_columns(spark: Any) -> None:
    spark.sql("SELECT 1 AS id, 2026 AS year").write.partitionBy("year").parquet(str(Path("lake/events").absolute()))
    assert rows(spark, lake(), "events") == [(1, 2026)]


@pytest.mark.full
def test_bucket(spark: Any, s3: Any) -> None:
    fields = s3.fields()
    with s3.files.open_output_stream(f"{fields['bucket']}/in/a.csv") as stream:
        stream.write(b"id,name\n1,a\n")
    assert rows(spark, ObjectStoreS3Connection(**fields), "in/a.csv") == [(1, "a")]
    assert rows(spark, ObjectStoreS3Connection(**fields, prefix="in", format="csv"), "*.csv") == [(1, "a")]
