"""Where sources that begin at their end began: with which event, message or version.

Spark writes down where a source begins together with its first batch, which may come days later. A pipeline that was
started again before that would begin at the end once more, and pass over what came between.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from weft.engine.streaming.scale import scale_of
from weft.pipelines.streaming.spec import Source
from weft.systems.objects.folder import Folder


class Starts:
    """By source, what its `start="latest"` was when the checkpoint was new. Kept in it, and gone with it."""

    def __init__(self, folder: Folder, path: str) -> None:
        """`path`: where they are kept, in a folder that can be another machine's."""
        self._folder, self._path = folder, path

    def settle(self, sources: Sequence[Source]) -> list[str]:
        """Where each source begins. An end is looked up once; when this returns, a crash does not make it forgotten."""
        known = self._read()
        ends = {each.name: scale_of(each, None).end() for each in sources if _is_open(each) and each.name not in known}
        if ends:
            known |= ends
            self._folder.write(self._path, json.dumps(known).encode())
            self._folder.flush([self._path])
        return [each.start for each in _begun(sources, known)]

    def known(self, sources: Sequence[Source]) -> list[Source]:
        """The sources, each of which begins where it began, as far as it has."""
        return _begun(sources, self._read())

    def _read(self) -> dict[str, str]:
        return dict(json.loads(self._folder.read(self._path) or b"{}"))


def _is_open(source: Source) -> bool:
    return source.start == "latest"


def _begun(sources: Sequence[Source], known: dict[str, str]) -> list[Source]:
    return [
        dataclasses.replace(each, start=known.get(each.name, each.start)) if _is_open(each) else each
        for each in sources
    ]
