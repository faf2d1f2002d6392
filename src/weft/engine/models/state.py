"""What a model has read when it was last built, stored in the transaction that wrote its result.

It is the watermark of the model's table (`weft.watermarks`, in files and Delta tables the log of the table): where the
table is created again it is forgotten, and a build that another one has overtaken changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec

from weft.engine.readers import stored_columns
from weft.errors import StorageError
from weft.pipelines.models import Model
from weft.systems.load import Load
from weft.systems.sql import watermarks
from weft.systems.sql.tables import Column, SqlTables
from weft.systems.watermark import STATE, LoadWatermark

Marks = dict[str, Any]
"""What was read of each input, by its name: `{"upto": 12}` of a stream, `{"build": "…"}` of a model."""


class LeftOut(msgspec.Struct, frozen=True):
    """Events that have a value for which a column has no place."""

    events: int
    first: int
    """The offset of the first one."""

    def after(self, before: LeftOut | None) -> LeftOut:
        """Return these together with earlier ones."""
        return self if before is None else LeftOut(before.events + self.events, before.first)


LeftOuts = dict[str, dict[str, LeftOut]]
"""By input and field."""


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """One build of a model."""

    build: str
    """Differs for each build: models that read this one compare it."""
    fingerprint: str
    materialise: str
    inputs: Marks = msgspec.field(default_factory=dict)
    key: tuple[str, ...] | None = None
    """The columns that identify a row; `None` in states of before."""
    query: str = ""
    """For a view, a hash of its query."""
    rows_of: str = ""
    """The fingerprint of rows that other code built, where later builds only added rows."""
    left_out: LeftOuts = msgspec.field(default_factory=dict)
    """What the rows leave out of the events that were read for them."""

    @property
    def built_by(self) -> str:
        """The fingerprint of rows that other code built, if there are any; else of all rows."""
        return self.rows_of or self.fingerprint

    def rows_not_of(self, fingerprint: str) -> str:
        """Return the fingerprint of rows that were not built under this one, also after a change of code was undone."""
        return next((each for each in (self.built_by, self.fingerprint) if each != fingerprint), "")


@dataclass(frozen=True)
class StoredModel:
    """What the target of a model has."""

    state: State | None = None
    text: str | None = None
    """The state as it is stored: the next one follows exactly this."""
    columns: tuple[Column, ...] | None = None
    """The columns of the table; `None` where there is none."""
    number: int = -1
    """For files and Delta tables, the number of the last build in their log."""
    rows: int | None = None
    """How many the table has, where its log says so."""

    def following(self, state: State) -> LoadWatermark:
        """Return what is stored with the rows of the next build."""
        return LoadWatermark(STATE, "text", msgspec.json.encode(state, order="sorted").decode(), 0, self.text)


def decoded(text: str, model: str) -> State:
    """Return a state that is stored."""
    try:
        return msgspec.json.decode(text, type=State)
    except msgspec.MsgspecError:
        raise StorageError(
            f"What is stored of the last build of {model} cannot be read: it may be of another version of Weft.",
            hint=f"Delete the row of {model!r} in weft.watermarks, and build it again: weft run {model} --full",
        ) from None


def load_of(model: Model, **options: Any) -> Load:
    """Return the load of a model's result, or one that only names its table."""
    return replace(model.target.plan(pipeline=model.name, commit_key=None), **options)


def read(tables: SqlTables, model: Model) -> StoredModel:
    """Return what the model's database has of it."""
    if tables.connection.is_missing():
        return StoredModel()
    load = load_of(model)
    columns = stored_columns(tables, load.schema, load.table)
    if columns is None:
        return StoredModel()
    stored = watermarks.read(tables, load)
    if stored is None or stored.column != STATE:
        return StoredModel(columns=tuple(columns))
    return StoredModel(decoded(stored.text, model.name), stored.text, tuple(columns))


@dataclass(frozen=True)
class Recorded:
    """The last build of a model, which may not be declared any more."""

    model: str
    target: str
    text: str
    built_at: datetime

    @property
    def state(self) -> State:
        return decoded(self.text, self.model)


def recorded(tables: SqlTables) -> list[Recorded]:
    """Return the last build of each model whose result is in a database."""
    if tables.connection.is_missing():
        return []
    return [Recorded(*each) for each in watermarks.read_all(tables, STATE)]


def write(tables: SqlTables, model: Model, watermark: LoadWatermark) -> None:
    """Store a state by itself, where no row has changed."""
    watermarks.prepare(tables)
    with tables.driver.session("publish") as session:
        watermarks.write(tables, session, load_of(model), watermark, 0)
