"""Where a streaming pipeline remembers how far it has come, and who may go on from there."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import IO

from weft.errors import BusyError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class Checkpoint:
    """The folder of Spark's own log of offsets and commits."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline = pipeline
        self.folder = current().root.absolute() / ".weft" / "checkpoints"
        name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", pipeline.name)
        given = pipeline.checkpoint
        if given is None:
            self.location = str(self.folder / name)
        else:
            self.location = given if _URL.match(given) else str(Path(given).expanduser().absolute())
        self._lock_file = self.folder / f"{name}.lock"
        self._held: IO[str] | None = None

    def lock(self) -> None:
        """Keep others of this machine from it, until `unlock` or the end of this process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        held = self._lock_file.open("a+")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.seek(0)
            owner = held.read().strip()
            held.close()
            raise BusyError(
                f"The pipeline {self.pipeline.name!r} runs already" + (f", as process {owner}." if owner else "."),
                hint="Stop that one first: two at one checkpoint would write over each other's log.",
            ) from None
        held.truncate(0)
        held.write(str(os.getpid()))
        held.flush()
        self._held = held

    def unlock(self) -> None:
        """Let others have it."""
        held, self._held = self._held, None
        if held is not None:
            held.close()
