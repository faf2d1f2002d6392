"""The gate of changes: what came last for each key, so that late and repeated changes do nothing.

The table `weft.cdc_gate` has the last change of each key that was changed lately, deleted keys too. It is read and
written in the transaction of the rows.
"""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

from weft.errors import ConnectionFailedError, StorageError, WeftError
from weft.systems.changes import SEPARATOR, Changes, Place
from weft.systems.load import Load
from weft.systems.sql.driver import Session
from weft.systems.sql.literals import literal
from weft.systems.sql.merge import ComparedMove
from weft.systems.sql.system_tables import CreatedError, create_system_table, refuse_created, system_table
from weft.systems.sql.tables import SqlTables

FIELDS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("target", pa.string(), nullable=False),
        pa.field("changed_key", pa.string(), nullable=False),
        pa.field("position", pa.string()),
        pa.field("ts_ms", pa.int64()),
        pa.field("is_deleted", pa.bool_(), nullable=False),
        # In a mirror, a hash of the key as the table has it; in a history, the key of a delete.
        pa.field("row_key", pa.string()),
    ]
)
_KEY = ("pipeline", "target", "changed_key")
SURVIVORS = "_weft_survivors"
# With so many new entries the planner of a database should know of them.
_MANY = 1000


def prepare(tables: SqlTables) -> None:
    """Create the gate where it is missing; refuse one of an earlier form."""
    if _has_form(tables):
        return
    create_system_table(tables, "cdc_gate", FIELDS, _KEY)
    if not _has_form(tables):
        table = system_table(tables, "cdc_gate")
        raise StorageError(
            f"The table {table} of {tables.connection.label} is of an earlier form: it has no column row_key.",
            hint=f"Stop the pipelines that write to this database, then: DROP TABLE {table}. They make it again, and "
            "know from then on which changes come late.",
        )


def _has_form(tables: SqlTables) -> bool:
    try:
        with tables.driver.session("read") as session:
            # Without the alias SQLite takes the name of a missing column for a text.
            names = tables.listed(FIELDS.names, "g.")
            session.rows(f"SELECT {names} FROM {system_table(tables, 'cdc_gate')} AS g WHERE 1 = 0")
    except ConnectionFailedError:
        raise
    except WeftError:
        return False
    return True


def forget(tables: SqlTables, load: Load) -> None:
    """Empty the gate of a target that is created again: its rows are gone. Not where another process has created and
    loaded it since this one looked."""
    gate = SqlGate(tables, load)
    with suppress(CreatedError), tables.driver.session("publish") as session:
        gate.empty(session)
        refuse_created(tables, session, load)


class SqlGate:
    """The SQL about the entries of one target."""

    def __init__(self, tables: SqlTables, load: Load) -> None:
        self.table = system_table(tables, "cdc_gate")
        self.pipeline = literal(load.pipeline, tables.dialect)
        self.rows, self.truncates, self.query = (
            literal(load.name + SEPARATOR * number, tables.dialect) for number in range(3)
        )
        self._columns = load.name + SEPARATOR * 3
        self.columns = literal(self._columns, tables.dialect)
        self.of_rows, self.of_truncates, self.of_query = map(self.of, (self.rows, self.truncates, self.query))
        self._tables = tables
        self._position = tables.quote("position")
        self._tolerance = 0 if load.changes is None else load.changes.tolerance_ms

    def column(self, name: str) -> str:
        """Return the literal of the target under which the entries of a column are: where its value is from, if the
        last change of a key does not say it."""
        return literal(self._columns + name, self._tables.dialect)

    def of(self, target: str, alias: str = "") -> str:
        """Return the condition that an entry is under the literal of a target."""
        return f"{alias}pipeline = {self.pipeline} AND {alias}target = {target}"

    def listed_columns(self, session: Session) -> list[str]:
        """Return the columns that have entries, or had them lately: each has an entry of its own that says so."""
        return [name for (name,) in session.rows(f"SELECT changed_key FROM {self.table} WHERE {self.of(self.columns)}")]

    def empty(self, session: Session) -> None:
        """Forget what was applied."""
        columns = [self.column(name) for name in self.listed_columns(session)]
        for each in (self.rows, self.truncates, self.query, self.columns, *columns):
            session.run(f"DELETE FROM {self.table} WHERE {self.of(each)}")

    def ordered(self, position: str) -> str:
        """Return a position as it is compared: a language may order letters and signs in its own way."""
        return self._tables.by_bytes(position, FIELDS.field("position"))

    def is_late(self, position: str, ts: str, entry: str = "g") -> str:
        """The condition that a change of this position and time is not newer than an entry. A position is that of
        one change; at one time there may be several, which come in their order. Positions begin again in a source that
        was restored: its changes are known by their time."""
        stored = f"{entry}.{self._position}"
        return (
            f"(({position} IS NOT NULL AND {stored} IS NOT NULL "
            f"AND {self.ordered(position)} <= {self.ordered(stored)} "
            f"AND ({ts} IS NULL OR {ts} <= {entry}.ts_ms + {self._tolerance})) "
            f"OR (({position} IS NULL OR {stored} IS NULL) AND {ts} < {entry}.ts_ms))"
        )

    def is_before(self, position: str, ts: str, change: Place, *, at_once: bool = False) -> str:
        """The condition that a change of this position and time is before another one. `at_once`: whether it is at the
        same time, where there are no positions."""
        earlier = "1 = 0" if change[1] is None else f"{ts} {'<=' if at_once else '<'} {change[1]}"
        if change[0] is None:
            return earlier
        place = f"{self.ordered(position)} <= {self.ordered(literal(change[0], self._tables.dialect))}"
        if change[1] is not None:
            place = f"{place} AND ({ts} IS NULL OR {ts} <= {change[1] + self._tolerance})"
        return f"CASE WHEN {position} IS NULL THEN {earlier} ELSE {place} END"


