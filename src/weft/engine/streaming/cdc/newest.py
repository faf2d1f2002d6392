"""The newest change of each key of a batch, by the order of the source: what a table is after all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.streaming.cdc.envelopes import Opened, as_text
from weft.systems.changes import (
    AT,
    CREATE,
    DELETE,
    END,
    ESCAPES,
    HASHED,
    KEY,
    OP,
    ORDER,
    POSITION,
    READ,
    SEPARATOR,
    TRUNCATE,
    TS,
    UPDATE,
)
from weft.systems.load import KEY_LENGTH

# What Debezium sends for a large value that an update did not change: as a text, and as bytes in base64.
_UNAVAILABLE = pa.array(["__debezium_unavailable_value", "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="])
# And as the numbers of its letters, for an array of integers.
_LETTERS = list(b"__debezium_unavailable_value")
_KEPT = "_weft_keeps_"


@dataclass(frozen=True)
class Newest:
    """A batch of changes as a set."""

    rows: pa.Table
    """The key columns, the columns of the row, and `weft.systems.changes.OWN`; one row a key."""
    kept: tuple[tuple[str, str], ...]
    """As `weft.systems.changes.Changes` has it."""
    truncates: tuple[tuple[str | None, int | None], ...]
    """As `Changes` has it too."""
    newest_ms: int | None
    creates: int
    updates: int
    deletes: int
    repeated: int
    """The changes that the batch has more than once."""


def newest(changes: Opened) -> Newest:
    """Return the last change of each key."""
    op, ts, position = changes.op, changes.ts, changes.position
    order = ordered(changes)
    truncates = np.flatnonzero(op[order] == TRUNCATE)
    truncated = [(position[number].as_py(), ts[number].as_py()) for number in order[truncates].tolist()]
    if len(truncates):
        order = order[truncates[-1] + 1 :]
    key = _key_texts(changes.keys, len(op))
    codes = key.dictionary_encode()
    number = codes.indices.to_numpy(zero_copy_only=False)
    is_repeated = _repeated(number, position)
    # The last one of a key stays.
    last_of = np.full(len(codes.dictionary), -1, dtype=np.int64)
    last_of[number[order]] = order
    places = np.full(len(op), -1, dtype=np.int64)
    places[order] = np.arange(len(order))
    chosen = last_of[last_of >= 0]
    chosen = chosen[np.argsort(places[chosen])]
    taken = pa.array(chosen)
    columns = {name: each.take(taken) for name, each in changes.keys.items()}
    kept: list[tuple[str, str]] = []
    for name, each in changes.columns.items():
        is_known = _known(each)
        if is_known is None:
            columns[name] = each.take(taken)
            continue
        # The last value of the key that the batch says.
        said = np.full(len(last_of), -1, dtype=np.int64)
        known_order = order[is_known[order]]
        said[number[known_order]] = known_order
        place = said[number[chosen]]
        columns[name] = each.take(pa.array(place, mask=place < 0))
        if (place < 0).any():
            flag = f"{_KEPT}{len(kept)}"
            kept.append((name, flag))
            columns[flag] = pa.array(place < 0)
    columns[OP] = pa.array(op[chosen].astype(np.int64))
    columns[KEY] = key.take(taken)
    columns[POSITION], columns[TS] = position.take(taken), ts.take(taken)
    columns[ORDER] = pa.array(places[chosen])
    # The delete of an old key is a part of an update.
    counted = op[_last_of_messages(changes.message) & ~is_repeated]
    return Newest(
        rows=pa.table(columns),
        kept=tuple(kept),
        truncates=tuple(truncated),
        newest_ms=pc.max(ts).as_py(),
        creates=int(np.isin(counted, (CREATE, READ)).sum()),
        updates=int((counted == UPDATE).sum()),
        deletes=int((counted == DELETE).sum()),
        repeated=int(is_repeated.sum()),
    )


def versions(changes: Opened) -> pa.Table:
    """Return all changes of rows, each with the time from which a row is so: those of one key at one time are a
    microsecond apart."""
    order = ordered(changes)
    order = order[changes.op[order] != TRUNCATE]
    key = _key_texts(changes.keys, len(changes.op))
    number = key.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = order[~_repeated(number, changes.position)[order]]
    taken = pa.array(order)
    names, ts = number[order], pc.fill_null(changes.ts, -1).to_numpy(zero_copy_only=False)[order]
    # How many changes of the key had the same time before.
    by_key = np.lexsort((np.arange(len(order)), ts, names))
    starts = np.ones(len(order), bool)
    starts[1:] = (np.diff(names[by_key]) != 0) | (np.diff(ts[by_key]) != 0)
    firsts = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    again = np.empty(len(order), np.int64)
    again[by_key] = np.arange(len(order)) - firsts
    texts, times = key.take(taken), changes.ts.take(taken)
    is_end = pa.array(changes.op[order] == DELETE)
    ends = pc.binary_join_element_wise(texts, times.cast(pa.string()), SEPARATOR * 2)
    return pa.table(
        {
            **{name: each.take(taken) for name, each in (changes.keys | changes.columns).items()},
            OP: pa.array(changes.op[order].astype(np.int64)),
            KEY: texts,
            POSITION: changes.position.take(taken),
            TS: times,
            ORDER: pa.array(np.arange(len(order))),
            AT: pa.array(ts * 1000 + again, mask=ts < 0).cast(pa.timestamp("us", "UTC")),
            END: pc.if_else(is_end, ends, pa.scalar(None, pa.string())),
        }
    )


def _last_of_messages(message: np.ndarray) -> np.ndarray:
    """Return which change is the last of its message: the other one is the delete of a key that it changed."""
    last = np.ones(len(message), bool)
    last[:-1] = message[1:] != message[:-1]
    return last


def ordered(changes: Opened) -> np.ndarray:
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


def _key_texts(keys: dict[str, pa.Array], size: int) -> pa.Array:
    """Return keys as texts that each database can have in a key."""
    texts = [_escaped(pc.fill_null(as_text(each), "")) for each in keys.values()]
    key = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, SEPARATOR)
    is_long = pc.greater(pc.utf8_length(key), KEY_LENGTH)
    if not pc.any(is_long).as_py():
        return key
    hashed = [HASHED + sha256(text.encode()).hexdigest() for text in key.filter(is_long).to_pylist()]
    return pc.replace_with_mask(key, is_long, pa.array(hashed))


def _escaped(text: pa.Array) -> pa.Array:
    for sign, escaped in ESCAPES:
        text = pc.replace_substring(text, sign, escaped)
    return text


def is_unavailable(column: pa.Array) -> bool:
    """Return whether some changes do not say the value of a column."""
    return _known(column) is not None


def unsaid_of_new_keys(changes: Opened) -> list[str]:
    """Return the columns whose values some changes of keys do not say."""
    has_new_key = np.zeros(len(changes.op), bool)
    has_new_key[1:] = changes.message[1:] == changes.message[:-1]
    if not has_new_key.any():
        return []
    moved = pa.array(has_new_key)
    return [name for name, each in changes.columns.items() if is_unavailable(each.filter(moved))]


def _known(column: pa.Array) -> np.ndarray | None:
    """Return which values are said; `None` where all are."""
    if pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type):
        if not pc.any(pc.equal(pc.list_value_length(column), len(_LETTERS))).as_py():
            return None
        is_known = np.array([each != _LETTERS for each in column.to_pylist()])
        return None if is_known.all() else is_known
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        column = pc.list_element(pc.if_else(pc.equal(pc.list_value_length(column), 1), column, None), 0)
    if not pa.types.is_string(column.type) and not pa.types.is_binary(column.type):  # bytes come in Avro
        return None
    unknown = pc.is_in(column, value_set=_UNAVAILABLE.cast(column.type))
    return None if not pc.any(unknown).as_py() else ~unknown.to_numpy(zero_copy_only=False)
