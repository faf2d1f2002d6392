"""The newest change of each key of a batch, by the order of the source: what a table is after all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.streaming.cdc.debezium_types import said
from weft.engine.streaming.cdc.envelopes import OpenedChanges, as_text
from weft.systems.changes import (
    AT,
    CREATE,
    DELETE,
    END,
    ESCAPES,
    FIRST,
    FIRST_TS,
    FROM,
    HASHED,
    KEEPS,
    KEY,
    OP,
    ORDER,
    POSITION,
    READ,
    SAID,
    SEPARATOR,
    TRUNCATE,
    TS,
    UNKNOWN,
    UPDATE,
    Place,
    Unavailable,
)
from weft.systems.load import KEY_LENGTH

_KEPT, _FROM = "_weft_keeps_", "_weft_from_"


@dataclass(frozen=True)
class Newest:
    """A batch of changes as a set."""

    rows: pa.Table
    """The key columns, the columns of the row, and `own` of `weft.systems.changes.Changes`; one row a key."""
    kept: tuple[Unavailable, ...]
    origins: tuple[str, ...]
    truncates: tuple[Place, ...]
    """These as `weft.systems.changes.Changes` has them."""
    newest_ms: int | None
    creates: int
    updates: int
    deletes: int
    repeated: int
    """The changes that the batch has more than once."""
    counted: pa.Table
    """As `Changes` has it."""


def newest(changes: OpenedChanges) -> Newest:
    """Return the last change of each key."""
    op, ts, position = changes.op, changes.ts, changes.position
    order = ordered(changes)
    truncates = np.flatnonzero(op[order] == TRUNCATE)
    truncated = [(position[number].as_py(), ts[number].as_py()) for number in order[truncates].tolist()]
    last_truncate = int(order[truncates[-1]]) if len(truncates) else None
    if len(truncates):
        order = order[truncates[-1] + 1 :]
    key = _key_texts(changes.keys)
    codes = key.dictionary_encode()
    number = codes.indices.to_numpy(zero_copy_only=False)
    is_repeated = _repeated(number, position)
    # The last one of a key stays.
    last_of, first_of = (np.full(len(codes.dictionary), -1, dtype=np.int64) for _ in range(2))
    last_of[number[order]] = order
    first_of[number[order[::-1]]] = order[::-1]
    places = np.full(len(op), -1, dtype=np.int64)
    places[order] = np.arange(len(order))
    chosen = last_of[last_of >= 0]
    chosen = chosen[np.argsort(places[chosen])]
    rows, first = pa.array(chosen), pa.array(first_of[number[chosen]])
    columns = {name: each.take(rows) for name, each in changes.keys.items()}
    known = {name: is_known for name, each in changes.columns.items() if (is_known := said(each)) is not None}
    last = last_values(changes, order[~is_repeated[order]], number, known, last_truncate) if known else None
    kept: list[Unavailable] = []
    for name, each in changes.columns.items():
        if last is None or name not in known:
            columns[name] = each.take(rows)
            continue
        # The last value of the key that the batch says.
        place, flag = last.places[name][number[chosen]], last.flags[name][number[chosen]]
        columns[name] = each.take(pa.array(place, mask=flag != SAID))
        unavailable = Unavailable(name, f"{_KEPT}{len(kept)}", f"{_KEPT}position_{len(kept)}")
        kept.append(unavailable)
        columns[unavailable.flag] = pa.array(flag)
        columns[unavailable.position] = position.take(pa.array(place, mask=place < 0))
    origins: tuple[str, ...] = ()
    if last is not None and ((was := last.origins[number[chosen]]) >= 0).any():
        # The first change of that key in the batch is its delete, and has its parts.
        source = pa.array(first_of[was], mask=was < 0)
        origins = tuple(f"{_FROM}{number}" for number in range(len(changes.keys)))
        columns |= {name: each.take(source) for name, each in zip(origins, changes.keys.values(), strict=True)}
        columns[FROM] = key.take(source)
    columns[OP] = pa.array(op[chosen].astype(np.int64))
    columns[KEY] = key.take(rows)
    columns[POSITION], columns[TS] = position.take(rows), ts.take(rows)
    columns[FIRST], columns[FIRST_TS] = position.take(first), ts.take(first)
    columns[ORDER] = pa.array(places[chosen])
    # The delete of an old key is a part of an update.
    is_whole = _last_of_messages(changes.message) & (op != TRUNCATE)
    is_counted = is_whole & ~is_repeated
    ops, counted = op[is_counted], pa.array(is_counted)
    return Newest(
        rows=pa.table(columns),
        kept=tuple(kept),
        origins=origins,
        truncates=tuple(truncated),
        newest_ms=pc.max(ts).as_py(),
        creates=int(np.isin(ops, (CREATE, READ)).sum()),
        updates=int((ops == UPDATE).sum()),
        deletes=int((ops == DELETE).sum()),
        repeated=int((is_whole & is_repeated).sum()),
        counted=pa.table(
            {
                OP: pa.array(ops.astype(np.int64)),
                KEY: key.filter(counted),
                POSITION: position.filter(counted),
                TS: ts.filter(counted),
            }
        ),
    )


def versions(changes: OpenedChanges) -> tuple[pa.Table, pa.Table]:
    """Return all changes of rows, and what each counts as, by its number."""
    order = ordered(changes)
    key = _key_texts(changes.keys)
    number = key.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = order[(changes.op[order] != TRUNCATE) & ~_repeated(number, changes.position)[order]]
    in_order = pa.array(order)
    texts, times, positions = key.take(in_order), changes.ts.take(in_order), changes.position.take(in_order)
    is_end = pa.array(changes.op[order] == DELETE)
    parts = (texts, times.cast(pa.string()), pc.fill_null(positions, ""))
    ends = bounded(pc.binary_join_element_wise(*parts, SEPARATOR * 2))
    rows = pa.table(
        {
            **{name: each.take(in_order) for name, each in (changes.keys | changes.columns).items()},
            OP: pa.array(changes.op[order].astype(np.int64)),
            KEY: texts,
            POSITION: positions,
            TS: times,
            ORDER: pa.array(np.arange(len(order))),
            AT: times.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
            END: pc.if_else(is_end, ends, pa.scalar(None, pa.string())),
        }
    )
    is_counted = _last_of_messages(changes.message)[order]
    return rows, pa.table({OP: pa.array(np.where(is_counted, changes.op[order], -1).astype(np.int64))})


def _last_of_messages(message: np.ndarray) -> np.ndarray:
    """Return which change is the last of its message: the other one is the delete of a key that it changed."""
    last = np.ones(len(message), bool)
    last[:-1] = message[1:] != message[:-1]
    return last


def ordered(changes: OpenedChanges) -> np.ndarray:
    """Return the numbers of the changes in the order of the source: by position and time as far as all have them, then
    as they came."""
    by = {name: each for name, each in (("position", changes.position), ("ts", changes.ts)) if not each.null_count}
    size = len(changes.op)
    if not by or all(_is_sorted(each) for each in by.values()):
        return np.arange(size)
    rows = pa.table({**by, "number": pa.array(np.arange(size))})
    order: np.ndarray = pc.sort_indices(rows, [(name, "ascending") for name in rows.column_names]).to_numpy()
    return order.astype(np.int64)


def _is_sorted(array: pa.Array, follows: Callable[[pa.Array, pa.Array], pa.Array] = pc.less_equal) -> bool:
    return len(array) < 2 or bool(pc.all(follows(array[:-1], array[1:])).as_py())


def _repeated(number: np.ndarray, position: pa.Array) -> np.ndarray:
    """Return which changes are there a second time: of one key at one position."""
    repeated = np.zeros(len(number), bool)
    # Most batches come in order, and to compare neighbours is fast.
    if position.null_count or _is_sorted(position, pc.less):
        return repeated
    places = position.dictionary_encode()
    if len(places.dictionary) == len(position):
        return repeated
    both = number.astype(np.int64) * len(places.dictionary) + places.indices.to_numpy(zero_copy_only=False)
    repeated[:] = True
    repeated[np.unique(both, return_index=True)[1]] = False
    return repeated


def _key_texts(keys: dict[str, pa.Array]) -> pa.Array:
    """Return keys as texts that each database can have in a key."""
    texts = [_escaped(pc.fill_null(as_text(each), "")) for each in keys.values()]
    return bounded(texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, SEPARATOR))


def bounded(texts: pa.Array) -> pa.Array:
    """Return texts with a hash in the place of those that are too long for a key."""
    is_long = pc.fill_null(pc.greater(pc.utf8_length(texts), KEY_LENGTH), False)
    if not pc.any(is_long).as_py():
        return texts
    hashed = [HASHED + sha256(text.encode()).hexdigest() for text in texts.filter(is_long).to_pylist()]
    return pc.replace_with_mask(texts, is_long, pa.array(hashed))


def _escaped(text: pa.Array) -> pa.Array:
    for sign, escaped in ESCAPES:
        text = pc.replace_substring(text, sign, escaped)
    return text


def is_unavailable(column: pa.Array) -> bool:
    """Return whether some changes do not say the value of a column."""
    return said(column) is not None


@dataclass(frozen=True)
class LastValues:
    """Where the values of the last change of each key come from. Arrays are indexed by the number of a key."""

    places: dict[str, np.ndarray]
    """By column the number of the change that says the value, or after which it is unknown; -1 where there is none."""
    flags: dict[str, np.ndarray]
    """By column SAID, KEEPS or UNKNOWN."""
    origins: np.ndarray
    """The number of the key that the stored row has, where it is another one; else -1."""


def last_values(
    changes: OpenedChanges, order: np.ndarray, number: np.ndarray, known: dict[str, np.ndarray], truncate: int | None
) -> LastValues:
    """Return where the values of columns are from that not all changes say. A row takes its values along when its key
    is changed, and one that is created again begins without any. `truncate`: the number of the one before all of it."""
    size = int(number.max()) + 1 if len(number) else 0
    start = (UNKNOWN, truncate) if truncate is not None else (KEEPS, -1)
    places = {name: np.full(size, start[1], dtype=np.int64) for name in known}
    flags = {name: np.full(size, start[0], dtype=np.int64) for name in known}
    origins = np.full(size, -1, dtype=np.int64)
    for name, is_known in known.items():
        saying = order[is_known[order]]
        places[name][number[saying]] = saying
        flags[name][number[saying]] = SAID
    # Only rows that came or went need to be followed one by one.
    is_part = ~_last_of_messages(changes.message)
    parts = np.isin(changes.message, changes.message[is_part])
    followed = np.unique(number[order[(changes.op[order] == DELETE) | parts[order]]])
    for name in known:
        places[name][followed], flags[name][followed] = start[1], start[0]
    moving: dict[int, tuple[int, dict[str, tuple[int, int]]]] = {}
    for place in order[np.isin(number[order], followed)].tolist():
        key, message = int(number[place]), int(changes.message[place])
        if changes.op[place] == DELETE:
            if is_part[place]:
                was = int(origins[key]) if origins[key] >= 0 else key
                moving[message] = was, {name: (int(places[name][key]), int(flags[name][key])) for name in known}
            origins[key] = -1
            for name in known:
                places[name][key], flags[name][key] = place, UNKNOWN
            continue
        if message in moving:
            was, values = moving.pop(message)
            origins[key] = was if any(flag == KEEPS for _, flag in values.values()) and was != key else -1
            for name, (where, flag) in values.items():
                # Earlier changes of the new key are about another row.
                places[name][key], flags[name][key] = place if flag == UNKNOWN else where, flag
        for name, is_known in known.items():
            if is_known[place]:
                places[name][key], flags[name][key] = place, SAID
    return LastValues(places, flags, origins)
