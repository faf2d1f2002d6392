"""Hints for errors of databases, which know nothing of streams."""

from __future__ import annotations

import re
from contextlib import suppress

from weft.errors import WeftError
from weft.project import current


def hint_for(text: str) -> str | None:
    """Return how to publish, where a table is missing because nothing was published to its stream yet."""
    project = current()
    for stream in project.streams.values():
        with suppress(WeftError):  # a connection that cannot be resolved
            connection = project.connection(stream.connection).resolved()
            missing = connection.reports_missing(text)
            if missing is None:
                continue
            names = {stream.name, f"{stream.schema}.{stream.name}"}
            if missing == "database":
                names.add(connection.target)
            if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names):
                return (
                    f"The table of the stream {stream.name!r} is created when something is first published to it: "
                    f"weft streams publish {stream.name} --data '{{…}}'"
                )
    return None
