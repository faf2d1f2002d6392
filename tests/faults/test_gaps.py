"""Offsets that a rolled back publish burned are nobody's: an ack of one acknowledges nothing else.

Only PostgreSQL has such gaps; SQLite and MySQL give the offset to the next publish.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from faults.actors import declared
from weft.errors import WeftError
from weft.streams import ack_sync, consume_sync, groups_sync, publish_sync


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_ack_of_a_burned_offset(system: Any) -> None:
    stream, connection = declared("gaps"), system.connection

    def publish(n: int) -> int:
        return int(publish_sync(stream, {"writer": "w", "n": n}, connection=connection)["first_rowid"])

    first = publish(1)
    with psycopg.connect(system.url, autocommit=True) as driver:
        driver.execute('ALTER TABLE "events"."gaps" ADD CHECK (n <> 2)')
    with pytest.raises(WeftError):
        publish(2)
    assert publish(3) == first + 2

    events = consume_sync(stream, "group", 10, connection, "one")
    assert [event["n"] for event in events] == [1, 3]
    ack_sync(stream, "group", [{"_weft_rowid": first}, {"_weft_rowid": first + 1}], connection=connection)
    (group,) = groups_sync(stream, connection=connection)
    assert group["pending"] == 1
    assert [event["n"] for event in consume_sync(stream, "group", 10, connection, "one")] == [3]
