"""A server that is full, a user who may do little, a server that is restarted under its readers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import servers
import weft
from weft import StorageError, WeftError
from weft.project import Project, use
from weft.systems.redis.log import RedisLog
from workers import declare, drain, log_of, plain


@pytest.fixture
def on_own_server(own_server: servers.Server, monkeypatch: pytest.MonkeyPatch, project: Path) -> Any:
    monkeypatch.setenv("WEFT_DSN", own_server.url())
    with use(Project()) as fresh, contextlib.closing(own_server.connect()) as client:
        yield client
        weft.streams.close(fresh)


def test_a_full_server_stores_nothing(on_own_server: Any) -> None:
    declare(fields={"n": "int64"}, idempotency_key="n")
    weft.publish_sync("orders", {"n": 0})
    on_own_server.config_set("maxmemory", 1)
    with pytest.raises(StorageError, match="maxmemory"):
        weft.publish_sync("orders", [{"n": n} for n in range(1, 100)])
    on_own_server.config_set("maxmemory", 0)
    assert on_own_server.xlen("orders") == 1
    assert weft.publish_sync("orders", [{"n": n} for n in range(1, 100)])["rows_deduplicated"] == 0
    assert [event["n"] for event in drain("orders")] == list(range(100))


def test_a_user_with_the_rights_that_the_guide_names(own_server: servers.Server, on_own_server: Any) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "redis.md").read_text(encoding="utf-8")
    rights = guide[guide.index("A user needs `") :].split("`")[1:6:2]
    words = [word for each in rights for word in each.split()]
    keys = ["~orders*", "~weft:*"]
    on_own_server.execute_command("ACL", "SETUSER", "app", "on", ">hunter2", *words, *keys)
    connection = weft.connect(url=f"redis://app:hunter2@127.0.0.1:{own_server.port}/0")
    assert connection.check()["server"]
    stream = declare(fields={"n": "int64"}, idempotency_key="n", max_deliveries=2, connection=connection)
    weft.publish_sync(stream, [{"n": n} for n in range(5)])
    events = weft.consume_sync(stream, "worker", 3, wait=1)
    weft.nack_sync(stream, "worker", events[:1])
    weft.ack_sync(stream, "worker", events[1:])
    assert len(drain(stream, "worker")) == 3
    assert weft.trim_sync(stream, max_rows=1) == 4
    assert weft.groups_sync(stream)[0]["lag"] == 0
    assert (log_of(stream).size() or 0) > 100
    on_own_server.execute_command("ACL", "SETUSER", "app", "-memory")
    assert log_of(stream).size() is None
    on_own_server.execute_command("ACL", "SETUSER", "app", "-@write")
    with pytest.raises(WeftError) as caught:
        weft.publish_sync(stream, {"n": 9})
    assert "hunter2" not in str(caught.value)


@pytest.mark.full
def test_more_events_than_a_script_passes_at_once(on_own_server: Any) -> None:
    """Lua takes some thousand arguments in a call; a batch may have a hundred thousand events."""
    declare(fields={"n": "int64"})
    count = 30_000
    weft.publish_sync("orders", [{"n": n} for n in range(count)])
    first = weft.consume_sync("orders", "worker", count, member="a")
    assert weft.nack_sync("orders", "worker", first) == count
    again = weft.consume_sync("orders", "worker", count, member="b")
    assert [event["n"] for event in again] == list(range(count))
    assert weft.ack_sync("orders", "worker", again) == count
    assert on_own_server.keys("weft:{orders}:*:worker") == []
    (group,) = weft.groups_sync("orders")
    assert (group["lag"], group["pending"]) == (0, 0)


@pytest.mark.brief(
    "1-full",
    "15-with-nulls",
    "16-full",
    "49-with-nulls",
    "50-full",
    "999-with-nulls",
    "1000-full",
    "1001-with-nulls",
    "2500-full",
)
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "with-nulls"])
@pytest.mark.parametrize("count", [1, 15, 16, 49, 50, 999, 1000, 1001, 2500])
def test_rows_around_what_a_script_reads_at_a_time(on_own_server: Any, count: int, is_full: bool) -> None:
    """Every kind of column, as texts that end with a zero byte or not, with and without nulls and keys."""
    kinds = {"n": "int64", "ratio": "float64", "text": "string", "raw": "bytes", "on": "bool", "more": "json"}
    declare(fields=kinds)
    events: list[dict[str, Any]] = [
        {"n": -n, "ratio": n / 7, "text": f"\0ü{n}", "raw": b"\0\xff%d" % n, "on": n % 2 == 0, "more": {"n": [n]}}
        for n in range(count)
    ]
    if not is_full:
        for n, event in enumerate(events):
            del event[list(kinds)[n % len(kinds)]]
    assert weft.publish_sync("orders", events)["rows_quarantined"] == 0
    again = [weft.publish_sync("orders", events, idempotency_key="once")["rows_deduplicated"] for _ in range(2)]
    assert again == [0, count]
    assert [plain(event) for event in drain("orders")] == events * 2


@pytest.mark.parametrize("width", [1, 50, 51, 120])
def test_as_many_columns_as_a_function_holds_and_more(on_own_server: Any, width: int) -> None:
    declare(fields={f"f{n}": "string" for n in range(width)})
    events = [{f"f{n}": f"{row} {n}" for n in range(width)} for row in range(60)]
    weft.publish_sync("orders", events)
    assert [plain(event) for event in drain("orders")] == events


def test_nothing_is_left_of_what_was_settled(on_own_server: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    for event in weft.consume_sync("orders", "worker"):
        weft.nack_sync("orders", "worker", event, reason="not yet") if event["n"] % 2 else weft.ack_sync(
            "orders", "worker", event
        )
    for event in weft.consume_sync("orders", "worker"):
        assert weft.ack_sync("orders", "worker", event) == 1
    assert on_own_server.keys("weft:{orders}:*:worker") == []


@pytest.mark.full
def test_scripts_take_little_memory_for_large_events(on_own_server: Any) -> None:
    """Scripts see entries with their values, but some at a time. Memory of Lua is not limited by maxmemory."""
    declare(fields={"body": "string"})
    for _ in range(100):
        weft.publish_sync("orders", [{"body": "x" * 100_000} for _ in range(10)])
    before = on_own_server.info("memory")["used_memory"]
    assert log_of("orders").lease("worker", "a", 1000, 3600).spans[0].events == 1000
    log_of("orders").lease("behind", "a", 1, 3600)
    assert log_of("orders").trim(log_of("orders").head()) == 1000
    assert on_own_server.info("memory")["used_memory_peak"] - before < 70_000_000


def test_walks_of_several_steps(on_own_server: Any) -> None:
    """Everybody waits for a script, so that a long way takes several."""
    declare(fields={"n": "int64"})
    count = 25_000
    weft.publish_sync("orders", [{"n": n} for n in range(count)])
    log = log_of("orders")
    for n in (1, 9_999, 10_000, 10_001, 12_500, 15_001, count):
        offset = log.nth_last(n)
        assert offset is not None
        assert log.read(offset - 1, offset, 1).columns[0] == [count - n]
    assert log.nth_last(count + 1) is None
    log.lease("worker", "a", 11_000, 3600)
    log.lease("worker", "b", 2_000, 3600)
    entries = on_own_server.xrange("orders", count=20_000)
    on_own_server.xdel("orders", entries[-1][0])  # unread: what is left is counted
    for _ in range(2):
        (group,) = log.groups()
        assert (group.lag, group.pending) == (count - 13_001, 13_000)
        assert [(member.member, member.pending) for member in group.members] == [("a", 11_000), ("b", 2_000)]


def test_a_walk_while_others_trim(on_own_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes keep the last eight events. The second one takes none of them for too old."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    log = log_of("orders")
    assert isinstance(log, RedisLog)
    walk = log._walk

    def walk_late(*given: Any) -> Any:
        on_own_server.xtrim("orders", maxlen=8, approximate=False)
        return walk(*given)

    monkeypatch.setattr(log, "_walk", walk_late)
    weft.trim_sync("orders", max_rows=8)
    assert [event["n"] for event in drain("orders")] == list(range(2, 10))
