"""Joins the stored rows of two sides that a process has in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from weft.systems.state_store import BATCH, CHECK, KEY, SIDE, TIME, Pairs


class _Side:
    """The rows of one side that have a key, in the order of their keys and times."""

    def __init__(self, rows: pa.Table, keys: np.ndarray, side: int) -> None:
        is_own = rows[SIDE].to_numpy() == side
        self.rows = rows.filter(pa.array(is_own))
        self.times, self.batches = self.rows[TIME].to_numpy(), self.rows[BATCH].to_numpy()
        self.keys = keys[is_own]
        """A number for each key, -1 where a row has none."""
        self.places = np.lexsort((self.times, self.keys))

    def among(self, chosen: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the places of rows, with their keys and times, in order."""
        places = self.places if chosen is None else self.places[chosen[self.places]]
        return places, self.keys[places], self.times[places]


def pairs_in_memory(rows: pa.Table, wanted: Pairs) -> pa.Table:
    """Return what a batch emits. The columns of the left side come first."""
    keys = _numbered(rows)
    left, right = (_Side(rows, keys, side) for side in (0, 1))
    is_new = left.batches == wanted.batch
    # A row that came with the batch finds all others; of those before it, each finds the new ones alone.
    found = [
        _matches(left, np.flatnonzero(is_new), right.among(), wanted.least, wanted.most),
        _matches(left, np.flatnonzero(~is_new), right.among(right.batches == wanted.batch), wanted.least, wanted.most),
    ]
    chosen_left, chosen_right = (np.concatenate(parts) for parts in zip(*found, strict=True))
    parts = [
        pa.table(
            {
                **{name: left.rows[name].take(pa.array(chosen_left)) for name in wanted.left},
                **{name: right.rows[name].take(pa.array(chosen_right)) for name in wanted.right},
            }
        )
    ]
    for side, due in wanted.alone.items():
        own, other = (left, right) if side == 0 else (right, left)
        is_due = own.times <= due.upto
        if due.after is not None:
            is_due &= (own.times > due.after) | (own.batches == wanted.batch)
        least, most = (wanted.least, wanted.most) if side == 0 else (-wanted.most, -wanted.least)
        places = np.flatnonzero(is_due)
        starts, ends = _ranges(own, places, other.among(), least, most)
        parts.append(own.rows.take(pa.array(places[starts == ends])).select((wanted.left, wanted.right)[side]))
    names = [*wanted.left, *wanted.right]
    schema = pa.schema([rows.schema.field(name) for name in names])
    return pa.concat_tables(parts, promote_options="default").select(names).cast(schema)


def _numbered(rows: pa.Table) -> np.ndarray:
    """Return a number for the key of each row, -1 where it has none."""
    key, check = rows[KEY].combine_chunks(), rows[CHECK].combine_chunks()
    has_key = key.is_valid().to_numpy(zero_copy_only=False)
    both = np.zeros(len(rows), [("key", np.int64), ("check", np.int64)])
    both["key"], both["check"] = key.fill_null(0).to_numpy(), check.fill_null(0).to_numpy()
    numbers = np.unique(both, return_inverse=True)[1]
    return np.where(has_key, numbers, -1)


def _matches(side: _Side, places: np.ndarray, others: Any, least: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the rows of two sides that belong together."""
    starts, ends = _ranges(side, places, others, least, most)
    counts = ends - starts
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(places, counts), others[0][np.repeat(starts, counts) + within]


def _ranges(side: _Side, places: np.ndarray, others: Any, least: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row where its partners begin and end in the order of the other side."""
    _, keys, times = others
    own_keys, own_times = side.keys[places], side.times[places]
    starts, ends = np.searchsorted(keys, own_keys, "left"), np.searchsorted(keys, own_keys, "right")
    first = _first(times, starts, ends, own_times + least)
    last = _first(times, starts, ends, own_times + most + 1)
    last[own_keys < 0] = first[own_keys < 0]  # a row without a key has no partner
    return first, last


def _first(times: np.ndarray, starts: np.ndarray, ends: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the first place of each range whose time is a bound or after it, by halving all ranges at once."""
    low, high = starts.copy(), ends.copy()
    while (is_open := low < high).any():
        middle = (low + high) // 2
        is_before = np.zeros(len(low), bool)
        is_before[is_open] = times[middle[is_open]] < bounds[is_open]
        low = np.where(is_open & is_before, middle + 1, low)
        high = np.where(is_open & ~is_before, middle, high)
    return low
