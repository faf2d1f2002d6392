"""Messages of any broker as rows: DataFrames of Spark, and of few messages a table of Arrow.

The messages of a batch are read and parsed once, also if the rows are used several times. A few thousand at a time are
parsed into Arrow, and each chunk is kept as one value of bytes. The columns are known when all messages are parsed;
then the chunks become columns. Tasks of Spark parse many messages. Few of them this process parses itself, by the same
functions: to plan a job takes longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import UTC_TIME, hinted, is_nested
from weft.spark_support.columns import struct_of
from weft.spark_support.lazy import F
from weft.systems.codec import Codec, codec_of
from weft.systems.codecs import kinds
from weft.systems.codecs.columns import converted, storable, unified_schema
from weft.systems.codecs.json import JsonCodec, documents_of
from weft.systems.stream_source import EVENT_TIME, Documents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COUNTS = ("good_rows", "bad_rows", "tombstones")
_BYTES = ("good", "columns", "kinds", "newest", "traceparents", "bad")
_CHUNK = pa.schema([*((name, pa.binary()) for name in _BYTES), *((name, pa.int64()) for name in _COUNTS)])
_ABOUT = ("columns", "kinds", "newest", "traceparents", *_COUNTS)
_CHUNK_ROWS = 10_000
_BAD = pa.schema(
    [
        ("payload", pa.binary()),
        ("error", pa.string()),
        ("partition", pa.string()),
        ("offset", pa.string()),
    ]
)
_RAW = ("key", "value", "topic", "partition", "offset")
"""What a row has of a message that is not parsed, as far as its broker has it."""
TRACEPARENT = "traceparent"
"""A column of messages where somebody traces the batch: the span that published a message, as W3C writes it."""
_MOST_TRACED, _LONGEST_TRACEPARENT = 128, 100
MOST_HERE, MOST_BYTES_HERE = 2_000, 16 << 20
"""Up to this many messages are read and parsed by this process."""
_Parse = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class _InSpark:
    """Chunks that tasks have made. Spark keeps them."""

    def __init__(self, messages: DataFrame, parse: _Parse) -> None:
        self.frame = messages.mapInArrow(parse, struct_of(_CHUNK)).persist()

    def about(self) -> pa.Table:
        """Return what there is to know of the chunks, without their rows."""
        return self.frame.select(*_ABOUT).toArrow()

    def rows(self, column: str, schema: pa.Schema) -> DataFrame:
        """Return the rows that are packed in a column."""
        chunks = self.frame.where("bad_rows > 0") if column == "bad" else self.frame
        return chunks.select(column).mapInArrow(partial(unpack, schema), struct_of(schema))

    def table(self, column: str, schema: pa.Schema) -> pa.Table | None:
        """Return the rows, where this process has them."""
        return None

    def close(self) -> None:
        """Let go of them."""
        self.frame.unpersist()


class _Here:
    """Chunks of few messages, which this process has made and keeps."""

    def __init__(self, messages: pa.Table, parse: _Parse, spark: SparkSession) -> None:
        self._spark = spark
        batches = messages.combine_chunks().to_batches(max_chunksize=_CHUNK_ROWS)
        self._chunks = pa.Table.from_batches(parse(batches), _CHUNK)

    def about(self) -> pa.Table:
        return self._chunks

    def rows(self, column: str, schema: pa.Schema) -> DataFrame:
        return _frame_of(self.table(column, schema), self._spark)

    def table(self, column: str, schema: pa.Schema) -> pa.Table:
        return pa.Table.from_batches(unpack(schema, self._chunks.select([column]).to_batches()), schema)

    def close(self) -> None:
        pass


class _Raw:
    """Messages that are not parsed: each is a row."""

    def __init__(self, messages: DataFrame, here: pa.Table | None) -> None:
        self._messages, self.here = messages, None
        if here is not None:
            names = [name for name in here.column_names if name in _RAW]
            self.here = here.select([*names, "timestamp"]).rename_columns([*names, EVENT_TIME])

    def rows(self, column: str, schema: pa.Schema | None) -> DataFrame:
        if column == "bad":
            return self._messages.sparkSession.createDataFrame([], struct_of(_BAD))
        if self.here is not None:
            return _frame_of(self.here, self._messages.sparkSession)
        shown = [name for name in self._messages.columns if name in _RAW]
        return self._messages.select(*shown, F.col("timestamp").alias(EVENT_TIME))

    def table(self, column: str, schema: pa.Schema | None) -> pa.Table | None:
        return self.here

    def close(self) -> None:
        pass


@dataclass
class ParsedMessages:
    """The rows of one micro-batch and the messages that are none. Both can be used as often as one likes: parsed
    messages are kept until `close`."""

    chunks: Any
    """Where they are."""
    good_rows: int | None
    """`None` for raw bytes that this process does not have: nobody counts them."""
    bad_rows: int = 0
    tombstones: int = 0
    """How many messages have no value: they are not rows."""
    columns: pa.Schema | None = None
    found: pa.Schema | None = None
    """The columns, with null as the type of what has none yet: the elements of empty arrays, for example."""
    known: Mapping[str, pa.DataType] = field(default_factory=dict)
    """The types under which the messages were parsed."""
    codec: Codec | None = None
    """What parsed them; `None` for raw bytes."""
    is_wider: bool = False
    """Whether columns have wider types than before."""
    added: Mapping[str, str] = field(default_factory=dict)
    newest: Mapping[str, int] = field(default_factory=dict)
    """By partition, the greatest time of its messages, in microseconds since 1970."""
    documents: Collection[str] = ()
    """The columns, in small letters, that are JSON as it is in the messages."""
    traceparents: Collection[str] = ()
    """The spans that published these messages: some if there are many."""

    @cached_property
    def good(self) -> DataFrame:
        """The rows."""
        frame: DataFrame = self.chunks.rows("good", self.columns)
        return frame

    @cached_property
    def bad(self) -> DataFrame:
        """The messages that are none, each with its reason: payload, error, partition, offset."""
        frame: DataFrame = self.chunks.rows("bad", _BAD)
        return frame

    def rejected(self) -> list[dict[str, Any]]:
        """Return the messages that could not be parsed."""
        if not self.bad_rows:
            return []
        here = self.chunks.table("bad", _BAD)
        rejected: list[dict[str, Any]] = (self.bad.toArrow() if here is None else here).to_pylist()
        return rejected

    def gather(self) -> pa.Table | None:
        """Return the rows, where this process has them."""
        return self.chunks.table("good", self.columns)

    @property
    def packed(self) -> DataFrame | None:
        """The rows as bytes, of which `unpack` makes rows, where tasks have made them."""
        return self.chunks.frame.select("good") if isinstance(self.chunks, _InSpark) else None

    def close(self) -> None:
        """Let go of what was kept."""
        self.chunks.close()


def _frame_of(rows: pa.Table, spark: SparkSession) -> DataFrame:
    """Return rows of this process as a DataFrame, with the types that a task would give them."""
    if not rows.num_rows:  # PySpark makes no lists of a column without a chunk
        rows = pa.Table.from_batches([pa.RecordBatch.from_pylist([], rows.schema)])
    return spark.createDataFrame(rows, struct_of(rows.schema))


def rows(
    frame: DataFrame,
    connection: Any,
    schema: Mapping[str, pa.DataType] | None = None,
    before: Mapping[str, pa.DataType] | None = None,
    *,
    widens: bool = True,
    grows: bool = True,
    added: Mapping[str, str] | None = None,
    codec: Codec | None = None,
    here: pa.Table | None = None,
    documents: Documents | None = None,
) -> ParsedMessages:
    """Return the messages of one micro-batch as rows, and those that are none with the reason.

    The frame has the columns value, partition, offset and timestamp, and those of `added`: by the name of a column of
    the rows, which is a text, the name that it has in the frame; perhaps `TRACEPARENT`. `codec`: another one than that
    of the connection. `here`: the same messages, if they are few and this process has them; then no job is run.

    JSON: the keys of all objects are the columns. A column of `schema` is of its type; `pa.json_()` asks for JSON as
    text. One of `before` is of the type that it had in earlier batches, or where it `widens` of a wider number, and
    where it `grows` an object may have more keys. Any other is of the type that most of its values have. A message with
    a value that does not fit is bad, alone. A column of nulls alone is of type void. `_event_ts` is the time of the
    message, also where it has such a key. Bad messages: payload, error, partition, offset.

    `documents` chooses, of columns of objects and lists, those that are JSON as it is in the messages. Their types are
    found, and decide which values fit, all the same.

    Avro and Protobuf: the columns are those of the newest schema of the `topic`, if it has one.
    """
    codec = codec or codec_of(connection.resolved().payload_format)
    if not codec.is_parsed:
        raw = _Raw(frame, here)
        there = None if raw.here is None else raw.here.schema
        return ParsedMessages(raw, None if raw.here is None else raw.here.num_rows, columns=there, found=there)
    names, declared = [*(before or {}), *(schema or {})], _without_case(schema or {})
    known = {**_without_case(before or {}), **declared}
    added = added or {}
    texts = _documents(documents, (before or {}).items(), declared) if isinstance(codec, JsonCodec) else set()

    def parse() -> tuple[_InSpark | _Here, pa.Table]:
        parsing = partial(parse_messages, codec, known, added=added, documents=texts)
        parsed = _InSpark(_wanted(frame, added), parsing) if here is None else _Here(here, parsing, frame.sparkSession)
        try:
            return parsed, parsed.about()
        except BaseException:
            parsed.close()
            raise

    chunks, parsed = parse()
    try:
        merged = kinds.merged_columns(map(json.loads, parsed["kinds"].to_pylist()))
        # Types are those of all messages, of which a task saw a part.
        if types := kinds.settled(merged, known, declared, widens=widens, grows=grows):
            known |= types
            chunks.close()
            chunks, parsed = parse()
        as_found = columns_of(parsed, names)
        if isinstance(codec, JsonCodec) and (chosen := _documents(documents, _items(as_found), declared)) - texts:
            texts |= chosen
            chunks.close()
            chunks, parsed = parse()
        good_rows, bad_rows, tombstones = (sum(parsed[name].to_pylist()) for name in _COUNTS)
        traced = dict.fromkeys(each for some in parsed["traceparents"].to_pylist() for each in json.loads(some))
        return ParsedMessages(
            chunks,
            good_rows,
            bad_rows,
            tombstones,
            columns=_with_documents(storable(as_found), texts).append(pa.field(EVENT_TIME, UTC_TIME)),
            found=as_found,
            known=known,
            codec=codec,
            is_wider=any(not known[name.lower()].equals(kind) for name, kind in (before or {}).items()),
            added=added,
            documents=texts,
            newest=_newest(map(json.loads, parsed["newest"].to_pylist())),
            traceparents=traced.keys(),
        )
    except BaseException:
        chunks.close()
        raise


def _items(schema: pa.Schema) -> Iterable[tuple[str, pa.DataType]]:
    return zip(schema.names, schema.types, strict=True)


def _documents(
    chooses: Documents | None, columns: Iterable[tuple[str, pa.DataType]], declared: Mapping[str, pa.DataType]
) -> set[str]:
    """Return the columns, in small letters, that are JSON as it is in the messages."""
    nested = [name for name, kind in columns if is_nested(kind) and name.lower() not in declared]
    return set() if chooses is None or not nested else set(map(str.lower, chooses(nested)))


def _with_documents(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    return pa.schema([hinted(each.name, "json") if each.name.lower() in names else each for each in schema])


def _wanted(frame: DataFrame, added: Mapping[str, str]) -> DataFrame:
    traced = [TRACEPARENT] if TRACEPARENT in frame.columns else []
    return frame.select(*dict.fromkeys(("value", "partition", "offset", "timestamp", *added.values(), *traced)))


def _newest(chunks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for chunk in chunks:
        for partition, moment in chunk.items():
            newest[partition] = max(moment, newest.get(partition, moment))
    return newest


def columns_of(parsed: pa.Table, names: Iterable[str]) -> pa.Schema:
    """Return the columns that chunks have together. Those of these names are spelled so."""
    schemas = [pa.ipc.read_schema(pa.py_buffer(each)) for each in dict.fromkeys(parsed["columns"].to_pylist())]
    return unified_schema(schemas, names)


def _without_case(types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    return {name.lower(): kind for name, kind in types.items()}


def with_offsets(frame: DataFrame, parsed: ParsedMessages, column: str, here: pa.Table | None = None) -> DataFrame:
    """Parse a micro-batch again, and return its rows with `partition:offset` of each in another column. Unless this
    process has its messages `here`, they are read again."""
    if parsed.found is None or parsed.codec is None:
        return parsed.good.withColumn(column, F.concat_ws(":", "partition", "offset"))
    parse = partial(
        parse_messages,
        parsed.codec,
        parsed.known,
        offset_column=column,
        added=parsed.added,
        documents=parsed.documents,
    )
    columns = _with_documents(storable(parsed.found), parsed.documents)
    columns = columns.append(pa.field(EVENT_TIME, UTC_TIME)).append(pa.field(column, pa.string()))
    if here is not None:
        return _Here(here, parse, frame.sparkSession).rows("good", columns)
    chunks = _wanted(frame, parsed.added).mapInArrow(parse, struct_of(_CHUNK))
    return chunks.select("good").mapInArrow(partial(unpack, columns), struct_of(columns))


def parse_messages(
    codec: Codec,
    known: Mapping[str, pa.DataType],
    batches: Iterable[pa.RecordBatch],
    offset_column: str | None = None,
    added: Mapping[str, str] | None = None,
    documents: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """In a task: parse messages into chunks, with partition:offset of each in a column, if one is named. `documents`:
    the columns, in small letters, that are JSON as it is in the messages."""
    own = {EVENT_TIME, *(added or {})}
    decoder = codec.decoder(known)
    for batch in batches:
        messages = batch.filter(batch["value"].is_valid())
        parsed = decoder.parse(messages["value"])
        columns = {name: each for name, each in parsed.columns.items() if name.lower() not in own}
        of_messages = {name: messages[each].cast(pa.string()) for name, each in (added or {}).items()}
        of_messages[EVENT_TIME] = messages["timestamp"].cast(UTC_TIME)
        if offset_column is not None:
            texts = (messages[name].cast(pa.string()) for name in ("partition", "offset"))
            of_messages[offset_column] = pc.binary_join_element_wise(*texts, ":")
        all_good, numbers = len(parsed.good) == messages.num_rows, pa.array(parsed.good, pa.int64())
        columns |= {name: each if all_good else each.take(numbers) for name, each in of_messages.items()}
        typed = good = pa.RecordBatch.from_pydict(columns)
        if documents and len(good):
            values = messages["value"] if all_good else messages["value"].take(numbers)
            good = pa.RecordBatch.from_pydict({**columns, **documents_of(values, columns, documents)})
        numbers = pa.array(parsed.bad, pa.int64())
        of_bad = (messages[name].take(numbers) for name in ("value", "partition", "offset"))
        payload, *place = of_bad
        place = [each.cast(pa.string()) for each in place]
        bad = pa.RecordBatch.from_arrays([payload, pa.array(parsed.bad.values(), pa.string()), *place], schema=_BAD)
        yield pa.RecordBatch.from_pylist(
            [
                {
                    "good": _packed(good),
                    "columns": typed.drop_columns([EVENT_TIME]).schema.serialize().to_pybytes(),
                    "kinds": json.dumps(parsed.kinds, default=dict).encode(),
                    "newest": json.dumps(newest_of(messages)).encode(),
                    "traceparents": json.dumps(_traceparents_of(messages)).encode(),
                    "bad": _packed(bad),
                    "good_rows": good.num_rows,
                    "bad_rows": bad.num_rows,
                    "tombstones": batch.num_rows - messages.num_rows,
                }
            ],
            schema=_CHUNK,
        )


def newest_of(messages: pa.RecordBatch | pa.Table, latest: int | None = None) -> dict[str, int]:
    """Return by partition the greatest time of messages that are not later than `latest`, in microseconds."""
    times = messages["timestamp"]
    moments = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    timed = pa.table({"partition": messages["partition"], "at": moments})
    if latest is not None:
        timed = timed.filter(pc.less_equal(timed["at"], latest))
    by_partition = timed.group_by("partition")
    return {str(each["partition"]): each["at_max"] for each in by_partition.aggregate([("at", "max")]).to_pylist()}


def _traceparents_of(messages: pa.RecordBatch) -> list[str]:
    if TRACEPARENT not in messages.schema.names:
        return []
    distinct = messages[TRACEPARENT].cast(pa.binary()).drop_null().unique()  # anybody may write any bytes there
    short = distinct.filter(pc.less_equal(pc.binary_length(distinct), _LONGEST_TRACEPARENT))
    return [each.decode(errors="replace") for each in short[:_MOST_TRACED].to_pylist()]


def unpack(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task: convert chunks to these columns."""
    for batch in batches:
        for chunk in batch.column(0):
            with pa.ipc.open_stream(chunk.as_buffer()) as reader:
                for part in reader:
                    there = {name.lower(): part.column(number) for number, name in enumerate(part.schema.names)}
                    nothing = pa.nulls(part.num_rows)
                    yield pa.RecordBatch.from_arrays(
                        [converted(there.get(each.name.lower(), nothing), each.type) for each in schema], schema=schema
                    )


def _packed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data
