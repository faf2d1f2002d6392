"""State that a process remembers: as the one in memory, whatever of it is remembered, after a restart at any moment."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from engine.streaming.join_oracle import Case
from engine.streaming.states import choose_limits, remembered
from engine.streaming.test_files_state import SCHEMA, contents
from engine.streaming.test_joins import KINDS, check_joins, keys_of, pipeline_of
from weft.engine.streaming import joins as joins_module
from weft.engine.streaming.joins import Joins
from weft.engine.streaming.stateful import LATE, REASON, Reduced
from weft.errors import WeftError
from weft.project import current
from weft.systems import pairs_in_memory
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import BATCH, CHECK, END, KEY, SIDE, TIME, Pairs, Selection, StateBatch

SPREAD = joins_module._spread
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
                stored = remembered(f"round {round_}", round_ + 19)  # the first of them in DuckDB
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

    shared: int | None = 0
    """In so many first bytes the digests of all keys are the same; `None`: keys are short texts."""

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
        if self.shared is None:
            return key.encode()
        return bytes(self.shared) + hashlib.sha256(key.encode()).digest()[self.shared :]


def test_no_two_keys_have_the_same_numbers() -> None:
    """Short ones are stored as they are, whatever bytes they end with, and of others a digest."""
    short = [b"", b"\0", b"\0\0", b"a", b"a\0", b"ab", b"k" * 7, b"k" * 8, b"k" * 9, b"k" * 15, b"k" * 14 + b"\0"]
    long = [hashlib.sha256(each).digest() for each in (b"", b"a", b"k" * 15)]
    long += [bytes(15) + each for each in (b"\0" * 17, b"\1" * 17)]  # of a digest 15 bytes count
    keys = [None, *short, *long]
    # In several chunks, of which one begins in the middle of what it has.
    chunks = [pa.array(keys[:4], pa.binary()), pa.array([b"other", *keys[4:]], pa.binary()).slice(1)]
    first, second = (each.to_pylist() for each in joins_module._numbers(pa.chunked_array(chunks)))
    assert (first[0], second[0]) == (None, None)
    numbers = list(zip(first, second, strict=True))
    assert len({*numbers}) == len(keys) - 1
    assert numbers[-1] == numbers[-2]
    assert len({*first}) == len(keys) - 1  # an index on one of the two finds a key


@pytest.mark.usefixtures("here")
def test_rows_that_could_not_be_stored_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pairs are found while they are stored."""
    schema = pa.schema([(END, pa.int64()), (TIME, pa.int64()), (SIDE, pa.int16()), (KEY, pa.int64())])
    for name in (CHECK, BATCH, "l", "r"):
        schema = schema.append(pa.field(name, pa.int64()))
    state, append = remembered("a"), SqlState.append

    def add(number: int) -> list[dict[str, Any]]:
        row = {END: 9, TIME: 1, SIDE: number % 2, KEY: 1, CHECK: 1, BATCH: number, "lr"[number % 2]: number}
        wanted = Pairs(number, 0, 0, ("l",), ("r",))
        found = state.append_joined(pa.Table.from_pylist([row], schema), StateBatch(number, None, None), wanted)
        assert found is not None
        return found.to_pylist()

    def away(*_: Any) -> None:
        raise WeftError("The database is away.")

    state.last()
    assert add(0) == []
    monkeypatch.setattr(SqlState, "append", away)
    with pytest.raises(WeftError, match="away"):
        add(1)
    monkeypatch.setattr(SqlState, "append", append)
    assert len(state.read(Selection())) == 1
    assert add(1) == [{"l": 0, "r": 1}]
    assert add(2) == [{"l": 2, "r": 1}]
    state.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("here")
def test_joins_as_in_plain_python(kind: str, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(count(2000, 12)):
        current().streams.clear()
        check(seed, kind, monkeypatch)


def check(seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a case and compare it with the oracle, whatever of its state is remembered."""
    chance = random.Random(seed)
    choose_limits(chance, monkeypatch)
    monkeypatch.setattr(pairs_in_memory, "_ROOM", chance.choice([1, 1 << 62]))
    shared = chance.choice([0, None, 2, 8])
    monkeypatch.setattr(PlainJoins, "shared", shared)
    # With 8, the numbers of all keys are the same but for `CHECK`.
    monkeypatch.setattr(joins_module, "_spread", (lambda first, _: first.copy()) if shared == 8 else SPREAD)
    case = Case.random(seed, kind, keys_of(seed))
    pipeline = pipeline_of(case)

    def opened() -> PlainJoins:
        return PlainJoins(pipeline, remembered(f"case {seed}", seed))

    check_joins(case, opened, PlainJoins.reduce, None)
