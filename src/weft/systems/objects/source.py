"""Files as DataFrames: the tables that loads made, by their log, and any other files of a folder or bucket."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from weft.errors import NotFoundError
from weft.spark_support import sessions
from weft.spark_support.folder import GLOB, folder_for
from weft.spark_support.lazy import T
from weft.systems.frame_checks import with_all_columns
from weft.systems.objects.encoding import EMPTY, decoded, file_schema
from weft.systems.objects.formats import SPARK_FORMAT, format_from_path, is_tab_separated
from weft.systems.objects.manifest import Manifest, TableState
from weft.systems.objects.options import FileOptions
from weft.systems.objects.paths import table_path
from weft.systems.objects.reading import read_format

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from weft.systems.objects.connection import FilesConnection
    from weft.systems.target import Documents


def read(spark: SparkSession, connection: FilesConnection, path: str, documents: Documents | None = None) -> DataFrame:
    """Return the rows of a table, or of the files at a path or glob of the connection.

    A table that loads made is read as its log says: whole loads, with the types that they had.
    """
    connection.configure(spark)
    own: Any = sessions.own_session(spark)
    options = connection.options
    rows = read_table(own, table_path(connection.root, None, path))
    if rows is not None:
        return rows
    return read_path(
        own,
        f"{connection.root}/{path.lstrip('/')}",
        options,
        is_format_given=connection.format is not None,
        documents=documents,
    )


def read_table(spark: SparkSession, path: str) -> DataFrame | None:
    """Return the rows of a table that loads made in this folder; `None` where there is none."""
    state = Manifest(folder_for(spark, path), path).state()
    return None if state is None else _table(spark, path, state)


def read_path(
    spark: SparkSession,
    path: str,
    options: FileOptions | None = None,
    *,
    is_format_given: bool = False,
    documents: Documents | None = None,
) -> DataFrame:
    """Return the rows of files that anybody may have written: of one, of all in a folder, or of those that a glob
    names.

    Without a format, the ends of their names say it. `documents`: see `read_format`.
    """
    options = options or FileOptions()
    if not is_format_given:
        format = format_from_path(path) or _format_inside(spark, path)
        options = options.with_format(format or options.format)
    delimiter = "\t" if is_tab_separated(path) and "delimiter" not in (options.csv_read_options or {}) else None
    try:
        return read_format(spark, [path], options, delimiter, documents=documents)
    except Exception as error:
        if "PATH_NOT_FOUND" in str(error)[:200] or "UNABLE_TO_INFER_SCHEMA" in str(error)[:200]:
            raise NotFoundError(
                f"There are no {options.format} files at {path}.",
                hint="Check the path. What begins with _ or . is hidden.",
            ) from None
        raise


def _format_inside(spark: SparkSession, path: str) -> str | None:
    if GLOB.search(path):
        return None
    names = folder_for(spark, path).files_in(path)
    formats = {format_from_path(name) for name in names if name[0] not in "_."} - {None}
    return formats.pop() if len(formats) == 1 else None


def _table(spark: Any, path: str, state: TableState) -> DataFrame:
    """Return the files of a state, under the schema that it has, as our writer wrote them."""
    schema = T.StructType.fromJson(json.loads(state.schema or "{}"))
    if not state.files:
        empty: DataFrame = spark.createDataFrame([], schema)
        return empty
    options = {
        **FileOptions(format=state.format).spark_reader(),
        **state.dialect,
        **sessions.TIME_FORMATS,
    }
    if state.format == "csv":
        options |= {"emptyValue": EMPTY, "enforceSchema": True}

    def part(columns: T.StructType, names: tuple[str, ...]) -> DataFrame:
        reader = spark.read.format(SPARK_FORMAT[state.format]).schema(file_schema(columns, state.format))
        rows: DataFrame = reader.options(**options).load([f"{path}/{name}" for name in names])
        return decoded(rows, columns, state.format)

    if state.format != "csv":
        return part(schema, state.files)
    # A file of CSV has its columns by their places alone: none that came later.
    parts, first = [], 0
    for files, columns in (*state.narrow, (len(state.files), len(schema))):
        rows = part(T.StructType(schema.fields[:columns]), state.files[first:files])
        parts.append(with_all_columns(rows, schema))
        first = files
    return functools.reduce(lambda one, other: one.union(other), parts)
