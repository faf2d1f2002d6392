"""The rows of a state that a process has in memory too, so that it does not read again what it has just stored.

The database has every row, and alone says what is so. A process remembers the rows that it adds, as long as they are
not too many, and reads them from memory. What it does not remember it reads from the database: after a restart, until
all rows of before are gone; and after an error, of which it is not known what it left behind.

Rows are removed by a thread, while the next batch is computed. Everything else that asks the database waits for it. The
same thread stores the rows of a join, while their pairs are found in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pyarrow as pa
import pyarrow.compute as pc

from weft.systems.pairs_in_memory import pairs_in_memory
from weft.systems.state_in_memory import mask, retyped
from weft.systems.state_store import Pairs, Selection, StateBatch, StateStore

MOST_BYTES = 256 << 20
"""The most bytes of rows that are remembered."""
# A state of so few rows is read when it is opened. A larger one is known when its rows of then are gone: a run of a
# single batch must not wait for all of it.
_FEW_ROWS = 20_000
_MOST_PARTS = 64


class RememberedState(StateStore):
    """A state in a database, and its rows in memory."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._parts: list[pa.Table] | None = None
        """The rows that were added since, the oldest first; `None` where nothing is remembered yet."""
        self._unknown: int | None = None
        """The greatest end of rows that are not remembered; `None` where all are."""
        self._is_too_large = False
        self._thread: ThreadPoolExecutor | None = None
        self._removal: Future[None] | None = None
        self._owed: int | None = None
        """Rows up to this end must be gone from the database before anything is asked of it: they were emitted."""

    @property
    def _is_known(self) -> bool:
        return self._parts is not None and self._unknown is None

    def last(self) -> StateBatch | None:
        self._settle()
        self._forget()
        return self._store.last()

    def schema(self) -> pa.Schema | None:
        return self._store.schema()

    def append(self, rows: pa.Table, batch: StateBatch, replaced: Selection | None = None) -> None:
        self._settle()
        self._begin()
        with self._changing():
            self._store.append(rows, batch, replaced)
        if replaced is not None and self._parts is not None:
            if self._unknown is not None and replaced.whole_keys:
                self._is_too_large = True  # which rows are meant depends on those that are not known
            self._keep(replaced)
        self._remember(rows)

    def append_joined(self, rows: pa.Table, batch: StateBatch, wanted: Pairs) -> pa.Table | None:
        self._settle()
        self._begin()
        if self._parts is None or self._unknown is not None:
            self.append(rows, batch)
            return None
        pairs, known = None, pa.concat_tables([*self._parts, rows])
        with self._changing():
            storing = self._worker.submit(self._store.append, rows, batch)
            try:
                with suppress(Exception):  # the batch is stored then all the same, and meets the error when it emits
                    pairs = pairs_in_memory(known, wanted)
            finally:
                storing.result()
        self._remember(rows)
        return pairs

    def _remember(self, rows: pa.Table) -> None:
        """Remember rows that were stored, unless they are too many."""
        if self._parts is None:
            return
        self._parts.append(rows)
        if len(self._parts) > _MOST_PARTS:
            pairs = (self._parts[at : at + 2] for at in range(0, len(self._parts), 2))
            self._parts = [pa.concat_tables(each).combine_chunks() for each in pairs]
        if self._is_too_large or sum(each.nbytes for each in self._parts) > MOST_BYTES:
            self._forget()
            self._is_too_large = True

    def retype(self, schema: pa.Schema) -> None:
        self._settle()
        with self._changing():
            self._store.retype(schema)
            if self._parts is not None:
                self._parts = [retyped(each, schema) for each in self._parts]

    def read(self, wanted: Selection) -> pa.Table:
        self._begin()
        if self._is_known:
            rows = self._rows()
            return rows.filter(mask(rows, wanted))
        self._settle()
        return self._store.read(wanted)

    def pairs(self, wanted: Pairs) -> pa.Table:
        self._begin()
        if self._is_known:
            return pairs_in_memory(self._rows(), wanted)
        self._settle()
        return self._store.pairs(wanted)

    def counts(self) -> dict[int, int]:
        self._settle()
        return self._store.counts()

    def groups(self, columns: Sequence[str], wanted: Selection) -> dict[int, int]:
        self._settle()
        return self._store.groups(columns, wanted)

    def refuses_name(self, name: str) -> str | None:
        return self._store.refuses_name(name)

    def can_hold(self, columns: Sequence[pa.Field]) -> bool:
        return self._store.can_hold(columns)

    def remove(self, upto: int) -> None:
        self._settle()
        is_known_now = False
        if self._parts is not None:
            self._keep(Selection(upto=upto))
            if is_known_now := self._unknown is not None and self._unknown <= upto:
                self._unknown = None
        self._owed = upto
        self._removal = self._worker.submit(self._remove, upto, is_known_now)

    def _remove(self, upto: int, is_known_now: bool) -> None:
        self._store.remove(upto)
        if is_known_now:
            self._store.is_remembered()

    def release(self) -> None:
        with suppress(Exception):  # it is tried again, and raised, by what comes next; another error may be on its way
            self._settle()
        self._store.release()

    def close(self) -> None:
        self._forget()
        if self._thread is not None:
            self._thread.shutdown()
        self._store.close()

    @property
    def _worker(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weft-state")
        return self._thread

    # ---------------------------------------------------------------------------------------------------------- memory

    def _settle(self) -> None:
        """Wait until rows are removed; try again what failed before. Raise where that fails too."""
        if self._owed is None:
            return
        removal, self._removal = self._removal, None
        with self._changing():
            if removal is None:
                self._store.remove(self._owed)
            else:
                removal.result()
        self._owed = None

    def _begin(self) -> None:
        """Remember rows from here on."""
        if self._parts is not None or self._is_too_large:
            return
        self._settle()
        schema = self._store.schema()
        if schema is None:
            self._parts = []
            return
        counts = self._store.counts()
        if sum(counts.values()) > _FEW_ROWS:
            self._parts, self._unknown = [], max(counts)
        else:
            self._parts, self._unknown = [self._store.read(Selection())], None
            self._store.is_remembered()

    def _rows(self) -> pa.Table:
        schema = self._store.schema()
        assert schema is not None and self._parts is not None
        return pa.concat_tables([schema.empty_table(), *self._parts])

    def _keep(self, gone: Selection) -> None:
        """Forget rows; those of most batches are untouched."""
        if gone.whole_keys:  # which are those of all batches
            rows = self._rows()
            self._parts = [rows.filter(pc.invert(mask(rows, gone)))]
            return
        kept = []
        for part in self._parts or ():
            is_gone = mask(part, gone)
            if not pc.any(is_gone, min_count=0).as_py():
                kept.append(part)
            elif len(rest := part.filter(pc.invert(is_gone))):
                kept.append(rest)
        self._parts = kept

    def _forget(self) -> None:
        self._parts, self._unknown = None, None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Forget everything where the database may or may not have a change."""
        try:
            yield
        except BaseException:
            self._forget()
            raise
