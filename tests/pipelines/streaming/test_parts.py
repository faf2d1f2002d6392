"""`Source`, `Target` and `Lookup` by themselves: what each takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from pipelines.streaming.test_declare import CSV, DELTA, EVENTS, LAKE, REDIS, WAREHOUSE
from weft import (
    DeclarationError,
    Lookup,
    ObjectStoreLocalConnection,
    Source,
    Target,
)
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("local")


def test_how_files_are_written_is_said_by_name() -> None:
    target = Target(
        connection=CSV,
        prefix="events/csv",
        csv_delimiter=";",
        csv_header=False,
        csv_quote="'",
        csv_escape="\\",
        csv_null_value="\\N",
    )
    assert target.connection_with_options(CSV).options.csv_delimiter == ";"
    assert target.options["csv_null_value"] == "\\N"
    assert (target.name, target.place) == ("events/csv", "prefix")


def test_how_files_are_read_is_said_by_name() -> None:
    options = {
        "has_header": True,
        "delimiter": 44,
        "quote": '"',
        "escape": "\\",
        "comment": "#",
        "null_regex": r"^(NA|NULL|\\N)$",
        "truncated_rows_ok": False,
        "schema_infer_max_records": 4096,
    }
    for each in (
        Target(connection=CSV, prefix="events/csv", csv_read_options=options),
        Source(connection=CSV, query="events/csv", csv_read_options=options),
    ):
        assert each.options["csv_read_options"] == {**options, "delimiter": ","}
    other = {"schema_infer_max_records": 4096, "batch_size": 8192}
    assert Target(connection=LAKE, prefix="events/json", format="json_lines", json_read_options=other).options


def test_what_a_connection_says_of_its_files_counts_unless_the_target_says_more() -> None:
    lake = ObjectStoreLocalConnection("/data", format="csv", csv_delimiter=";", csv_header=False)
    files = Target(connection=lake, prefix="a", csv_delimiter="|").connection_with_options(lake).options
    assert (files.format, files.csv_delimiter, files.csv_header) == ("csv", "|", False)
    files = Target(connection=lake, prefix="a", format="parquet").connection_with_options(lake).options
    assert (files.format, files.csv_delimiter) == ("parquet", None)


def test_options_are_copies() -> None:
    read = {"delimiter": ";"}
    target = Target(connection="lake", prefix="a", csv_read_options=read)
    read["delimiter"] = "|"
    assert target.options["csv_read_options"] == {"delimiter": ";"}


def test_a_prefix_of_delta_is_a_table() -> None:
    assert Target(connection=DELTA, prefix="events/").table == (None, "events")
    weft.register_connection(DELTA)
    (target,) = make(
        name="p", source=EVENTS, source_query="x", targets=[Target(connection="delta", prefix="a")]
    ).targets
    assert (target.connection, target.table, target.prefix) == ("delta", (None, "a"), None)


def test_names_of_connections_are_checked_when_they_lead_somewhere() -> None:
    weft.register_connection(CSV)
    target = Target(connection="csv_lake", prefix="a", parquet_compression="zstd")
    with pytest.raises(DeclarationError, match="parquet_compression is an option of parquet files; these are csv"):
        make(name="p", source=EVENTS, source_query="x", targets=[target])


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (Target, {"connection": CSV, "prefix": "a", "parquet_compression": "zstd"}, "of parquet files; these are csv"),
        (Target, {"connection": LAKE, "prefix": "a", "csv_read_options": {}}, "of csv files; these are parquet"),
        (Target, {"connection": LAKE, "prefix": "a", "parquet_compression": "zstdd"}, "Did you mean 'zstd'"),
        (
            Target,
            {"connection": LAKE, "prefix": "a", "parquet_compresion": "zstd"},
            "Did you mean 'parquet_compression'",
        ),
        (
            Target,
            {"connection": CSV, "prefix": "a", "csv_read_options": {"delimeter": ";"}},
            "Did you mean 'delimiter'",
        ),
        (Target, {"connection": CSV, "prefix": "a", "csv_quote": "''"}, "a single ASCII character"),
        (Target, {"connection": LAKE, "prefix": "a", "options": {"connection": 1}}, "no option 'connection'"),
        (Target, {"connection": LAKE, "prefix": "a", "options": [1]}, "options must be a dict"),
        (Target, {"connection": LAKE, "prefix": "/"}, "prefix must name a folder"),
        (Target, {"connection": LAKE, "prefix": "a", "mode": "merge"}, "'merge' is for tables.*\n.*Delta"),
        (Target, {"connection": LAKE, "prefix": "a", "update_columns": ["a"]}, "no option|is an option of tables"),
        (Target, {"connection": WAREHOUSE, "table": "a", "csv_header": True}, "csv_header is an option of files"),
        (Target, {"connection": REDIS, "stream": "a", "mode": "merge"}, "'merge' is for tables"),
        (Target, {"table": "a", "prefix": "b"}, "takes one of table, prefix and stream"),
        (Target, {"connection": "x"}, "names no place"),
        (Target, {"table": "a", "handle_deletes": "hard"}, "no option 'handle_deletes'"),
        (Target, {"table": "a", "mode": "truncate"}, "no mode 'truncate'"),
        (Target, {"table": "a", "mode": ["merge"]}, "mode is"),
        (Target, {"table": "a", "primary_key": [1]}, "primary_key must be a list of column names"),
        (Target, {"table": ("a", "")}, "table is"),
        (Target, {"stream": ""}, "stream must be"),
        (Target, {"table": "a", "connection": 5}, "connection must be a connection or its name"),
        (Source, {"query": ""}, "query is a topic"),
        (Source, {"query": "a", "conection": "b"}, "Did you mean 'connection'"),
        (Source, {"query": "a", "start": "yesterday"}, "start is 'yesterday'"),
        (Source, {"query": "a", "max_rows": 0}, "max_rows must be"),
        (Source, {"query": "a", "connection": LAKE, "max_rows": 5}, "not a limit of object_store_local.\n.*max_files"),
        (Source, {"query": "a", "connection": EVENTS, "max_files": 5}, "not a limit of sqlite.\n.*max_rows"),
        (Source, {"query": "a", "connection": EVENTS, "columns": {"n": "int64"}}, "sqlite.* has types of its own"),
        (Source, {"query": "a", "columns": ["n"]}, "columns must be a dict"),
        (Source, {"query": "a", "columns": {"n": "number"}}, "field 'n' is 'number'.*\n.*float64"),
        (Source, {"query": "a", "columns": {"n": "int64", "N": "int64"}}, "two columns are called 'N'"),
        (Source, {"query": "a", "columns": {"_event_ts": "date"}}, "cannot be called '_event_ts'"),
        (Source, {"query": "a", "connection": LAKE, "start": 5}, "is an offset, and object_store_local has none"),
        (Source, {"query": "a", "connection": LAKE, "start": "latest"}, "files are read from the first on"),
        (Source, {"query": "a", "connection": EVENTS, "start": "0:5"}, "is offsets of partitions, which Kafka has"),
        (Source, {"query": "a", "connection": EVENTS, "start": "12-0"}, "is an id of Redis, and this is a "),
        (Source, {"query": "a", "connection": EVENTS, "format": "csv"}, "format is an option of files"),
        (Lookup, {}, "needs a table or a query, not neither"),
        (Lookup, {"table": "a", "query": "b"}, "not both"),
        (Lookup, {"query": "a", "schema": "b"}, "schema is that of a table"),
        (Lookup, {"tabel": "a"}, r"no option 'tabel'\.\n  Did you mean 'table'"),
        (Lookup, {"table": "a", "refresh_interval_ms": 0}, "refresh_interval_ms must be"),
        (Lookup, {"table": 5}, "table must be a text"),
    ],
)
def test_parts_refused(cls: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        cls(**given)


def test_offsets_of_streams() -> None:
    assert [Source(query="a", start=each).start for each in ("latest", 12, "3", "12-0")] == [
        "latest",
        "12",
        "3",
        "12-0",
    ]
