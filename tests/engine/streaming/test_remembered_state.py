"""State that a process remembers: as the one in memory, whatever of it is remembered, after a restart at any moment."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from engine.streaming.join_oracle import Case, Oracle
from engine.streaming.states import choose_limits, remembered
from engine.streaming.test_files_state import SCHEMA, contents
from engine.streaming.test_joins import KINDS, emitted, joins_of
from weft.engine.streaming.joins import Joins
from weft.engine.streaming.stateful import LATE, REASON, Reduced
from weft.errors import WeftError
from weft.project import current
from weft.systems import pairs_in_memory
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import BATCH, END, KEY, SIDE, TIME, Selection, StateBatch

SELECTED = pa.schema(
    [
        (REASON, pa.string()),
        (TIME, pa.int64()),
        (SIDE, pa.int16()),
        (KEY, pa.binary()),
        *(
            (f"{side}_{name}", kind)
            for side in ("left", "right")
            for name, kind in (("key", pa.string()), ("number", pa.int64()))
        ),
    ]
)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("here")
def test_as_in_memory(seed: int, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    for round_ in range(count(100, 5)):
        chance = random.Random(seed * 1000 + round_)
        choose_limits(chance, monkeypatch)
        plain, schema, stored = InMemoryState(), SCHEMA, None
        for number in range(20):
            if stored is None or not chance.randrange(6):
                stored = remembered(f"round {round_}")
                assert stored.last() == plain.last()
            if plain.last() is not None:
                if not chance.randrange(3):
                    upto = chance.randrange(100)
                    plain.remove(upto)
                    stored.remove(upto)
                if not chance.randrange(8):
                    schema = schema.append(pa.field(f"c{number}", pa.string()))
                    plain.retype(schema)
                    stored.retype(schema)
            table = [
                {END: chance.randrange(100), KEY: chance.choice("abc"), BATCH: number, "n": chance.randrange(10**18)}
                for _ in range(chance.choice([0, 1, 10]))
            ]
            wanted = chance.choice([None, None, Selection(after=chance.randrange(100)), Selection(whole_keys=True)])
            if wanted is not None and wanted.whole_keys:
                wanted = Selection(after=-1, upto=chance.randrange(100), whole_keys=True, keys=("a",))
            for each in (plain, stored):
                each.append(pa.Table.from_pylist(table, schema), StateBatch(number, number, None), wanted)
            assert contents(stored) == contents(plain)


@pytest.mark.usefixtures("here")
def test_what_another_process_stored_is_not_remembered() -> None:
    first, second = remembered("a"), remembered("a")
    row = pa.Table.from_pylist([{END: 1, KEY: "a", BATCH: 0, "n": 1}], SCHEMA)
    first.last()
    first.append(row, StateBatch(0, None, None))
    second.last()
    second.append(row, StateBatch(1, None, None))
    with pytest.raises(WeftError, match="another process has gone on"):
        first.append(row, StateBatch(1, None, None))
    assert len(first.read(Selection())) == 2


@pytest.mark.usefixtures("here")
def test_a_removal_that_fails_is_done_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to remove is in the targets already, and would be emitted once more."""
    state, remove = remembered("a"), SqlState.remove
    rows = pa.Table.from_pylist([{END: end, KEY: "a", BATCH: 0, "n": 1} for end in (1, 2)], SCHEMA)
    state.last()
    state.append(rows, StateBatch(0, None, None))
    failures = [WeftError("The database is away."), WeftError("It still is.")]

    def away(store: SqlState, upto: int) -> None:
        if failures:
            raise failures.pop(0)
        remove(store, upto)

    monkeypatch.setattr(SqlState, "remove", away)
    state.remove(1)
    state.release()  # where another error may be on its way
    with pytest.raises(WeftError, match="still"):
        state.append(rows.slice(1), StateBatch(1, None, None))
    assert state.read(Selection())[END].to_pylist() == [2]


def _selected(sides: set[int]) -> pa.Schema:
    """Return the columns of rows of these sides. As Spark has it, one of a side alone may say that it has no nulls."""
    others = [each for side, each in enumerate(("left_", "right_")) if side not in sides]
    fields = [each for each in SELECTED if not each.name.startswith(tuple(others))]
    return pa.schema([each.with_nullable(not others or not each.name.endswith("_number")) for each in fields])


class PlainJoins(Joins):
    """Joins of rows that were not selected by Spark."""

    shared = 0
    """In so many first bytes the digests of all keys are the same."""

    def reduce(self, rows: Any) -> Reduced:
        selected = []
        for each in rows:
            side = "left" if each.side == 0 else "right"
            is_late = self.last is not None and self.last.watermark is not None
            is_late = is_late and each.at < self.last.watermark - self._allowed  # type: ignore[union-attr,operator]
            selected.append(
                {
                    REASON: LATE if is_late else None,
                    TIME: each.at,
                    SIDE: each.side,
                    KEY: None if each.key is None else self._digest(each.key),
                    f"{side}_key": each.key,
                    f"{side}_number": each.number,
                }
            )
        return self.reduced(pa.Table.from_pylist(selected, _selected({each.side for each in rows})), {})

    def _digest(self, key: str) -> bytes:
        return bytes(self.shared) + hashlib.sha256(key.encode()).digest()[self.shared :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("here")
def test_joins_as_in_plain_python(kind: str, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Case 11: a row without a partner, and a column that had no nulls at first.
    for seed in range(count(2000, 12)):
        current().streams.clear()
        check(seed, kind, monkeypatch)


def check(seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a case, with restarts before batches and replays of them, and compare it with the oracle."""
    chance = random.Random(seed)
    choose_limits(chance, monkeypatch)
    monkeypatch.setattr(pairs_in_memory, "_ROOM", chance.choice([1, 1 << 62]))
    monkeypatch.setattr(PlainJoins, "shared", chance.choice([0, 0, 2, 8]))
    case, found = Case.random(seed, kind), Counter[tuple[Any, Any]]()
    oracle, joins, restarts = Oracle(case), opened(case), chance.choice([1, 2, 5, 1000])
    for number, batch in enumerate(case.batches):
        if not chance.randrange(restarts):
            joins.close()
            joins = opened(case)
        assert not joins.begin(number)
        joins.add(number, joins.reduce(batch) if batch else joins.nothing(), None)
        once = emitted(joins.emission(None))
        if not chance.randrange(restarts):
            # As after a crash: the state has the batch, and what it emits is the same.
            joins.close()
            joins = opened(case)
            assert joins.begin(number) == (joins.last is not None)
        assert emitted(joins.emission(None)) == once
        oracle.add(batch)
        found += once
        assert found == oracle.emitted, f"case {seed}, batch {number}"
    joins.close()


def opened(case: Case) -> PlainJoins:
    pipeline = joins_of(case, InMemoryState()).pipeline
    return PlainJoins(pipeline, remembered(f"case {case.seed}"))
