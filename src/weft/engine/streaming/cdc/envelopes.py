"""Messages about changes, opened a batch at a time: what happened, to which key, when, and the row as it is then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import is_nested, nested_to_json
from weft.engine.streaming.cdc.debezium_types import Meaning, meanings, misfits
from weft.engine.streaming.cdc.json_rows import StoredTable, number_texts, rows_of, with_exact_keys
from weft.pipelines.streaming.cdc import CDC
from weft.systems.changes import CREATE, DELETE, READ, TRUNCATE, UPDATE
from weft.systems.codec import Parsed
from weft.systems.codecs.json import JsonDecoder

_CODES = {"create": CREATE, "read": READ, "update": UPDATE, "delete": DELETE, "truncate": TRUNCATE, "skip": -2}
_SKIP, _BAD = -2, -1
# The two parts of a message in which Kafka Connect sends a schema along with the envelope.
_SCHEMA, _PAYLOAD = "schema", "payload"
# Later than 1973 in milliseconds, and in seconds later than the year 5000.
_MILLISECONDS_FROM = 100_000_000_000
_DIGITS = 20
_FILES = {"debezium": ("source.file",), "maxwell": ("position",)}
_NUMBERS = {
    "debezium": tuple(f"source.{each}" for each in ("scn", "lsn", "pos", "row", "ord", "event_serial_no")),
    "maxwell": ("xid", "xoffset"),
}
# A text without a row.
_NOTHING = pa.array([None, "", "null"])
# A file of a log, and of Maxwell the place in it: "master.000006:800911".
_FILE = r"^(?P<base>.*\.)(?P<number>\d+)(?::(?P<place>\d+))?$"


@dataclass
class OpenedChanges:
    """The changes of a batch, in the order of their messages. A message that changes a key is two of them."""

    op: np.ndarray
    """The operation of each change."""
    message: np.ndarray
    """The number of each change's message."""
    keys: dict[str, pa.Array]
    columns: dict[str, pa.Array]
    """The row as it is then, without its keys; nulls of a delete."""
    position: pa.Array
    """Texts that sort as the log of the database does; null where messages do not say it."""
    ts: pa.Array
    """In milliseconds since 1970, or null."""
    before: pa.Array | None = None
    """The rows as they were, as far as messages say it."""
    after: pa.Array | None = None
    """The rows as they are then; null of a delete."""
    meanings: dict[str, Meaning] = field(default_factory=dict)
    """What the schema of the messages says of the columns."""
    skipped: int = 0
    """Messages that are no change of a row: tombstones, heartbeats, changes of schemas."""
    bad: dict[int, str] = field(default_factory=dict)
    """By the number of a malformed message what is wrong with it."""


Stored = Callable[[], Sequence[StoredTable]]
"""Returns the tables that changes go to, as far as they are there."""


