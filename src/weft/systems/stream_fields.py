"""The declared fields of a stream, compared with the stored ones: fields are added, and never changed."""

from __future__ import annotations

from weft.errors import DeclarationError
from weft.systems.log import Log
from weft.types import FieldType, comparable


def declare(log: Log, fields: dict[str, FieldType]) -> None:
    """Give a stream the declared fields that it lacks; raise where it stores one in another way."""
    present = log.fields(fresh=True)
    spelled = {comparable(name): name for name in present}
    for name in fields:
        stored_as = spelled.get(comparable(name), name)
        if stored_as != name:
            raise DeclarationError(
                f"Field {name!r} of stream {log.schema}.{log.name} is stored as {stored_as!r}.",
                hint="Databases take names that differ in case or accents for one: keep the stored name.",
            )
    missing = {name: kind for name, kind in fields.items() if name not in present}
    if missing:
        log.add_fields(missing)
        present = log.fields(fresh=True)
    for name, kind in fields.items():
        stored = present[name]
        if (stored.base, stored.precision, stored.scale) != (kind.base, kind.precision, kind.scale):
            raise DeclarationError(
                f"Field {name!r} of stream {log.schema}.{log.name} is declared {kind}, but stored as {stored}.",
                hint="Stored data is never converted: keep the stored type, or give the field another name.",
            )
