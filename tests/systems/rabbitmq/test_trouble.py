"""What holds up a receiver or ends it: a full log, large messages, a database that is away, an account that is gone,
kill -9. Nothing is lost, and nothing is stored twice. Without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import servers
import weft
from broker_pipelines import check_receiver_killed
from rabbitmq_server import wait_for_count
from servers import wait_until
from tests.systems.rabbitmq.conftest import drain, offsets_of, received_values
from weft.engine.streaming.sources import open_source
from weft.project import Project
from weft.systems import received
from weft.systems.rabbitmq import receiver
from weft.systems.rabbitmq.receiver import QueueReceiver


def numbers(*values: int) -> list[bytes]:
    return [b"%d" % n for n in values]


def test_once_behind_a_full_log(rabbitmq: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what is there, and says who holds it up. When that one is forgotten it goes on."""
    monkeypatch.setattr(received, "_TIDY_SECONDS", 0.0)
    queue = rabbitmq.create_queue()
    rabbitmq.publish(queue, numbers(*range(12)))
    connection = replace(connection, prefetch=4, max_unread=5, keep_days=1)
    offsets = offsets_of(connection, queue)
    offsets.made().reset("slow", 0)
    monkeypatch.setattr(received, "PATIENCE", 0.3)
    position = offsets.first()
    offsets.stop_at_head()
    with pytest.raises(weft.StorageError, match=rf"slow is .* behind.*\n.*weft streams forget {offsets.name} slow"):
        while True:
            position = offsets.following(position)
    read = len(received_values(offsets))
    assert 5 <= read < 12 and position == offsets.log.head()
    wait_for_count(rabbitmq, queue, 12 - read)
    offsets.log.forget_consumer("slow")
    drain(offsets_of(connection, queue), position)
    assert sorted(map(int, received_values(offsets))) == list(range(12))


def test_large_messages_wait_at_the_broker(rabbitmq: Any, connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MOST_HELD", 2 << 20)
    monkeypatch.setattr(receiver, "MOST_BYTES", 1 << 20)
    queue = rabbitmq.create_queue()
    rabbitmq.publish(queue, [b"%02d" % n + bytes(500_000) for n in range(20)])
    opened = QueueReceiver(connection.resolved(), queue)
    try:
        assert opened.waiting() == 20
        taken: list[bytes] = []

        def is_all() -> bool:
            opened.receive(0, 0.02)  # as while others are stored: it takes what comes
            assert sum(len(body) for _, _, body in opened._got) < (2 << 20) + 700_000
            taken.extend(each.value for each in opened.receive(100, 0.05))
            opened.acknowledge()
            return len(taken) == 20

        wait_until(is_all, "all messages", 120)
        assert [int(each[:2]) for each in taken] == list(range(20))
        wait_until(opened.is_drained, "the end", 120)
    finally:
        opened.close()
    assert rabbitmq.count(queue) == 0


@pytest.fixture
def log_server(need_server: Any) -> Iterator[servers.PostgresServer]:
    """A database of its own, that is stopped."""
    need_server("postgres")
    server = servers.PostgresServer()
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.timing
def test_the_database_of_the_log_is_away(
    rabbitmq: Any, connection: Any, here: Project, log_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "PATIENCE", 600.0)  # also if this machine stands still
    queue = rabbitmq.create_queue()
    log = weft.connect(url=log_server.url(), name="log")
    weft.register_connection(log)
    connection = replace(connection, received_log="log", keep_days=1)
    offsets = offsets_of(connection, queue)
    first = offsets.first()
    for number in range(2):
        rabbitmq.publish(queue, numbers(*range(10 * number, 10 * number + 5)))
        wait_until(lambda: offsets.following(first) > first, "messages", 120)
        log_server.kill()
        rabbitmq.publish(queue, numbers(*range(10 * number + 5, 10 * number + 10)))
        # Nothing new as far as it knows: the query goes on.
        assert [offsets.following(first) for _ in range(2)] == [first, first]
        log_server.start()
    last = [0]

    def are_all_there() -> bool:
        last[0] = offsets.following(last[0])
        return len(received_values(offsets)) >= 20

    wait_until(are_all_there, "all messages", 120)
    assert sorted(map(int, received_values(offsets))) == list(range(20))
    # A database that stays away fails the pipeline, and the error names it.
    log_server.kill()
    monkeypatch.setattr(received, "PATIENCE", 0.5)
    with pytest.raises(weft.ConnectionFailedError, match=r"the connection 'log'.*\n.*weft connections check log"):
        wait_until(lambda: offsets.following(last[0]) < 0, "the error", 120)
    source = open_source(weft.Source(connection=connection, query=queue))
    with pytest.raises(weft.ConnectionFailedError, match=r"'log'.*It keeps what copies receives from .*'broker'"):
        source.check("copies", "")


@pytest.mark.full
def test_an_account_that_is_removed(
    rabbitmq: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = rabbitmq.create_queue()
    rabbitmq.control("add_user", "guest-of-a-test", "hunter3")
    rabbitmq.control("set_permissions", "guest-of-a-test", ".*", ".*", ".*")
    address = rabbitmq.url().partition("@")[2]
    offsets = offsets_of(replace(connection, amqp_url=f"amqp://guest-of-a-test:hunter3@{address}"), queue)
    first = offsets.first()
    rabbitmq.publish(queue, numbers(1))
    wait_until(lambda: offsets.following(first) > first, "a message", 120)
    monkeypatch.setattr(received, "PATIENCE", 0.5)
    rabbitmq.control("delete_user", "guest-of-a-test")
    rabbitmq.cut_connections()
    with pytest.raises(weft.ConnectionFailedError, match="'broker'") as told:
        wait_until(lambda: offsets.following(offsets.log.head()) < 0, "the error", 120)
    assert "ACCESS_REFUSED" in str(told.value) and "hunter" not in str(told.value)
    assert received_values(offsets) == numbers(1)


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.timeout(3600)
def test_a_receiver_that_is_killed(rabbitmq: Any, here: Project, count: Any) -> None:
    queue = rabbitmq.create_queue()
    connection = {"kind": "rabbitmq", "name": "broker", "amqp_url": rabbitmq.url()}
    publish, is_empty = partial(rabbitmq.publish, queue), lambda: rabbitmq.count(queue) == 0
    check_receiver_killed(count(60), connection, queue, publish, is_empty)


def test_messages_of_all_sizes_keep_their_order(rabbitmq: Any, connection: Any) -> None:
    """An acknowledgement is for all before it: one that came later must not be taken first."""
    sizes = [0, 1, 300, 65_536, 65_537, 10, 200_000, 0, 5, 131_072, 7, 4096]
    values = [b"%03d" % number + b"x" * size for number, size in enumerate(sizes * 10)]
    queue = rabbitmq.create_queue()
    rabbitmq.publish(queue, [b"", *values], headers={"a": [1, "é"]}, timestamp=1_700_000_000)
    opened = QueueReceiver(connection.resolved(), queue)
    taken: list[Any] = []
    try:
        wait_until(lambda: taken.extend(opened.receive(7, 0.05)) or len(taken) == 121, "all messages", 120)
        assert opened._last == 121
        assert [each.value for each in taken] == [b"", *values]
        assert {each.about["headers"]["a"][1] for each in taken} == {"é"} and {each.about["key"] for each in taken} == {
            queue
        }
        assert len({each.identity for each in taken}) == 121 and {each.sent_at.year for each in taken} == {2023}
    finally:
        opened.close()
    wait_for_count(rabbitmq, queue, 121)
