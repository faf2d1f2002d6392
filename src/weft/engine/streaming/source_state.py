"""What a checkpoint keeps of its sources next to Spark's log: which they are, and where those with `start="latest"`
began.

Spark's log knows sources by their order alone: a pipeline that reads another one under the same name would go on in it
at the position of the one before, and skip what is before that.

And it records where a source begins together with its first batch, which may come days later. A pipeline that was
restarted before that would begin at the end once more, and skip what came between.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from weft.engine.streaming.sources import open_source
from weft.errors import DeclarationError
from weft.pipelines.streaming.spec import Source, StreamingPipeline
from weft.project import current
from weft.spark_support.folder import Location


class Sources:
    """The pipeline that a checkpoint is of, and its sources in their order. Kept in it from its first batch on, and
    gone with it."""

    NAME = "sources.json"

    def __init__(self, home: Location) -> None:
        """`home`: the checkpoint."""
        self._file = home.at(self.NAME)

    def check(self, pipeline: StreamingPipeline) -> bool:
        """Raise where it is another pipeline, or reads others; whether they are noted at all."""
        noted, now = json.loads(self._file.read() or "null"), _named(pipeline.sources)
        owner, before = (noted["pipeline"], noted["sources"]) if isinstance(noted, dict) else (None, noted)
        if owner is not None and owner != pipeline.name:
            raise DeclarationError(
                f"The checkpoint of {pipeline.name} is that of the pipeline {owner}: what one has read, the other "
                "would pass over.",
                hint='Give each its own: checkpoint="…". If it is the same pipeline under another name, remove '
                f"{self._file.path}, and it goes on.",
            )
        if before is not None and before != now:
            raise DeclarationError(
                f"The checkpoint of {pipeline.name} is of {_listed(before)}, and now the pipeline reads {_listed(now)}."
                " It would go on in one source at the position of another.",
                hint=f"To start again: weft checkpoints reset {pipeline.name}. Or give the pipeline another name.",
            )
        return owner is not None

    def note(self, pipeline: StreamingPipeline) -> None:
        """Remember a pipeline."""
        noted = {"pipeline": pipeline.name, "sources": _named(pipeline.sources)}
        self._file.write(json.dumps(noted))


def _named(sources: Sequence[Source]) -> list[list[str]]:
    return [[current().connection(each.connection).kind, each.name.strip("/")] for each in sources]


def _listed(named: list[list[str]]) -> str:
    return ", ".join(f"{name} ({kind})" for kind, name in named)


class Starts:
    """By source, what its `start="latest"` was when the checkpoint was new. Kept in it, and gone with it."""

    NAME = "starts.json"

    def __init__(self, home: Location) -> None:
        """`home`: the checkpoint."""
        self._home, self._file = home, home.at(self.NAME)

    def settle(self, sources: Sequence[Source]) -> list[str]:
        """Where each source begins. An end is looked up once; when this returns, a crash does not make it forgotten."""
        if self._home.at("metadata").read() is None:  # what Spark writes first
            for each in sources:
                open_source(each).check_start()
        known = self._read()
        ends = {each.name: open_source(each).end() for each in sources if _is_open(each) and each.name not in known}
        if ends:
            known |= ends
            self._file.write(json.dumps(known))
        return [each.start for each in _begun(sources, known)]

    def known(self, sources: Sequence[Source]) -> list[Source]:
        """Return the sources, each with the start at which it began, if it has begun."""
        return _begun(sources, self._read())

    def _read(self) -> dict[str, str]:
        return dict(json.loads(self._file.read() or "{}"))


def _is_open(source: Source) -> bool:
    return source.start == "latest"


def _begun(sources: Sequence[Source], known: dict[str, str]) -> list[Source]:
    return [
        dataclasses.replace(each, start=known.get(each.name, each.start)) if _is_open(each) else each
        for each in sources
    ]
