"""A load that is tried and undone: what it would do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from weft.errors import WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql import checks
from weft.systems.sql.commit import LoadAttempt, SourceRows, UndoneError, name_rejected
from weft.systems.sql.tables import SqlTables


def attempt(tables: SqlTables, load: Load, rows: SourceRows) -> Counts:
    """Return what a load would do to an existing target: carry it out, and undo it."""
    return _undone(tables, load, rows, _Trial.run)


def attempt_unmade(tables: SqlTables, load: Load, rows: SourceRows) -> Counts:
    """Return what a load would do to a target that does not exist or will change: stage and check its rows."""
    more = checks.implied(load, load.written(rows.schema).names)
    return _undone(tables, replace(load, checks=(*load.checks, *more)), rows, _Trial.check)


def _undone(tables: SqlTables, load: Load, rows: SourceRows, work: Callable[[_Trial], Counts]) -> Counts:
    counts, trial = Counts(), None
    try:
        with suppress(UndoneError), tables.driver.session("publish") as session:
            trial = _Trial(tables, session, load, rows)
            counts = work(trial)
            raise UndoneError
    except WeftError as error:
        name_rejected(trial, error)
        raise
    return counts


class _Trial(LoadAttempt):
    """An attempt that is undone, so that neither the ledger nor the watermark shall know of it."""

    is_trial: ClassVar[bool] = True

    def _claim(self) -> None:
        """Nothing: it is undone."""

    def _record(self, counts: Counts) -> None:
        """Nothing: it is undone."""

    def check(self) -> Counts:
        """Stage the rows and check whether they are as expected: all that can be known without the target."""
        bad = self._bad_rows()
        with self._temporary_tables():
            move = self._move({}, *self._stage(bad, {}))
            self._check_empty()
            expected = checks.Checks(self.transaction, move, is_trial=True)
            left_out = self._check_keys(move, expected)
            aside = expected.run(self.rows_read)
            counts = move.into_new_table(self.rows_read - left_out - aside)
        unstaged = 0 if bad is None else bad.unstaged
        return replace(
            counts,
            rows_read=self.rows_read + unstaged,
            quarantined=expected.incomplete + aside + unstaged,
            warnings=tuple(expected.warnings),
        )
