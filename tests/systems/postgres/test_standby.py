"""A standby has the events of its primary, and not the registry of what is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import servers
import weft
from weft.errors import StorageError
from weft.project import Project, use
from weft.streams import close


class Standby(servers.PostgresServer):
    def __init__(self, primary: servers.PostgresServer) -> None:
        self.primary = primary
        super().__init__()

    def initialise(self) -> None:
        copy = (self.find("pg_basebackup"), "--checkpoint=fast", "--no-sync", "--write-recovery-conf")
        self.run(*copy, "--pgdata", str(self.data), "--dbname", self.primary.url())
        self.data.chmod(0o700)


@pytest.fixture
def primary() -> Iterator[servers.PostgresServer]:
    """A server of this test's own: a copy of one that other tests write to may take long."""
    if servers.PostgresServer.is_missing():
        pytest.skip("PostgreSQL is missing")
    server = servers.PostgresServer()
    server.start()
    yield server
    server.stop()


@contextmanager
def declared(url: str) -> Iterator[str]:
    """A project with the stream `clicks` at this URL."""
    with use(Project()) as project:
        try:
            yield weft.stream(name="clicks", connection=weft.connect(url=url), fields={"n": "int64"})(lambda: None).name
        finally:
            close(project)


@pytest.mark.full
def test_a_standby_is_refused(primary: servers.PostgresServer) -> None:
    with declared(primary.create_database("events")) as clicks:
        weft.publish_sync(clicks, {"n": 1})
        assert len(weft.consume_sync(clicks, "reader")) == 1
    standby = Standby(primary)
    try:
        standby.start()
        with declared(standby.url("events")), pytest.raises(StorageError, match=r"is a standby\..* miss their events"):
            weft.read_stream(standby.url("events"), "clicks")
    finally:
        standby.stop()