def opened(messages: pa.Table, cdc: CDC, stored: Stored = tuple) -> OpenedChanges:
    """Open the envelopes of these messages. A value that a column of `stored` cannot have makes its message a bad
    one."""
    paths, size, stored = cdc.paths, messages.num_rows, cache(stored)
    parts, bad = _Parts(messages, cdc, stored), dict[int, str]()
    op = parts.at(paths.op)
    code = _codes(op, cdc, size)
    if parts.payload is not None:
        # A tombstone with a schema.
        code[(code == _BAD) & _mask(pc.is_null(parts.payload))] = _SKIP
    if (is_bad := code == _BAD).any():
        code[is_bad & parts.are_of_no_row()] = _SKIP
    for number in np.flatnonzero(code == _BAD).tolist():
        word = None if op is None else op[number].as_py()
        why = f"It has no operation at {paths.op!r}." if word is None else f"{word!r} is no operation."
        bad[number] = parts.unread.get(number, why)
    (before, unread_before), (after, unread_after) = parts.rows(paths.before), parts.rows(paths.after)
    is_row = np.isin(code, (CREATE, READ, UPDATE))
    missing = is_row & _mask(_is_null(after, size))
    for number in np.flatnonzero(missing).tolist():
        bad[number] = unread_after.get(number, f"It has no row at {paths.after!r}.")
    # The row before may have had another key, whose row would stay.
    for number, why in unread_before.items():
        if code[number] == UPDATE:
            missing[number] = True
            bad.setdefault(number, why)
    code[missing] = _BAD
    after_columns, before_columns = _fields(after), _fields(before)
    keys: dict[str, pa.Array] = {}
    old: dict[str, pa.Array] = {}
    for path, name in zip(cdc.key_field or (), cdc.keys, strict=True):
        alternatives = (after_columns.get(name), parts.at(path), before_columns.get(name))
        alike = _alike([pa.nulls(size) if each is None else each for each in alternatives])
        keys[name], old[name] = pc.coalesce(*alike), alike[-1]
        absent = np.isin(code, (CREATE, READ, UPDATE, DELETE)) & _mask(pc.is_null(keys[name]))
        for number in np.flatnonzero(absent).tolist():
            bad[number] = unread_before.get(number, f"It has no key at {path!r}.")
        code[absent] = _BAD
    meant = parts.meanings()
    of_rows, of_keys = np.isin(code, (CREATE, READ, UPDATE)), np.isin(code, (CREATE, READ, UPDATE, DELETE))
    for name, each, is_written in (
        *((name, each, of_rows) for name, each in after_columns.items() if name not in keys),
        *((name, each, of_keys) for name, each in keys.items()),
        *((name, each, code == UPDATE) for name, each in old.items()),
    ):
        for number, why in _misfits(name, each, is_written, meant.get(name), stored, cdc).items():
            bad.setdefault(number, why)
            code[number] = _BAD
    moved = np.flatnonzero((code == UPDATE) & _moved(old, keys, size))
    numbers = np.flatnonzero(code >= 0)
    order = np.concatenate([moved, numbers])
    # The delete of the old key comes before the change itself.
    order = order[np.argsort(order, kind="stable")]
    is_old = np.zeros(len(order), bool)
    is_old[np.searchsorted(order, moved)] = True
    chosen = pa.array(order)
    position, ts = _position(parts, cdc, size), _ts(parts, paths.ts, cdc, size)
    changed = pa.array(is_old)
    return OpenedChanges(
        op=np.where(is_old, DELETE, code[order]),
        message=order,
        keys={name: pc.if_else(changed, old[name].take(chosen), each.take(chosen)) for name, each in keys.items()},
        columns={name: each.take(chosen) for name, each in after_columns.items() if name not in keys},
        position=position.take(chosen),
        ts=ts.take(chosen),
        before=None if before is None else before.take(chosen),
        after=None if after is None else after.take(pa.array(order, mask=is_old | (code[order] == DELETE))),
        meanings=meant,
        skipped=int((code == _SKIP).sum()),
        bad=dict(sorted(bad.items())),
    )


def table_names(messages: pa.Table, cdc: CDC) -> pa.Array:
    """Return of each message the table that it is about; null where it does not say it."""
    parts, names = _Parts(messages, cdc), list[pa.Array]()
    for paths in cdc.paths.tables:
        texts = [each.cast(pa.string()) for path in paths if (each := parts.at(path)) is not None]
        if len(texts) == len(paths):
            names.append(texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, "."))
    return pc.coalesce(*names) if names else pa.nulls(messages.num_rows, pa.string())


def _misfits(
    name: str, array: pa.Array, is_written: np.ndarray, meaning: Meaning | None, stored: Stored, cdc: CDC
) -> dict[int, str]:
    """Return which of the written values of a column its tables cannot have."""
    reasons: dict[int, str] = {}
    if pa.types.is_null(array.type):
        return reasons
    written = array if is_written.all() else pc.if_else(pa.array(is_written), array, pa.scalar(None, array.type))
    for each in stored():
        if (column := each.columns.get(name.lower())) is not None:
            how = {"has_bits": cdc.envelope == "debezium", "refuses_rows": each.refuses_rows}
            reasons |= misfits(written, column, meaning, cdc.time_unit, **how)
    return reasons


