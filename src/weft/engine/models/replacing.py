"""A full build: readers see what was there, or nothing where that was nothing, and then the new rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from uuid import uuid4

import msgspec
import pyarrow as pa

from weft.engine import inputs
from weft.engine.inputs import Input
from weft.engine.load import Job
from weft.engine.models import state
from weft.engine.models.state import State, StoredModel, load_of
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines import graph
from weft.pipelines.models import Model, models
from weft.systems.load import SCD2_COLUMNS, UNNAMED, Counts, Load
from weft.systems.sql import watermarks
from weft.systems.sql.driver import Session
from weft.systems.sql.tables import SqlTables
from weft.systems.watermark import LoadWatermark

NEW = "__weft_new"
"""In the name of the table that takes the place of another one."""
_MARKER = msgspec.json.encode(State(build="being replaced", fingerprint="", materialise=""))


def refuse_foreign(tables: SqlTables, model: Model, stored: StoredModel) -> None:
    """Raise where the model's table has rows that no build of it wrote."""
    if stored.columns is None or stored.state is not None:
        return
    load = load_of(model)
    with tables.driver.session("read") as session:
        # A build that ended before its commit could leave an empty table behind.
        if session.row(f"SELECT 1 FROM {tables.table(load.schema, load.table)} LIMIT 1") is None:
            return
    raise LoadRefusedError(
        f"The table {load.name} exists, and no build of the model {model.name} wrote its rows.",
        hint=f"Give the model another name or schema. To replace the rows: weft run {model.name} --full",
    )


def replace_all(job: Job, data: Input, tables: SqlTables, stored: StoredModel, model: Model) -> tuple[Counts, str]:
    """Load the result of a full build in place of all rows. Where the columns, the keys or the kind of the old table
    differ, it is a view, or there is none, the rows go into a new table: a build that fails then leaves no empty table
    behind, and nobody reads one."""
    load, last = job.load, stored.state
    is_same = last is not None and last.materialise == model.materialise and last.key in (None, load.keys)
    if is_same and has_same_columns(tables, load, stored, inputs.schema_of(data)):
        job.load = replace(load, replaces_all=True)
        return job.run(data, tables)
    assert load.watermark is not None
    if stored.columns is None:
        watermarks.prepare(tables)  # makes the database where there is none
        watermarks.forget(tables, load)
    else:
        _refuse_views(tables, model)
    new = _new_name(tables, load)
    # Each attempt has a table of its own, so none of them may count as done.
    unnamed = f"{UNNAMED}{uuid4()}"
    job.load = replace(load, table=new, replaces=load.table, watermark=None, checkpoint_id=unnamed)
    try:
        counts, engine = job.run(data, tables)
        with _exchanging(tables, load, load.watermark) as session:
            drop_views(tables, session, model)
            kind = None
            if stored.columns is not None:
                kind = "VIEW" if tables.is_view(session, load.schema, load.table) else "TABLE"
            elif tables.columns(session, load.schema, load.table) is not None:
                raise load.overtaken()
            tables.replace_table(session, load.schema, load.table, new, kind)
    except Exception:
        with suppress(WeftError), tables.driver.session("publish") as session:
            session.run(f"DROP TABLE IF EXISTS {tables.table(load.schema, new)}")
        raise
    return counts, engine


def _new_name(tables: SqlTables, load: Load) -> str:
    """Return the name of a table that nobody else makes, and remove those that killed builds have left."""
    begin = f"{load.table.encode()[:44].decode(errors='ignore')}{NEW}"
    with tables.driver.session("read") as session:
        left = [name for name in tables.names(session, load.schema) if name.startswith(begin)]
    with tables.driver.session("publish") as session:
        for name in left:
            session.run(f"DROP TABLE IF EXISTS {tables.table(load.schema, name)}")
    return f"{begin}_{uuid4().hex[:8]}"


@contextmanager
def _exchanging(tables: SqlTables, load: Load, watermark: LoadWatermark) -> Iterator[Session]:
    """Yield a session for the statements that exchange what a model has, and store its state with them.

    Where such statements commit by themselves, a state that no build has is stored first: a build that was overtaken
    stops there, and one that dies later is followed by a full build."""
    watermarks.prepare(tables)
    if tables.commits_ddl:
        marker = replace(watermark, text=_MARKER.decode())
        with tables.driver.session("publish") as session:
            watermarks.write(tables, session, load, marker, 0)
        watermark = replace(watermark, after=marker.text)
    with tables.driver.session("publish") as session:
        yield session
        watermarks.write(tables, session, load, watermark, 0)


def has_same_columns(tables: SqlTables, load: Load, stored: StoredModel, schema: pa.Schema) -> bool:
    """Whether rows of these columns fit the table."""
    stored_names = [each.name for each in stored.columns or ()]
    own = SCD2_COLUMNS if load.mode == "scd2" else ()
    columns = {each.name: each for each in stored.columns or () if each.name not in own}
    return (
        set(own) <= set(stored_names)
        and set(columns) == set(schema.names)
        and all(tables.fits(columns[field.name], field) for field in schema)
    )


def create_view(
    tables: SqlTables, model: Model, query: str, stored: StoredModel, new: State, *, again: bool = False
) -> None:
    """Create the view in place of what the last build left, with the state of the model; `again`: also if it is so."""
    load, last = load_of(model), stored.state
    new = msgspec.structs.replace(new, query=blake2b(query.encode(), digest_size=8).hexdigest())
    is_same = last is not None and (last.materialise, last.query) == ("view", new.query)
    if is_same and last is not None and last.fingerprint == new.fingerprint and not again:
        return
    if stored.columns is None:
        watermarks.forget(tables, load)
    else:
        _refuse_views(tables, model)
    with _exchanging(tables, load, stored.following(new)) as session:
        if load.schema is not None:
            tables.create_schema(session, load.schema)
        name = tables.table(load.schema, load.table)
        if stored.columns is not None:
            drop_views(tables, session, model)
            kind = "VIEW" if tables.is_view(session, load.schema, load.table) else "TABLE"
            session.run(f"DROP {kind} {name}")
        session.run(f"CREATE VIEW {name} AS {query}")


def views_over(model: Model) -> list[Model]:
    """Return the models that are views over a model or over such a view, each after those that it reads."""
    known = models()
    names = {model.name}
    views = []
    for each in graph.in_order(known):
        if isinstance(each, Model) and each.materialise == "view" and not names.isdisjoint(each.depends_on):
            names.add(each.name)
            views.append(each)
    return views


def _refuse_views(tables: SqlTables, model: Model) -> None:
    """Raise where views that are no models keep what a build replaces from being dropped."""
    ours = [(load.schema, load.table) for load in map(load_of, (model, *views_over(model)))]
    with tables.driver.session("read") as session:
        views = ", ".join(tables.views_over(session, ours))
    if views:
        raise LoadRefusedError(
            f"The columns of {model.target.name} change, and {tables.connection.label} changes none that views read: "
            f"{views}.",
            hint=f"DROP VIEW {views}; weft run {model.name}; then create them again.",
        )


def drop_views(tables: SqlTables, session: Session, model: Model) -> None:
    """Drop the views over a table whose columns change: a database lets no view stand in the way, or leaves it broken.
    The build of the model creates them again."""
    for view in reversed(views_over(model)):
        load = load_of(view)
        stored = state.read(tables, view).state
        if stored is not None and stored.materialise == "view":
            session.run(f"DROP VIEW IF EXISTS {tables.table(load.schema, load.table)}")
            watermarks.remove(tables, session, view.name, load.name)
