"""Joins the stored rows of two sides that a process has in memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.systems.state_store import BATCH, CHECK, KEY, SIDE, TIME, Pairs

_Places = np.ndarray
"""Numbers of rows."""
# Rows that may have a key of others are found by so many bits of it, before keys are compared.
_BITS = 22
# Key and time are one number, as long as it is smaller than this.
_ROOM = 1 << 62


def pairs_in_memory(rows: pa.Table, wanted: Pairs) -> pa.Table:
    """Return what a batch emits. The columns of the left side come first."""
    search = _Search(rows, wanted)
    is_new, is_left = search.batches == wanted.batch, search.sides == 0
    # A row that came with the batch finds all others; of those before it, each is found by the new ones alone.
    pairs = [
        search.matches(is_new & is_left, ~is_left, wanted.least, wanted.most),
        search.matches(is_new & ~is_left, is_left & ~is_new, -wanted.most, -wanted.least)[::-1],
    ]
    left, right = (pa.array(np.concatenate(parts)) for parts in zip(*pairs, strict=True))
    columns = {name: rows[name].take(left) for name in wanted.left}
    parts = [pa.table({**columns, **{name: rows[name].take(right) for name in wanted.right}})]
    for side, names in ((0, wanted.left), (1, wanted.right)):
        if side in wanted.alone:
            bounds = (wanted.least, wanted.most) if side == 0 else (-wanted.most, -wanted.least)
            places = search.alone(search.due[side], search.sides != side, *bounds)
            parts.append(rows.select(names).take(pa.array(places)))
    names = (*wanted.left, *wanted.right)
    schema = pa.schema([rows.schema.field(name).with_nullable(True) for name in names])
    return pa.concat_tables(parts, promote_options="default").select(names).cast(schema)


class _Search:
    """Finds partners among rows: those whose key is one of the rows that the batch asks for, mostly few of all."""

    def __init__(self, rows: pa.Table, wanted: Pairs) -> None:
        self.sides, self.batches, self.times = (rows[name].to_numpy() for name in (SIDE, BATCH, TIME))
        keys, checks = (pc.fill_null(rows[name], 0).to_numpy() for name in (KEY, CHECK))
        self._has_key = pc.is_valid(rows[KEY]).to_numpy()
        self.due = {}
        is_asked = self.batches == wanted.batch
        for side, due in wanted.alone.items():
            is_due = (self.sides == side) & (self.times <= due.upto)
            if due.after is not None:
                is_due &= (self.times > due.after) | (self.batches == wanted.batch)
            self.due[side] = is_due
            is_asked = is_asked | is_due
        # A key is a part of a digest: its last bits are as good as any.
        bits = keys & ((1 << _BITS) - 1)
        is_known = np.zeros(1 << _BITS, bool)
        is_known[bits[is_asked]] = True
        self._is_candidate = self._has_key & is_known[bits]
        places = np.flatnonzero(self._is_candidate)
        self._numbers = np.zeros(len(keys), np.int64)
        """A number for the key of each candidate."""
        self._numbers[places] = _numbered(keys[places], checks[places])
        least, most = (int(each(self.times[places])) if len(places) else 0 for each in (np.min, np.max))
        self._first, self._span = least, most - least + 2
        self._is_wide = (len(places) + 1) * self._span >= _ROOM
        """Whether key and time do not fit into one number: times are then counted, not measured."""
        self._moments = np.unique(self.times[places]) if self._is_wide else None
        if self._moments is not None:
            self._span = len(self._moments) + 2

    def matches(self, own: np.ndarray, others: np.ndarray, least: int, most: int) -> tuple[_Places, _Places]:
        """Return rows and their partners, whose times are so much later. `own`, `others`: which rows those are."""
        places = np.flatnonzero(own & self._is_candidate)
        partners, starts, ends = self._ranges(places, others, least, most)
        counts = ends - starts
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(places, counts), partners[np.repeat(starts, counts) + within]

    def alone(self, own: np.ndarray, others: np.ndarray, least: int, most: int) -> _Places:
        """Return the rows that have no partner."""
        places = np.flatnonzero(own & self._has_key)
        _, starts, ends = self._ranges(places, others, least, most)
        return np.concatenate([np.flatnonzero(own & ~self._has_key), places[starts == ends]])

    def _ranges(
        self, places: _Places, others: np.ndarray, least: int, most: int
    ) -> tuple[_Places, np.ndarray, np.ndarray]:
        """Return possible partners in the order of their keys and times, and for each row where its own begin and end
        among them."""
        partners = np.flatnonzero(others & self._is_candidate)
        ordered = self._position(partners, 0)
        order = np.argsort(ordered)
        ordered, partners = ordered[order], partners[order]
        starts, ends = self._position(places, least), self._position(places, most + 1)
        # One after the other in order: places that are near each other are found much faster.
        order = np.argsort(starts)
        near = np.empty((2, len(places)), np.int64)
        for at, bounds in enumerate((starts, ends)):
            near[at, order] = np.searchsorted(ordered, bounds[order])
        return partners, near[0], near[1]

    def _position(self, places: _Places, later: int) -> np.ndarray:
        """Return where keys and times, so much later, come in the order of keys and times."""
        times = self.times[places] + later
        moments = times - self._first if self._moments is None else np.searchsorted(self._moments, times)
        position: np.ndarray = self._numbers[places] * self._span + np.clip(moments, 0, self._span - 1)
        return position


def _numbered(keys: np.ndarray, checks: np.ndarray) -> np.ndarray:
    """Return a number for each key."""
    order = np.argsort(keys)
    is_next, differs = np.diff(keys[order]) != 0, np.diff(checks[order]) != 0
    if (differs & ~is_next).any():  # two keys with the same first half
        order = np.lexsort((checks, keys))
        is_next = (np.diff(keys[order]) != 0) | (np.diff(checks[order]) != 0)
    numbers = np.zeros(len(keys), np.int64)
    numbers[order[1:]] = np.cumsum(is_next)
    return numbers
