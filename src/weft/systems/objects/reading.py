"""Files of one format, of any writer, as a DataFrame with types that are inferred from their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from weft.errors import StorageError
from weft.spark_support.columns import HINT
from weft.spark_support.lazy import F, T
from weft.spark_support.sessions import active, java_class
from weft.systems.codec import codec_of
from weft.systems.codecs import kinds
from weft.systems.codecs.columns import storable
from weft.systems.frame_checks import column
from weft.systems.objects import decimals, json_keys
from weft.systems.objects.encoding import EMPTY
from weft.systems.objects.formats import SPARK_FORMAT
from weft.systems.objects.options import FileOptions
from weft.systems.objects.sampling import Head, known_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

    from weft.systems.target import Documents

_INFER = 1000
"""From how many rows the types of a CSV file are inferred unless `schema_infer_max_records` says otherwise."""
_MORE, _LINE, _PARTS, _ROW = "_weft_more", "_weft_line", "_weft_parts", "_weft_row"
BAD = f"_weft_bad_{uuid4().hex}"
"""The column of lines that cannot be parsed. No key of JSON has this name."""
_JSON = {"columnNameOfCorruptRecord": BAD}
WHY_TWICE = "_weft_twice"
"""The column, where there is one, that says of a line in which keys are one column that this is why it is bad."""


@dataclass(frozen=True)
class Partitions:
    """Columns that folders have in their names: `base/year=2026/month=1/…`."""

    base: str
    names: tuple[str, ...]


def read_format(
    spark: Any,
    paths: list[str],
    options: FileOptions,
    delimiter: str | None = None,
    partitions: Partitions | None = None,
    known: Mapping[str, DataType] | None = None,
    heads: Sequence[Head | None] = (),
    bad: str | None = None,
    declared: Collection[str] = (),
    widens: bool = True,
    grows: bool = True,
    documents: Documents | None = None,
) -> DataFrame:
    """Return the rows of files of one format. One that cannot be read is an error, or its text is in the column `bad`.

    Where files are followed, `known` are the types that their columns had before, of which some are `declared`. They
    stay, but for the others that are not texts a wider type may come if it `widens`; a column that has had nothing but
    nulls has no type yet. `heads` is what files of one header begin with. Unless it `grows`, a row of JSON with a key
    that an object did not have before is in the column `bad`. `documents` chooses columns that are texts of what
    the files have there: JSON, or numbers as they are written.
    """
    final_types = partial(_final_types, spark, known=known or {}, declared=declared, widens=widens)
    reader = spark.read.format(SPARK_FORMAT[options.format]).options(**options.spark_reader())
    if delimiter is not None:
        reader = reader.option("sep", delimiter)
    if partitions is not None:
        reader = reader.option("basePath", partitions.base)
    if bad is not None:
        reader = reader.option("mode", "PERMISSIVE").option("columnNameOfCorruptRecord", bad)
    frame: DataFrame
    if options.format == "csv":
        read = options.read if delimiter is None else {**options.read, "delimiter": delimiter}
        most = read.get("schema_infer_max_records", _INFER)
        schema = known_schema(heads, read, options.csv_null_value or "", known or {}, most)
        folders = partitions.names if partitions else ()
        has_empty = known is not None and _has_empty_texts(spark, paths, heads, read["quote"])
        if schema is None or has_empty or not set(schema.names).isdisjoint(folders):
            types = None if known is None else final_types
            return _csv(
                spark, reader, paths, read, folders, types, bad, declared, documents=documents, has_empty=has_empty
            )
        load_csv = partial(_load_lines, reader.option("enforceSchema", False), paths, bad=bad)
        return decimals.loaded(load_csv, schema, declared, bad, partial(_csv_line, read))
    if options.format == "json_lines":
        lines, most = spark.read.text(paths).select("value"), options.read.get("schema_infer_max_records")
        # All of them, unless limited: a key that is in none of the sampled rows would be lost.
        sample = lines if most is None else lines.limit(most)
        inferred = _inferred(spark, json_keys.marked(sample), "json", _JSON)
        found_twice = json_keys.has_twice(inferred)
        if known is not None and most is not None and not found_twice:
            found_twice = not lines.where(json_keys.has_key_twice(F.col("value"))).isEmpty()
        if not found_twice and (most is not None or json_keys.MAY_HAVE_MORE in inferred.names):
            found_twice = json_keys.some_have_more(lines)
        inferred = _without(inferred, json_keys.MAY_HAVE_MORE)
        if found_twice and bad is None:
            raise StorageError(f"A line of {_shown(paths)} has a key twice, or more than one object.")
        load: Callable[[StructType, str | None], DataFrame] = partial(_load_lines, reader, paths)
        names = json_keys.spellings(inferred.names, known) if known is not None else {}
        if found_twice or names:
            how = {**options.spark_reader(), **({} if bad is None else {"mode": "PERMISSIVE"})}
            inferred, lines, load = _with_one_key_each(spark, sample, lines, names, partitions, paths, how)
        if BAD in inferred.names:
            if bad is None:
                raise StorageError(f"Lines of {_shown(paths)} are not JSON objects.")
            inferred = _without(inferred, BAD)
            if not inferred.names and not found_twice:
                return _lines_alone(spark, paths, bad)
        schema = inferred if documents is None else _with_documents(inferred, documents)
        frame = load(schema, None)
        if known is not None:
            by_most, rows = _of_most_values(schema, known, lines), frame
            schema, void = final_types(by_most, sample=rows, rows=rows)
            frame = decimals.loaded(lambda texts: load(texts, bad), schema, declared, bad, F.to_json)
            if bad is not None and not grows:
                kept, _ = final_types(by_most, sample=rows, rows=rows, grows=False)
                frame = _without_new_keys(frame, kept, bad)
            frame = _without_types(frame, void)
    else:
        # Else the columns of one file count for all.
        frame = reader.option("mergeSchema", True).load(paths)
        frame = frame if bad is None else frame.withColumn(bad, F.lit(None).cast("string"))
    return frame


def _with_documents(schema: StructType, documents: Documents) -> StructType:
    names = documents(schema)

    def text(column: StructField) -> StructField:
        is_nested = isinstance(column.dataType, T.StructType | T.ArrayType)
        return T.StructField(column.name, T.StringType(), metadata={HINT: "json"} if is_nested else None)

    return T.StructType([text(each) if each.name in names else each for each in schema])


def _load_lines(reader: Any, paths: list[str], schema: StructType, bad: str | None) -> DataFrame:
    frame: DataFrame = reader.schema(_with(schema, bad)).load(paths)
    return frame


def _csv_line(read: Mapping[str, Any], values: Column) -> Column:
    dialect = {"sep": read["delimiter"], "quote": read["quote"], "escape": read.get("escape", read["quote"])}
    dialect |= {"ignoreLeadingWhiteSpace": "false", "ignoreTrailingWhiteSpace": "false"}
    return F.to_csv(values, dialect)


def _with_one_key_each(
    spark: Any,
    sample: DataFrame,
    lines: DataFrame,
    names: Mapping[str, str],
    partitions: Partitions | None,
    paths: list[str],
    options: Mapping[str, str],
) -> tuple[StructType, DataFrame, Callable[[StructType, str | None], DataFrame]]:
    """Read lines in which two spellings of a key, such as `Id` and `id`, are one column: objects get those of `names`.
    Return the types that Spark infers of these objects, the objects, and what loads all lines."""
    for is_strict in (False, True):
        objects = json_keys.objects_of(F.col("value"), names, is_strict=is_strict)
        kept = [each.select(F.explode(objects).alias("value")) for each in (sample, lines)]
        inferred = _inferred(spark, kept[0], "json", _JSON)
        if not json_keys.has_twice(inferred):
            break
    folders = partitions.names if partitions else ()
    texts = spark.read if partitions is None else spark.read.option("basePath", partitions.base)
    parted = json_keys.objects_of(column(_LINE), names, is_strict=is_strict)

    def load(schema: StructType, bad: str | None) -> DataFrame:
        rows: DataFrame = texts.text(paths).where(F.trim("value") != "").withColumnRenamed("value", _LINE)
        rows = rows.withColumn(_PARTS, F.coalesce(parted, F.array(F.lit(None).cast("string"))))
        rows = rows.withColumn(_MORE, F.explode(column(_PARTS)))
        if options["mode"] == "FAILFAST":
            fails = F.raise_error(F.lit(json_keys.TWICE)).cast("string")
            rows = rows.withColumn(_MORE, F.coalesce(column(_MORE), fails))
        how = {**options, "columnNameOfCorruptRecord": bad or BAD}
        rows = rows.withColumn(_ROW, F.from_json(column(_MORE), _with(schema, bad), how))
        columns = {each.name: column(_ROW)[each.name] for each in schema if each.name not in folders}
        if bad is not None:
            is_bad = column(_MORE).isNull() | column(_ROW).isNull() | column(_ROW)[bad].isNotNull()
            text = F.when(F.size(column(_PARTS)) > 1, column(_MORE)).otherwise(column(_LINE))
            columns[bad] = F.when(is_bad, text)
            columns[WHY_TWICE] = F.when(column(_MORE).isNull(), F.lit(json_keys.TWICE))
        return rows.withColumns(columns).drop(_LINE, _PARTS, _MORE, _ROW)

    return inferred, kept[1], load


def _with(schema: StructType, bad: str | None) -> StructType:
    return schema if bad is None else T.StructType([*schema, T.StructField(bad, T.StringType())])


def _without(schema: StructType, name: str) -> StructType:
    return T.StructType([each for each in schema if each.name != name])


def _without_new_keys(frame: DataFrame, kept: StructType, bad: str) -> DataFrame:
    """Return rows with columns of these types. One with a value that they do not hold is in the column `bad`, written
    again: Spark gives the text only of a line that it cannot parse."""
    types: dict[str, Any] = {each.name: each.dataType for each in frame.schema}
    texts = {each.name: F.to_json(column(each.name)) for each in kept if each.dataType != types[each.name]}
    if not texts:
        return frame
    wanted: dict[str, Any] = {each.name: each.dataType for each in kept}
    narrow = {name: F.from_json(text, wanted[name]) for name, text in texts.items()}
    has_more = reduce(or_, (~text.eqNullSafe(F.to_json(narrow[name])) for name, text in texts.items()))
    line = F.to_json(F.struct(*(column(name) for name in types if name != bad)))
    return frame.withColumns({**narrow, bad: F.coalesce(column(bad), F.when(has_more, line))})


def _lines_alone(spark: Any, paths: list[str], bad: str) -> DataFrame:
    """Lines none of which is a row: Spark reads no file for their text alone."""
    lines: DataFrame = spark.read.text(paths)
    return lines.where(F.trim("value") != "").withColumnRenamed("value", bad)


def _shown(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"one of {len(paths):,} files, {paths[0]} the first,"


def _csv(
    spark: Any,
    reader: Any,
    paths: list[str],
    read: dict[str, Any],
    partitions: Collection[str],
    final_types: Any | None,
    bad: str | None,
    declared: Collection[str] = (),
    *,
    documents: Documents | None = None,
    has_empty: bool = False,
) -> DataFrame:
    """Read CSV files with types that are inferred from their first rows. Without a header the `declared` columns are
    the first ones.

    Where Spark's reader cannot do what is asked (nulls by a pattern, rows that are cut off, empty texts that are no
    nulls), all is read as texts and converted here. A value that does not fit is an error either way, or its row is a
    bad one."""
    # A file with another header is an error: its columns would be read by position, not by name.
    reader = reader.option("enforceSchema", False)
    if has_empty:
        reader = reader.option("emptyValue", EMPTY)
    texts: DataFrame = reader.option("inferSchema", False).load(paths)
    names = [name for name in texts.columns if name not in partitions]
    if not read["has_header"] and set(names).isdisjoint(declared):
        # Spark numbers them: _c0, _c1.
        spelled = dict(zip(names, declared, strict=False))
        texts, names = texts.withColumnsRenamed(spelled), [spelled.get(name, name) for name in names]
    pattern, is_cut = read.get("null_regex"), read.get("truncated_rows_ok", False)
    is_converted = pattern is not None or is_cut or has_empty
    if is_converted and (is_cut or bad is not None):
        wanted = [*names, _MORE] if is_cut else names
        schema = _with(T.StructType([T.StructField(name, T.StringType()) for name in wanted]), bad)
        lenient = reader.option("mode", "PERMISSIVE").option("enforceSchema", True) if is_cut else reader
        texts = lenient.schema(schema).load(paths)
    if has_empty:
        texts = texts.withColumns(
            {name: F.when(column(name) == EMPTY, F.lit("")).otherwise(column(name)) for name in names}
        )
    if is_cut and bad is None:
        too_many = F.raise_error(F.lit(f"A row has more than {len(names)} values"))
        kept = F.when(column(_MORE).isNull(), column(names[0])).otherwise(too_many)
        texts = texts.withColumn(names[0], kept)
    elif is_converted and bad is not None:
        # Spark keeps the text of rows that are too long or too short. That of others is written again.
        line = F.coalesce(column(bad), _csv_line(read, F.struct(*map(column, wanted))))
        texts = texts.withColumn(_LINE, line)
        if is_cut:
            texts = texts.withColumn(bad, F.when(column(_MORE).isNotNull(), column(_LINE)))
    texts = texts.drop(_MORE) if is_cut else texts
    if pattern is not None:
        # The pattern matches the whole value: one for a part says so itself.
        texts = texts.withColumns(
            {name: F.when(~F.rlike(column(name), F.lit(pattern)), column(name)) for name in names}
        )
    rows = texts.select(*map(column, names))
    sample = rows.limit(read.get("schema_infer_max_records", _INFER))
    # One text a row in Spark's own dialect, for its own inference.
    lines = sample.select(F.to_csv(F.struct(*map(column, names)), {"quoteAll": "true", "escape": '"'}).alias("value"))
    schema = _inferred(spark, lines, "csv", {"inferSchema": "true", "escape": '"'}, names)
    void: set[str] = set()
    if final_types is not None:
        schema, void = final_types(schema, sample=sample, rows=rows)
        if len(void) == len(names) and rows.isEmpty():
            return texts.select()
    numbers: list[str] = []
    if documents is not None:
        numbers = [*documents(schema)]
        schema = _with_documents(schema, lambda _: numbers)
    if has_empty:
        # An empty number or time is null, as in files in which every value has quotes.
        others = [each.name for each in schema if not isinstance(each.dataType, T.StringType)]
        texts = texts.withColumns({name: F.nullif(column(name), F.lit("")) for name in others})
    if not is_converted:
        texts = decimals.loaded(
            partial(_load_lines, reader, paths, bad=bad), schema, declared, bad, partial(_csv_line, read)
        )
    elif bad is None:
        texts = texts.withColumns({field.name: decimals.required(field.name, field.dataType) for field in schema})
    else:
        converted = {field.name: decimals.converted(column(field.name), field.dataType) for field in schema}
        fails = reduce(or_, (column(name).isNotNull() & each.isNull() for name, each in converted.items()))
        why = F.coalesce(column(bad), F.when(fails, column(_LINE)))
        texts = texts.withColumns({**converted, bad: why}).drop(_LINE)
    texts = texts.withColumns({name: F.trim(column(name)) for name in numbers}) if numbers else texts
    return _without_types(texts, void)


def _has_empty_texts(spark: Any, paths: list[str], heads: Sequence[Head | None], quote: str) -> bool:
    """Return whether files may have an empty text in quotes: Spark's reader takes it for a null."""
    if heads and all(head is not None and head.is_whole for head in heads):
        return any(head is not None and quote.encode() * 2 in head.text for head in heads)
    lines = spark.read.text(paths).where(F.contains(F.col("value"), F.lit(quote * 2)))
    return not lines.isEmpty()


