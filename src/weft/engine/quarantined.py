"""Rows that the targets of a pipeline put aside: loaded once more, or removed.

One transaction of the target's database takes the rows of an earlier load out of the quarantine and loads them. So each
row is in one place, whatever happens meanwhile: what the target rejects again, it puts aside again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa

from weft.columns import shows_bytes
from weft.engine import inputs
from weft.engine.load import Job
from weft.engine.payload_rows import SHOWN, rejected_rows
from weft.engine.projection import TableProjection
from weft.engine.readers import opened_tables, stored_columns
from weft.engine.run import plan_load
from weft.errors import LoadRefusedError, NotFoundError
from weft.pipelines.declare import Pipeline, PipelineTarget
from weft.project import current
from weft.systems.base import Connection, system_for
from weft.systems.expectation import Expectation
from weft.systems.load import LOAD_COLUMNS, Load, QuarantinedRows, full_name
from weft.systems.sql import quarantine
from weft.systems.sql.tables import SqlTables


@dataclass
class Quarantined:
    """What the targets of a pipeline have put aside, or what became of it."""

    rows: int = 0
    """How many there are: the chosen ones."""
    again: int = 0
    """How many of them were put aside again."""
    held: dict[str, int] = field(default_factory=dict)
    """Why rows are not loaded again, and how many."""
    places: list[str] = field(default_factory=list)
    """The tables that have some of them."""
    targets: list[str] = field(default_factory=list)
    """The tables to which they belong."""


@dataclass(frozen=True)
class _Place:
    """The quarantine of one target, and the rows of it that were chosen."""

    pipeline: Pipeline
    target: PipelineTarget
    connection: Connection
    sets: Sequence[QuarantinedRows]

    @property
    def name(self) -> str:
        return full_name(self.target.table.schema, quarantine.name_for(self.target.table.name))

    def load(self) -> Load:
        """Return the load that takes rows out of it: of all rows of the source it knows nothing."""
        planned = plan_load(self.pipeline, self.target, f"replay {uuid4().hex}", datetime.now(UTC))
        return replace(
            planned,
            on_bad_rows="quarantine",
            handle_deletes=None,
            ttl_seconds=None,
            checks=tuple(_of_rows(planned.checks)),
        )

    def why_not(self, rows: QuarantinedRows) -> str | None:
        """Return why rows of a set cannot be loaded again."""
        if self.load().mode == "truncate":
            return f"each run replaces all of {self.target.name}: mend the source, and run {self.pipeline.name}"
        if shows_bytes(rows.errors[0]):
            return SHOWN
        is_made = self.target.column_map or any(each.normalizers for each in self.target.table.columns)
        if rows.rows_of is None and is_made:
            return "an older version put them aside, and did not say whether normalizers had changed them"
        return None


def _of_rows(checks: Sequence[Expectation]) -> Iterator[Expectation]:
    """Yield what each row must meet; one that does not is put aside again."""
    for each in checks:
        if each.is_about_rows:
            yield replace(each, reaction="warn" if each.reaction == "warn" else "quarantine")


class QuarantinedGroup(NamedTuple):
    """Rows in quarantine whose errors have the same first line."""

    place: str
    group: str
    rows: int
    error: str


def groups(pipeline: Pipeline) -> list[QuarantinedGroup]:
    """Return what was put aside by error, the commonest first."""
    by_group: dict[tuple[str, str], QuarantinedGroup] = {}
    for place in _chosen(pipeline, None):
        with opened_tables(place.connection) as tables:
            sets = quarantine.sets(tables, place.target.table.schema, place.target.table.name, pipeline.name)
        for rows, error in sets:
            group = quarantine.group_of(error)
            before = by_group.get((place.name, group), QuarantinedGroup(place.name, group, 0, error.partition("\n")[0]))
            by_group[place.name, group] = before._replace(rows=before.rows + rows.count)
    return sorted(by_group.values(), key=lambda each: -each.rows)


def count(pipeline: Pipeline, group: str | None = None, *, to_replay: bool = False) -> Quarantined:
    """Count what was put aside: all, or the rows of one group. `to_replay`: those that can be loaded again, and why
    others cannot."""
    return _counted(_chosen(pipeline, group), to_replay=to_replay)


def replay(pipeline: Pipeline, group: str | None = None, *, expected: int | None = None) -> Quarantined:
    """Load what was put aside once more, the rows of one load in one transaction. `expected`: so many rows, else
    nothing."""
    places = _chosen(pipeline, group)
    done = _counted(places, to_replay=True)
    _refuse_others(pipeline, done.rows, expected)
    for place in places:
        with opened_tables(place.connection) as tables:
            for rows in place.sets:
                if place.why_not(rows) is None:
                    done.again += _reload(place, rows, tables)
    return done


def purge(pipeline: Pipeline, group: str | None = None, *, expected: int | None = None) -> Quarantined:
    """Remove what was put aside. `expected`: so many rows, else nothing."""
    places = _chosen(pipeline, group)
    done = _counted(places)
    _refuse_others(pipeline, done.rows, expected)
    done.rows = 0
    for place in places:
        with opened_tables(place.connection) as tables, tables.driver.session("publish") as session:
            done.rows += sum(quarantine.remove(tables, session, place.load(), rows) for rows in place.sets)
    return done


def _counted(places: Sequence[_Place], *, to_replay: bool = False) -> Quarantined:
    total = Quarantined(places=[each.name for each in places], targets=[each.target.name for each in places])
    for place in places:
        for rows in place.sets:
            why = place.why_not(rows) if to_replay else None
            if why is None:
                total.rows += rows.count
            else:
                total.held[why] = total.held.get(why, 0) + rows.count
    return total


def _refuse_others(pipeline: Pipeline, rows: int, expected: int | None) -> None:
    if expected is not None and rows != expected:
        raise LoadRefusedError(
            f"{pipeline.name} has {rows:,} such rows in quarantine by now, not {expected:,}; nothing was done.",
            hint=f"Look at them again: weft quarantine list {pipeline.name}",
        )


def _chosen(pipeline: Pipeline, group: str | None) -> list[_Place]:
    """Return what the targets of a pipeline put aside of its rows: all, or the rows of one group."""
    places = []
    for target in pipeline.targets:
        connection = current().connection(target.connection or target.table.connection)
        # Files and Delta tables have none. A database that is not there yet is not made by a look at it.
        if system_for(connection.kind).tables is None or connection.is_missing():
            continue
        with opened_tables(connection) as tables:
            sets = _sets(tables, target, pipeline, group)
        if sets:
            places.append(_Place(pipeline, target, connection, sets))
    if group is not None and not places:
        raise NotFoundError(
            f"{pipeline.name} has no group {group!r} of rows in quarantine.",
            hint=f"weft quarantine list {pipeline.name}",
        )
    return places


def _sets(tables: SqlTables, target: PipelineTarget, pipeline: Pipeline, group: str | None) -> list[QuarantinedRows]:
    """Return the chosen rows by the load that put them aside."""
    sets: dict[tuple[object, ...], QuarantinedRows] = {}
    for rows, error in quarantine.sets(tables, target.table.schema, target.table.name, pipeline.name):
        if group is None or quarantine.group_of(error) == group:
            key = (rows.checkpoint_id, rows.batch_id, rows.rows_of, shows_bytes(error))
            others = sets.get(key)
            if others is not None:
                rows = replace(rows, errors=others.errors + rows.errors, count=others.count + rows.count)
            sets[key] = rows
    return list(sets.values())


def _reload(place: _Place, chosen: QuarantinedRows, tables: SqlTables) -> int:
    """Load a set; return how many of its rows were put aside again."""
    load, target = place.load(), place.target
    stored = quarantine.read(tables, load, chosen)
    columns = stored_columns(tables, target.table.schema, target.table.name) or []
    known = {each.name: each.field for each in columns if not each.generated}
    if chosen.rows_of == "source":
        known = _of_source(known, target)
    else:
        # They are what normalizers made of them.
        plain = tuple(replace(each, normalizers=()) for each in target.table.columns)
        target = replace(target, column_map={}, table=replace(target.table, columns=plain))
    rows, numbers, bad = rejected_rows([payload for _, payload in stored], known)
    if not numbers:
        return len(stored)  # they stay as they are
    # The load says when and by which run.
    if target.table.load_columns:
        rows = rows.drop_columns([name for name in LOAD_COLUMNS if name in rows.column_names])
    returned = tuple((why, stored[number][1]) for number, why in bad.items())
    chosen = replace(chosen, count=len(stored), returned=returned)
    job = Job(replace(load, from_quarantine=chosen), place.connection, projection=TableProjection(target))
    counts, _ = job.run(inputs.understand(rows, has_source=False), tables)
    return counts.quarantined + len(returned)


def _of_source(known: dict[str, pa.Field], target: PipelineTarget) -> dict[str, pa.Field]:
    """Return the columns of the source whose types follow from those of the table: a normalizer may take any."""
    normalized = {each.name for each in target.table.columns if each.normalizers}
    return {
        target.column_map.get(name, name): each.with_name(target.column_map.get(name, name))
        for name, each in known.items()
        if name not in normalized
    }
