"""The capability of a system to be a target that Spark writes: files, tables or topics.

A system names its class of targets in `System.target`. SQL tables need none: every system with `tables` is written by
`weft.systems.sql.commit`, and every system with a `log` takes events. A target writes a DataFrame under the key of a
load, and called again with the same load it changes nothing, unless it is not `exactly_once`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pyarrow as pa

from weft.errors import DeclarationError
from weft.systems.load import Counts, Load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Reject = Callable[[pa.Table, str], None]
"""Takes rows that a target refuses, with the reason, before it commits the others."""

Documents = Callable[["StructType"], Collection[str]]
"""Chooses of the columns that a reader finds those that it returns as texts, as they are in what it reads: objects and
lists, which are texts of JSON, and floats."""


class ArrowRows(Protocol):
    """Rows as Arrow, in parts."""

    @property
    def schema(self) -> pa.Schema:
        """Their canonical columns."""

    @property
    def columns(self) -> StructType:
        """The columns as Spark would read them."""

    def each_part(self, work: Callable[[int, Iterable[pa.RecordBatch]], Any]) -> list[Any]:
        """Return what `work` returns for each part's number and batches. A part may be tried again."""


@dataclass(frozen=True)
class TableLog:
    """What the log of a table says, and what it keeps for one writer of loads."""

    version: int
    """Grows with each change of the table."""
    columns: str | None = None
    """The columns, as Spark writes them in JSON."""
    rows: int | None = None
    """How many there are, where the log says so."""
    batch_id: int = -1
    """The last load of the writer; -1 where there is none."""
    state: str | None = None
    """What was stored with that load."""
    at: datetime | None = None
    """When that was."""
    positions: str | None = None
    """`Load.positions` of the last load, if that was a batch of a streaming pipeline."""
    is_complete: bool = True
    """Whether the last load is in place. One that was cut off is completed by the next, or by `SparkTarget.has`."""


class SparkTarget(ABC):
    """The tables, files or topics of one connection. Sessions that are handed over have its jars and settings."""

    modes: ClassVar[tuple[str, ...]] = ("append",)
    exactly_once: ClassVar[bool] = True
    """Whether a load that is tried again is there once. Only such a target takes loads and batch pipelines."""
    keeps_columns: ClassVar[bool] = False
    """Whether a table that is truncated keeps its columns."""
    folds_columns: ClassVar[bool] = False
    """Whether names of columns that differ in upper and lower case alone are one name."""
    removes_rows: ClassVar[bool] = False
    """Whether a merge removes the rows that a load names in `removed`."""
    keeps_states: ClassVar[bool] = False
    """Whether it keeps the `state` of a load in the commit of its rows, so that a model may be built here. Then
    it has a `place` for each table, and can `drop` one."""

    def __init__(self, connection: Any) -> None:
        self.connection: Any = connection

    def check(self, load: Load) -> None:
        """Raise for what the target cannot do, before anything runs."""
        aside = [check for check in load.checks if check.reaction == "quarantine"]
        if aside:
            raise DeclarationError(
                f"{aside[0]}: {self.connection.label} ({self.connection.kind}) has no place to put rows aside.",
                hint='Use on_quality_failure="fail" or "warn", or a SQL database.',
            )

    def state(self, load: Load) -> str | None:
        """Return a text that changes whenever the target of a load does, where that is known without Spark."""
        return None

    def validate(self, name: str) -> str:
        """Raise if a streaming pipeline could not write to `name`; return details to show. Changes nothing."""
        return ""

    @abstractmethod
    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        """Commit the rows of a DataFrame under the key of a load. Rows that the target refuses by themselves, such as
        those without a key, go to `reject`, where there is one, before the commit."""

    def copy(self, rows: ArrowRows, load: Load, spark: SparkSession) -> Counts | None:
        """Commit Arrow rows without making them Spark's; return `None`, with nothing written, if only `write` can."""
        return None

    def has(self, load: Load, spark: SparkSession) -> bool:
        """Return whether the target has the rows of a load."""
        return False

    def tables(self) -> list[tuple[str | None, str]]:
        """Return schema and name of the tables that loads made here, as far as they are found quickly."""
        return []

    def kept(self, load: Load, *, with_columns: bool = True) -> TableLog | None:
        """Return what the log of the load's table says, without Spark; `None` where no load has made one. Without its
        columns it may be found sooner."""
        return None

    def rows(self, load: Load) -> int | None:
        """Return how many rows the load's table has, without Spark; `None` where its log does not say so."""
        kept = self.kept(load, with_columns=False)
        return None if kept is None else kept.rows

    def place(self, load: Load) -> str:
        """Return where the load's table is: the same by each connection that leads there."""
        raise NotImplementedError

    def drop(self, load: Load) -> None:
        """Remove the load's table and its log, without Spark; other tables in its folder stay. A drop that was cut off
        is finished when it is called again."""
        raise NotImplementedError

    def version(self, load: Load) -> int | None:
        """Return the `version` of `kept`, where it is found sooner by itself."""
        kept = self.kept(load, with_columns=False)
        return None if kept is None else kept.version

    def has_others_files(self, load: Load) -> bool:
        """Return whether there are files of rows where the load's table would be that no load made. Without Spark."""
        return False

    def columns(self, load: Load, spark: SparkSession) -> list[str] | None:
        """Return the columns of the load's table; `None` where no load has made it."""
        return None

    def refused_columns(self, columns: Iterable[pa.Field], load: Load, spark: SparkSession) -> dict[str, str]:
        """Return the new columns that the load's table cannot have because of a name, each with the reason."""
        return {}

    def read(self, path: str, spark: SparkSession) -> DataFrame:
        """Return the rows of a table, or of the files at a path. Only an `exactly_once` target is asked."""
        raise NotImplementedError

    def read_documents(self, path: str, spark: SparkSession, documents: Documents) -> DataFrame:
        """Return the rows with those columns as texts of JSON that `documents` chooses, where they are in the files."""
        return self.read(path, spark)

    # ---------------------------------------------------------------------------------------------------------- preview

    def stored(self, load: Load, spark: SparkSession) -> DataFrame | None:
        """Return the rows of the load's table now; `None` if there is none. Raise if the load would be refused."""
        return None

    def changes(self, frame: DataFrame, stored: DataFrame | None, load: Load) -> Counts:
        """Return what a merge or scd2 load of these rows would insert, update and delete."""
        raise NotImplementedError
