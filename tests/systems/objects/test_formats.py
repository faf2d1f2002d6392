"""The end of a path says the format, whatever the compression."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from weft.connections import format_from_path


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("s3://bucket/year=2026/events.csv.gz", "csv"),
        ("logs.ndjson", "json_lines"),
        ("data.parquet", "parquet"),
        ("unknown.xml", None),
        ("data.pq", "parquet"),
        ("data.tsv", "csv"),
        ("data.json", "json_lines"),
        ("data.jsonl", "json_lines"),
        ("data.orc", "orc"),
        ("DATA.CSV.GZ", "csv"),
        *((f"data.csv.{suffix}", "csv") for suffix in ("gz", "bz2", "zst", "lz4", "snappy")),
        ("data.csv.xz", None),
        ("data.csv.gz.gz", None),
        ("data.csv?download=true", None),
        ("s3://bucket.csv/data", None),
        ("csv", None),
        ("", None),
        (Path("a") / "b.orc", "orc"),
    ],
)
def test_format_from_path(path: str, format: str | None) -> None:
    assert format_from_path(path) == format
    assert weft.format_from_path is format_from_path
