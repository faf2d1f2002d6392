"""Dead letters: rows that could not be read, transformed or stored, each with the reason and its origin."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from weft.engine.readers import opened_tables
from weft.engine.streaming import row_origin
from weft.engine.streaming.dead_letter_stores import open_store
from weft.engine.streaming.row_origin import ORIGIN
from weft.errors import DeclarationError, WeftError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.systems.base import Connection
from weft.systems.dead_letter_store import DeadLetter, DeadLetterStore, StoredLetter, as_json, digest
from weft.systems.load import Load
from weft.systems.log import EXTRA, RESERVED_PREFIX
from weft.systems.sql import quarantine


class DeadLetterBox:
    """The dead letters of a pipeline. `replays`: how often those of a replay have been replayed."""

    def __init__(self, pipeline: StreamingPipeline, *, replays: int = 0) -> None:
        self.pipeline, self._replays = pipeline, replays
        self.put_ids: set[str] = set()
        """The letters that were put into this box."""
        self._store = open_store(pipeline)

    @property
    def store(self) -> DeadLetterStore:
        """The store; an error with the options that declare one, where there is none."""
        if self._store is None:
            raise DeclarationError(
                f"{self.pipeline.name} has no place for dead letters.",
                hint="Name one: dead_letter_stream, dead_letter_table, dead_letter_topic or dead_letter_path.",
            )
        return self._store

    def put(self, letters: Sequence[DeadLetter], checkpoint: str, batch_id: int, part: str) -> None:
        """Store the letters of a batch. The same ones of the same batch again change nothing."""
        if not letters or self._store is None:
            return
        now = datetime.now(UTC)
        seen: Counter[DeadLetter] = Counter()
        stored = []
        for each in letters:
            seen[each] += 1
            # By what it says: a batch that is tried again under other SQL may have other letters, in another order.
            letter_id = digest(repr((checkpoint, batch_id, part, tuple(vars(each).values()), seen[each])))
            stored.append(
                StoredLetter(
                    **vars(each),
                    failed_at=now,
                    letter_id=letter_id,
                    pipeline=self.pipeline.name,
                    batch=None if self._replays else batch_id,
                    replays=self._replays,
                )
            )
        self.put_stored(stored)

    def put_stored(self, letters: Sequence[StoredLetter]) -> None:
        """Store letters that have an id."""
        if letters:
            self.put_ids.update(each.letter_id for each in letters)
            self.store.put(letters)

    def letters(self) -> Iterator[StoredLetter]:
        """Yield all letters of this pipeline, each once, in no order; also the notes of replays that were begun."""
        seen: set[str] = set()
        for record in self.store.records():
            letter = StoredLetter.of(record)
            if letter is None or letter.pipeline != self.pipeline.name or letter.letter_id in seen:
                continue
            seen.add(letter.letter_id)
            if letter.stage != "gone":
                yield letter

    def remove(self, ids: Collection[str]) -> None:
        """Remove letters by their ids."""
        if ids:
            self.store.remove(ids)


# ----------------------------------------------------------------------------------------------- rows that are to blame


def failing_rows(
    rows: pa.Table, attempt: Callable[[pa.Table], pa.Table], *, is_known: bool = False
) -> tuple[pa.Table, list[tuple[int, str]]]:
    """Return the rows that can be transformed, and the numbers of those that cannot, each with the reason. `is_known`:
    all together have failed.

    They are found by halving, with as few failed attempts as possible: after each one Spark restarts Python's workers.
    """
    bad: list[tuple[int, str]] = []

    def fails(first: int, end: int, *, is_known: bool = False) -> bool:
        if not is_known or end - first == 1:
            try:
                attempt(rows.slice(first, end - first))
            except WeftError as error:
                if end - first == 1:
                    bad.append((first, error.what))
                    return True
            else:
                return False
        middle = (first + end) // 2
        # Where the first half is good, it is the other one that fails.
        fails(middle, end, is_known=not fails(first, middle))
        return True

    fails(0, len(rows), is_known=is_known and len(rows) > 0)
    return without_rows(rows, {number for number, _ in bad}), bad


def without_rows(rows: pa.Table, numbers: Collection[int]) -> pa.Table:
    """Return the rows but for those with these numbers."""
    return rows.take(pa.array([number for number in range(len(rows)) if number not in numbers], pa.int64()))


def letter_of(row: dict[str, Any], why: str) -> DeadLetter:
    """Return the letter of a row that `transform_sql` failed for; the row has the column of its origin."""
    row = dict(row)
    extra = row.pop(EXTRA, None)
    # Without `_event_ts` the same SQL over it could not be run again.
    shown = {name: value for name, value in row.items() if not name.startswith(RESERVED_PREFIX)}
    if extra is not None:
        shown |= json.loads(extra)
    return DeadLetter("transform", why, payload=as_json(shown), **json.loads(row[ORIGIN]))


# ---------------------------------------------------------------------------------------------- rows that were rejected


def name_origins(letters: Sequence[DeadLetter], with_origins: Callable[[], pa.Table]) -> Sequence[DeadLetter]:
    """Return the letters of rejected rows with their origins, as far as these are known: SQL that groups rows, for
    example, leaves none."""
    # Whatever fails here, the letters are worth more than their origins, and so is the batch.
    with suppress(Exception):
        rows = with_origins()
        if ORIGIN in rows.column_names:
            return row_origin.with_origins(letters, rows)
    return letters


def keyless(rows: pa.Table, load: Load, source: str) -> list[DeadLetter]:
    """Return the letters of rows without a key, which a target without a quarantine does not get."""
    why = quarantine.keyless(load)
    return [DeadLetter("store", why, source, quarantine.payload(row), target=load.name) for row in rows.to_pylist()]


@contextmanager
def rejected(connection: Connection, load: Load, source: str) -> Iterator[list[DeadLetter]]:
    """Yield what a target's quarantine has of this batch; it is removed from there at the end."""
    with opened_tables(connection) as tables:
        quarantine.prepare(tables, load)
        place = tables.table(load.schema, quarantine.table_name(load))
        of_batch = f"{tables.quote('_weft_checkpoint_id')} = ? AND {tables.quote('_weft_batch_id')} = ?"
        key = (load.checkpoint_id, load.batch_id)
        with tables.driver.session("read") as session:
            rows = session.rows(f"SELECT {tables.quote('_weft_error')}, payload FROM {place} WHERE {of_batch}", key)
        yield [DeadLetter("store", error, source, payload, target=load.name) for error, payload in rows]
        if rows:
            with tables.driver.session("publish") as session:
                session.run(f"DELETE FROM {place} WHERE {of_batch}", key)
