"""Files as DataFrames: the tables that loads made, as their log says, and whatever else lies in a folder or bucket."""

from __future__ import annotations

import functools
import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from weft.errors import NotFoundError
from weft.systems.objects import spark as sessions
from weft.systems.objects.encoding import EMPTY, decoded, file_schema
from weft.systems.objects.folder import folder_for
from weft.systems.objects.formats import format_from_path, is_tab_separated
from weft.systems.objects.manifest import Manifest, State
from weft.systems.objects.options import TIMESTAMP, TIMESTAMP_NTZ, FileOptions
from weft.systems.objects.paths import table_path
from weft.systems.objects.rows import column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from weft.systems.objects.connection import ObjectStoreLocalConnection, ObjectStoreS3Connection

SPARK_FORMAT = {"parquet": "parquet", "csv": "csv", "json_lines": "json", "orc": "orc"}
_INFER = 1000
"""From so many rows the types of a CSV or JSON file are told unless `schema_infer_max_records` says otherwise."""
_GLOB = re.compile(r"[*?\[{]")
_MORE = "_weft_more"


def read(spark: SparkSession, connection: ObjectStoreLocalConnection | ObjectStoreS3Connection, path: str) -> DataFrame:
    """The rows of a table, or of the files at a path or glob of the connection.

    A table that loads made is read as its log says: whole loads, with the types that they had.
    """
    sessions.configure(spark, connection)
    own: Any = sessions.own_session(spark, {})
    options = connection.options
    found = read_table(own, table_path(connection.root, None, path))
    if found is not None:
        return found
    return read_path(
        own, f"{connection.root}/{path.lstrip('/')}", options, is_format_given=connection.format is not None
    )


def read_table(spark: SparkSession, path: str) -> DataFrame | None:
    """The rows of a table that loads made in this folder; `None` where there is none."""
    state = Manifest(folder_for(spark, path), path).state()
    return None if state is None else _table(spark, path, state)


def table_columns(
    spark: SparkSession,
    connection: ObjectStoreLocalConnection | ObjectStoreS3Connection,
    schema: str | None,
    table: str,
) -> list[str] | None:
    """The columns of a table that loads made; `None` where there is none."""
    sessions.configure(spark, connection)
    path = table_path(connection.root, schema, table)
    state = Manifest(folder_for(spark, path), path).state()
    return None if state is None else [field["name"] for field in json.loads(state.schema or "{}").get("fields", ())]


def read_path(
    spark: SparkSession, path: str, options: FileOptions | None = None, *, is_format_given: bool = False
) -> DataFrame:
    """The rows of files that anybody may have written: of one, of all in a folder, or of those that a glob names.

    Without a format, the ends of their names say it.
    """
    options = options or FileOptions()
    if not is_format_given:
        found = format_from_path(path) or _format_inside(spark, path)
        options = options.with_format(found or options.format)
    delimiter = "\t" if is_tab_separated(path) and "delimiter" not in (options.csv_read_options or {}) else None
    try:
        return _files(spark, [path], options, delimiter)
    except Exception as error:
        if "PATH_NOT_FOUND" in str(error)[:200] or "UNABLE_TO_INFER_SCHEMA" in str(error)[:200]:
            raise NotFoundError(
                f"There are no {options.format} files at {path}.",
                hint="Check the path. What begins with _ or . is hidden.",
            ) from None
        raise


def follow(
    spark: SparkSession,
    connection: ObjectStoreLocalConnection | ObjectStoreS3Connection,
    prefix: str,
    max_files: int,
) -> DataFrame:
    """A streaming DataFrame of the files under a prefix, each once, whatever its name: path and time of change.

    Only which files there are: what is in them is read later, by `read_files`, under whatever schema they have then.
    """
    sessions.configure(spark, connection)
    found = (
        spark.readStream.format("binaryFile")
        .schema("path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY")
        .option("recursiveFileLookup", True)
        .option("maxFilesPerTrigger", max_files)
        # Else files that are a week older than the newest would be passed over without a word.
        .option("maxFileAge", "36500d")
        .load(f"{connection.root}/{prefix.strip('/')}")
    )
    return found.select("path", "modificationTime")


def read_files(
    spark: SparkSession,
    connection: ObjectStoreLocalConnection | ObjectStoreS3Connection,
    changed: dict[str, datetime],
    time_column: str,
) -> DataFrame:
    """The rows of these files, and when each file was last changed."""
    from pyspark.sql import functions as F

    sessions.configure(spark, connection)
    own: Any = sessions.own_session(spark, {})
    given = connection.options
    alike: dict[tuple[str, str | None], list[str]] = {}
    for path in changed:
        name = given.format if connection.format is not None else format_from_path(path) or given.format
        delimiter = "\t" if is_tab_separated(path) and "delimiter" not in (given.csv_read_options or {}) else None
        alike.setdefault((name, delimiter), []).append(path)
    frames = []
    for (name, delimiter), paths in alike.items():
        rows = _files(own, paths, given.with_format(name), delimiter)
        moment = F.col("_metadata.file_modification_time")
        if name == "csv" and {"null_regex", "truncated_rows_ok"} & given.with_format(name).read.keys():
            # Converted after they were read, they do not tell any more which file they are from.
            moment = F.lit(max(changed[path] for path in paths))
        frames.append(rows.withColumn(time_column, moment))
    return functools.reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)


