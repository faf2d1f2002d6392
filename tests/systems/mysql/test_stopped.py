"""A process that is told to stop in the middle of a statement ends it on the server, too."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import servers
from servers import wait_until
from weft.systems.mysql.store import MySQLStore

pytestmark = pytest.mark.timing

# It takes an hour, and does not look whether anybody waits for it.
LONG = "SELECT BENCHMARK(100000000000, SHA1('x'))"


class StopError(BaseException):
    """What a handler of SIGTERM raises."""


@pytest.fixture
def is_running(url: str, shared_server: Callable[[str], servers.Server]) -> Iterator[Callable[[], bool]]:
    database = url.rpartition("/")[2]
    with contextlib.closing(shared_server("mysql").connect()) as connection:

        def look() -> bool:
            cursor = connection.cursor()
            cursor.execute(
                "SELECT count(*) FROM information_schema.PROCESSLIST WHERE db = %s AND INFO LIKE %s",
                (database, f"{LONG[:20]}%"),
            )
            return bool(cursor.fetchone()[0])

        yield look


def test_told_to_stop(store: MySQLStore, is_running: Callable[[], bool]) -> None:
    stopped = threading.Event()

    def stop(number: int, frame: object) -> None:
        if not stopped.is_set():
            stopped.set()
            raise StopError

    def when_it_runs() -> None:
        wait_until(is_running, "the statement to run")
        while not stopped.is_set():  # one that comes just before this process waits for the answer does not wake it
            os.kill(os.getpid(), signal.SIGTERM)
            stopped.wait(0.1)

    before = signal.signal(signal.SIGTERM, stop)
    sender = threading.Thread(target=when_it_runs)
    try:
        sender.start()
        with pytest.raises(StopError), store.session("publish") as session:
            session.run(LONG)
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
    wait_until(lambda: not is_running(), "the statement to end")
    with store.session("publish") as session:
        assert session.row("SELECT 1") == (1,)
