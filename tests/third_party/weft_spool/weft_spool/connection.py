"""The connection: which folder has the queues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weft.errors import DeclarationError, NotFoundError
from weft.systems.base import Connection, measured
from weft_spool.queue_file import Queue


@dataclass(frozen=True)
class SpoolConnection(Connection):
    """A folder of queues: `SpoolConnection("/var/spool/shop", name="shop")`."""

    kind: ClassVar[str] = "spool"
    one_host: ClassVar[bool] = True

    path: str

    @property
    def folder(self) -> Path:
        """The folder, with `${VAR}` replaced."""
        return Path(self.resolved().path).absolute()

    def queue(self, name: str) -> Queue:
        """Return a queue, which need not be there yet."""
        if Path(name).name != name:
            raise DeclarationError(f"{name!r} is no name of a queue: it has a slash.")
        return Queue(self.folder / name)

    def existing_queue(self, name: str) -> Queue:
        """Return a queue, or raise if there is none of that name."""
        queue = self.queue(name)
        if not queue.exists():
            raise NotFoundError(f"{self.label} has no queue {name!r}.", hint="The first message makes it.")
        return queue

    def check(self) -> dict[str, Any]:
        """Look into the folder."""
        report: dict[str, Any] = {}
        with measured(report):
            try:
                queues = len(list(self.folder.iterdir()))
            except OSError as error:
                raise self.failed(error, hint="Make the folder, or correct its path.") from None
        return {"server": "spool", "queues": queues, **report}
