"""What to do about errors of databases that know nothing of streams."""

from __future__ import annotations

import re
from contextlib import suppress

from weft.errors import WeftError
from weft.project import current

# How the databases say that a table, its schema or its file is not there.
_IS_MISSING = re.compile(r"no such table|does not exist|doesn't exist|Unknown database|there is no file", re.IGNORECASE)
_IS_ALL_MISSING = re.compile(r"Unknown database|there is no file|database \S+ does not exist", re.IGNORECASE)


def hint_for(text: str) -> str | None:
    """Where a table is missing because it is a stream's to which nothing was published yet: how to publish."""
    if not _IS_MISSING.search(text):
        return None
    project = current()
    for stream in project.streams.values():
        names = {stream.name, f"{stream.schema}.{stream.name}"}
        with suppress(WeftError):  # a connection that cannot be resolved
            if _IS_ALL_MISSING.search(text):
                names.add(project.connection(stream.connection).target)
        if any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names):
            return (
                f"The table of the stream {stream.name!r} is made when something is first published to it: "
                f"weft streams publish {stream.name} --data '{{…}}'"
            )
    return None
