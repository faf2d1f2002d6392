"""The columns that a source has had: files and messages bring their own, and a batch may lack what others have.

They are kept beside the checkpoint, so that SQL which names a column goes on working where a batch does not have it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Columns:
    """By source, the columns of all batches so far, with the type that each had last."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._checkpoint = ""
        self._known: dict[str, dict[str, Any]] = {}

    def complete(self, frame: Any, source: str, checkpoint: str) -> Any:
        """A batch with all columns that its source has had. One of nulls alone has the type that it had before."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import NullType, StructField

        self._load(checkpoint)
        known = self._known.setdefault(source, {})
        found = {field.name: field for field in frame.schema}
        columns = []
        for name, field in found.items():
            column = F.col(f"`{name.replace('`', '``')}`")
            if isinstance(field.dataType, NullType) and name in known:
                column = column.cast(StructField.fromJson(known[name]).dataType)
            columns.append(column.alias(name))
        for name, text in known.items():
            if name not in found:
                columns.append(F.lit(None).cast(StructField.fromJson(text).dataType).alias(name))
        new = {
            name: field.jsonValue()
            for name, field in found.items()
            if not isinstance(field.dataType, NullType) and known.get(name) != field.jsonValue()
        }
        if new:
            known.update(new)
            self._store()
        return frame.select(*columns)

    def _load(self, checkpoint: str) -> None:
        if checkpoint == self._checkpoint:
            return
        self._checkpoint, self._known = checkpoint, {}
        if self._path is None or not self._path.exists():
            return
        stored = json.loads(self._path.read_text(encoding="utf-8"))
        if stored["checkpoint"] == checkpoint:  # that of a checkpoint that was reset says nothing
            self._known = stored["columns"]

    def _store(self) -> None:
        if self._path is None:
            return
        text = json.dumps({"checkpoint": self._checkpoint, "columns": self._known})
        draft = self._path.with_suffix(".new")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, self._path)
