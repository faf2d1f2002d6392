"""Which connections to SQLite wait for the disk."""

from __future__ import annotations

from contextlib import closing

import pytest

import weft
from weft.systems.sqlite.sessions import SqliteSessions

NORMAL, FULL = 1, 2


@pytest.mark.parametrize(("durable_acks", "expected"), [(False, NORMAL), (True, FULL)])
def test_durability(durable_acks: bool, expected: int) -> None:
    """Publishes always wait, acks where the connection says so."""
    connection = weft.SQLiteConnection("events.db", durable_acks=durable_acks)
    with closing(SqliteSessions(connection)) as sessions:
        for role, level in (("publish", FULL), ("keep", expected)):
            with sessions.session(role) as session:  # type: ignore[arg-type]
                assert session.row("PRAGMA synchronous") == (level,)
