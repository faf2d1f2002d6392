"""Expectations, tried on the staged rows of a load inside its transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from weft.errors import DeclarationError, LoadRefusedError, nearest
from weft.systems.expectation import Expectation, Reaction
from weft.systems.load import MOST_ASIDE, Load
from weft.systems.sql import quarantine
from weft.systems.sql.driver import Session
from weft.systems.sql.literals import literal
from weft.systems.sql.tables import SqlTables

REPEATED = "_weft_repeated"

Quote = Callable[[str], str]


def condition(check: Expectation, quote: Quote, dialect: str) -> str:
    """What a row meets that breaks an expectation."""
    columns = [quote(name) for name in check.columns]
    if check.kind == "not_null":
        return " OR ".join(f"{column} IS NULL" for column in columns)
    if check.kind == "accepted":
        return f"{columns[0]} NOT IN ({', '.join(literal(value, dialect) for value in check.values)})"
    if check.kind == "range":
        low, high = check.values
        bounds = [(low, "<"), (high, ">")]
        return " OR ".join(
            f"{columns[0]} {sign} {literal(value, dialect)}" for value, sign in bounds if value is not None
        )
    if check.kind == "length":
        return f"length({columns[0]}) > {check.values[0]}"
    assert check.kind == "sql", check.kind
    return f"NOT ({check.text}\n)"


def refuse_unknown_columns(checks: tuple[Expectation, ...], columns: list[str], target: str) -> None:
    """Raise where an expectation is about a column that is not written."""
    for check in checks:
        for name in check.columns:
            if name not in columns:
                close = nearest(name, columns)
                raise DeclarationError(
                    f"The expectation {check} of {target} is about a column that is not loaded.",
                    hint=f"Did you mean {close!r}?" if close else f"Columns: {', '.join(columns[:30])}.",
                )


def is_broken(check: Expectation, rows: int, latest: Any, moment: datetime) -> str | None:
    """What is wrong with all rows together, if anything: their number, or the time of the latest one."""
    if check.kind == "row_count":
        low, high = check.values
        if (low is not None and rows < low) or (high is not None and rows > high):
            return f"{rows:,} rows"
        return None
    if latest is None:
        return "there is no time at all"
    try:
        when = latest if isinstance(latest, datetime) else datetime.fromisoformat(str(latest))
    except ValueError:
        raise DeclarationError(
            f"The expectation {check} is about a column that holds no times, but {str(latest)[:40]!r}."
        ) from None
    when = when.replace(tzinfo=UTC) if when.tzinfo is None else when
    if moment - when > timedelta(seconds=check.values[0]):
        return f"the latest is of {when.isoformat(' ', 'seconds')}"
    return None


def refuse_broken(load: Load, broken: list[str], hint: str, *, can_quarantine: bool = False) -> None:
    """Raise where an expectation is broken that must not be."""
    if broken:
        lines = "".join(f"\n    {line}" for line in broken)
        raise LoadRefusedError(
            f"The rows for {load.name} are not as expected, and nothing was written:{lines}",
            can_quarantine=can_quarantine,
            hint=hint,
        )


def implied(load: Load, written: list[str]) -> tuple[Expectation, ...]:
    """What a table that is yet to be made would demand of its rows."""
    reaction: Reaction = "quarantine" if load.on_bad_rows == "quarantine" else "fail"
    declared = load.declared
    required = [] if declared is None else [field.name for field in declared.schema or () if not field.nullable]
    groups: list[tuple[str, ...]] = []
    if declared is not None and load.mode != "scd2":
        required += declared.primary_key
        groups = [group for group in (declared.primary_key, *declared.unique) if group]
    nulls = [Expectation("not_null", (name,), reaction=reaction) for name in dict.fromkeys(required) if name in written]
    return (
        *nulls,
        *(Expectation("unique", group, reaction=reaction) for group in groups if set(group) <= set(written)),
    )


class Checks:
    """The expectations of a load, on its staging table."""

    def __init__(
        self, tables: SqlTables, session: Session, load: Load, stage: str, schema: pa.Schema, *, is_trial: bool = False
    ) -> None:
        self.is_trial = is_trial
        """Whether rows are only counted: there may be no place to put them aside yet."""
        self.tables, self.session, self.load = tables, session, load
        self.stage, self.schema, self.columns = tables.temporary(stage), schema, schema.names
        self.warnings: list[str] = []

    @property
    def may_put_aside(self) -> bool:
        """Whether rows may go from the staging table."""
        return any(check.reaction == "quarantine" for check in self.load.checks)

    def run(self, rows: int, *, is_found_first: bool = False) -> int:
        """Try each; gives how many rows were put aside. Raises where one is broken that must not be.

        `is_found_first`: they go to the list of rows that `BadRows` puts aside in the end.
        """
        load = self.load
        self._number = quarantine.NOWHERE if is_found_first else None
        refuse_unknown_columns(load.checks, self.columns, load.name)
        failed: list[str] = []
        aside = 0
        for check in load.checks:
            said = self._whole(check, rows) if not check.is_about_rows else None
            if check.is_about_rows:
                bad = self._bad(check)
                count = self._count(bad)
                if count and check.reaction == "quarantine":
                    aside += self._put_aside(check, bad, count, f"expectation {check}")
                    continue
                said = f"{count:,} of {rows:,} rows: {self._example(bad)}" if count else None
            if said is not None:
                (self.warnings if check.reaction == "warn" else failed).append(f"{check}: {said}")
        hint = 'on_quality_failure="warn" loads them all the same, "quarantine" puts them aside.'
        are_too_long = all(line.startswith("length(") for line in failed)
        if are_too_long:
            hint = 'Texts are longer than their column: on_bad_rows="quarantine" puts such rows aside.'
        refuse_broken(load, failed, hint, can_quarantine=are_too_long)
        return aside

    def put_keyless_aside(self, *, is_found_first: bool) -> int:
        """Put rows aside that have no key; gives how many."""
        self._number = quarantine.NOWHERE if is_found_first else None
        check = Expectation("not_null", self.load.keys)
        bad = self._bad(check)
        return self._put_aside(check, bad, self._count(bad), quarantine.keyless(self.load))

    def _whole(self, check: Expectation, rows: int) -> str | None:
        latest = None
        if check.kind == "freshness":
            found = self.session.row(f"SELECT max({self.tables.quote(check.columns[0])}) FROM {self.stage}")
            latest = None if found is None else found[0]
        return is_broken(check, rows, latest, self.load.moment)

    def _bad(self, check: Expectation) -> str:
        """A condition on the staged rows, as `s`."""
        if check.kind != "unique":
            return condition(check, self._ordered, self.tables.dialect)
        names = [self.tables.quote(name) for name in check.columns]
        listed = ", ".join(names)
        present = " AND ".join(f"{name} IS NOT NULL" for name in names)
        # A table of its own: MySQL cannot name a temporary table twice in one statement.
        self.tables.drop_temporary(self.session, REPEATED)
        self.tables.create_temporary_as(
            self.session,
            REPEATED,
            f"SELECT {listed} FROM {self.stage} WHERE {present} GROUP BY {listed} HAVING count(*) > 1",
        )
        on = " AND ".join(f"r.{name} = s.{name}" for name in names)
        return f"EXISTS (SELECT 1 FROM {self.tables.temporary(REPEATED)} AS r WHERE {on})"

    def _ordered(self, name: str) -> str:
        return self.tables.ordered(f"s.{self.tables.quote(name)}", self.schema.field(name))

    def _count(self, bad: str) -> int:
        found = self.session.row(f"SELECT count(*) FROM {self.stage} AS s WHERE {bad}")
        assert found is not None
        return int(found[0])

    def _example(self, bad: str) -> str:
        return quarantine.name_of(self._rows(bad, 1)[0], self.load)

    def _rows(self, bad: str, most: int) -> list[dict[str, object]]:
        names = ", ".join(f"s.{self.tables.quote(name)}" for name in self.columns)
        found = self.session.rows(f"SELECT {names} FROM {self.stage} AS s WHERE {bad} LIMIT {most}")
        return [dict(zip(self.columns, row, strict=True)) for row in found]

    def _put_aside(self, check: Expectation, bad: str, count: int, why: str) -> int:
        if count > MOST_ASIDE:
            raise LoadRefusedError(
                f"{count:,} rows for {self.load.name} break {check}: too many to put aside, and nothing was written.",
                hint="Look at the source, or at the expectation.",
            )
        for row in self._rows(bad, 0 if self.is_trial else count):
            quarantine.insert(self.tables, self.session, self.load, why, row, self._number)
        self.session.run(self.tables.delete_where(self.stage, bad))
        return count
