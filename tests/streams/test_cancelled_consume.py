"""A consume that is cancelled gives back what nobody received, and that delivery does not count."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import weft
from weft.streams.runtime import open_stream

pytestmark = pytest.mark.timing


def _wait_until_free(stream: Any) -> None:
    deadline = time.monotonic() + 60
    while weft.groups_sync(stream)[0]["members"]:
        assert time.monotonic() < deadline, "nobody gave the events back"
        time.sleep(0.01)


async def test_what_a_cancelled_task_leased_is_free_at_once(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @weft.stream(fields={"n": "int64"}, max_deliveries=2)
    def numbers() -> None: ...

    await weft.publish(numbers, [{"n": n} for n in range(3)])
    log = open_stream(numbers).log
    reading, cancelled = threading.Event(), threading.Event()
    read = log.read

    def slow_read(*arguments: int) -> Any:
        # The real read, held up until the task that asked for it is gone.
        reading.set()
        assert cancelled.wait(60)
        return read(*arguments)

    for _ in range(3):  # more often than max_deliveries
        with monkeypatch.context() as patch:
            patch.setattr(log, "read", slow_read)
            task = asyncio.create_task(weft.consume(numbers, "worker"))
            await asyncio.to_thread(reading.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            cancelled.set()
            await asyncio.to_thread(_wait_until_free, numbers)
        reading.clear()
        cancelled.clear()
    events = await weft.consume(numbers, "worker")
    assert [event["n"] for event in events] == [0, 1, 2]
    assert (await weft.groups(numbers))[0]["members"][0]["deliveries"] == 1


async def test_a_loss_that_a_cancelled_task_was_to_be_told_of(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @weft.stream(fields={"n": "int64"})
    def numbers() -> None: ...

    await weft.publish(numbers, [{"n": n} for n in range(3)])
    await weft.ack(numbers, "worker", await weft.consume(numbers, "worker", 1))
    await weft.trim(numbers, max_rows=1)
    log = open_stream(numbers).log
    lease, leased, cancelled, told = log.lease, threading.Event(), threading.Event(), threading.Event()

    def slow_lease(*arguments: Any, **named: Any) -> Any:
        # The real one, whose answer is held up until the task that asked for it is gone.
        answer = lease(*arguments, **named)
        leased.set()
        assert cancelled.wait(60)
        return answer

    report_again = log.report_again
    monkeypatch.setattr(log, "report_again", lambda *arguments: (report_again(*arguments), told.set()))
    with monkeypatch.context() as patch:
        patch.setattr(log, "lease", slow_lease)
        task = asyncio.create_task(weft.consume(numbers, "worker"))
        await asyncio.to_thread(leased.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
    assert await asyncio.to_thread(told.wait, 60)
    with pytest.raises(weft.EventsLostError) as raised:
        await weft.consume(numbers, "worker")
    assert raised.value.lost == 1
    assert [event["n"] for event in await weft.consume(numbers, "worker")] == [2]
    assert (await weft.groups(numbers))[0]["lost"] == 1
