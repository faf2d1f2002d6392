"""State in files of a checkpoint: Parquet files of rows, and for each batch a manifest that says which of them count.

A manifest is made where there is none of its number, and says everything: what the batch decided, the files with rows,
and those with the numbers of rows that were removed since. What the last manifest does not name is left over from a
crash. The process has all rows in memory too: it reads files when it starts, and only writes them after that.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from dataclasses import asdict
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from weft.errors import WeftError
from weft.spark_support.folder import Location
from weft.systems.state_in_memory import InMemoryState, mask
from weft.systems.state_store import END, Selection, StateBatch, overtaken

_ROW, _MANIFEST = "_weft_row", ".json"
# Live rows are written again, as one file, when there are more files, or when files hold this many dead rows.
_MOST_FILES, _MOST_DEAD = 100, 100_000
_KEPT_MANIFESTS = 50


class FilesState(InMemoryState):
    """The state of one checkpoint, in a folder of it."""

    def __init__(self, folder: Location) -> None:
        super().__init__()
        self._folder = folder
        self._files: list[str] = []
        self._numbers = np.zeros(0, np.int64)
        """The number of each row."""
        self._next = 0
        self._written = 0
        """How many rows the files have, with those that were removed."""
        self._broken: list[str] = []
        """Manifests that a crash cut off."""
        self._removed: list[tuple[int, int]] = []
        """Up to which end rows were removed, though files have them, and the number of the first row after that."""

    @property
    def path(self) -> str:
        """Where the files are."""
        return self._folder.path

    def last(self) -> StateBatch | None:
        while True:
            names = self._folder.names()
            newest, manifest, files = None, None, []
            for newest in sorted(filter(_is_manifest, names), key=_number_of, reverse=True):
                with suppress(ValueError):  # one that a crash cut off
                    manifest = json.loads(self._folder.at(newest).read() or "")
                    break
                self._broken.append(newest)
            if manifest is None:
                return None
            files = [self._folder.at(name).read_bytes() for name in manifest["files"]]
            if None not in files:
                break
            # A process that has gone on meanwhile removed some.
            if set(names) == set(self._folder.names()):
                raise WeftError(f"Files of the state are missing in {self.path}: those that {newest} names.")
        self._files, self._next = manifest["files"], manifest["next"]
        self._removed = [(upto, before) for upto, before in manifest["removed"]]
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(manifest["columns"])))
        parts = [pq.read_table(pa.py_buffer(each or b"")) for each in files]
        gone = pa.chunked_array([each[_ROW] for each in parts if each.column_names == [_ROW]], pa.int64())
        tables = [each for each in parts if each.column_names != [_ROW]]
        self._written = sum(map(len, tables))
        # Rows that are gone may hold values that their column no longer can.
        rows = pa.concat_tables([_as(self._live(each, gone.combine_chunks()), schema) for each in tables])
        self._numbers = rows[_ROW].to_numpy()
        self._rows = rows.select(schema.names).replace_schema_metadata(schema.metadata)
        self._last = StateBatch(**manifest["decided"])
        return self._last

    def _live(self, rows: pa.Table, gone: pa.Array) -> pa.Table:
        """Return the rows of a file that were not removed."""
        is_live = pc.invert(pc.is_in(rows[_ROW], gone))
        for upto, before in self._removed:
            is_live = pc.and_(is_live, pc.or_(pc.greater(rows[END], upto), pc.greater_equal(rows[_ROW], before)))
        return rows.filter(is_live)

    def append(self, rows: pa.Table, batch: StateBatch, replaced: Selection | None = None) -> None:
        if self._last is not None and not batch.follows(self._last):
            raise overtaken(batch)
        kept, kept_numbers = rows.slice(0, 0) if self._rows is None else self._rows, self._numbers
        gone = kept_numbers[:0]
        if replaced is not None:
            is_gone = mask(kept, replaced)
            gone = kept_numbers[is_gone.to_numpy()]
            kept, kept_numbers = kept.filter(pc.invert(is_gone)), kept_numbers[~is_gone.to_numpy()]
        new_numbers = np.arange(self._next, self._next + len(rows))
        live, numbers = pa.concat_tables([kept, rows]), np.concatenate([kept_numbers, new_numbers])
        files, written = [*self._files], self._written + len(rows)
        if len(files) > _MOST_FILES or written - len(live) > max(_MOST_DEAD, len(live)):
            files, written = [self._write(batch, _numbered(live, numbers))], len(live)
        else:
            if len(rows) or not files:  # one file at least, so that it is known which columns there are
                files.append(self._write(batch, _numbered(rows, new_numbers)))
            if len(gone):
                files.append(self._write(batch, pa.table({_ROW: gone})))
        manifest = {
            "columns": base64.b64encode(live.schema.serialize().to_pybytes()).decode(),
            "decided": asdict(batch),
            "files": files,
            "next": self._next + len(rows),
            "removed": self._removed,
        }
        name = f"{batch.number}-{batch.ticks}{_MANIFEST}"
        for each in self._broken:
            self._folder.at(each).remove()
        if self._is_overtaken(name) or not self._folder.at(name).create(json.dumps(manifest)):
            raise overtaken(batch)
        if self._is_overtaken(name):  # by a process that did so at the same moment
            raise overtaken(batch)
        self._rows, self._numbers, self._last = live, numbers, batch
        self._files, self._written, self._next = files, written, self._next + len(rows)
        # Files that the manifest does not name are of the batch before, or of a crash. Some manifests stay, so that a
        # process that was stopped for long finds that others have gone on.
        kept = {*files, *sorted(filter(_is_manifest, self._folder.names()), key=_number_of)[-_KEPT_MANIFESTS:]}
        for each in self._folder.names():
            if each not in kept:
                self._folder.at(each).remove()

    def _is_overtaken(self, name: str) -> bool:
        """Return whether there is a manifest after one of this name."""
        return any(_number_of(each) > _number_of(name) for each in filter(_is_manifest, self._folder.names()))

    def remove(self, upto: int) -> None:
        """The next manifest says so: until then a crash brings the rows back, and they are removed again."""
        if self._rows is not None:
            is_live = pc.greater(self._rows[END], upto)
            self._rows, self._numbers = self._rows.filter(is_live), self._numbers[is_live.to_numpy()]
            self._removed = [*(each for each in self._removed if each[0] > upto), (upto, self._next)]

    def _write(self, batch: StateBatch, rows: pa.Table) -> str:
        name, sink = f"{batch.number}-{uuid4().hex[:12]}.parquet", pa.BufferOutputStream()
        pq.write_table(rows, sink, compression="zstd")
        self._folder.at(name).write_bytes(sink.getvalue().to_pybytes())
        return name


def _is_manifest(name: str) -> bool:
    return name.endswith(_MANIFEST)


def _number_of(name: str) -> list[int]:
    return [int(each) for each in name.removesuffix(_MANIFEST).split("-")]


def _numbered(rows: pa.Table, numbers: np.ndarray) -> pa.Table:
    return rows.append_column(_ROW, pa.array(numbers, pa.int64()))


def _as(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows of a file with the columns that the state has now."""
    columns = {
        each.name: rows[each.name].cast(each.type) if each.name in rows.column_names else pa.nulls(len(rows), each.type)
        for each in schema
    }
    return pa.table([*columns.values(), rows[_ROW]], schema=schema.append(pa.field(_ROW, pa.int64())))
