"""The columns that a source has had: files and messages bring their own, and a batch may lack what others have.

They are kept in the checkpoint, so that SQL which names a column goes on working where a batch does not have it.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from weft.spark_support.folder import Location
from weft.systems.stream_source import OFFSET


class Columns:
    """By source, the columns of all batches so far, with the type that each had last."""

    NAME = "columns.json"

    def __init__(self, home: Location) -> None:
        """`home`: the checkpoint."""
        self._file = home.at(self.NAME)
        self._checkpoint = ""
        self._known: dict[str, dict[str, Any]] = {}

    def complete(self, frame: Any, source: str, checkpoint: str) -> Any:
        """A batch with all columns that its source has had. One of nulls alone has the type that it had before."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import NullType, StructField

        known = self._of(source, checkpoint)
        fields = {field.name: field for field in frame.schema}
        # SQL takes `Id` and `id` for one column.
        here = {name.lower(): name for name in fields}
        missing = {}
        for name, text in known.items():
            spelled = here.get(name.lower(), name)
            if spelled not in fields or isinstance(fields[spelled].dataType, NullType):
                missing[spelled] = F.lit(None).cast(StructField.fromJson(text).dataType)
        new = {
            name: field.jsonValue()
            for name, field in fields.items()
            if not isinstance(field.dataType, NullType) and known.get(name) != field.jsonValue() and name != OFFSET
        }
        if new:
            newer = {name.lower() for name in new}
            for name in [each for each in known if each.lower() in newer]:
                del known[name]
            known.update(new)
            self._store()
        # Each step over a DataFrame takes as long as to write some thousand rows.
        return frame.withColumns(missing) if missing else frame

    def types(self, source: str, checkpoint: str) -> dict[str, Any]:
        """Return the types that the columns of a source had last."""
        from pyspark.sql.types import StructField

        return {name: StructField.fromJson(text).dataType for name, text in self._of(source, checkpoint).items()}

    def kept(self, source: str) -> list[pa.Field]:
        """Return all columns that a source has had."""
        from pyspark.sql.pandas.types import to_arrow_type
        from pyspark.sql.types import StructField

        stored = self._read()
        columns = {} if stored is None else stored["columns"].get(source, {})
        kinds = {name: StructField.fromJson(text).dataType for name, text in columns.items()}
        return [pa.field(name, to_arrow_type(kind, timezone="UTC")) for name, kind in kinds.items()]

    def _of(self, source: str, checkpoint: str) -> dict[str, Any]:
        self._load(checkpoint)
        return self._known.setdefault(source, {})

    def _read(self) -> dict[str, Any] | None:
        text = self._file.read()
        return None if text is None else dict(json.loads(text))

    def _load(self, checkpoint: str) -> None:
        if checkpoint == self._checkpoint:
            return
        self._checkpoint, self._known = checkpoint, {}
        stored = self._read()
        # That of a checkpoint that was reset says nothing.
        if stored is not None and stored["checkpoint"] == checkpoint:
            self._known = stored["columns"]

    def _store(self) -> None:
        self._file.write(json.dumps({"checkpoint": self._checkpoint, "columns": self._known}))
