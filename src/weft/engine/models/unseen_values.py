"""What a model does not see of a stream: values that a column has no place for, and that are in `_weft_extra`. Its
column has a null there, so that a sum leaves them out. A build counts them and says so."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa

from weft.engine.models.inputs import ModelSource, Observer
from weft.engine.models.state import LeftOut, LeftOuts
from weft.engine.readers import SqlReader, StreamReader, read_all
from weft.streams import runtime
from weft.systems.log import EXTRA, META_TYPES, ROWID


def count(observer: Observer, sources: list[ModelSource]) -> LeftOuts:
    """Return, of each input that a function is given, the fields whose values a build of these events leaves out."""
    left_outs = {each.input.name: _count(observer, each) for each in sources if each.input.parameter is not None}
    return {name: fields for name, fields in left_outs.items() if fields}


def _count(observer: Observer, source: ModelSource) -> dict[str, LeftOut]:
    reader = source.reader
    if not isinstance(reader, StreamReader) or reader.upto <= reader.after:
        return {}
    # A key for which the stream has no column is none of the input: the model cannot have meant it.
    fields = {name for name, _ in reader.types if name not in META_TYPES}
    counts: dict[str, LeftOut] = {}
    for batch in _extras(observer, source, reader):
        for offset, text in zip(batch.column(ROWID).to_pylist(), batch.column(EXTRA).to_pylist(), strict=True):
            for name, value in json.loads(text).items():
                if value is not None and name in fields:
                    counts[name] = LeftOut(1, offset).after(counts.get(name))
    return counts


def _extras(observer: Observer, source: ModelSource, reader: StreamReader) -> Iterator[pa.RecordBatch]:
    """Yield the offsets and extras of the events that have some: most streams have none."""
    asked = reader.selecting([ROWID, EXTRA])
    stream, connection = source.relation.stream, source.relation.connection
    assert stream is not None
    if source.relation.table is not None:
        tables = observer.tables(connection)
        sql = (
            f"SELECT {tables.listed(asked.schema.names)} FROM {tables.connection.stream_table(stream)} "
            f"WHERE {ROWID} > {reader.after} AND {ROWID} <= {reader.upto} AND {EXTRA} IS NOT NULL"
        )
        yield from read_all(SqlReader(tables, sql, asked.schema))
        return
    log = runtime.open_stream(stream, connection, to_read=True).log
    for batch in log.read_arrow(reader.after, reader.upto, [ROWID, EXTRA]):
        yield batch.filter(batch.column(EXTRA).is_valid())


def merged(before: LeftOuts, now: LeftOuts) -> LeftOuts:
    """Return what two builds of different events leave out."""
    both = {name: dict(fields) for name, fields in before.items()}
    for name, fields in now.items():
        known = both.setdefault(name, {})
        known.update({field: each.after(known.get(field)) for field, each in fields.items()})
    return both


def described(left_outs: LeftOuts) -> list[str]:
    """Say what is left out, a line for each field."""
    return [
        f"{name}: {each.events:,} event{'' if each.events == 1 else 's'} with a value of {field!r} that its column has "
        f"no place for: it is null here. Look: weft streams tail {name.rpartition('.')[2]} --since {each.first - 1}"
        for name, fields in left_outs.items()
        for field, each in fields.items()
    ]
