"""Names of consumers and members: any printable text is one, and two that differ at all are two."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import servers
import weft
from marks import on_tables
from weft import SettingsError
from weft.project import Project, use
from weft.streams.runtime import close
from weft.systems.redis.group_member import GIVEN_BACK
from workers import declare, execute, log_of

NAMES = [
    "a",
    "A",
    "á",
    "a\u0301",
    "ä",
    "ae",
    "æ",
    "ß",
    "ss",
    "SS",
    "i",
    "ı",
    "İ",
    "o",
    "ø",
    "K",
    "k",
    "\u212a",  # the Kelvin sign
    "1",
    "01",
    "1.0",
    "1e0",
    "0x1",
    "null",
    "NULL",
    "None",
    "two  spaces",
    "two spaces",
    "quote'single",
    'quote"double',
    "back`tick",
    "back\\slash",
    "'; DROP TABLE x; --",
    "%",
    "%s",
    "%%",
    "_",
    "?",
    ":x",
    "$1",
    "a/b",
    "a:b",
    "a.b",
    "{x}",
    "名前",
    "имя",
    "اسم",
    "🦄",
    "🦄🦄",
    "𝔘",
    "x" * 199,
    "x" * 200,
    "é" * 200,
    "🦄" * 199,
    "🦄" * 200,
]


def test_consumers_are_told_apart(streams: Project) -> None:
    """What one acknowledges is news to all others."""
    declare()
    weft.publish_sync("orders", [{"n": 0}, {"n": 1}])
    for name in NAMES:
        events = weft.consume_sync("orders", name)
        assert len(events) == 2, name
        assert weft.ack_sync("orders", name, events[:1]) == 1
    groups = {group["consumer"]: group["pending"] for group in weft.groups_sync("orders")}
    assert groups == dict.fromkeys(NAMES, 1)
    weft.reset_sync("orders", "🦄", to="start")
    groups = {group["consumer"]: group["pending"] for group in weft.groups_sync("orders")}
    assert groups == {**dict.fromkeys(NAMES, 1), "🦄": 0}


def test_members_are_told_apart(streams: Project) -> None:
    declare()
    weft.publish_sync("orders", [{"n": n} for n in range(len(NAMES))])
    for n, name in enumerate(NAMES):
        for _ in range(2):
            assert [event["n"] for event in weft.consume_sync("orders", "worker", 1, member=name)] == [n], name
    (group,) = weft.groups_sync("orders")
    assert {member["member"] for member in group["members"]} == set(NAMES)
    for name, other in pairwise(NAMES):
        events = [{"_weft_rowid": weft.consume_sync("orders", "worker", 1, member=name)[0]["_weft_rowid"]}]
        with pytest.raises(weft.LeaseLostError):
            weft.ack_sync("orders", "worker", events, member=other)


def test_names_in_errors(streams: Project) -> None:
    declare()
    weft.publish_sync("orders", {"n": 0})
    for name in NAMES:
        with pytest.raises(weft.LeaseLostError) as caught:
            weft.ack_sync("orders", name, {"_weft_rowid": 10**9})
        assert repr(name) in str(caught.value)


REFUSED: list[Any] = [
    "",
    " ",
    " a",
    "a ",
    "a\n",
    "a\nb",
    "\t",
    "a\x00",
    "\x7f",
    "\ud800",
    "\u200b",
    "x" * 201,
    5,
    b"a",
    ["a"],
]


def test_refused(streams: Project) -> None:
    declare()
    for name in REFUSED:
        with pytest.raises(SettingsError, match="consumer"):
            weft.consume_sync("orders", name)
        with pytest.raises(SettingsError, match="member"):
            weft.consume_sync("orders", "worker", member=name)
    with pytest.raises(SettingsError, match="consumer"):
        weft.consume_sync("orders", None)  # type: ignore[arg-type]
    assert weft.groups_sync("orders") == []


printable = st.text(st.characters(), min_size=1, max_size=200).filter(
    lambda n: n.isprintable() and n == n.strip() and n != GIVEN_BACK
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(names=st.lists(printable, min_size=2, max_size=4, unique=True))
def test_any_names(streams: Project, names: list[str]) -> None:
    declare()
    if not log_of("orders").count():
        weft.publish_sync("orders", {"n": 0})
    for name in names:
        weft.reset_sync("orders", name, to="start")
    for name in names:
        assert len(weft.consume_sync("orders", name, member=name)) == 1
        assert len(weft.consume_sync("orders", name, member=name)) == 1


def test_stream_names(streams: Project) -> None:
    """Words of SQL, dashes and the longest names; tables beside a user's own."""
    names = ["select", "order", "group", "a-b", "a_b", "_", "T1"]
    for schema in ("select", "s" * 44):
        for name in names:
            made = declare(f"{name}", schema=schema, on_schema_drift="quarantine", max_deliveries=1)
            weft.publish_sync(made, {"n": 1, "at": f"{schema}.{name}"})
            assert weft.publish_sync(made, {"n": "x"})["rows_quarantined"] == 1
            assert [event["at"] for event in weft.consume_sync(made, "worker", member="a")] == [f"{schema}.{name}"]
            assert weft.consume_sync(made, "worker", member="a") == []
            assert len(weft.consume_sync(made.quarantine, "worker")) == 1
            assert len(weft.consume_sync(made.dead_letters, "worker")) == 1
    longest = declare("x" * 47, schema="s" * 16)
    weft.publish_sync(longest, {"n": 1})
    assert len(weft.consume_sync(longest, "worker")) == 1


