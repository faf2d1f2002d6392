"""Expectations, tried on the staged rows of a load inside its transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from weft.errors import DeclarationError, LoadRefusedError, did_you_mean
from weft.systems.expectation import Expectation, Reaction
from weft.systems.load import MOST_ASIDE, Load
from weft.systems.sql import quarantine
from weft.systems.sql.literals import literal
from weft.systems.sql.move import LoadTransaction, Move

REPEATED = "_weft_repeated"

Quote = Callable[[str], str]


def condition(check: Expectation, quote: Quote, dialect: str) -> str:
    """Return the condition that a row meets which breaks an expectation."""
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
        # DuckDB knows no length of a number, which becomes a text in the table.
        return f"length(CAST({columns[0]} AS VARCHAR)) > {check.values[0]}"
    assert check.kind == "sql", check.kind
    return f"NOT ({check.text}\n)"


def refuse_unknown_columns(checks: tuple[Expectation, ...], columns: list[str], target: str) -> None:
    """Raise where an expectation is about a column that is not written."""
    for check in checks:
        for name in check.columns:
            if name not in columns:
                raise DeclarationError(
                    f"The expectation {check} of {target} is about a column that is not loaded.",
                    hint=did_you_mean(name, columns, f"Columns: {', '.join(columns[:30])}."),
                )


def is_broken(check: Expectation, rows: int, latest: Any, moment: datetime) -> str | None:
    """Return what is wrong with all rows together, if anything: their number, or the time of the latest one."""
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
    """Return the expectations that a table which does not exist yet would enforce."""
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
    """The expectations of a load, on the rows that it moves."""

    def __init__(self, transaction: LoadTransaction, move: Move, *, is_trial: bool = False) -> None:
        self.is_trial = is_trial
        """Whether rows are only counted: there may be no place to put them aside yet."""
        self.transaction = transaction
        self.tables, self.session, self.load = transaction.tables, transaction.session, transaction.load
        self.schema, self.columns = transaction.schema, transaction.schema.names
        self.move = move
        self.incomplete = 0
        """How many rows were put aside because they have no key, or no event time."""
        self.warnings: list[str] = []
        # Where savepoints are missing, `BadRows` stores what is put aside at the end.
        self._is_listed = self.load.on_bad_rows == "quarantine" and not self.tables.savepoints

    @property
    def stage(self) -> str:
        """The staging table, which is another one once rows that share a key were left out."""
        return self.tables.temporary(self.move.stage)

    @property
    def may_quarantine(self) -> bool:
        """Whether rows may go from the staging table."""
        return any(check.reaction == "quarantine" for check in self.load.checks)

    def run(self, rows: int) -> int:
        """Try each; return how many rows were put aside. Raises where one is broken that must not be."""
        load = self.load
        refuse_unknown_columns(load.checks, self.columns, load.name)
        failed: list[tuple[Expectation, str]] = []
        aside = 0
        for check in load.checks:
            problem = None
            if not check.is_about_rows:
                problem = self._whole(check, rows)
            elif count := self._count(bad := self._bad(check)):
                if check.reaction == "quarantine":
                    aside += self._quarantine(check, bad, count, f"expectation {check}")
                else:
                    problem = f"{count:,} of {rows:,} rows: {quarantine.name_of(self._rows(bad, 1)[0], load)}"
            if problem is not None and check.reaction == "warn":
                self.warnings.append(f"{check}: {problem}")
            elif problem is not None:
                failed.append((check, f"{check}: {problem}"))
        hint = 'on_quality_failure="warn" loads them all the same'
        # Where all rows together are not as expected, none of them is to be put aside.
        hint += ', "quarantine" puts them aside.' if all(check.is_about_rows for check, _ in failed) else "."
        are_too_long = all(check.kind == "length" for check, _ in failed)
        if are_too_long:
            hint = 'Texts are longer than their column: on_bad_rows="quarantine" puts such rows aside.'
        refuse_broken(load, [line for _, line in failed], hint, can_quarantine=are_too_long)
        return aside

    def put_keyless_aside(self) -> None:
        """Put the rows aside that have no key."""
        self._put_incomplete_aside(self.load.keys, quarantine.keyless(self.load))

    def put_timeless_aside(self) -> int:
        """Put the rows aside that have no event time, where there should be one; return how many."""
        event = self.load.event_timestamp_column
        return 0 if event is None else self._put_incomplete_aside((event,), quarantine.timeless(self.load))

    def _put_incomplete_aside(self, names: Sequence[str], why: str) -> int:
        check = Expectation("not_null", tuple(names))
        bad = self._bad(check)
        count = self._count(bad)
        self.incomplete += self._quarantine(check, bad, count, why) if count else 0
        return count

    def _whole(self, check: Expectation, rows: int) -> str | None:
        latest = None
        if check.kind == "freshness":
            latest = self.session.value(f"SELECT max({self.tables.quote(check.columns[0])}) FROM {self.stage}")
        return is_broken(check, rows, latest, self.load.moment)

    def _bad(self, check: Expectation) -> str:
        """A condition on the staged rows, as `s`."""
        if check.kind != "unique":
            return condition(check, self._ordered, self.tables.dialect)
        names = [self.tables.quote(name) for name in check.columns]
        listed = ", ".join(names)
        present = " AND ".join(f"{name} IS NOT NULL" for name in names)
        # A table of its own: MySQL cannot name a temporary table twice in one statement.
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
        return int(self.session.value(f"SELECT count(*) FROM {self.stage} AS s WHERE {bad}"))

    def _rows(self, bad: str, most: int) -> list[dict[str, object]]:
        names = self.tables.listed(self.columns, "s.")
        rows = self.session.rows(f"SELECT {names} FROM {self.stage} AS s WHERE {bad} LIMIT {most}")
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

    def _quarantine(self, check: Expectation, bad: str, count: int, why: str) -> int:
        if count > MOST_ASIDE:
            raise LoadRefusedError(
                f"{count:,} rows for {self.load.name} break {check}: too many to put aside, and nothing was written.",
                hint="Look at the source, or at the expectation.",
            )
        if not self.is_trial:
            rows = [(why, row) for row in self._rows(bad, count)]
            quarantine.insert(self.transaction, rows, [quarantine.NOWHERE] * len(rows) if self._is_listed else None)
        self.session.run(self.tables.delete_where(self.stage, bad))
        return count
