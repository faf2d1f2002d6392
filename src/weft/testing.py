"""What users test their own streams with: a project in memory and a clock to move. No server, no files, no waiting.

def test_refund():
    with weft.testing.project() as project:
        weft.publish_sync("orders", {"order_id": 1, "total": 9.5})
        project.clock.move(days=1)
        assert [event["order_id"] for event in project.events("orders")] == [1]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from weft.project import DEFAULT, Project, build_connection, current, use
from weft.streams.declare import Stream
from weft.streams.events import to_dicts
from weft.streams.retention import aware
from weft.streams.runtime import close, open_stream
from weft.systems.base import Connection
from weft.systems.file import MEMORY

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Where every clock starts: the same moment in every run, so that a test can name the times that it expects."""


class Clock:
    """A clock that stands still until it is moved.

    Times of publication, leases, delays, ages for retention and the horizon of idempotency keys follow it. What a call
    itself waits for (`wait=`, `timeout=`) does not: that is real time.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = aware(start)

    def __call__(self) -> float:
        return self._now.timestamp()

    def now(self) -> datetime:
        """The time, in UTC."""
        return self._now

    def move(self, by: float | timedelta = 0, /, **units: float) -> datetime:
        """Go on by seconds, a `timedelta` or its units: `move(90)`, `move(days=2, hours=1)`. Gives the new time."""
        self._now += (by if isinstance(by, timedelta) else timedelta(seconds=by)) + timedelta(**units)
        return self._now

    def set(self, moment: datetime) -> None:
        """Go to a moment; one without a zone is UTC."""
        self._now = aware(moment)


class MemoryProject(Project):
    """A project whose every connection is a database in memory, unless the test itself registers another."""

    def __init__(self, outer: Project) -> None:
        super().__init__(outer.root)
        self.clock: Clock = Clock()
        self.streams = dict(outer.streams)
        declared = [stream.connection for stream in outer.streams.values()]
        self._replaced = {each for each in (*declared, *outer.connections.values()) if isinstance(each, Connection)}

    def connection(self, name: str | Connection | None = None) -> Connection:
        """As for every project, except that what was declared outside leads to memory as well."""
        if isinstance(name, Connection) and name in self._replaced and name not in self.connections.values():
            # An unnamed one is told from the others by its hash, which is the same for equal connections.
            name = name.name or f"unnamed-{abs(hash(name))}"
        return super().connection(name)

    def events(self, stream: str | Stream) -> list[dict[str, Any]]:
        """Everything that a stream holds, in order, as `consume` would give it."""
        log = open_stream(stream).log
        return to_dicts(log.read(0, log.head(), log.count()))

    def _definitions(self, name: str) -> Iterator[tuple[str, Callable[[], Connection]]]:
        registered = self.connections.get(name)
        if registered is not None:
            yield "code", lambda: registered
        yield "weft.testing", lambda: build_connection(name, {"kind": "sqlite", "path": MEMORY}, "weft.testing")

    def _names(self) -> list[str]:
        declared = {stream.connection for stream in self.streams.values() if isinstance(stream.connection, str)}
        return sorted({DEFAULT, *self.connections, *declared})


@contextmanager
def project() -> Iterator[MemoryProject]:
    """A fresh project in memory, in use until the block ends; also the body of a fixture.

        @pytest.fixture(autouse=True)
        def project():
            with weft.testing.project() as project:
                yield project

    Streams that were declared before are there, all of them empty. Every connection's name leads to a database in
    memory, one a name, whatever the environment, `weft.toml` or the user's files say, unless the block registers it.
    """
    outer = current()
    inner = MemoryProject(outer)
    with use(inner):
        try:
            yield inner
        finally:
            close(inner)
            # A module that was first imported inside is not imported again: what it declared is kept for the next test.
            for name, stream in inner.streams.items():
                if "<locals>" not in getattr(stream, "origin", "<locals>"):
                    outer.streams.setdefault(name, stream)