@on_tables
def test_a_users_own_table_is_not_taken_for_a_stream(streams: Project, system: Any) -> None:
    declare("first")
    weft.publish_sync("first", {"n": 1})
    table = log_of("first").table.replace("first", "mine")
    execute(system, f"CREATE TABLE {table} (id INTEGER)")
    declare("mine")
    for _ in range(2):
        with pytest.raises(weft.DeclarationError, match="mine"):
            weft.publish_sync("mine", {"n": 1})
    weft.publish_sync("first", {"n": 2})


def test_streams_of_two_projects_whose_names_differ_in_case_alone(streams: Project, system: Any) -> None:
    """They are two streams, or the second one is refused: never one table."""
    declare("orders", fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    with use(Project()) as other:
        declare("Orders", fields={"n": "int64"})
        if system.kind == "sqlite":
            for use_it in (
                lambda: weft.publish_sync("Orders", {"n": 2}),
                lambda: weft.consume_sync("Orders", "c"),
                lambda: weft.read_stream("default", "Orders"),
                lambda: weft.delete_stream_sync("Orders"),
            ):
                with pytest.raises(weft.DeclarationError, match=r"events\.Orders and events\.orders.* one table"):
                    use_it()
        else:
            weft.publish_sync("Orders", {"n": 2})
            assert [event["n"] for event in weft.consume_sync("Orders", "c")] == [2]
        close(other)
    assert [event["n"] for event in weft.consume_sync("orders", "c")] == [1]


@pytest.mark.full
def test_a_server_that_ignores_the_case_of_tables(need_server: Any) -> None:
    need_server("mysql")

    class Folding(servers.MariaDBServer):
        def command(self) -> list[str]:
            return [*super().command(), "--lower-case-table-names=1"]

    server = Folding()
    server.start()
    try:
        with use(Project()) as project, server.database() as url:
            connection = weft.connect(url=url)
            weft.publish_sync(declare("orders", fields={"n": "int64"}, connection=connection), {"n": 1})
            project.streams.clear()
            other = declare("Orders", fields={"n": "int64"}, connection=connection)
            with pytest.raises(weft.DeclarationError, match=r"events\.Orders and events\.orders.* one table"):
                weft.publish_sync(other, {"n": 2})
            close(project)
    finally:
        server.kill()
