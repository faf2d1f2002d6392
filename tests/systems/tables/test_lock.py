"""One load at a time changes a table; readers are not held up."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from systems.tables import values
from weft.systems.sql.tables import SqlTables

pytestmark = pytest.mark.timing


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_other_locks_are_not_waited_for_as_long(tables: SqlTables) -> None:
    """Those of loads may take an hour. What others lock, such as rows in a transaction that somebody forgot, is waited
    for as before."""
    with tables.driver.session("publish") as session:
        before = session.value("SHOW lock_timeout")
        tables.lock(session, None, "locked")
        assert session.value("SHOW lock_timeout") == before == "30s"


def test_the_second_waits_for_the_first(tables: SqlTables) -> None:
    table = values.create(tables, "locked", pa.schema([("x", pa.int64())]))
    order: list[str] = []
    locked = threading.Event()

    def second() -> None:
        locked.wait()
        with tables.driver.session("publish") as session:
            tables.lock(session, None, "locked")
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    try:
        with tables.driver.session("publish") as session:
            tables.lock(session, None, "locked")
            session.run(f"INSERT INTO {table} VALUES (1)")
            locked.set()
            time.sleep(0.3)
            if not tables.one_writer:
                assert values.read_all(tables, f"SELECT * FROM {table}").num_rows == 0
            order.append("first")
    finally:
        locked.set()
        thread.join()
    assert order == ["first", "second"]
    assert values.read_all(tables, f"SELECT * FROM {table}").num_rows == 1
