"""`where=action=click`: which events a subscriber gets."""

from __future__ import annotations

import msgspec

from weft.errors import listed
from weft.server import bodies
from weft.server.live import Filter
from weft.server.problems import bad_parameter
from weft.streams.events import ROWID_TEXT, in_rounds
from weft.streams.runtime import OpenedStream
from weft.systems.log import PUBLISH_ID, PUBLISHED_AT, ROWID

# How many of the newest events are searched for a field that is no column.
_ASKED = 100


def filter_of(ready: OpenedStream, wheres: list[str], *, resumes: bool = False) -> Filter | None:
    """Return the filter for events of which fields have these values. A field that no event has is refused; not of a
    subscriber that comes back: a browser that is refused then stops for good."""
    wanted = [where.partition("=") for where in wheres]
    for name, equals, _ in wanted:
        if not equals or not name:
            raise bad_parameter("where needs a field and its value: where=action=click.", field="where")
    if not wanted:
        return None
    if not resumes:
        _check_names(ready, {name for name, _, _ in wanted})
    return lambda event: all(_text(event.get(name)) == value for name, _, value in wanted)


def _check_names(ready: OpenedStream, names: set[str]) -> None:
    stream, stored = ready.stream, ready.log.fields(fresh=True)
    fields = [*stored, *(name for name in stream.fields if name not in stored)]
    takes_others = not fields or (stream.on_schema_drift == "evolve" and not stream.validate_schema)
    spelled = {field.lower() for field in fields}
    for name in names.difference(fields, (ROWID, ROWID_TEXT, PUBLISHED_AT, PUBLISH_ID)):
        # Another name may be that of a field to come; not one that differs from a field in case alone.
        if (takes_others and name.lower() not in spelled) or _has(ready, name):
            continue
        raise bad_parameter(
            f"None of the newest {_ASKED} events of {stream.name!r} has a field {name[:60]!r}.",
            hint=listed(name, fields, f"Fields: {', '.join(fields[:20])}{' …' if len(fields) > 20 else ''}."),
            field="where",
        )


def _has(ready: OpenedStream, name: str) -> bool:
    """Return whether one of the newest events has a field that has no column: not each has one."""
    log = ready.log
    first = log.nth_last(_ASKED)
    newest = in_rounds(log, log.floor() if first is None else first - 1, log.head(), _ASKED)
    return any(name in event for event in newest)


def _text(value: object) -> str | None:
    """Return a value as its readers see it: in JSON, a text without its quotes."""
    if value is None or isinstance(value, str):
        return value
    encoded = bodies.encode(value)
    return str(msgspec.json.decode(encoded)) if encoded.startswith(b'"') else encoded.decode()
