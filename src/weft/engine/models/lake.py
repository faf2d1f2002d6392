"""Results of models in Delta tables and files.

What a model has read is stored in the commit of its rows: in the log of the table. A build is the next batch of its
writer, so of two builds that follow the same one the log takes one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from weft.columns import canonical_schema
from weft.engine import inputs
from weft.engine.inputs import Input
from weft.engine.load import Job
from weft.engine.models.state import Recorded, StoredModel, decoded, load_of
from weft.errors import ConnectionFailedError, DeclarationError, LoadRefusedError, WeftError
from weft.pipelines.models import Model
from weft.spark_support.folder import GLOB
from weft.systems.base import Connection, system_for
from weft.systems.load import Counts, Load
from weft.systems.sql.tables import Column
from weft.systems.target import SparkTarget, TableLog

_log = logging.getLogger("weft.engine")
WRITER = "model"
"""The name under which the log of a table has the builds of its model."""


class Lake:
    """The tables of a connection to Delta or files that models are built into, or read."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._target: SparkTarget = system_for(connection.kind).load("target")(connection)

    def refuse(self, model: Model) -> None:
        """Raise for a model that cannot be built here."""
        here = f"{self.connection.label} ({self.connection.kind})"
        if not self._target.keeps_states:
            raise DeclarationError(
                f"Model {model.name!r} cannot be built in {here}, which keeps nothing about what a model has read.",
                hint="Name a SQL database, Delta tables or files as its connection.",
            )
        if model.materialise == "view":
            raise DeclarationError(
                f"Model {model.name!r} cannot be a view in {here}: a view is a query of a SQL database.",
                hint='materialise="table"',
            )
        if load_of(model).mode not in self._target.modes:
            raise DeclarationError(
                f"Model {model.name!r} cannot be {model.materialise!r} in {here}, whose files are never changed.",
                hint='materialise="table" or "incremental"; Delta tables and databases take merge and scd2.',
            )

    def refuse_foreign(self, model: Model, stored: StoredModel) -> None:
        """Raise where there is a table of which no build of the model is known."""
        name = load_of(model).name
        if stored.columns is None:
            if self._target.has_others_files(load_of(model)):
                raise LoadRefusedError(
                    f"The folder of {name} has files, and no build of the model {model.name} wrote them.",
                    hint="Give the model another name or schema, or move the files away. To build it beside them, for "
                    f"readers that follow its log alone: weft run {model.name} --full",
                )
            return
        if stored.state is not None:
            return
        what = "exists, and no build of the model {} wrote its rows."
        if stored.number >= 0:
            what = "does not say any more what the model {} has read: its log was cut off."
        raise LoadRefusedError(
            f"The table {name} {what.format(model.name)}",
            hint=f"Give the model another name or schema. To replace the rows: weft run {model.name} --full",
        )

    # ---------------------------------------------------------------------------------------------------------- reading

    def _kept(self, model: Model, *, with_columns: bool) -> TableLog | None:
        return self._target.kept(replace(load_of(model), checkpoint_id=WRITER), with_columns=with_columns)

    def stored(self, model: Model) -> StoredModel:
        """Return what there is of a model."""
        kept = self._kept(model, with_columns=True)
        if kept is None:
            return StoredModel()
        state = None if kept.state is None else decoded(kept.state, model.name)
        return StoredModel(state, kept.state, _columns(kept.columns), kept.batch_id, kept.rows)

    def recorded(self, model: Model) -> Recorded | None:
        """Return the last build of a model."""
        kept = self._kept(model, with_columns=False)
        if kept is None or kept.state is None:
            return None
        return Recorded(model.name, model.target.name, kept.state, _at(kept))

    def rows(self, schema: str | None, table: str) -> int | None:
        """Return how many rows a table has, where its log says so."""
        return self._target.rows(_load(schema, table))

    def place(self, schema: str | None, table: str) -> str:
        """Return where a table is: the same by each connection that leads there."""
        return self._target.place(_load(schema, table))

    def all_recorded(self, places: Container[str]) -> Iterator[Recorded]:
        """Yield the last build of each table that a model of its name has built, but for those at some places."""
        for schema, table in self._target.tables() if self._target.keeps_states else ():
            # A model and its table have one name.
            load = replace(_load(schema, table), pipeline=table, checkpoint_id=WRITER)
            if self._target.place(load) in places:
                continue
            try:
                kept = self._target.kept(load, with_columns=False)
            except ConnectionFailedError:
                raise
            except WeftError as error:  # a damaged log, perhaps of somebody else's table
                _log.warning("Whether a model built %s in %s is not known: %s", load.name, self.connection.label, error)
                continue
            if kept is not None and kept.state is not None:
                yield Recorded(table, load.name, kept.state, _at(kept))

    def version(self, path: str) -> Any:
        """Return what changes with each load into the table at a path; `None` where nothing does."""
        if GLOB.search(path):
            return None
        try:
            version = self._target.version(_load(None, path))
        except DeclarationError:  # a path of files that no table can have
            return None
        return None if version is None else {"loads": f"version {version}"}

    # ---------------------------------------------------------------------------------------------------------- writing

    def finish(self, model: Model) -> None:
        """Complete a build that was cut off after it was decided, so that this one follows it."""
        kept = self._kept(model, with_columns=False)
        if kept is not None and not kept.is_complete:
            from weft.engine import spark_io

            spark_io.has(self.connection, load_of(model))

    def load(self, job: Job, data: Input, stored: StoredModel, *, is_full: bool) -> tuple[Counts, str]:
        """Load the result of a build: the commit of its rows has its state."""
        job.load = replace(job.load, checkpoint_id=WRITER, batch_id=stored.number + 1, replaces_all=is_full)
        counts, engine = job.run(data)
        if counts.replayed:
            kept = self._target.kept(job.load, with_columns=False)
            if kept is None or kept.state != job.load.state:
                raise job.load.overtaken()
        return counts, engine

    def note(self, job: Job, stored: StoredModel) -> None:
        """Store a state by itself, where no row has changed."""
        assert stored.columns is not None
        nothing = inputs.Memory(pa.schema([each.field for each in stored.columns]), [])
        job.load = replace(job.load, mode="append", keys=(), deduplicate_by=(), checks=())
        self.load(job, nothing, stored, is_full=False)

    def drop(self, schema: str | None, table: str) -> None:
        """Remove a table, with what is known of its builds."""
        self._target.drop(_load(schema, table))


def _load(schema: str | None, table: str) -> Load:
    """Return a load that only names its table."""
    return Load(schema=schema, table=table, moment=datetime.now(UTC))


def _at(kept: TableLog) -> datetime:
    return kept.at or datetime.fromtimestamp(0, UTC)


def lake_of(connection: Connection) -> Lake | None:
    """Return the tables of a connection to Delta or files; `None` for other systems."""
    system = system_for(connection.kind)
    return Lake(connection) if system.tables is None and system.takes_loads else None


def _columns(text: str | None) -> tuple[Column, ...]:
    """Return the columns of a table, which its log has as Spark writes them."""
    from pyspark.sql import types as T
    from pyspark.sql.pandas.types import to_arrow_schema

    columns = T.StructType.fromJson(json.loads(text or '{"fields": []}'))
    fields = canonical_schema(to_arrow_schema(columns, timezone="UTC"))
    return tuple(
        Column(each.name, field, each.dataType.simpleString()) for each, field in zip(columns, fields, strict=True)
    )


def sql_type(field: pa.Field) -> str:
    """Return what Spark calls the type of a column."""
    from pyspark.sql.pandas.types import from_arrow_type

    return str(from_arrow_type(field.type, prefer_timestamp_ntz=True).simpleString())
