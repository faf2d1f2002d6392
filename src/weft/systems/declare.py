"""A declaration meets what is stored: fields are added, and never changed."""

from __future__ import annotations

from typing import Protocol

from weft.errors import DeclarationError
from weft.types import FieldType, comparable


class Declarable(Protocol):
    """A log that remembers which fields were declared for it."""

    schema: str
    name: str
    declared: dict[str, FieldType]

    def fields(self, *, fresh: bool = False) -> dict[str, FieldType]:
        """See `weft.systems.log.Log`."""

    def add_fields(self, fields: dict[str, FieldType]) -> None:
        """See `weft.systems.log.Log`."""


def declare(log: Declarable, fields: dict[str, FieldType]) -> None:
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
    log.declared.update(fields)