def _format_inside(spark: SparkSession, path: str) -> str | None:
    if _GLOB.search(path):
        return None
    names = folder_for(spark, path).files_in(path)
    found = {format_from_path(name) for name in names if name[0] not in "_."} - {None}
    return found.pop() if len(found) == 1 else None


def _table(spark: Any, path: str, state: State) -> DataFrame:
    """The files of a state, under the schema that it has, as our writer wrote them."""
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(json.loads(state.schema or "{}"))
    if not state.files:
        empty: DataFrame = spark.createDataFrame([], schema)
        return empty
    reader = spark.read.format(SPARK_FORMAT[state.format]).schema(file_schema(schema, state.format))
    given = {
        **FileOptions(format=state.format).spark_reader(),
        **state.dialect,
        "timestampFormat": TIMESTAMP,
        "timestampNTZFormat": TIMESTAMP_NTZ,
    }
    if state.format == "csv":
        given |= {"emptyValue": EMPTY, "enforceSchema": True}
    frame = reader.options(**given).load([f"{path}/{name}" for name in state.files])
    return decoded(frame, schema, state.format)


def _files(spark: Any, paths: list[str], options: FileOptions, delimiter: str | None) -> DataFrame:
    reader = spark.read.format(SPARK_FORMAT[options.format]).options(**options.spark_reader())
    if delimiter is not None:
        reader = reader.option("sep", delimiter)
    frame: DataFrame
    if options.format == "csv":
        return _csv(spark, reader, paths, options.read)
    if options.format == "json_lines":
        lines = spark.read.text(paths).limit(options.read.get("schema_infer_max_records", _INFER))
        frame = reader.schema(_inferred(spark, lines, "json", {})).load(paths)
    else:
        frame = reader.load(paths)
    return frame


def _csv(spark: Any, reader: Any, paths: list[str], read: dict[str, Any]) -> DataFrame:
    """CSV files with types that their first rows tell.

    Where Spark's reader cannot do what is asked (nulls by a pattern, rows that are cut off), all is read as texts and
    converted here: a value that does not fit is an error either way.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    texts: DataFrame = reader.option("inferSchema", False).load(paths)
    names = texts.columns
    pattern, is_cut = read.get("null_regex"), read.get("truncated_rows_ok", False)

    def cleaned(frame: DataFrame) -> DataFrame:
        if pattern is None:
            return frame
        # Of the whole value: a pattern that should match a part says so itself.
        return frame.select(
            *(F.when(~F.rlike(column(name), F.lit(pattern)), column(name)).alias(name) for name in names)
        )

    if is_cut:
        fields = [StructField(name, StringType()) for name in (*names, _MORE)]
        texts = reader.option("mode", "PERMISSIVE").option("enforceSchema", True).schema(StructType(fields)).load(paths)
        too_many = F.raise_error(F.lit(f"A row has more than {len(names)} values"))
        kept = F.when(column(_MORE).isNull(), column(names[0])).otherwise(too_many)
        texts = texts.select(kept.alias(names[0]), *map(column, names[1:]))
    sample = cleaned(texts).limit(read.get("schema_infer_max_records", _INFER))
    # One text a row in Spark's own dialect, for its own inference.
    lines = sample.select(F.to_csv(F.struct(*map(column, names)), {"quoteAll": "true", "escape": '"'}).alias("value"))
    schema = _inferred(spark, lines, "csv", {"inferSchema": "true", "escape": '"'}, names)
    if pattern is None and not is_cut:
        frame: DataFrame = reader.schema(schema).load(paths)
        return frame
    clean = cleaned(texts)
    return clean.select(*(column(field.name).cast(field.dataType).alias(field.name) for field in schema))


def _inferred(
    spark: Any, lines: DataFrame, format: str, options: dict[str, str], names: list[str] | None = None
) -> StructType:
    """The schema that Spark's own reader infers of these lines."""
    from pyspark.sql.types import StringType, StructField, StructType

    reader = spark._jsparkSession.read()
    for name, value in options.items():
        reader = reader.option(name, value)
    texts = getattr(lines._jdf, "as")(spark._jvm.org.apache.spark.sql.Encoders.STRING())
    read = reader.csv(texts) if format == "csv" else reader.json(texts)
    inferred = StructType.fromJson(json.loads(read.schema().json()))
    if names is None:
        return inferred
    types = [field.dataType for field in inferred]
    # A file without rows tells no types.
    types += [StringType()] * (len(names) - len(types))
    return StructType([StructField(name, type) for name, type in zip(names, types, strict=True)])