def _without_types(frame: DataFrame, names: Collection[str]) -> DataFrame:
    return frame.withColumns({name: F.lit(None) for name in names}) if names else frame


def _of_most_values(schema: StructType, known: Mapping[str, DataType], lines: DataFrame) -> StructType:
    """Return the types that Spark inferred of lines of JSON, but of new columns with values of several types, which it
    takes for texts, the type that most values have."""
    before = {name.lower() for name in known}
    doubtful = {each.name.lower() for each in schema if isinstance(each.dataType, T.StringType)} - before
    if not doubtful:
        return schema
    from pyspark.sql.pandas.types import from_arrow_type

    counted = lines.mapInArrow(_kinds, "kinds string").collect()
    by_column = kinds.merged_columns(json.loads(each.kinds) for each in counted)
    mixed = {name: each for name, each in by_column.items() if name in doubtful and kinds.is_mixed(each)}
    decided = storable(pa.schema([(name, kinds.type_of(each)) for name, each in mixed.items()]))
    types = {each.name: from_arrow_type(each.type) for each in decided}
    return T.StructType([T.StructField(each.name, types.get(each.name.lower(), each.dataType)) for each in schema])


def _kinds(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task: count the values of lines of JSON by their kinds."""
    decoder = codec_of("json").decoder({})
    for batch in batches:
        parsed = decoder.parse(batch["value"].cast(pa.binary()))
        yield pa.RecordBatch.from_pydict({"kinds": [json.dumps(parsed.kinds, default=dict)]})


def _final_types(
    spark: Any,
    schema: StructType,
    *,
    known: Mapping[str, DataType],
    declared: Collection[str],
    widens: bool,
    sample: DataFrame,
    rows: DataFrame,
    grows: bool = True,
) -> tuple[StructType, set[str]]:
    """Return the types under which rows are read that were looked at, and which columns have no value in any row."""
    spelled = {each.name.lower(): each.name for each in schema}
    known = {spelled.get(name.lower(), name): kind for name, kind in known.items()}
    fixed = {spelled.get(name.lower(), name) for name in declared}
    # A column that seems to be text may hold only nulls.
    doubtful = [each.name for each in schema if isinstance(each.dataType, T.StringType)]
    empty = _empty(sample, [name for name in doubtful if known.get(name) != T.StringType()])
    new = [name for name in empty if name not in known]
    void = set(new) if rows is sample else _empty(rows, new)
    types: dict[str, DataType] = {}
    for each in schema:
        kind = known.get(each.name, each.dataType) if each.name in empty else each.dataType
        # Of 64 bits, as in JSON: a table does not get a wider column when a later file has a larger number.
        is_small = isinstance(kind, T.IntegerType) and each.name not in known
        types[each.name] = T.LongType() if is_small else kind
    inferred = T.StructType([T.StructField(name, type) for name, type in types.items()])
    return _keep_known_types(spark, inferred, known, fixed, widens, grows), void


def _empty(frame: DataFrame, names: Collection[str]) -> set[str]:
    """Return the columns that have nothing but nulls."""
    if not names:
        return set()
    counts = frame.agg(*(F.count(column(name)) for name in names)).collect()[0]
    return {name for name, count in zip(names, counts, strict=True) if not count}


def _keep_known_types(
    spark: Any, schema: StructType, known: Mapping[str, DataType], fixed: Collection[str], widens: bool, grows: bool
) -> StructType:
    """Return the types that columns had before, or wider ones where these hold what was found now and before."""
    cast = java_class(spark, "org.apache.spark.sql.catalyst.expressions.Cast")
    to_java = spark._jsparkSession.parseDataType

    def is_wider(one: DataType, other: DataType) -> bool:
        return bool(cast.canUpCast(to_java(other.json()), to_java(one.json())))

    def chosen(before: DataType, now: DataType) -> DataType:
        if before == now or isinstance(before, T.StringType):
            return before
        if isinstance(before, T.ArrayType) and isinstance(now, T.ArrayType):
            return T.ArrayType(chosen(before.elementType, now.elementType))
        if isinstance(before, T.StructType) and isinstance(now, T.StructType):
            types = {each.name: each.dataType for each in before}
            types |= {
                each.name: chosen(types[each.name], each.dataType) if each.name in types else each.dataType
                for each in now
                if grows or each.name in types
            }
            return T.StructType([T.StructField(name, kind) for name, kind in types.items()])
        # Any type can become a text.
        can_widen = widens and not isinstance(now, T.StringType) and is_wider(now, before)
        return now if can_widen and not is_wider(before, now) else before

    return T.StructType(
        [
            T.StructField(
                each.name,
                known[each.name] if each.name in fixed else chosen(known.get(each.name, each.dataType), each.dataType),
            )
            for each in schema
        ]
    )


def _inferred(
    spark: Any, lines: DataFrame, format: str, options: dict[str, str], names: list[str] | None = None
) -> StructType:
    """Return the schema that Spark's own reader infers of these lines."""
    reader = spark._jsparkSession.read()
    for name, value in options.items():
        reader = reader.option(name, value)
    texts = getattr(lines._jdf, "as")(java_class(spark, "org.apache.spark.sql.Encoders").STRING())
    # Spark merges the keys of partitions by the settings of the session that is active, in which `a` may be `A`: of the
    # lines that spell a column otherwise than the first, the values would be lost.
    with active(spark):
        read = reader.csv(texts) if format == "csv" else reader.json(texts)
    inferred = T.StructType.fromJson(json.loads(read.schema().json()))
    if names is None:
        return inferred
    types = [field.dataType for field in inferred]
    # A file without rows has no types.
    types += [T.StringType()] * (len(names) - len(types))
    return T.StructType([T.StructField(name, type) for name, type in zip(names, types, strict=True)])