class _Parts:
    """The parts of messages, by their paths."""

    def __init__(self, messages: pa.Table, cdc: CDC, stored: Stored = tuple) -> None:
        before, self._after = (path.removeprefix(f"{_PAYLOAD}.") for path in (cdc.paths.before, cdc.paths.after))
        self._rows, self._cdc, self._stored = {before, self._after}, cdc, stored
        self._read: dict[str, tuple[pa.Array | None, dict[int, str]]] = {}
        self._columns = {name: _combined(messages.column(name)) for name in messages.column_names}
        self.size = messages.num_rows
        self.payload: pa.Array | None = None
        self.unread: dict[int, str] = {}
        """By the number of a message why its payload could not be read."""
        # A row, or a part of another envelope, may be called so too.
        inner = None if cdc.paths.op.split(".")[0] in self._columns else self._columns.get(_PAYLOAD)
        if inner is not None:
            payload, self.unread = _parsed(inner, _whatever(self._texts_in("")))
            if payload is not None:
                self.payload = inner
                self._columns = {**self._columns, **_fields(payload)}

    def are_of_no_row(self) -> np.ndarray:
        """Return which messages of Debezium are about a transaction or a schema, or heartbeats: they have a time of
        their own, and neither an operation nor a row."""
        if self._cdc.envelope != "debezium":
            return np.zeros(self.size, bool)
        paths = self._cdc.paths
        is_of_none = ~_mask(_is_null(self.at("ts_ms"), self.size))
        for path in (paths.op, paths.before, paths.after):
            is_of_none &= _mask(_is_null(self.at(path), self.size))
        return is_of_none

    def meanings(self) -> dict[str, Meaning]:
        """Return what the schemas of the first and the last message say: the table may have been altered between."""
        schemas = self._columns.get(_SCHEMA) if self.payload is not None else None
        if schemas is None or schemas.null_count == len(schemas):
            return {}
        there = np.flatnonzero(_mask(pc.is_valid(schemas)))
        first, last = (schemas[int(each)].as_py() for each in (there[0], there[-1]))
        texts = (json.loads(each) if isinstance(each, str) else each for each in (first, last))
        return {name: each for schema in texts if isinstance(schema, dict) for name, each in meanings(schema).items()}

    def at(self, path: str) -> pa.Array | None:
        """Return what messages have at a path; `None` where none has it."""
        so_far, *rest = path.removeprefix(f"{_PAYLOAD}.").split(".")
        column = self._columns.get(so_far)
        for name in rest:
            inner = None if column is None else self._objects(so_far, column)[0]
            if inner is None or inner.type.get_field_index(name) < 0:
                return None
            column, so_far = pc.struct_field(inner, name), f"{so_far}.{name}"
        return column

    def rows(self, path: str) -> tuple[pa.Array | None, dict[int, str]]:
        """Return the rows at a path, `None` where no message has one; and why some could not be read."""
        column = self.at(path)
        rows, unread = (None, {}) if column is None else self._objects(path.removeprefix(f"{_PAYLOAD}."), column)
        return rows, {number: f"Its row at {path!r} cannot be read. {why}" for number, why in unread.items()}

    def _objects(self, place: str, column: pa.Array) -> tuple[pa.Array | None, dict[int, str]]:
        """Return what messages have at a place as objects, each read once."""
        if place not in self._read:
            read = _whatever(self._texts_in(f"{place}."))
            if place == self._after and not pa.types.is_struct(column.type):
                of_messages = {*self.meanings(), *self._cdc.keys}
                is_growing = self._cdc.schema_evolution == "evolve"
                read = partial(rows_of, stored=self._stored(), left=of_messages, is_growing=is_growing)
            self._read[place] = _parsed(column, self._with_exact_keys(read))
        return self._read[place]

    def _with_exact_keys(self, read: Callable[[pa.Array], Parsed]) -> Callable[[pa.Array], Parsed]:
        return lambda texts: with_exact_keys(texts, read(texts), self._cdc.keys, self._stored())

    def _texts_in(self, place: str) -> dict[str, pa.DataType]:
        """Return what stays a text in an object at a place: rows, which are of no type before their table is known."""
        inside = (path.removeprefix(place) for path in self._rows if path.startswith(place))
        return {path.split(".")[0]: pa.json_() for path in inside}


