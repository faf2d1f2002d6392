"""From a caller's dicts to a batch of columns: validation, schema drift and quarantine.

Almost every publish takes the short way: all keys known, every column of one type, checked at the speed of C. What
does not fit goes event by event through `_by_event`, which finds the culprit's index or a place for its value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, is_dataclass
from operator import itemgetter
from typing import Any

from weft.errors import SchemaError, did_you_mean
from weft.streams.declare import MAX_NEW_COLUMNS, Stream, can_be_column
from weft.streams.plain import plain_events
from weft.systems.log import EXTRA, META_TYPES, RESERVED_PREFIX, Batch, Log
from weft.types import FieldType, check_column, check_value, comparable, dump_json, infer, to_json

NO_SUCH_FIELD, OF_ALL_EXTRA = "the stream has no such field", "of all that fits no column"
"""`server/rejected.py` knows by these words where the value ends in a reason. Reasons are stored: if you change a word,
add the new one there and keep the old."""
# Columns that one publish adds to a table that has some: one event of odd keys does not use up what a stream may have.
_NEW_COLUMNS_A_PUBLISH = 20


@dataclass(slots=True)
class Encoded:
    """The columns of the events that fit, and the quarantine's records of those that do not."""

    columns: tuple[str, ...]
    values: list[list[Any]]
    events: list[dict[str, Any]]
    """The events that fit."""
    extra: list[str | None] | None = None
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    nulls: tuple[bool, ...] | None = None
    """By column, whether it has nulls; `None` if that is unknown."""


def as_events(events: object, stream: Stream) -> list[dict[str, Any]]:
    """Return one event or many as a list of dicts."""
    if type(events) is dict:
        return [events]
    if isinstance(events, Mapping):
        events = [events]
    elif isinstance(events, (str, bytes)) or not hasattr(events, "__iter__"):
        raise SchemaError(
            f"publish to {stream.name!r} takes an event (a dict) or a list of events, not {type(events).__name__}.",
            hint=_as_dict(events),
        )
    if hasattr(events, "to_pylist") or hasattr(events, "to_dicts") or hasattr(events, "iterrows"):
        raise SchemaError(
            f"publish to {stream.name!r} takes dicts, not a {type(events).__module__.partition('.')[0]} frame.",
            hint="Pass .to_pylist() of an Arrow table, .to_dicts() of polars, .to_dict('records') of pandas.",
        )
    listed: list[dict[str, Any]] = list(events)
    if set(map(type, listed)) - {dict}:
        for index, event in enumerate(listed):
            if not isinstance(event, Mapping):
                raise SchemaError(
                    f"Event {index} of the publish to {stream.name!r} is {_shown(event)}, not a dict.",
                    index=index,
                    value=event,
                    hint=_as_dict(event),
                )
            listed[index] = dict(event)
    return listed


def _as_dict(event: object) -> str | None:
    """Return a hint how to make a dict of an event that is not one."""
    if is_dataclass(event):
        return "Pass dataclasses.asdict(event)."
    return "Pass json.loads(text)." if isinstance(event, (str, bytes)) else None


def keys_of(events: list[dict[str, Any]]) -> Set[str]:
    """Return every key of these events. If all have equally many, those of the first: `_columns` compares them."""
    keys = events[0].keys()
    same = len(events) == 1 or sum(map(len, events)) == len(keys) * len(events)
    return keys if same else set().union(*events)


def encode_quickly(
    stream: Stream, log: Log, events: list[dict[str, Any]], keys: Set[str] | None = None
) -> Encoded | None:
    """Encode events without a look at each value; return `None` where one needs it. Never touches the database."""
    fields = log.fields()
    by_name = _columns(events, keys_of(events) if keys is None else keys)
    if not by_name.keys() <= fields.keys():
        return None
    required = stream.validate_schema
    if required and not by_name.keys() <= stream.fields.keys():
        return None  # a column that is there from an earlier declaration does not make a key valid
    columns, values, nulls = [], [], []
    for name, kind in fields.items():
        if name in by_name:
            checked, has_nulls = check_column(by_name[name], kind)
            if checked is None or (log.forbidden and _has_forbidden(checked, kind, log.forbidden)):
                return None
            if required and has_nulls and not _optional(stream, name):
                return None
            columns.append(name)
            values.append(checked)
            nulls.append(has_nulls)
        elif required and name in stream.fields and not _optional(stream, name):
            return None
    return Encoded(tuple(columns), values, events, nulls=tuple(nulls))


def _columns(events: list[dict[str, Any]], keys: Set[str]) -> dict[str, list[Any]]:
    try:
        return {name: list(map(itemgetter(name), events)) for name in keys}
    except KeyError:  # an event without one of them may have others
        return {name: [event.get(name) for event in events] for name in set().union(*events)}