class GatedMove(ComparedMove):
    """A move of changes, which the gate knows."""

    _dropped = 0
    """How many staged rows were dropped."""

    @property
    def changes(self) -> Changes:
        """What the load says of its changes."""
        assert self.load.changes is not None
        return self.load.changes

    @property
    def gate(self) -> SqlGate:
        """The gate of this target."""
        return SqlGate(self.tables, self.load)

    def _begin(self) -> None:
        """Forget what an earlier checkpoint applied: a pipeline that was reset applies its changes again."""
        gate, query = self.gate, self.changes.query
        if query is None:
            return
        known = self.session.value(f"SELECT {self._q('position')} FROM {gate.table} WHERE {gate.of_query}")
        if known == query:
            return
        gate.empty(self.session)
        self._insert(gate.query, "", query, None)

    def _insert(self, target: str, key: str, position: str | None, ts: int | None) -> None:
        """Add an entry that is of no row."""
        named, where, when = (literal(each, self.tables.dialect) for each in (key, position, ts))
        self.session.run(
            f"INSERT INTO {self.gate.table} ({self.tables.listed(FIELDS.names)}) "
            f"VALUES ({self.gate.pipeline}, {target}, {named}, {where}, {when}, {self.tables.true}, NULL)"
        )

    def _forget(self, column: str) -> None:
        """Remove the entries that are too old, and those of the keys that a staged column has."""
        gate = self.gate
        self.session.run(f"DELETE FROM {gate.table} WHERE {gate.of_rows} AND ts_ms < {self._oldest}")
        self._forget_staged(gate.rows, column)

    def _forget_staged(self, target: str, column: str) -> None:
        gate = self.gate
        same = {"pipeline": gate.pipeline, "target": target, "changed_key": f"s.{self._q(column)}"}
        on = " AND ".join(f"t.{name} = {value}" for name, value in same.items())
        self.session.run(self.tables.delete_from(gate.table, self.tables.temporary(self.stage), on, same))

    def _insert_staged(self, select: str) -> None:
        """Add entries of staged changes, by a query."""
        names = self.tables.listed(FIELDS.names)
        if int(self.session.run(f"INSERT INTO {self.gate.table} ({names}) {select}").rowcount) >= _MANY:
            self.tables.filled(self.session, self.gate.table)

    @property
    def _now_ms(self) -> int:
        return int(self.load.moment.timestamp() * 1000)

    @property
    def _oldest(self) -> int:
        """Changes before this time are forgotten."""
        return self.changes.oldest_ms(self.load.moment)

    def _drop(self, condition: str) -> None:
        """Drop staged rows."""
        statement = self.tables.delete_where(self.tables.temporary(self.stage), condition)
        self._dropped += int(self.session.run(statement).rowcount)

    def _note_truncate(self, place: Place, key: str = "") -> None:
        """Note a truncate in the gate, in the place of one that has this key."""
        gate, named = self.gate, literal(key, self.tables.dialect)
        self.session.run(f"DELETE FROM {gate.table} WHERE {gate.of_truncates} AND changed_key = {named}")
        self._insert(gate.truncates, key, *place)

    def _known_truncates(self) -> list[Place]:
        """Position and time of the truncates that were applied: the last one, in a history all."""
        gate = self.gate
        rows = self.session.rows(f"SELECT {self._q('position')}, ts_ms FROM {gate.table} WHERE {gate.of_truncates}")
        return [(position, ts) for position, ts in rows]