def _combined(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _whatever(known: Mapping[str, pa.DataType]) -> Callable[[pa.Array], Parsed]:
    """Return what reads objects of whatever types."""
    return JsonDecoder(known, takes_all=True).parse


def _parsed(array: pa.Array, read: Callable[[pa.Array], Parsed]) -> tuple[pa.Array | None, dict[int, str]]:
    """Return objects, of JSON too that is kept as a text, `None` where there are none; and why others are none."""
    if pa.types.is_struct(array.type):
        return array, {}
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        others = np.flatnonzero(_mask(pc.is_valid(array))).tolist()
        return None, dict.fromkeys(others, f"It is no object: it is of the type {array.type}.")
    there = np.flatnonzero(_mask(pc.invert(pc.is_in(pc.utf8_trim(array, " \t\r\n"), value_set=_NOTHING))))
    texts = array.take(pa.array(there)).cast(pa.binary())
    if not len(texts):
        return None, {}
    parsed = read(texts)
    unread = {int(there[number]): why for number, why in parsed.bad.items()}
    if not len(parsed.good):
        return None, unread
    # The number of each message's row among the parsed rows; null where there is none.
    places = np.full(len(array), -1, dtype=np.int64)
    places[there[np.asarray(parsed.good, dtype=np.int64)]] = np.arange(len(parsed.good))
    index = pa.array(places, mask=places < 0)
    columns = [each.take(index) for each in parsed.columns.values()]
    return pa.StructArray.from_arrays(columns, list(parsed.columns), mask=pa.array(places < 0)), unread


def _fields(array: pa.Array | None) -> dict[str, pa.Array]:
    if array is None:
        return {}
    return {each.name: pc.struct_field(array, each.name) for each in array.type}


def _mask(array: pa.Array) -> np.ndarray:
    mask: np.ndarray = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return mask


def _is_null(array: pa.Array | None, size: int) -> pa.Array:
    return pa.repeat(True, size) if array is None else pc.is_null(array)


def _codes(op: pa.Array | None, cdc: CDC, size: int) -> np.ndarray:
    """Return of each message what its operation is."""
    if op is None:
        return np.full(size, _BAD, dtype=np.int8)
    ops = cdc.paths.ops
    numbers = pc.index_in(op.cast(pa.string()), value_set=pa.array(list(ops)))
    codes = np.array([_CODES[each] for each in ops.values()] + [_BAD], dtype=np.int8)
    code: np.ndarray = codes[pc.fill_null(numbers, len(ops)).to_numpy(zero_copy_only=False)]
    return code


def _first(*candidates: Any) -> pa.Array:
    """Return the first value of each row, in a type that holds all."""
    *arrays, size = candidates
    there = [each for each in arrays if each is not None and not pa.types.is_null(each.type)]
    if not there:
        return pa.nulls(size, pa.string())
    kind = there[0].type
    return pc.coalesce(*(_as(each, kind) for each in there))


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type.equals(kind):
        return array
    try:
        return array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return pa.nulls(len(array), kind)


def _alike(arrays: list[pa.Array]) -> list[pa.Array]:
    """Return keys in one type, with each value: as texts, where the type of the first does not hold all of them."""
    kinds = [each.type for each in arrays if not pa.types.is_null(each.type)]
    # Arrow rounds a number with more digits, or one in a text, to the nearest float.
    are_texts = any(map(pa.types.is_floating, kinds)) and any(each != kinds[0] for each in kinds)
    for kind in () if are_texts else kinds[:1]:
        try:
            return [pa.nulls(len(each), kind) if pa.types.is_null(each.type) else each.cast(kind) for each in arrays]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            break
    return [as_text(each) for each in arrays]


def as_text(key: pa.Array) -> pa.Array:
    """Return keys as texts that can be compared: nested ones as JSON, bytes in hexadecimal digits, and a number as
    the same text whatever its type is."""
    if is_nested(key.type):
        return nested_to_json(key)
    if pa.types.is_binary(key.type):
        return pa.array([None if each is None else each.hex() for each in key.to_pylist()], pa.string())
    return number_texts(key) if pa.types.is_floating(key.type) else key.cast(pa.string())


def _moved(old: dict[str, pa.Array], keys: dict[str, pa.Array], size: int) -> np.ndarray:
    """Return which rows had another key before."""
    moved = np.zeros(size, bool)
    for name, was in old.items():
        moved |= _mask(pc.not_equal(as_text(was), as_text(keys[name])))
    for name in old:
        # Maxwell names the changed columns alone: the other part of the key is as it was.
        old[name] = pc.coalesce(old[name], keys[name])
    return moved


# ------------------------------------------------------------------------------------------------- order and time


def _position(parts: _Parts, cdc: CDC, size: int) -> pa.Array:
    """Return texts that sort as the positions do: numbers have leading zeros."""
    for paths in cdc.paths.positions:
        arrays = [parts.at(path) for path in paths]
        is_known = np.zeros(size, bool)
        for each in arrays:
            is_known |= ~_mask(_is_null(each, size))
        if is_known.any():
            texts = [
                pa.repeat("", size) if each is None else pc.fill_null(_sortable(each, path, cdc), "")
                for path, each in zip(paths, arrays, strict=True)
            ]
            joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, "/")
            return pc.if_else(pa.array(is_known), joined, pa.scalar(None, pa.string()))
    return pa.nulls(size, pa.string())


