"""Files as sources, targets and dead letters of streaming pipelines."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from weft.errors import DeclarationError
from weft.systems.base import Connection, Settings
from weft.systems.endpoint import Endpoint
from weft.systems.objects.connection import FileFields
from weft.systems.objects.options import FileOptions, format_of_option

_HINTS = typing.get_type_hints(FileFields)


class FileEndpoint(Endpoint):
    """The files under a prefix of a folder or bucket. They are read from the first on."""

    is_source = True
    limit = "max_files"
    start_forms: ClassVar = {"earliest": "a start"}
    places = ("prefix",)
    dead_letters = ("path",)
    options: ClassVar = {each.name: _HINTS[each.name] for each in fields(FileOptions)}
    holds = "files"

    def parse_start(self, start: str, connection: Connection, query: str) -> str:
        """Return `earliest`: files have no offsets."""
        if start == "latest":
            raise DeclarationError("files are read from the first on: leave start='latest' out.")
        if start != "earliest":
            raise DeclarationError(f"start={start!r} is an offset, and {connection.kind} has none.")
        return start

    def check_options(self, connection: Connection, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options as `FileOptions` has them."""
        super().check_options(connection, options)
        checked = merged_options(connection, options)
        return Settings({name: getattr(checked, name) for name in options})

    def with_options(self, connection: Connection, options: Mapping[str, Any]) -> Connection:
        """Return a connection whose files are written and read as the options say."""
        return replace(connection, **vars(merged_options(connection, options)))

    def nested_option(self, name: str, value: Any, connection: Connection | None, options: Mapping[str, Any]) -> Any:
        """Return what is said of files of one format where the files are of that format.

        It is no mistake where they are of another: it counts once they are not.
        """
        format = format_of_option(name)
        checked = FileOptions.declare(format, **{name: value})
        own = connection.format or FileOptions.format if isinstance(connection, FileFields) else format
        return getattr(checked, name) if (options.get("format") or own) == format else None


def merged_options(connection: Connection, options: Mapping[str, Any]) -> FileOptions:
    """Return how files of a connection are written and read where a source or target says more of it."""
    own = {each.name: getattr(connection, each.name) for each in fields(FileOptions)}
    if options.get("format") not in (None, own["format"] or FileOptions.format):
        own = {}  # An option of one format means nothing to another.
    return FileOptions.declare(**{**own, **options})
