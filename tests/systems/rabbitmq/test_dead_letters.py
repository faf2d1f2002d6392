"""Dead letters in a queue that somebody else reads at the same time. Without Spark."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

import weft
from servers import wait_until
from weft.project import Project
from weft.systems.dead_letter_store import StoredLetter
from weft.systems.rabbitmq import dead_letters
from weft.systems.rabbitmq.dead_letters import RabbitMQLetters


def test_letters_that_somebody_else_holds(
    rabbitmq: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are waited for; who does not give them back has the removal fail, which would say that they are gone."""
    queue = f"failed-{next(rabbitmq.numbers)}"
    store = RabbitMQLetters(connection, queue, "copies", lambda: None)
    more: dict[str, Any] = {"failed_at": datetime.now(UTC), "pipeline": "copies"}
    store.put([StoredLetter("read", "bad", "events", "{", letter_id=f"id{number}", **more) for number in range(3)])
    with rabbitmq.channel() as channel:
        for _ in zip(range(3), channel.consume(queue), strict=False):
            pass
        with monkeypatch.context() as hasty, pytest.raises(weft.WeftError, match="hold messages"):
            hasty.setattr(dead_letters, "_PATIENCE", 0.0)
            hasty.setattr(dead_letters, "_BUSY_SECONDS", 0.0)
            store.remove(["id1"])
        with ThreadPoolExecutor() as pool:
            removal = pool.submit(store.remove, ["id1", "unknown"])
            wait_until(
                lambda: channel.queue_declare(queue, passive=True).method.consumer_count == 2, "the removal to begin"
            )
            channel.close()
            removal.result(120)
    assert sorted(each["letter_id"] for each in store.records()) == ["id0", "id2"]
