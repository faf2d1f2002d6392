"""How files are written and read, as the keywords of sources and targets: what a type checker knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class FileKeywords(TypedDict, total=False):
    """The options of files by name. `weft.systems.objects.options` checks them."""

    format: Literal["parquet", "csv", "json_lines", "orc"] | None
    parquet_compression: Literal["snappy", "gzip", "zstd", "uncompressed"] | None
    csv_delimiter: str | int | None
    csv_header: bool | None
    csv_quote: str | int | None
    csv_escape: str | int | None
    csv_null_value: str | None
    csv_read_options: Mapping[str, Any] | None
    json_read_options: Mapping[str, Any] | None
