"""Reads the rows of a micro-batch under the types that the columns of each source have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.engine.streaming import fan_in
from weft.engine.streaming.checkpoint_files import Columns
from weft.engine.streaming.log_source import EventRows
from weft.engine.streaming.transform import TypedRows
from weft.errors import WeftError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.systems.log import EXTRA
from weft.systems.stream_source import BatchRows, FrameRows, UntypedRows


class BatchReader:
    """Reads the rows of all sources. Columns of one name are one column, where rows of all sources become one table."""

    def __init__(self, pipeline: StreamingPipeline, columns: Columns) -> None:
        self._pipeline, self._columns = pipeline, columns
        # For a mirror, schema_evolution decides about new columns.
        self.widens = pipeline.on_drift == "evolve" or pipeline.cdc is not None
        self._is_read = fan_in.columns_read(pipeline)
        self._sees_extra = EXTRA in (pipeline.transform_sql or "").lower()
        """Whether the SQL itself has the values that fit no column of a stream."""

    def read(self, parts: Sequence[BatchRows], query_id: str) -> Iterator[TypedRows]:
        """Yield the rows of each source, those of files and messages under the types that their columns had, those of
        streams without events that have values of other types."""
        alike: dict[int, FrameRows | None] = {}
        refused: dict[str, dict[str, str]] = {}
        if self._pipeline.unites_sources and len(parts) > 1:
            streams = {each.source: fan_in.types_of_rows(each) for each in parts if isinstance(each, EventRows)}
            refused = self._refused(parts, streams, query_id)
            alike = self._read_alike(parts, streams, query_id)
        for each in parts:
            rows: TypedRows | None
            if id(each) in alike:
                rows = alike[id(each)]
            elif isinstance(each, UntypedRows):
                rows = each.read(self._columns.types(each.source, query_id), widens=self.widens)
            elif isinstance(each, EventRows) and (not self._sees_extra or each.source in refused):
                rows = each.split(refused.get(each.source), mends=not self._sees_extra)
            else:
                rows = each
            if rows is not None:
                yield rows

    def _refused(
        self, parts: Sequence[BatchRows], streams: dict[str, dict[str, Any]], query_id: str
    ) -> dict[str, dict[str, str]]:
        """Return, by stream, the columns that an event added and that cannot be next to those of another source; they
        are taken out of its types. Take note of the others, so that they count while the stream has no events."""
        if not fan_in.sets_aside(self._pipeline):
            return {}
        before = {each.source: self._columns.types(each.source, query_id) for each in parts}
        types = {each.source: streams.get(each.source, before[each.source]) for each in parts}
        declared = {
            each.source: each.declared if isinstance(each, EventRows) else self._columns.declared(each.source)
            for each in parts
        }
        of_all = fan_in.refused(types, declared, before, self._is_read)
        refused = {source: columns for source, columns in of_all.items() if source in streams}
        for source, columns in streams.items():
            for name in refused.get(source, ()):
                del columns[name]
            self._columns.note(fan_in.schema_of(columns), source, query_id)
        return refused

    def _read_alike(
        self, parts: Sequence[BatchRows], streams: Mapping[str, dict[str, Any]], query_id: str
    ) -> dict[int, FrameRows | None]:
        """Return the rows of files and messages, by the identity of what is read. A column that another source has too
        is of its type; a value that does not fit makes its row a bad one, as where one source has two types."""
        untyped = [each for each in parts if isinstance(each, UntypedRows)]
        if not untyped:
            return {}
        types: dict[str, dict[str, Any]] = {}
        fixed: dict[str, dict[str, Any]] = {}
        for each in parts:
            if isinstance(each, UntypedRows):
                types[each.source] = self._columns.types(each.source, query_id)
                fixed[each.source] = self._columns.declared(each.source)
            else:
                types[each.source] = fixed[each.source] = streams.get(each.source) or fan_in.types_of_rows(each)
        read: dict[int, FrameRows | None] = {}
        by_source: dict[str, dict[str, Any]] = {}
        for each in untyped:
            self._columns.agree(each.source, fan_in.missing(each.source, (*fixed.values(), *types.values()), types))
            read[id(each)] = rows = each.read(self._columns.types(each.source, query_id), widens=self.widens)
            by_source[each.source] = {} if rows is None else fan_in.types_of_rows(rows)
            types[each.source] = fan_in.updated(types[each.source], by_source[each.source])
        # Files of Parquet keep the types that are written in them, also when they are read under others. That is known
        # after the first time; the second time these types decide those of the other sources.
        for _ in range(2):
            is_settled = True
            for source, others in fan_in.settled(types, fixed, widens=self.widens).items():
                self._columns.agree(source, others)
                for each in untyped:
                    if each.source == source and others.keys() & by_source[source].keys():
                        rows = each.read(self._columns.types(source, query_id), widens=False, again=True)
                        read[id(each)], now = rows, {} if rows is None else fan_in.types_of_rows(rows)
                        if own := fan_in.unchanged(others, by_source[source], now):
                            fixed[source] = {**fixed[source], **own}
                            self._columns.agree(source, own)
                            is_settled = False
                        by_source[source], types[source] = now, fan_in.updated(types[source], now)
            if is_settled:
                break
        return read

    def split(self, parts: Sequence[BatchRows], query_id: str, widens: bool, grows: bool) -> list[BatchRows]:
        """Return the rows again, with those apart that cannot be parsed; parts of which none is apart are returned as
        they were given. `widens` and `grows`: see `UntypedRows.split`."""
        again = list(parts)
        for number, each in enumerate(parts):
            if isinstance(each, UntypedRows):
                with suppress(WeftError):  # the error that the batch failed with says more
                    rows = each.split(self._columns.types(each.source, query_id), widens=widens, grows=grows)
                    if rows is not None and rows.bad:
                        again[number] = rows
                    elif rows is not None:
                        rows.close()
        return again
