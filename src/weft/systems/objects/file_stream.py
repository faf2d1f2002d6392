"""The rows of the files of one micro-batch, each with the columns and types that it has by then."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.spark_support import sessions
from weft.spark_support.folder import COMPRESSED, place_of
from weft.spark_support.lazy import F
from weft.spark_support.sessions import FILE_METADATA
from weft.systems.objects.formats import is_tab_separated
from weft.systems.objects.reading import WHY_TWICE, Partitions, read_format
from weft.systems.objects.sampling import Head
from weft.systems.stream_source import EVENT_TIME, OFFSET

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from weft.systems.objects.connection import FilesConnection

_log = logging.getLogger("weft.engine")
UNFINISHED = (".tmp", ".part", ".partial", ".inprogress", ".crdownload", ".filepart")
"""How the names of files end that are still being written, and are renamed then."""
_FOLDER_OF_PARTITION = re.compile(r"/([^/=]+)=[^/]*(?=/)")
_OPENED_AT_ONCE = 8
# How many bytes are read of files to see their headers and first rows: of all together, and of each at least.
_HEADS, _HEAD = 1 << 20, 1 << 16
# How many are held: those of thousands of files would fill the memory, and some say as much as all.
_HEADS_HELD = 1 << 23
Dated = Callable[[bool], "DataFrame"]
"""Makes the DataFrame of files: with the time at which each was changed, or with nulls in its place."""


@dataclass(frozen=True)
class _Kind:
    """What files must have in common to be read as one."""

    format: str
    delimiter: str | None
    partitions: Partitions | None
    header: bytes | None = None


def read_files(
    spark: SparkSession,
    connection: FilesConnection,
    prefix: str,
    paths: Collection[str],
    known: Mapping[str, DataType],
    *,
    with_offsets: bool = False,
    bad_column: str | None = None,
    declared: Collection[str] = (),
    widens: bool = True,
    grows: bool = True,
) -> Dated | None:
    """Return the rows of these files; `None` where they have no columns.

    `known` are the types that columns had in files before, or have as they are `declared`; others may become wider if
    it `widens`. `EVENT_TIME` is when the file of a row was last changed, `OFFSET` the file itself. A `bad_column` has
    of a row that cannot be read its text and why; without it such a row is an error. Unless it `grows`, one with a key
    that an object of JSON did not have before is such a row.
    """
    connection.configure(spark)
    own: Any = sessions.own_session(spark)
    parts, before = [], {name.lower(): name for name in known}
    for kind, heads in _group_files(own, connection, f"{connection.root}/{prefix.strip('/')}", paths).items():
        options, alike = connection.options.with_format(kind.format), list(heads)
        read = functools.partial(
            read_format,
            own,
            options=options,
            delimiter=kind.delimiter,
            partitions=kind.partitions,
            known=known,
            bad=bad_column,
            declared=declared,
            widens=widens,
            grows=grows,
        )
        for rows in _read(read, alike, list(heads.values())):
            if not rows.columns:
                continue
            # A key or header in another case is the column that was there before.
            spelled = {name: before[name.lower()] for name in rows.columns if name.lower() in before}
            changed = {name: other for name, other in spelled.items() if other not in rows.columns}
            rows = rows.withColumnsRenamed(changed) if changed else rows
            added = {}
            if with_offsets:
                place = rows.metadataColumn(FILE_METADATA)["file_path"]
                added[OFFSET] = F.regexp_replace(place, rf"^.*\Q{connection.root}\E/", "")
            if bad_column is not None:
                fields = rows.drop(bad_column, WHY_TWICE).schema
                types = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in fields)
                text = F.col(bad_column)
                why = F.lit(f"It cannot be parsed as a row of these columns: {types}.")
                if kind.format == "json_lines":
                    is_object = F.is_valid_utf8(text) & F.json_object_keys(text).isNotNull()
                    why = F.when(is_object, F.lit(f"A value does not fit its column: {types}."))
                    why = F.coalesce(why, F.lit("It is not a JSON object."))
                if WHY_TWICE in rows.columns:
                    why = F.coalesce(F.col(WHY_TWICE), why)
                rejected = F.struct(text.alias("payload"), why.alias("error"))
                added[bad_column] = F.when(F.col(bad_column).isNotNull(), rejected)
            parts.append((rows, added))
    if not parts:
        return None

    def dated(is_dated: bool) -> DataFrame:
        frames = []
        for rows, added in parts:
            at = F.lit(None).cast("timestamp")
            if is_dated:
                at = rows.metadataColumn(FILE_METADATA)["file_modification_time"]
            frames.append(rows.withColumns({EVENT_TIME: at, **added}).drop(WHY_TWICE))
        whole: DataFrame = sessions.union_of(frames)
        return whole

    return dated


def _read(read: Callable[..., DataFrame], paths: list[str], heads: Sequence[Head | None]) -> list[DataFrame]:
    try:
        return [read(paths, heads=heads)]
    except Exception as error:
        if "CANNOT_MERGE" not in str(error) or len(paths) == 1:
            raise
        # Columns of one name have several types. A union knows which of them holds both.
        return [read([path]) for path in paths]


def _group_files(
    spark: Any, connection: FilesConnection, root: str, paths: Collection[str]
) -> dict[_Kind, dict[str, Head | None]]:
    """Return the files that can be read as one, and what those of CSV begin with."""
    options, by_kind = connection.options, dict[_Kind, list[str]]()
    for path in paths:
        if path.lower().endswith(UNFINISHED):
            _log.warning("%s is passed by: the end of its name says that it is still written", path)
            continue
        delimiter = "\t" if is_tab_separated(path) and "delimiter" not in (options.csv_read_options or {}) else None
        by_kind.setdefault(_Kind(connection.format_of(path), delimiter, _partitions(path, root)), []).append(path)
    read = options.with_format("csv").read
    # The columns of a CSV file are in the order of its own header.
    several, held = dict[_Kind, dict[str, Head | None]](), 0
    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        for kind, each in by_kind.items():
            if kind.format != "csv" or not read["has_header"]:
                several[kind] = dict.fromkeys(each)
                continue
            look = functools.partial(_head, spark, max(_HEADS // len(each), _HEAD))
            for path, head in zip(each, pool.map(look, each), strict=True):
                alike = several.setdefault(
                    dataclasses.replace(kind, header=_header(head.text, read.get("comment"))), {}
                )
                held += len(head.text)
                alike[path] = head if held < _HEADS_HELD else None
    return several


def _partitions(path: str, root: str) -> Partitions | None:
    """Return the columns that the folders of a file have in their names, below the prefix that is followed."""
    start = path.find(root)
    end = start + len(root)
    if start < 0 or (first := _FOLDER_OF_PARTITION.search(path, end)) is None:
        return None
    return Partitions(path[: first.start()], tuple(_FOLDER_OF_PARTITION.findall(path, end)))


def _head(spark: Any, size: int, path: str) -> Head:
    folder, place = place_of(spark, path)
    text = folder.head(place, size)
    return Head(text, len(text) < size and not place.endswith(COMPRESSED))


def _header(head: bytes, comment: str | None) -> bytes:
    """Return the first line of a file that is not a comment."""
    skipped = comment.encode() if comment else None
    lines = head.splitlines()
    return next((line for line in lines if line and (skipped is None or not line.startswith(skipped))), b"")
