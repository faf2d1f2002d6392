"""Options of files are checked when they are declared, against the format of the files."""

from __future__ import annotations

import pytest

from weft import DeclarationError, ObjectStoreLocalConnection
from weft.systems.objects.options import FileOptions

CSV = {
    "csv_delimiter": ";",
    "csv_header": False,
    "csv_quote": "'",
    "csv_escape": "\\",
    "csv_null_value": "\\N",
    "csv_read_options": {
        "has_header": True,
        "delimiter": ",",
        "quote": '"',
        "escape": "\\",
        "comment": "#",
        "null_regex": r"^(NA|NULL|\\N)$",
        "truncated_rows_ok": False,
        "schema_infer_max_records": 4096,
    },
}
JSON = {"json_read_options": {"schema_infer_max_records": 4096, "batch_size": 8192}}


def test_every_option_of_the_guide() -> None:
    assert FileOptions.declare("csv", **CSV).csv_null_value == "\\N"
    assert FileOptions.declare("json_lines", **JSON).read["batch_size"] == 8192
    for compression in ("snappy", "gzip", "zstd", "uncompressed"):
        assert (
            FileOptions.declare("parquet", parquet_compression=compression).spark_writer()["compression"] == compression
        )


@pytest.mark.parametrize(
    ("format", "given", "message"),
    [
        ("csv", {"parquet_compression": "zstd"}, r"option of parquet files; these are csv[\s\S]*format=\"parquet\""),
        ("parquet", {"csv_read_options": {"delimiter": ","}}, "csv_read_options is an option of csv files"),
        (None, {"csv_delimiter": ","}, "csv_delimiter is an option of csv files; these are parquet"),
        ("orc", {"json_read_options": {}}, "json_read_options is an option of json_lines files"),
        ("json", {}, "no file format 'json'"),
        ("parquett", {}, "Did you mean 'parquet'"),
        ("parquet", {"parquet_compression": "zst"}, "Did you mean 'zstd'"),
        ("csv", {"csv_delimeter": ";"}, "no option 'csv_delimeter'[\\s\\S]*Did you mean 'csv_delimiter'"),
        ("csv", {"csv_delimiter": ";;"}, "csv_delimiter must be a single ASCII character"),
        ("csv", {"csv_delimiter": "→"}, "single ASCII character"),
        ("csv", {"csv_quote": ""}, "single ASCII character"),
        ("csv", {"csv_escape": "\n"}, "single ASCII character"),
        ("csv", {"csv_header": "no"}, "csv_header must be true or false"),
        ("csv", {"csv_null_value": 0}, "csv_null_value must be a text"),
        ("csv", {"csv_read_options": {"delimitr": ","}}, "has no option 'delimitr'[\\s\\S]*Did you mean 'delimiter'"),
        ("csv", {"csv_read_options": {"null_regex": "("}}, r"\['null_regex'\] is not a regular expression"),
        ("csv", {"csv_read_options": {"delimiter": 300}}, "single ASCII character"),
        ("csv", {"csv_read_options": {"schema_infer_max_records": 0}}, "at least 1"),
        ("csv", {"csv_read_options": {"truncated_rows_ok": 1}}, "true or false"),
        ("csv", {"csv_read_options": "delimiter"}, "must be a table of options"),
        ("csv", {"csv_delimiter": '"'}, "csv_delimiter and csv_quote are both '\"'"),
        ("csv", {"csv_quote": ","}, "csv_delimiter and csv_quote are both ','"),
        ("csv", {"csv_escape": ","}, "csv_delimiter and csv_escape are both"),
        ("csv", {"csv_null_value": "a,b"}, "csv_null_value cannot hold ','"),
        ("csv", {"csv_null_value": "a\n"}, "csv_null_value cannot hold"),
        ("csv", {"csv_read_options": {"delimiter": "#", "comment": "#"}}, "csv_read_options: delimiter and comment"),
        ("json_lines", {"json_read_options": {"batch_size": True}}, "whole number"),
        ("json_lines", {"json_read_options": {"delimiter": ","}}, "has no option 'delimiter'"),
    ],
)
def test_mistakes(format: str | None, given: dict[str, object], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        FileOptions.declare(format, **given)
    with pytest.raises(DeclarationError):
        ObjectStoreLocalConnection("lake", format=format, **given)  # type: ignore[arg-type]


def test_a_character_may_be_a_number() -> None:
    assert FileOptions.declare("csv", csv_read_options={"delimiter": 44}).read["delimiter"] == ","


def test_reads_as_it_writes_unless_told_otherwise() -> None:
    options = FileOptions.declare("csv", csv_delimiter="|", csv_header=False, csv_read_options={"quote": "'"})
    assert options.read == {"has_header": False, "delimiter": "|", "quote": "'"}