def _optional(stream: Stream, name: str) -> bool:
    declared = stream.fields.get(name)
    return declared is None or declared.nullable


def _has_forbidden(column: list[Any], kind: FieldType, forbidden: str) -> bool:
    return kind.base == "string" and any(character in text for text in column if text for character in forbidden)


def encode(stream: Stream, log: Log, events: list[dict[str, Any]], *, fresh: bool = True) -> Encoded:
    """Encode events one by one. May add columns; raises `SchemaError` for the first event that cannot be stored.
    `fresh`: read the columns that are there again."""
    events = plain_events(events)
    for index, event in enumerate(events):
        _check_keys(stream, index, event)
    if not events:
        return Encoded((), [], [])
    # Another process may have added columns. A stream without any takes them from its first events.
    fields = log.fields(fresh=fresh)
    if (stream.on_schema_drift == "evolve" or not fields) and not stream.validate_schema:
        new = _new_fields(stream, fields, events)
        if new:
            # First whether the events can be stored at all: a publish that is refused leaves no columns behind.
            _by_event(stream, log, events, {**fields, **new})
            log.add_fields(new)
    return encode_quickly(stream, log, events) or _by_event(stream, log, events, log.fields())


def unfit(stream: Stream, log: Log, events: list[dict[str, Any]]) -> dict[int, SchemaError]:
    """Return the numbers of the events that `encode` refuses, each with the reason. Stores nothing."""
    fields, refused = log.fields(fresh=True), dict[int, SchemaError]()
    events = plain_events(events)
    if (stream.on_schema_drift == "evolve" or not fields) and not stream.validate_schema:
        fields = {**fields, **_new_fields(stream, fields, events)}
    for index, event in enumerate(events):
        try:
            _check_keys(stream, index, event)
            _by_event(stream, log, [event], fields)
        except SchemaError as error:
            refused[index] = error
    return refused


def _check_keys(stream: Stream, index: int, event: dict[str, Any]) -> None:
    for key in event:
        if type(key) is not str:
            raise _error(stream, index, str(key), key, "a key must be a string")
        if key.lower().startswith(RESERVED_PREFIX):
            raise _error(
                stream,
                index,
                key,
                event[key],
                f"keys that begin with {RESERVED_PREFIX} are set by Weft",
                hint="Leave it out.",
            )
        if not key.isascii():
            try:
                key.encode()
            except UnicodeEncodeError:
                raise _error(stream, index, ascii(key), event[key], "the key holds a lone surrogate") from None


def _new_fields(stream: Stream, fields: dict[str, FieldType], events: list[dict[str, Any]]) -> dict[str, FieldType]:
    room = min(stream.max_new_columns - len(fields.keys() - stream.fields.keys()), MAX_NEW_COLUMNS - len(fields))
    if fields:
        room = min(room, _NEW_COLUMNS_A_PUBLISH)
    used = {comparable(name) for name in fields}
    new: dict[str, FieldType] = {}
    for key in dict.fromkeys(key for event in events for key in event if key not in fields):
        if len(new) >= room:
            break
        if not can_be_column(key) or comparable(key) in used:
            continue
        kind = infer([event.get(key) for event in events])
        if kind is not None:
            new[key] = kind
            used.add(comparable(key))
    return new


def _by_event(stream: Stream, log: Log, events: list[dict[str, Any]], fields: dict[str, FieldType]) -> Encoded:
    rows: list[dict[str, Any]] = []
    extras: list[str | None] = []
    kept: list[dict[str, Any]] = []
    quarantined: list[dict[str, Any]] = []
    for index, event in enumerate(events):
        try:
            row, extra = _one(stream, log, fields, index, event)
        except SchemaError as error:
            if stream.on_schema_drift != "quarantine":
                raise
            quarantined.append(_record(index, event, error))
        else:
            rows.append(row)
            extras.append(extra)
            kept.append(event)
    columns = tuple(name for name in fields if any(name in row for row in rows))
    values = [[row.get(name) for row in rows] for name in columns]
    return Encoded(columns, values, kept, extras if any(extras) else None, quarantined)


