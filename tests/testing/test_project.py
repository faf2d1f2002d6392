"""`weft.testing.project`: everything in memory, nothing left behind."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

import weft
from weft.project import Project, current
from weft.streams import Stream
from weft.streams.runtime import open_stream
from weft.streams.watch import Watch


@pytest.fixture
def orders() -> Stream:
    @weft.stream(fields={"order_id": "int64", "total": "float64"})
    def orders(): ...

    return orders


def test_streams_declared_before_are_there(orders: Stream) -> None:
    with weft.testing.project() as project:
        weft.publish_sync("orders", [{"order_id": 1}, {"order_id": 2}])
        weft.publish_sync(orders, {"order_id": 3, "note": "extra"})
        assert [event["order_id"] for event in project.events(orders)] == [1, 2, 3]
        assert project.events("orders")[2]["note"] == "extra"


def test_each_starts_empty_and_leaves_no_file(orders: Stream, project: Path) -> None:
    for _ in range(2):
        with weft.testing.project() as inner:
            assert inner.events("orders") == []
            weft.publish_sync("orders", {"order_id": 1})
    assert list(project.iterdir()) == []


def test_the_outer_project_is_back_even_after_an_error(orders: Stream, outer: Project) -> None:
    with pytest.raises(ZeroDivisionError), weft.testing.project():
        weft.publish_sync(orders, {"order_id": 1})
        _ = 1 / 0
    assert current() is outer


def test_what_a_test_declares_is_gone_after_it(outer: Project) -> None:
    with weft.testing.project():

        @weft.stream
        def visits(): ...

        weft.publish_sync("visits", {"page": "/"})
    assert "visits" not in outer.streams


def test_a_module_first_imported_inside_is_known_to_the_next_test(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "late_streams.py").write_text("from weft import stream\n\n@stream\ndef late(): ...\n")
    monkeypatch.syspath_prepend(str(project))
    for _ in range(2):
        with weft.testing.project():
            import late_streams  # type: ignore[import-not-found]  # noqa: F401

            assert weft.publish_sync("late", {"a": 1})["first_rowid"] == 1


def test_every_name_leads_to_a_memory_of_its_own(
    project: Path, orders: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DSN", "postgres://nowhere.invalid/db")
    monkeypatch.setenv("WEFT_DSN_LAKE", "postgres://nowhere.invalid/db")
    (project / "weft.toml").write_text('[connections.warehouse]\nurl = "mysql://nowhere.invalid/db"\n')
    (Path.home() / ".weft").mkdir()
    (Path.home() / ".weft" / "connections.toml").write_text('[connections.home]\nurl = "${NOT_SET}"\n')
    with weft.testing.project() as inner:
        for name in ("default", "lake", "warehouse", "home", "unheard_of"):
            assert weft.publish_sync(orders, {"order_id": 1}, connection=name)["first_rowid"] == 1
            assert inner.where(name).target == ":memory:"


@pytest.mark.parametrize("name", ["warehouse", None])
def test_a_connection_that_was_declared_outside_is_replaced(name: str | None) -> None:
    server = weft.PostgresConnection("postgres://nowhere.invalid/db", name=name)
    if name:
        weft.register_connection(server)

    @weft.stream(connection=server)
    def by_object(): ...

    @weft.stream(connection=name)
    def by_name(): ...

    with weft.testing.project() as inner:
        for stream in ("by_object", "by_name"):
            weft.publish_sync(stream, {"a": 1})
            assert len(inner.events(stream)) == 1


def test_what_the_test_registers_counts(project: Path, orders: Stream) -> None:
    with weft.testing.project():
        weft.register_connection(weft.SQLiteConnection("real.db", name="warehouse"))
        weft.publish_sync(orders, {"order_id": 1}, connection="warehouse")
    assert (project / "real.db").exists()


def test_a_url_is_no_name(orders: Stream) -> None:
    with weft.testing.project(), pytest.raises(weft.DeclarationError, match="cannot be the name of a connection"):
        weft.publish_sync(orders, {"order_id": 1}, connection="postgres://host/db")


def test_names_that_lead_somewhere_are_listed() -> None:
    @weft.stream(connection="warehouse")
    def visits(): ...

    with weft.testing.project() as inner:
        assert [info.name for info in inner.describe_connections()] == ["default", "warehouse"]


async def test_subscribe_and_consume_async(orders: Stream) -> None:
    with weft.testing.project():
        live = weft.subscribe("orders")
        await weft.publish("orders", {"order_id": 1})
        assert (await anext(live))["order_id"] == 1
        events = await weft.consume("orders", "billing")
        await weft.ack("orders", "billing", events)
        assert (await weft.groups("orders"))[0]["pending"] == 0


def test_quarantine_and_dead_letters_can_be_looked_at() -> None:
    @weft.stream(fields={"n": "int64"}, on_schema_drift="quarantine", max_deliveries=1)
    def numbers(): ...

    with weft.testing.project() as inner:
        weft.publish_sync("numbers", [{"n": 1}, {"n": "one"}])
        events = weft.consume_sync("numbers", "adder")
        weft.nack_sync("numbers", "adder", events, reason="cannot add")
        assert weft.consume_sync("numbers", "adder") == []
        assert inner.events("numbers__quarantine")[0]["event"] == {"n": "one"}
        assert inner.events("numbers__dead_letter")[0]["reason"] == "cannot add"


@pytest.mark.timing
@pytest.mark.filterwarnings("error")
def test_closing_waits_for_work_in_the_background() -> None:
    @weft.stream(retention={"max_rows": 1})
    def short(): ...

    for _ in range(20):
        with weft.testing.project():
            weft.publish_sync("short", [{"a": 1}, {"a": 2}])
    gc.collect()


@pytest.mark.timeout(60)
def test_closing_ends_the_watch_that_a_wait_began(orders: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without closing, it would go on for a while, for the next who waits."""
    monkeypatch.setattr(Watch, "_LINGER_SECONDS", 3600)
    with weft.testing.project():
        waiting = threading.Thread(target=weft.consume_sync, args=("orders", "billing"), kwargs={"wait": 0.2})
        waiting.start()
        waiting.join()
        watch = open_stream(orders).hub.watch
        thread = watch._thread
        assert thread is not None and thread.is_alive()
    assert not thread.is_alive()
