"""The statements of scd2: a key has a row for each version, of which one is current."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import ClassVar

from weft.errors import LoadRefusedError
from weft.systems.load import IS_CURRENT, ROW_HASH, VALID_FROM, VALID_TO, Counts
from weft.systems.sql.merge import HIT, SINCE, ComparedMove
from weft.systems.sql.move import CHAIN, CHANGED, KEPT, LINE
from weft.systems.sql.system_tables import instant

# Later than every instant that a database holds: the end of what has no end.
NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)


class Scd2(ComparedMove):
    """Versions by the moment of the load."""

    since: ClassVar[str | None] = VALID_FROM

    def _for_null(self, name: str, default: str) -> str:
        """A version has its own value, not that of the version before."""
        return default

    @property
    def stored(self) -> str:
        wanted = dict.fromkeys((*self.load.keys, *self.load.compared(self.names), VALID_FROM))
        listed, current = self.tables.listed(wanted), f"{self._q(IS_CURRENT)} = {self.tables.true}"
        return f"(SELECT {listed} FROM {self.target} WHERE {current})"

    def apply(self) -> Counts:
        """End the versions that differ, and insert the new ones."""
        load, tables = self.load, self.tables
        hits, new = self._delta()
        if not hits and not new:
            return Counts()
        changed, now = self._changes, self._after_stored(new)
        if hits:
            self.session.run(
                tables.update_from(
                    self.target,
                    changed,
                    f"{self._on()} AND s.{self._q(HIT)} = 1 AND t.{self._q(IS_CURRENT)} = {tables.true}",
                    {VALID_TO: now, IS_CURRENT: tables.false},
                )
            )
        names = tables.listed([*self.names, VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH])
        digest = self._hash({name: f"s.{self._q(name)}" for name in load.compared(self.names)})
        self.session.run(
            f"INSERT INTO {self.target} ({names}) "
            f"SELECT {tables.listed(self.names, 's.')}, {now}, NULL, {tables.true}, {digest} FROM {changed} AS s "
            f"WHERE {self.mark}"
        )
        return Counts(inserted=new, updated=hits)

    def _after_stored(self, new: int) -> str:
        """The moment of the load, or one after what is stored where the clock went back since: this load is later,
        whatever the clock says."""
        tables, now, changed = self.tables, self._now(), self._changes
        stored = [f"SELECT max({self._q(SINCE)}) FROM {changed} AS d WHERE {self._q(SINCE)} >= {now}"]
        if new and self.load.handle_deletes is not None:
            # Where a key was missing and is back, its last version has ended.
            until = f"t.{self._q(VALID_TO)}"
            stored.append(
                f"SELECT max({until}) FROM {self.target} AS t JOIN {changed} AS s ON {self._on()} "
                f"WHERE s.{self._q(HIT)} = 0 AND {until} > {now}"
            )
        after = [instant(self.session.value(f"SELECT {tables.add_seconds(f'({each})', 0.000_001)}")) for each in stored]
        return tables.moment(max([self.load.moment, *filter(None, after)]))

    def delete_missing(self) -> Counts:
        """Close the versions whose key the source no longer has, and those that are too old."""
        load, tables = self.load, self.tables
        deleted = 0
        if load.handle_deletes is not None:
            # Compare with all rows of the source: rows that were put aside are bad, not missing.
            stage = tables.temporary(self.present or self.stage)
            deleted += self._close(
                self._later_of(self._now()), f"NOT EXISTS (SELECT 1 FROM {stage} AS s WHERE {self._on(value=True)})"
            )
        if load.ttl_seconds is not None:
            oldest = tables.add_seconds(self._now(), -load.ttl_seconds)
            ends = tables.add_seconds(f"t.{self._q(VALID_FROM)}", load.ttl_seconds)
            deleted += self._close(ends, f"t.{self._q(VALID_FROM)} < {oldest}")
        return Counts(deleted=deleted)

    def _now(self) -> str:
        return self.tables.moment(self.load.moment)

    def _later_of(self, moment: str) -> str:
        """No version ends before it began, even if the clock went back or an event is of the future."""
        since = f"t.{self._q(VALID_FROM)}"
        return f"CASE WHEN {since} > {moment} THEN {since} ELSE {moment} END"

    def _close(self, valid_to: str, condition: str) -> int:
        tables = self.tables
        cursor = self.session.run(
            tables.update(
                self.target,
                {VALID_TO: valid_to, IS_CURRENT: tables.false},
                f"t.{self._q(IS_CURRENT)} = {tables.true} AND {condition}",
            )
        )
        return int(cursor.rowcount)


class Scd2ByEvent(Scd2):
    """Versions by the time of an event, in whatever order the events come."""

    # An event changes what becomes of others with its key.
    can_compare: ClassVar[bool] = False

    @property
    def identity(self) -> list[str]:
        """Several events of one key are its history. Two at one instant would be a contradiction."""
        event = self.load.event_timestamp_column
        return [*self.load.keys, *([event] if event is not None and not self.load.deduplicate_by else [])]

    def apply(self) -> Counts:
        """Put the events into the history of their keys, unless they change nothing."""
        began = self._began
        self._refuse_timeless(began)
        # A row that says what the current version says, and not of an earlier time, changes nothing. (Where a key has
        # several rows of which one does, all of them are looked at again below.)
        earlier = f"{began} < t.{self._q(VALID_FROM)}"
        self._delta(earlier)
        if not self.session.value(f"SELECT count(*) FROM {self.tables.temporary(CHANGED)}"):
            return Counts()
        return self._put_into_history(began)

    @property
    def _began(self) -> str:
        """The time of a staged row: of the column's type, whatever the source had."""
        event = self.load.event_timestamp_column
        assert event is not None
        return self.tables.instant(self._value(event), self.columns[event].field)

    def _staged_hash(self, compared: Sequence[str]) -> str:
        return self._hash({name: self._value(name) for name in compared})

    def _refuse_timeless(self, began: str) -> None:
        if nulls := self.session.value(f"SELECT count(*) FROM {self.source} AS s WHERE {began} IS NULL"):
            raise LoadRefusedError(
                f"{nulls:,} source rows of {self.load.name} have no event time ({self.load.event_timestamp_column} is "
                "null).",
                hint=f"Filter them out in the source, or load without event_timestamp_column.{self.load.about_nulls}",
            )

    def into_new_table(self, rows: int) -> Counts:
        """Each event that changes something is a version, and the last one of a key is closed where it is too old."""
        tables, load, event = self.tables, self.load, self.load.event_timestamp_column
        assert event is not None
        began = tables.instant(f"s.{self._q(event)}", self.fields[event])
        self._refuse_timeless(began)
        digest = tables.row_hash([f"s.{self._q(name)}" for name in load.compared(self.names)])
        keys, ts, new, before, last = tables.listed(load.keys), *map(self._q, ("_ts", "_hash", "_before", "_last"))
        line = f"SELECT {tables.listed(load.keys, 's.')}, {began} AS {ts}, {digest} AS {new} FROM {self.source} AS s"
        compared = f"SELECT l.*, LAG({new}) OVER (PARTITION BY {keys} ORDER BY {ts}) AS {before} FROM ({line}) AS l"
        versions = (
            f"SELECT count(*) AS n, max({ts}) AS {last} FROM ({compared}) AS c "
            f"WHERE {before} IS NULL OR {before} <> {new} GROUP BY {keys}"
        )
        is_old = "1 = 0"
        if load.ttl_seconds is not None:
            is_old = f"{last} < {tables.add_seconds(self._now(), -load.ttl_seconds)}"
        row = self.session.row(f"SELECT sum(n), count(CASE WHEN {is_old} THEN 1 END) FROM ({versions}) AS v")
        assert row is not None
        inserted = min(int(row[0] or 0), rows)  # those that are put aside are staged too
        return Counts(inserted=inserted, unchanged=rows - inserted, deleted=int(row[1]))

    def _put_into_history(self, began: str) -> Counts:
        """Put events into the history of their keys: each begins a version where it changes something, ends the one
        before it, and is ended by the one after it, whatever order they come in."""
        tables, run = self.tables, self.session.run
        keys, listed = list(self.load.keys), tables.listed(self.load.keys)
        ts, until, src, digest = (self._q(name) for name in ("_ts", "_until", "_src", "_hash"))
        covered, before, before_ts, is_new = (self._q(name) for name in ("_cover", "_before", "_before_ts", "_is_new"))
        end, following, to = (self._q(name) for name in ("_end", "_next", "_to"))
        never = tables.moment(NEVER)
        distinct = ", ".join(f"{self._same([key])} AS {self._q(key)}" for key in keys)
        touched = f"(SELECT DISTINCT {distinct} FROM {tables.temporary(CHANGED)})"
        stored_hash, staged_hash = self._stage_stored(touched)
        line = tables.temporary(LINE)
        raw_keys = ", ".join(self._value(key) for key in keys)
        same = " AND ".join(f"{self._as_key(key, self._value(key))} = k.{self._q(key)}" for key in keys)
        known = (
            f"EXISTS (SELECT 1 FROM {self.target} AS t WHERE {self._on(value=True)} "
            f"AND t.{self._q(VALID_FROM)} = {began} AND {stored_hash} = {staged_hash})"
        )
        run(
            f"INSERT INTO {line} ({listed}, {ts}, {until}, {src}, {digest}) "
            f"SELECT {raw_keys}, {began}, NULL, 1, {staged_hash} FROM {self.source} AS s "
            f"JOIN {touched} AS k ON {same} WHERE NOT {known}"
        )
        order = f"PARTITION BY {self._same(keys)} ORDER BY {ts}, {src}, COALESCE({until}, {never})"
        tables.create_temporary_as(
            self.session,
            KEPT,
            f"SELECT * FROM (SELECT l.*, {self._cover(order)} AS {covered}, LAG({digest}) OVER ({order}) AS {before}, "
            f"LAG({ts}) OVER ({order}) AS {before_ts}, MIN({src}) OVER (PARTITION BY {self._same(keys)}) AS {is_new} "
            f"FROM {line} AS l) AS w WHERE {src} = 0 OR {before} IS NULL OR {before} <> {digest} "
            # The key was missing and is back, with the values it had.
            f"OR ({covered} <= {ts} AND {before_ts} < {covered})",
        )
        own_end = f"CASE WHEN {covered} > {ts} AND {covered} < {never} THEN {covered} END"
        tables.create_temporary_as(
            self.session,
            CHAIN,
            f"SELECT c.*, CASE WHEN {end} IS NULL THEN {following} "
            f"WHEN {following} IS NULL OR {end} < {following} THEN {end} ELSE {following} END AS {to} "
            f"FROM (SELECT k.*, {own_end} AS {end}, LEAD({ts}) OVER ({order}) AS {following} "
            f"FROM {tables.temporary(KEPT)} AS k) AS c",
        )
        matching = " AND ".join(f"{self._value(key)} = c.{self._q(key)}" for key in keys)
        return self._write_chain(f"{matching} AND {began} = c.{ts}", f"c.{src} = 1")

    def _stage_stored(self, touched: str, more: str = "") -> tuple[str, str]:
        """Stage the stored versions of the keys in question, with `more` columns; return the expressions that hash a
        stored and a staged row."""
        compared = self.load.compared(self.names)
        stored_hash = self._hash({name: f"t.{self._q(name)}" for name in compared})
        ts, until, src, digest = (self._q(name) for name in ("_ts", "_until", "_src", "_hash"))
        self.tables.create_temporary_as(
            self.session,
            LINE,
            f"SELECT {self.tables.listed(self.load.keys, 't.')}, t.{self._q(VALID_FROM)} AS {ts}, "
            f"t.{self._q(VALID_TO)} AS {until}, {more}0 AS {src}, {stored_hash} AS {digest} "
            f"FROM {self.target} AS t JOIN {touched} AS s ON {self._on()}",
        )
        return stored_hash, self._staged_hash(compared)

    def _cover(self, order: str) -> str:
        """Return where the version ends that began last before a row: stored versions never overlap."""
        until = f"COALESCE({self._q('_until')}, {self.tables.moment(NEVER)})"
        return (
            f"MAX(CASE WHEN {self._q('_src')} = 0 THEN {until} END) "
            f"OVER ({order} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
        )

    def _write_chain(self, joined: str, is_new: str, on: str = "", more: Mapping[str, str] | None = None) -> Counts:
        """End stored versions earlier, and add the new ones. `joined`: which staged row `s` a version `c` is; `on`:
        which stored row `t` is the version `s` beyond its key and its times; `more`: columns besides those of scd2."""
        tables, more = self.tables, more or {}
        ts, until, to, src = (self._q(name) for name in ("_ts", "_until", "_to", "_src"))
        chain, never = tables.temporary(CHAIN), tables.moment(NEVER)
        is_moved = f"{src} = 0 AND COALESCE({to}, {never}) <> COALESCE({until}, {never})"
        is_current = f"IS NULL THEN {tables.true} ELSE {tables.false} END"
        self.session.run(
            tables.update_from(
                self.target,
                f"(SELECT * FROM {chain} WHERE {is_moved})",
                f"{self._on()} AND t.{self._q(VALID_FROM)} = s.{ts}{on} "
                f"AND COALESCE(t.{self._q(VALID_TO)}, {never}) = COALESCE(s.{until}, {never})",
                {VALID_TO: f"s.{to}", IS_CURRENT: f"CASE WHEN s.{to} {is_current}"},
            )
        )
        names = tables.listed([*self.names, VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH, *more])
        values = ", ".join([*(self._value(name) for name in self.names), f"c.{ts}", f"c.{to}"])
        own = ", ".join([f"CASE WHEN c.{to} {is_current}", f"c.{self._q('_hash')}", *more.values()])
        cursor = self.session.run(
            f"INSERT INTO {self.target} ({names}) SELECT {values}, {own} "
            f"FROM {self.source} AS s JOIN {chain} AS c ON {joined} WHERE {is_new} AND {self.mark}"
        )
        written = int(cursor.rowcount)  # of DuckDB's cursor, before its next statement
        fresh = f"SELECT count(*) FROM {chain} AS c WHERE c.{self._q('_is_new')} = 1 AND {is_new}"
        inserted = int(self.session.value(fresh))
        return Counts(inserted=inserted, updated=written - inserted)
