"""An append wakes the readers of other processes; where the announcement is lost, they look once a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from servers import wait_until
from weft.systems.postgres import notify
from weft.systems.postgres.notify import CHANNEL
from weft.systems.postgres.store import PostgresStore

Connect = Callable[..., psycopg.Connection[Any]]


def announced(listening: psycopg.Connection[Any], before: str) -> int:
    """How often something was announced since the last time."""
    listening.execute(f"NOTIFY {CHANNEL}, '{before}'")
    for number, notification in enumerate(listening.notifies(timeout=60)):
        if notification.payload == before:
            return number
    raise TimeoutError(f"{before} was not announced")


@pytest.mark.timing
def test_append_wakes_another_process(make_store: Callable[..., PostgresStore], clock: Any) -> None:
    publisher, reader = make_store(), make_store()
    seen = reader.changed(None, 1)
    listening = reader._listener._driver
    # The clock stands, so that no second goes by after which the reader would look anyway.
    for _ in range(3):
        assert reader.changed(seen, 0.01) == seen
        publisher.appended()
        wait_until(lambda seen=seen: reader.changed(seen, 1) != seen, "the announcement")  # type: ignore[misc]
        seen = reader.changed(None, 0)
    assert reader._listener._driver is listening


def test_lost_announcement_costs_a_second(store: PostgresStore, clock: Any) -> None:
    seen = store.changed(None, 1)
    for _ in range(3):
        clock.now += 0.99
        assert store.changed(seen, 0.01) == seen
        clock.now += 0.02
        now = store.changed(seen, 0.01)
        assert now != seen
        assert store.changed(now, 0.01) == now
        seen = now


def test_burst_is_announced_once_and_after_its_end(store: PostgresStore, connect: Connect, clock: Any) -> None:
    listening = connect(autocommit=True)
    listening.execute(f"LISTEN {CHANNEL}")
    pausing, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def pause(seconds: float) -> None:
        assert seconds == notify._NOTIFY_SECONDS
        pausing.release()
        assert go_on.acquire(timeout=60)

    clock.sleep = pause
    store.appended()
    assert pausing.acquire(timeout=60)
    assert announced(listening, "the burst") == 1
    for _ in range(1000):
        store.appended()
    assert announced(listening, "the next") == 0
    go_on.release()
    assert pausing.acquire(timeout=60)
    assert announced(listening, "the close") == 1
    store.appended()
    go_on.release(2)
    thread = store._notifier._thread
    store.close()
    assert thread is not None
    thread.join(60)
    assert announced(listening, "the end") in (1, 2)  # what was left, and the close's own


def test_nobody_listens_once_nobody_waits(store: PostgresStore, connect: Connect, clock: Any) -> None:
    connection = connect(autocommit=True)

    def listening() -> int:
        found = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query = %s AND datname = current_database()",
            (f"LISTEN {CHANNEL}",),
        ).fetchone()
        assert found
        return int(found[0])

    seen = store.changed(None, 1)
    assert listening() == 1
    store.unwatch()
    wait_until(lambda: listening() == 0, "the server to see that the connection is closed")
    assert store.changed(seen, 1) != seen  # listens again, and looks for what it missed
    assert listening() == 1


@pytest.mark.timing
def test_close_announces_what_is_left_and_waits_for_nothing_else(
    store: PostgresStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_POLL_SECONDS", 3600)
    listening = connect(autocommit=True)
    listening.execute(f"LISTEN {CHANNEL}")
    store.changed(None, 1)
    store.appended()
    thread = store._notifier._thread
    assert thread is not None
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.changed, None, 3600)
        store.close()
        waiting.result(60)
    assert not thread.is_alive()
    assert announced(listening, "the end") >= 1
