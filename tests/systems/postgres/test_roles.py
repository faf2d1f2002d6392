"""Each role on PostgreSQL does its work with the rights that the guide names, and no others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import weft
from weft.project import Project, use
from weft.streams import close

GUIDE = Path(__file__).parents[3] / "docs" / "streams.md"
Connect = Callable[..., psycopg.Connection[Any]]


def rights() -> dict[str, list[str]]:
    """The statements of the guide, by role."""
    block = GUIDE.read_text(encoding="utf-8").partition("## Rights in the database")[2].partition("```sql\n")[2]
    parts = re.split(r"^-- (\w+).*$", block.partition("```")[0], flags=re.M)[1:]
    return {
        role: [each for each in text.split(";\n") if each.strip()]
        for role, text in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.fixture
def user_events(url: str) -> Iterator[weft.Stream]:
    """A stream with two events and a consumer, made by another role."""
    with use(Project()) as project:

        @weft.stream(fields={"n": "int64"}, idempotency_key="n")
        def user_events() -> None: ...

        weft.publish_sync(user_events, [{"n": 1}, {"n": 2}], connection=weft.connect(url))
        weft.consume_sync(user_events, "other", 1, weft.connect(url))
        yield user_events
        close(project)


@pytest.fixture
def role(url: str, connect: Connect) -> Iterator[Callable[..., weft.Connection]]:
    """`role("reader")` is a connection of a role with these rights."""
    connection = connect(autocommit=True)
    connection.execute("DROP ROLE IF EXISTS app")
    connection.execute("CREATE ROLE app LOGIN")

    def granted(*names: str) -> weft.Connection:
        connection.execute("DROP OWNED BY app")
        for statement in [each for name in ("each", *names) for each in rights()[name]]:
            connection.execute(statement)
        return weft.connect(url.replace("weft@", "app@"))

    yield granted
    connection.execute("DROP OWNED BY app")
    connection.execute("DROP ROLE app")


async def first_of(stream: Any, connection: weft.Connection) -> Any:
    async with weft.subscribe(stream, since="start", connection=connection) as events:
        return (await anext(events))["n"]


def test_a_reader_only_reads(user_events: weft.Stream, role: Callable[..., weft.Connection]) -> None:
    app = role("reader")
    assert weft.read_stream(app, user_events)["n"].to_list() == [1, 2]
    assert asyncio.run(first_of(user_events, app)) == 1
    assert [each["consumer"] for each in weft.groups_sync(user_events, connection=app)] == ["other"]
    with pytest.raises(weft.WeftError, match="permission denied") as refused:
        weft.publish_sync(user_events, {"n": 3}, connection=app)
    assert "GRANT" in (refused.value.hint or "")
    with pytest.raises(weft.WeftError, match="permission denied"):
        weft.consume_sync(user_events, "mine", 1, app)


def test_a_reader_of_a_stream_that_is_not_there(user_events: weft.Stream, role: Callable[..., weft.Connection]) -> None:
    @weft.stream
    def missing() -> None: ...

    app = role("reader")
    assert len(weft.read_stream(app, missing)) == 0
    assert weft.groups_sync(missing, connection=app) == []


def test_a_publisher(user_events: weft.Stream, role: Callable[..., weft.Connection]) -> None:
    app = role("publisher")
    assert weft.publish_sync(user_events, [{"n": 2}, {"n": 3}], connection=app)["rows_deduplicated"] == 1
    assert weft.publish_sync(user_events, {"n": 4}, connection=app, idempotency_key="k")["rows_received"] == 1


def test_a_consumer(user_events: weft.Stream, role: Callable[..., weft.Connection]) -> None:
    app = role("consumer")
    events = weft.consume_sync(user_events, "mine", 10, app)
    assert weft.nack_sync(user_events, "mine", events[:1], connection=app) == 1
    assert weft.ack_sync(user_events, "mine", events[1:], connection=app) == 1
    assert weft.reset_sync(user_events, "mine", "end", connection=app) == 2


def test_retention(user_events: weft.Stream, role: Callable[..., weft.Connection]) -> None:
    app = role("retention")
    assert weft.trim_sync(user_events, max_rows=1, connection=app) == 1


@pytest.mark.spark
def test_a_pipeline(user_events: weft.Stream, role: Callable[..., weft.Connection], connect: Connect) -> None:
    app = role("pipeline")
    weft.run_streaming_pipeline(
        name="copy",
        source=weft.Source(connection=app, query=user_events),
        target=app,
        target_table="public.copied",
        mode="merge",
        target_primary_key=["n"],
        once=True,
    )
    assert connect(autocommit=True).execute("SELECT n FROM copied ORDER BY n").fetchall() == [(1,), (2,)]
