"""Rows that a target rejects, named in the error of a load that puts none aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from weft.errors import LoadRefusedError
from weft.systems.load import Load
from weft.systems.sql import quarantine
from weft.systems.sql.bad_rows import NUMBERED, BadRows, EnoughError, Reason, keep, numbered, with_number
from weft.systems.sql.move import LoadTransaction

# How many rejected rows an error names.
_NAMED_ROWS = 5


class RejectedRows(BadRows):
    """Searches for bad rows to name some of them in an error, and puts none aside."""

    most_waiting: ClassVar[int] = _NAMED_ROWS

    def __init__(self, transaction: LoadTransaction) -> None:
        super().__init__(transaction, is_trial=True)
        self._named: list[str] = []
        self._are_duplicates = False

    def refusal(self, search: Callable[[], object]) -> LoadRefusedError | None:
        """The error that names the rows which this search finds, or `None` where it finds none."""
        stopped = False
        try:
            search()
        except EnoughError:
            stopped = True
        if not self._named:
            return None
        rows = f"{'at least ' if stopped else ''}{self.count} row{'s' if self.count > 1 else ''}"
        lines = "".join(f"\n    {line}" for line in self._named)
        place = quarantine.table_name(self.load)
        aside = f'on_bad_rows="quarantine" puts such rows aside into {place} and loads the others.'
        return LoadRefusedError(
            f"The table {self.load.name} rejected {rows}, and nothing was written:{lines}",
            can_quarantine=True,
            hint=f"{repeated_hint(self.load)} {aside}" if self._are_duplicates else aside,
        )

    def unprojected(self, stage: str, select: str, projection: str, names: Sequence[str]) -> LoadRefusedError | None:
        """The error that names the rows of a query of which the columns of the target cannot be computed."""
        tables, session = self.tables, self.session
        keys = with_number(tables, {})
        rows = tables.create_temporary_as(session, NUMBERED, numbered(tables, select), keys=keys)
        keep(self.transaction)
        return self.refusal(lambda: self.project(NUMBERED, stage, projection, names, rows, {}))

    def _refuse_deletes(self) -> None:
        """The load has failed already."""

    def _store(self, rejected: list[tuple[int, dict[str, object], Reason]]) -> None:
        super()._store(rejected)
        for _, row, (error, is_duplicate) in rejected:
            self._are_duplicates |= is_duplicate
            self._named.append(f"{quarantine.name_of(row, self.load, getattr(error, 'field', None))}: {error.what}")
        if len(self._named) >= _NAMED_ROWS:
            raise EnoughError


def repeated_hint(load: Load) -> str:
    """What to do about rows whose key is there already."""
    merge = 'mode="merge" updates the rows whose key is there.'
    if load.mode != "append" or load.watermark is not None:
        return merge
    return f'mode="append" inserts all rows of its query: incremental_column of a pipeline reads only new ones, {merge}'
