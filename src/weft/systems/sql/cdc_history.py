"""The statements that put changes into the history of a table, by the order and the times of the source.

A version has the position of its change in a column: of versions of one millisecond it says which came first, and a
change that comes again is known by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import pyarrow as pa

from weft.systems.changes import AT, DELETE, END, KEY, OP, ORDER, POSITION, READ, TS, Place, by_kind, instant_of
from weft.systems.load import VALID_FROM, VALID_TO, Counts
from weft.systems.sql.cdc_gate import SURVIVORS, GatedMove
from weft.systems.sql.literals import literal
from weft.systems.sql.move import CHAIN, KEPT, LINE
from weft.systems.sql.scd2 import NEVER, Scd2ByEvent

_ENDS = pa.schema([(KEY, pa.string()), (AT, pa.timestamp("us", "UTC")), (POSITION, pa.string())])


class ChangeHistory(Scd2ByEvent, GatedMove):
    """Keeps each version of a row, from the time of the change to that of the next one, whatever order they come in."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._known: set[int] = set()
        """The numbers of changes that the history had before."""

    @property
    def identity(self) -> list[str]:
        return [*self.load.keys, ORDER]

    def check_keys(self, rows: int, reject: Callable[[], None] | None = None) -> int:
        left_out = super().check_keys(rows, reject)
        self._begin()
        return left_out

    @property
    def _began(self) -> str:
        return self.tables.instant(f"s.{self._q(AT)}", self.fields[AT])

    def _staged_hash(self, compared: Sequence[str]) -> str:
        """A delete has no values: it ends the version before it."""
        return f"CASE WHEN s.{self._q(OP)} = {DELETE} THEN '' ELSE {super()._staged_hash(compared)} END"

    # -------------------------------------------------------------------------------------------------------- truncates

    def clear(self) -> Counts:
        """End the versions that truncates of the source ended."""
        since, to, deleted = f"t.{self._q(VALID_FROM)}", f"t.{self._q(VALID_TO)}", 0
        for place in self.changes.truncates:
            if place[1] is not None:
                end, before = self.tables.moment(instant_of(place[1])), self._is_before(place, place[1])
                within = f"{before} AND {since} <= {end} AND {to} > {end}"
                self.session.run(self.tables.update(self.target, {VALID_TO: end}, within))
                deleted += self._close(self._later_of(end), before)
        return Counts(deleted=deleted)

    def _is_before(self, truncate: Place, ts: int) -> str:
        """The condition that a stored version is before a truncate. At one time without positions it is."""
        since, position = f"t.{self._q(VALID_FROM)}", f"t.{self._q(POSITION)}"
        by_time = f"{since} <= {self.tables.moment(instant_of(ts))}"
        if truncate[0] is None:
            return by_time
        # As `SqlGate.is_late`: positions start over in a source that was restored.
        latest = self.tables.moment(instant_of(ts + self.changes.tolerance_ms))
        place = self.gate.ordered(literal(truncate[0], self.tables.dialect))
        by_place = f"{self.gate.ordered(position)} <= {place} AND {since} <= {latest}"
        return f"CASE WHEN {position} IS NULL THEN {by_time} ELSE {by_place} END"

    # --------------------------------------------------------------------------------------------------------- versions

    def apply(self) -> Counts:
        """Put the changes into the history of their keys. Each one is a version, but for what a snapshot reads as it
        was."""
        self._refuse_timeless(self._began)
        self._draw_line()
        self._chain()
        return self._write()

    def _draw_line(self) -> None:
        """Gather the stored versions of the keys in question, what is staged of them, and what ends versions."""
        tables, keys, run = self.tables, list(self.load.keys), self.session.run
        began = self._began
        distinct = ", ".join(f"{self._as_key(key, self._value(key))} AS {self._q(key)}" for key in keys)
        touched = f"(SELECT DISTINCT {distinct} FROM {self.source} AS s)"
        names = ["_ts", "_until", "_position", "_src", "_op", "_number", "_hash"]
        position, op, number = map(self._q, ("_position", "_op", "_number"))
        placed = f"t.{self._q(POSITION)} AS {position}, -1 AS {op}, -1 AS {number}, "
        stored_hash, staged_hash = self._stage_stored(touched, placed)
        line = tables.temporary(LINE)
        same = f"t.{self._q(POSITION)} = s.{self._q(POSITION)}"
        # A table that was made before positions were kept has none of its older versions.
        unplaced = f"(s.{self._q(POSITION)} IS NULL OR t.{self._q(POSITION)} IS NULL)"
        known = (
            f"(EXISTS (SELECT 1 FROM {self.target} AS t WHERE {self._on(value=True)} "
            f"AND t.{self._q(VALID_FROM)} = {began} "
            f"AND ({same} OR ({unplaced} AND {stored_hash} = {staged_hash}))) "
            f"OR EXISTS (SELECT 1 FROM {self.gate.table} AS g WHERE {self.gate.of_rows} "
            f"AND g.changed_key = s.{self._q(END)}))"
        )
        values = ", ".join(self._value(key) for key in keys)
        added = run(
            f"INSERT INTO {line} ({tables.listed([*keys, *names])}) "
            f"SELECT {values}, {began}, NULL, s.{self._q(POSITION)}, 1, s.{self._q(OP)}, s.{self._q(ORDER)}, "
            f"{staged_hash} FROM {self.source} AS s WHERE NOT {known}"
        ).rowcount
        if int(added) < int(self.session.value(f"SELECT count(*) FROM {self.source} AS s")):
            again = self.session.rows(f"SELECT s.{self._q(ORDER)} FROM {self.source} AS s WHERE {known}")
            self._known |= {int(each) for (each,) in again}
        self._add_ends(line)

    def _add_ends(self, line: str) -> None:
        """Add the deletes and truncates that came before: what comes late ends with them too."""
        gate, tables, keys = self.gate, self.tables, list(self.load.keys)
        stage, position = tables.temporary(self.stage), self._q("position")
        ends = self.session.rows(
            f"SELECT row_key, ts_ms, {position} FROM {gate.table} WHERE {gate.of_rows} "
            f"AND row_key IN (SELECT {self._q(KEY)} FROM {stage})"
        )
        truncates = {(ts, place) for place, ts in (*self.changes.truncates, *self._known_truncates()) if ts is not None}
        if truncates:
            staged = self.session.rows(f"SELECT DISTINCT {self._q(KEY)} FROM {stage}")
            ends = [*ends, *((key, *each) for (key,) in staged for each in truncates)]
        if not ends:
            return
        columns = [
            pa.array([key for key, _, _ in ends], pa.string()),
            pa.array([instant_of(ts) for _, ts, _ in ends], _ENDS.field(AT).type),
            pa.array([place for _, _, place in ends], pa.string()),
        ]
        definitions = ", ".join(f"{self._q(each.name)} {tables.sql_type(each)}" for each in _ENDS)
        tables.create_temporary(self.session, SURVIVORS, definitions)
        table = tables.temporary(SURVIVORS)
        tables.copy_in(self.session, table, _ENDS, [pa.RecordBatch.from_arrays(columns, schema=_ENDS)])
        values = ", ".join(f"{self._value(key)} AS {self._q(key)}" for key in keys)
        at = tables.instant(f"e.{self._q(AT)}", _ENDS.field(AT))
        self.session.run(
            f"INSERT INTO {line} ({tables.listed([*keys, '_ts', '_position', '_src', '_op', '_number', '_hash'])}) "
            f"SELECT DISTINCT {values}, {at}, e.{self._q(POSITION)}, 1, {DELETE}, -1, '' FROM {self.source} AS s "
            f"JOIN {table} AS e ON e.{self._q(KEY)} = s.{self._q(KEY)}"
        )

    def _chain(self) -> None:
        """Find of each version when it ends: with the next one, or where it ended before."""
        tables, keys = self.tables, list(self.load.keys)
        ts, until, position, src, number, digest = map(
            self._q, ("_ts", "_until", "_position", "_src", "_number", "_hash")
        )
        highest, at, before, covered, end, following, to, is_new = map(
            self._q, ("_highest", "_at", "_before", "_cover", "_end", "_next", "_to", "_is_new")
        )
        never, same = tables.moment(NEVER), self._same(keys)
        by_place = f"{same}, CASE WHEN {position} IS NULL THEN 1 ELSE 0 END ORDER BY {self.gate.ordered(position)}"
        # The clock of a source may go back, and MySQL's times are of when a statement began. Positions do not; but they
        # begin again in a source that was restored, much later.
        line = (
            f"SELECT l.*, MAX({ts}) OVER (PARTITION BY {by_place} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) "
            f"AS {highest} FROM {tables.temporary(LINE)} AS l"
        )
        is_near = f"{position} IS NOT NULL AND {highest} <= {tables.add_seconds(ts, self.changes.tolerance_ms / 1000)}"
        timed = f"SELECT h.*, CASE WHEN {is_near} THEN {highest} ELSE {ts} END AS {at} FROM ({line}) AS h"
        # At one time without positions: what an earlier delete ended, that delete, what came after it, what is staged.
        rank = (
            f"CASE WHEN {src} = 0 AND {until} <= {ts} THEN 0 WHEN {src} = 1 AND {number} = -1 THEN 1 "
            f"WHEN {src} = 0 THEN 2 ELSE 3 END"
        )
        places = (at, self.gate.ordered(f"COALESCE({position}, '')"), rank, number, f"COALESCE({until}, {never})")
        order = f"PARTITION BY {same} ORDER BY {', '.join(places)}"
        tables.create_temporary_as(
            self.session,
            KEPT,
            f"SELECT * FROM (SELECT w.*, LAG({digest}) OVER ({order}) AS {before}, "
            f"MIN({src}) OVER (PARTITION BY {same}) AS {is_new} FROM ({timed}) AS w) AS q "
            # A snapshot reads a row as it was.
            f"WHERE NOT ({src} = 1 AND {self._q('_op')} = {READ} AND {before} IS NOT NULL AND {before} = {digest})",
        )
        # A row that comes late ends where the version ended into which it falls, whatever ended that.
        cover = self._cover(order)
        own_end = f"CASE WHEN {src} = 0 THEN {until} WHEN {covered} > {at} AND {covered} < {never} THEN {covered} END"
        kept = tables.temporary(KEPT)
        linked = f"SELECT k.*, {cover} AS {covered}, LEAD({ts}) OVER ({order}) AS {following} FROM {kept} AS k"
        ended = f"SELECT c.*, {own_end} AS {end} FROM ({linked}) AS c"
        first = f"CASE WHEN {end} IS NULL OR {following} < {end} THEN {following} ELSE {end} END"
        tables.create_temporary_as(
            self.session,
            CHAIN,
            # Among versions with the same time only the last has a length.
            f"SELECT e.*, CASE WHEN {first} < {ts} THEN {ts} ELSE {first} END AS {to} FROM ({ended}) AS e",
        )

    def _write(self) -> Counts:
        """End versions earlier, and add the new ones."""
        number, position = f"c.{self._q('_number')} = s.{self._q(ORDER)}", f"s.{self._q(POSITION)}"
        place, stored = f"COALESCE(s.{self._q('_position')}, '')", f"COALESCE(t.{self._q(POSITION)}, '')"
        is_version = f"c.{self._q('_src')} = 1 AND c.{self._q('_hash')} <> ''"
        return self._write_chain(number, is_version, f" AND {stored} = {place}", {POSITION: position})

    # --------------------------------------------------------------------------------------------------------- the gate

    def delete_missing(self) -> Counts:
        """Note the deletes in the gate: each one, because it ends whatever comes late and began before it."""
        gate, end = self.gate, self._q(END)
        stage = self.tables.temporary(self.stage)
        self._forget(END)
        self._insert_staged(
            f"SELECT DISTINCT {gate.pipeline}, {gate.rows}, s.{end}, s.{self._q(POSITION)}, s.{self._q(TS)}, "
            f"{self.tables.true}, s.{self._q(KEY)} FROM {stage} AS s "
            f"WHERE s.{end} IS NOT NULL AND s.{self._q(TS)} >= {self._oldest}"
        )
        self.session.run(f"DELETE FROM {gate.table} WHERE {gate.of_truncates} AND ts_ms < {self._oldest}")
        for place in self.changes.truncates:
            if place[1] is not None:
                self._note_truncate(place, sha256(repr(place).encode()).hexdigest())
        if not self._known or self.changes.counted is None:
            return Counts()
        return Counts(late=by_kind(self.changes.counted[OP].take(pa.array(sorted(self._known))).to_pylist()))
