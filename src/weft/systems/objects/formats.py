"""The file formats, and which one a path names."""

from __future__ import annotations

import os

SPARK_FORMAT = {"parquet": "parquet", "csv": "csv", "json_lines": "json", "orc": "orc"}
FORMATS = tuple(SPARK_FORMAT)
EXTENSIONS = {"parquet": ".parquet", "csv": ".csv", "json_lines": ".json", "orc": ".orc"}
"""The extensions of the files that Spark writes."""

_FORMAT_OF = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json_lines",
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".orc": "orc",
}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4", ".snappy")


def format_from_path(path: str | os.PathLike[str]) -> str | None:
    """Return the format of a file by the end of its path or URL: "parquet", "csv", "json_lines", "orc", or `None`.

    One compression suffix is taken off first: `events.csv.gz` is "csv". A query string is not: `x.csv?download=true`
    names no format.
    """
    return _FORMAT_OF.get(os.path.splitext(_uncompressed(path))[1])


def is_tab_separated(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a CSV file with tabs between its values."""
    return _uncompressed(path).endswith(".tsv")


def _uncompressed(path: str | os.PathLike[str]) -> str:
    # Only the last part of a URL counts, so that a host such as `s3.csv` names no format.
    name = os.fspath(path).lower().rpartition("/")[2]
    for suffix in _COMPRESSIONS:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name