def _sortable(array: pa.Array, path: str, cdc: CDC) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    text = array.cast(pa.string())
    if not pa.types.is_string(array.type):
        return _padded(text)
    # Other texts sort as they are: to pad digits at the end of "…:000a" or of "0/16B374A" would change their order.
    if path in _FILES.get(cdc.envelope, ()):
        parts = pc.extract_regex(text, _FILE)
        file, place = _padded(pc.struct_field(parts, "number")), pc.struct_field(parts, "place")
        ends = pc.if_else(pc.equal(place, ""), "", pc.binary_join_element_wise(":", _padded(place), ""))
        return pc.coalesce(pc.binary_join_element_wise(pc.struct_field(parts, "base"), file, ends, ""), text)
    if path in _NUMBERS.get(cdc.envelope, ()):
        return pc.if_else(pc.match_substring_regex(text, r"^\d+$"), _padded(text), text)
    return text


def _padded(digits: pa.Array) -> pa.Array:
    return pc.utf8_lpad(digits, _DIGITS, "0")


def _ts(parts: _Parts, paths: Sequence[str], cdc: CDC, size: int) -> pa.Array:
    times = [_milliseconds(each, cdc) for path in paths if (each := parts.at(path)) is not None]
    return _first(*times, size).cast(pa.int64())


def _milliseconds(array: pa.Array, cdc: CDC) -> pa.Array:
    if pa.types.is_string(array.type):
        array = _as(array, pa.timestamp("ms", "UTC"))
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("ms", array.type.tz), safe=False).cast(pa.int64())
    number = _as(array if pa.types.is_integer(array.type) else pc.round(_as(array, pa.float64())), pa.int64())
    if cdc.envelope == "debezium":
        return number
    return pc.if_else(pc.less(number, _MILLISECONDS_FROM), pc.multiply(number, 1000), number)