def _one(
    stream: Stream, log: Log, fields: dict[str, FieldType], index: int, event: dict[str, Any]
) -> tuple[dict[str, Any], str | None]:
    strict = stream.validate_schema or stream.on_schema_drift != "evolve"
    row: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    misfits: dict[str, str] = {}
    if stream.validate_schema:
        for name, kind in stream.fields.items():
            if not kind.nullable and event.get(name) is None:
                why = "is missing" if name not in event else "is null"
                raise SchemaError(
                    f"Event {index} of the publish to {stream.name!r}: field {name!r} {why}; it must be {kind}.",
                    index=index,
                    field=name,
                )
    for key, value in event.items():
        known = fields.get(key)
        if known is None or (stream.validate_schema and key not in stream.fields):
            if strict:
                hint = did_you_mean(key, stream.fields or fields)
                raise _error(stream, index, key, value, NO_SUCH_FIELD, hint=hint)
            extra[key] = value
            continue
        try:
            checked = check_value(value, known)
        except ValueError as problem:
            misfits[key] = f"it must be {known}, but {problem}"
            if strict:
                raise _error(stream, index, key, value, misfits[key]) from None
            extra[key] = value
            continue
        if log.forbidden and _has_forbidden([checked], known, log.forbidden):
            extra[key] = value  # escaped in JSON it can be stored, and comes back the same
        else:
            row[key] = checked
    return row, _extra_text(stream, index, extra, misfits) if extra else None


def _extra_text(stream: Stream, index: int, extra: dict[str, Any], misfits: dict[str, str]) -> str:
    """Return what fits no column as JSON. `misfits` says of values that have a column why they do not fit it."""
    try:
        return str(check_value(extra, META_TYPES[EXTRA]))
    except ValueError as problem:
        for key, value in extra.items():
            try:
                check_value({key: value}, META_TYPES[EXTRA])
            except ValueError as culprit:
                first = misfits.get(key, "it has no column")
                what = f"{first}; and what fits no column is kept as JSON, but {culprit}"
                raise _error(stream, index, key, value, what) from None
        raise _error(stream, index, EXTRA, list(extra), f"{OF_ALL_EXTRA} together, {problem}") from None


def _record(index: int, event: dict[str, Any], error: SchemaError) -> dict[str, Any]:
    try:
        as_json = json.loads(json.dumps(event, default=to_json, allow_nan=False))
        dump_json(as_json)
    except (ValueError, TypeError, RecursionError) as problem:
        raise SchemaError(
            f"{error.what} It cannot be quarantined either: {problem}.",
            index=index,
            field=error.field,
            value=error.value,
        ) from None
    return {"event": as_json, "field": error.field, "reason": error.what}


def _error(
    stream: Stream, index: int, name: str, value: object, problem: str, *, hint: str | None = None
) -> SchemaError:
    return SchemaError(
        f"Event {index} of the publish to {stream.name!r}, field {name!r} = {_shown(value)}: {problem}.",
        index=index,
        field=name,
        value=value,
        hint=hint,
    )


def _shown(value: object) -> str:
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    except Exception:  # too deep, too many digits, or an object's own fault
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}…"


def to_batch(
    stream: Stream,
    log: Log,
    publishes: list[tuple[str, int]],
    encoded: Encoded,
    key_fields: tuple[str, ...] | None = None,
    publish_key: str | None = None,
    published: list[dict[str, Any]] | None = None,
) -> Batch:
    """Return the batch of what fits, with idempotency keys where the stream (or the caller) names fields for them.

    An event without such a key has one under the `publish_key`: its number in the publish. `published`: all events that
    came under this key, also those that do not fit.
    """
    batch = Batch(log, publishes, encoded.columns, encoded.values, encoded.extra, nulls=encoded.nulls)
    names = stream.key_fields if key_fields is None else key_fields
    if names:
        columns = [_key_column(stream, name, encoded) for name in names]
        # An event with a null among its key fields has no key: it is never a duplicate.
        batch.keys = [None if None in values else _key(values) for values in zip(*columns, strict=True)]
    if publish_key is not None:
        known = batch.keys or [None] * len(encoded.events)
        batch.keys = [_key(("publish", publish_key, at)) if key is None else key for at, key in enumerate(known)]
        if published is not None:
            batch.publish_keys = _key(("publish", publish_key)), _key(("publish", publish_key, _canonical(published)))
    if batch.keys is not None:
        batch.key_horizon = stream.key_horizon_days * 86_400
    return batch


def _key_column(stream: Stream, name: str, encoded: Encoded) -> list[Any]:
    if name not in encoded.columns:
        return [event.get(name) for event in encoded.events]
    values = encoded.values[encoded.columns.index(name)]
    if name in stream.fields and stream.fields[name].base == "json":
        values = [None if text is None else _canonical(json.loads(text)) for text in values]
    if encoded.extra is None:
        return values
    # A value that does not fit its column is in `_weft_extra`: it is not a null.
    return [event.get(name) if value is None else value for value, event in zip(values, encoded.events, strict=True)]


def _canonical(value: Any) -> str:
    """Return a text that is the same for the same events or JSON, whatever the order of their keys."""
    try:
        return json.dumps(value, sort_keys=True, default=repr)
    except TypeError:  # keys of several types, which a quarantine takes
        return repr(value)


def _key(values: tuple[object, ...]) -> bytes:
    """Return a digest of the values in 20 bytes."""
    return hashlib.blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=20).digest()
