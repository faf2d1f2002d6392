"""`idempotency_key`: an event whose key was stored before is left out, and nothing else is."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import weft
import weft.streams
from marks import on_tables
from servers import wait_until
from weft import SchemaError, WeftError
from weft.project import Project
from weft.systems.redis.client import open_client
from weft.testing import Clock
from workers import declare, drain, execute, log_of, plain, rowids, started

KEYED = {"fields": {"id": "int64", "n": "int64"}, "idempotency_key": "id"}


def publish(*ids: Any, **more: Any) -> dict[str, Any]:
    return weft.publish_sync("orders", [{"id": each, **more} for each in ids])


def ids(stream: str = "orders") -> list[Any]:
    return [event["id"] for event in drain(stream)]


def table(system: Any, schema: str, name: str) -> str:
    return {"sqlite": f'"{schema}.{name}"', "postgres": f"{schema}.{name}", "mysql": f"`{schema}.{name}`"}[system.kind]


def age_keys(system: Any, days: int) -> None:
    """Let every key have been seen earlier: a server has a clock of its own, which no test can move."""
    if system.kind == "redis":
        with closing(open_client(system.connection)) as client:
            for key, seen in client.zrange("weft:{orders}:keys", 0, -1, withscores=True):
                client.zadd("weft:{orders}:keys", {key: seen - days * 86_400_000_000})
        return
    execute(system, f"UPDATE {table(system, 'weft', 'keys')} SET seen = seen - {days * 86_400_000_000}")


def remembered() -> int:
    """How many keys the database holds."""
    log = log_of("orders")
    if hasattr(log, "keys"):  # on Redis
        return int(log.store.command("ZCARD", log.keys.seen))
    with log.store.session("read") as session:
        return int(session.row(f"SELECT count(*) FROM {log.store.keys}")[0])


def test_json_as_a_key(streams: Project) -> None:
    """The order of its keys says nothing."""
    declare(fields={"id": "json"}, idempotency_key="id")
    assert publish({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1, "b": 2})["rows_deduplicated"] == 1


def test_across_publishes(streams: Project) -> None:
    declare(**KEYED)
    first = publish(1, n=1)
    second = publish(1, n=2)
    assert (first["rows_received"], first["rows_deduplicated"]) == (1, 0)
    assert (second["rows_received"], second["rows_deduplicated"]) == (1, 1)
    assert (second["first_rowid"], second["last_rowid"]) == (None, None)
    assert second["status"] == "accepted"
    (event,) = drain("orders")
    assert plain(event) == {"id": 1, "n": 1}
    assert event["_weft_publish_id"] == first["publish_id"]


def test_within_a_publish(streams: Project) -> None:
    """The first one wins."""
    declare(**KEYED)
    result = weft.publish_sync("orders", [{"id": n % 3, "n": n} for n in range(10)])
    assert (result["rows_received"], result["rows_deduplicated"]) == (10, 7)
    assert [(event["id"], event["n"]) for event in drain("orders")] == [(0, 0), (1, 1), (2, 2)]


def test_offsets_in_the_result(streams: Project) -> None:
    """Of what was stored, whatever was left out before, between and after it."""
    declare(**KEYED)
    publish(1, 2)
    result = publish(1, 3, 2, 4, 1)
    assert result["rows_deduplicated"] == 3
    events = drain("orders")
    assert [event["id"] for event in events] == [1, 2, 3, 4]
    assert [result["first_rowid"], result["last_rowid"]] == rowids(events)[2:]
    result = publish(4, 5, 4)
    (event,) = drain("orders")
    assert (result["first_rowid"], result["last_rowid"]) == (event["_weft_rowid"], event["_weft_rowid"])


def test_null_is_no_key(streams: Project) -> None:
    """Events without a key never collapse into one."""
    declare(**KEYED)
    assert publish(None, None, n=1)["rows_deduplicated"] == 0
    assert weft.publish_sync("orders", [{"n": 2}, {"n": 3}, {}])["rows_deduplicated"] == 0
    assert weft.publish_sync("orders", {"n": 2})["rows_deduplicated"] == 0
    result = weft.publish_sync("orders", [{"id": None, "n": 4}, {"id": 7, "n": 5}, {"n": 6}, {"id": 7, "n": 7}])
    assert result["rows_deduplicated"] == 1
    assert [event["n"] for event in drain("orders")] == [1, 1, 2, 3, None, 2, 4, 5, 6]


def test_several_fields(streams: Project) -> None:
    declare(fields={"shop": "string", "id": "int64"}, idempotency_key=["shop", "id"])
    pairs = [("a", 1), ("a", 2), ("b", 1), ("a", 1), (None, 1), (None, 1), ("a", None), ("a", None), ("b", 1)]
    result = weft.publish_sync("orders", [{"shop": shop, "id": number} for shop, number in pairs])
    assert result["rows_deduplicated"] == 2
    stored = [(event["shop"], event["id"]) for event in drain("orders")]
    assert stored == [("a", 1), ("a", 2), ("b", 1), (None, 1), (None, 1), ("a", None), ("a", None)]
    assert weft.publish_sync("orders", {"id": 1, "shop": "b"})["rows_deduplicated"] == 1


def test_fields_do_not_run_into_each_other(streams: Project) -> None:
    declare(fields={"a": "string", "b": "string"}, idempotency_key=["a", "b"])
    pairs = [("x", "yz"), ("xy", "z"), ("xyz", ""), ("", "xyz"), ("x', 'y", "z"), ("x", "y', 'z"), ("x,", ",y")]
    result = weft.publish_sync("orders", [{"a": a, "b": b} for a, b in pairs])
    assert result["rows_deduplicated"] == 0


def test_streams_have_their_own_keys(streams: Project) -> None:
    for name in ("orders", "returns"):
        declare(name, **KEYED)
        assert weft.publish_sync(name, {"id": 1})["rows_deduplicated"] == 0
        assert weft.publish_sync(name, {"id": 1})["rows_deduplicated"] == 1


def test_the_same_value_written_differently(streams: Project) -> None:
    """A key is the stored value, not its spelling."""
    kinds: dict[str, list[Any]] = {
        "decimal(10,2)": ["1.5", Decimal("1.50"), 1.5],
        "timestamp": [
            "2026-01-31T12:00:00+02:00",
            datetime(2026, 1, 31, 10, tzinfo=UTC),
            datetime(2026, 1, 31, 10),
            datetime(2026, 1, 31, 10, fold=1),
            "2026-01-31T10:00:00Z",
        ],
        "uuid": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", UUID("a0eebc999c0b4ef8bb6d6bb9bd380a11")],
        "float64": [2, 2.0],
        "date": ["2026-01-31", datetime(2026, 1, 31).date()],
    }
    for number, (kind, spellings) in enumerate(kinds.items()):
        name = f"orders_{number}"
        declare(name, fields={"id": kind}, idempotency_key="id")
        results = [weft.publish_sync(name, {"id": each})["rows_deduplicated"] for each in spellings]
        assert results == [0] + [1] * (len(spellings) - 1), kind


def test_values_that_are_not_the_same(streams: Project) -> None:
    """Databases take some of these for equal."""
    declare(fields={"id": "string"}, idempotency_key="id")
    values = ["a", "A", "a ", " a", "á", "a\u0301", "", " ", "1", "01", "ß", "ss", "x\x00y", "x\x00z", "0" * 3000]
    values += ["0" * 3001]
    assert publish(*values)["rows_deduplicated"] == 0
    assert publish(*values)["rows_deduplicated"] == len(values)
    for value in values:
        assert publish(value)["rows_deduplicated"] == 1
    assert ids() == values


def test_without_declared_fields(streams: Project) -> None:
    declare(idempotency_key="id")
    assert publish("a", "b", "a")["rows_deduplicated"] == 1
    assert publish("b", "c")["rows_deduplicated"] == 1
    assert ids() == ["a", "b", "c"]


@pytest.mark.parametrize("wrong", ["x", 2**70, [1, 2], {"a": 1}, 1.5, True], ids=repr)
def test_a_key_of_another_type(streams: Project, wrong: Any) -> None:
    """It goes beside its column, and is a key all the same: alone, and among others that fit."""
    declare(**KEYED)
    assert publish(wrong, n=1)["rows_deduplicated"] == 0
    assert publish(wrong, n=2)["rows_deduplicated"] == 1
    result = publish(1, wrong, None, 2, wrong, n=3)
    assert result["rows_deduplicated"] == 2
    assert ids() == [wrong, 1, None, 2]


def test_a_key_of_another_type_is_refused(streams: Project) -> None:
    declare(**KEYED, on_schema_drift="reject")
    with pytest.raises(SchemaError) as caught:
        publish(1, "x")
    assert (caught.value.index, caught.value.field, caught.value.value) == (1, "id", "x")
    assert publish(1)["rows_deduplicated"] == 0


def test_a_key_of_another_type_is_quarantined(streams: Project) -> None:
    """Twice, as it came twice: what does not fit has no key."""
    declare(**KEYED, on_schema_drift="quarantine")
    result = publish(1, "x", 1, "x", 2)
    assert (result["rows_deduplicated"], result["rows_quarantined"]) == (1, 2)
    assert ids() == [1, 2]
    assert [event["event"]["id"] for event in drain("orders__quarantine")] == ["x", "x"]


def test_a_refused_publish_leaves_no_key_behind(streams: Project) -> None:
    declare(**KEYED, validate_schema=True)
    with pytest.raises(SchemaError):
        weft.publish_sync("orders", [{"id": 1, "n": 1}, {"id": 2, "n": "two"}])
    with pytest.raises(SchemaError):
        weft.publish_sync("orders", [{"id": 1, "n": 1}, {"id": 2, "n": 1, "_weft_x": 1}])
    assert publish(1, 2, n=1)["rows_deduplicated"] == 0
    assert ids() == [1, 2]


@on_tables
def test_a_publish_that_the_database_refuses_leaves_no_key_behind(streams: Project, system: Any) -> None:
    declare(**KEYED)
    publish(1)
    orders = table(system, "events", "orders")
    if system.kind == "sqlite":
        execute(system, f"CREATE TRIGGER no BEFORE INSERT ON {orders} BEGIN SELECT RAISE(ABORT, 'unlucky'); END")
    else:
        execute(system, f"ALTER TABLE {orders} ADD CONSTRAINT unlucky CHECK (id < 2)")
    for _ in range(2):
        with pytest.raises(WeftError, match="unlucky"):
            publish(1, 2, 3)
    execute(system, "DROP TRIGGER no" if system.kind == "sqlite" else f"ALTER TABLE {orders} DROP CONSTRAINT unlucky")
    assert publish(1, 2, 3)["rows_deduplicated"] == 1
    assert ids() == [1, 2, 3]


def test_many_at_once(streams: Project) -> None:
    """Publishes that share a commit, or race for one."""
    declare(**KEYED)
    publish(0)

    async def all_of_them() -> list[dict[str, Any]]:
        return await asyncio.gather(*(weft.publish("orders", [{"id": n % 7}, {"id": 7}]) for n in range(70)))

    results = asyncio.run(all_of_them())
    assert sum(result["rows_deduplicated"] for result in results) == 140 - 7
    events = drain("orders")
    assert sorted(event["id"] for event in events) == list(range(8))
    by_rowid = {event["_weft_rowid"]: event["_weft_publish_id"] for event in events}
    for result in results:
        stored = [rowid for rowid, publish_id in by_rowid.items() if publish_id == result["publish_id"]]
        assert stored == [] or (stored[0], stored[-1]) == (result["first_rowid"], result["last_rowid"])


@pytest.mark.full
@pytest.mark.timing
def test_many_processes(streams: Project) -> None:
    """Four of them publish the same keys in different orders: each key is stored exactly once."""
    declare(**KEYED)
    publish(-1)
    code = """
        import random
        declare(fields={"id": "int64", "n": "int64"}, idempotency_key="id")
        keys = list(range(300))
        random.Random(args[0]).shuffle(keys)
        line()
        stored = duplicates = 0
        while keys:
            some, keys = keys[:7], keys[7:]
            result = weft.publish_sync("orders", [{"id": key, "n": args[0]} for key in some])
            duplicates += result["rows_deduplicated"]
            stored += len(some) - result["rows_deduplicated"]
        answer((stored, duplicates))
    """
    with started(4, code) as runs:
        for run in runs:
            run.ready()
        for run in runs:
            run.tell()
        answers = [run.answer() for run in runs]
    assert sum(stored for stored, _ in answers) == 300
    assert sum(duplicates for _, duplicates in answers) == 900
    assert sorted(ids()) == list(range(-1, 300))


def test_survives_retention(streams: Project) -> None:
    """Keys are remembered when the events are gone, also after a restart."""
    declare(**KEYED, retention={"max_rows": 1})
    publish(1, 2, 3)
    weft.trim_sync("orders", max_rows=0)
    assert publish(1, 2, 3)["rows_deduplicated"] == 3
    weft.streams.close(streams)
    assert publish(3, 4)["rows_deduplicated"] == 1
    weft.trim_sync("orders")
    assert ids() == [4]


def test_survives_a_reset_and_dead_consumers(streams: Project) -> None:
    declare(**KEYED)
    publish(1)
    drain("orders")
    weft.reset_sync("orders", "drain", to="start")
    assert publish(1)["rows_deduplicated"] == 1
    assert ids() == [1]


def test_horizon(streams: Project, system: Any) -> None:
    """Once a key is older than the horizon it is new again, and is then remembered for as long."""
    declare(fields=KEYED["fields"], idempotency_key={"fields": ["id"], "horizon_days": 7})
    publish(1, 2)
    age_keys(system, days=6)
    assert publish(1, 2)["rows_deduplicated"] == 2
    age_keys(system, days=2)
    result = publish(1, 3, 1)
    assert (result["rows_received"], result["rows_deduplicated"]) == (3, 1)
    assert publish(1)["rows_deduplicated"] == 1
    assert ids() == [1, 2, 1, 3]


def test_old_keys_are_forgotten(streams: Project, system: Any) -> None:
    """Beside publishes, so that they do not pile up for ever."""
    declare(fields=KEYED["fields"], idempotency_key={"fields": ["id"], "horizon_days": 7})
    publish(*range(10))
    age_keys(system, days=8)
    weft.streams.close(streams)  # a process looks at once when it starts to publish, and then every some seconds
    publish(10)
    wait_until(lambda: remembered() == 1, "the old keys to be removed")
    assert publish(10)["rows_deduplicated"] == 1


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_horizon_by_the_clock(streams: Project) -> None:
    streams.clock = clock = Clock()
    declare(fields=KEYED["fields"], idempotency_key={"fields": ["id"], "horizon_days": 7})
    publish(1)
    clock.move(days=7)
    assert publish(1)["rows_deduplicated"] == 1
    clock.move(seconds=1)
    assert publish(1)["rows_deduplicated"] == 0
    clock.move(days=7)
    assert publish(1)["rows_deduplicated"] == 1
    clock.move(days=-20)  # a clock that was set back forgets nothing
    assert publish(1)["rows_deduplicated"] == 1


def test_a_publish_with_a_key_of_its_own(streams: Project) -> None:
    declare(fields={"id": "int64"})
    events = [{"id": 1}, {"id": 1}]
    assert weft.publish_sync("orders", events, idempotency_key="a")["rows_deduplicated"] == 0
    again = weft.publish_sync("orders", events, idempotency_key="a")
    assert (again["rows_received"], again["rows_deduplicated"], again["first_rowid"]) == (2, 2, None)
    assert weft.publish_sync("orders", events, idempotency_key="b")["rows_deduplicated"] == 0
    assert weft.publish_sync("orders", events)["rows_deduplicated"] == 0
    assert ids() == [1] * 6
    for bad in ("", "x" * 256, 7):
        with pytest.raises(weft.SettingsError, match="idempotency_key"):
            weft.publish_sync("orders", events, idempotency_key=bad)  # type: ignore[arg-type]


def test_both_kinds_of_keys(streams: Project) -> None:
    """The key of an event comes first; what has none is known by that of its publish."""
    declare(**KEYED)
    weft.publish_sync("orders", [{"id": 1}, {"id": None}], idempotency_key="a")
    again = weft.publish_sync("orders", [{"id": 1}, {"id": None}], idempotency_key="a")
    assert again["rows_deduplicated"] == 2
    assert weft.publish_sync("orders", [{"id": 1}, {"id": None}], idempotency_key="b")["rows_deduplicated"] == 1
    assert ids() == [1, None, None]


@pytest.mark.parametrize("other", [[], [{"id": 1}], [{"id": 1}, {"id": 2}, {"id": 3}], [{"id": 3}, {"id": 2}]])
def test_the_key_of_a_publish_with_other_events(streams: Project, other: list[dict[str, Any]]) -> None:
    declare(fields={"id": "int64"})
    events = [{"id": 1, "more": {"a": 1, "b": 2}}, {"id": 2}]
    weft.publish_sync("orders", events, idempotency_key="a")
    with pytest.raises(weft.SettingsError, match=r"idempotency key of this publish to 'orders' .* Nothing was stored"):
        weft.publish_sync("orders", other, idempotency_key="a")
    # The same events, in another order of their keys.
    events[0] = {"more": {"b": 2, "a": 1}, "id": 1}
    assert weft.publish_sync("orders", events, idempotency_key="a")["rows_deduplicated"] == 2
    assert weft.publish_sync("orders", other, idempotency_key="b")["rows_deduplicated"] == 0
    assert ids() == [1, 2, *(each["id"] for each in other)]


def test_the_key_of_a_publish_without_events(streams: Project) -> None:
    declare(fields={"id": "int64"})
    for _ in range(2):
        assert weft.publish_sync("orders", [], idempotency_key="a")["rows_received"] == 0
    with pytest.raises(weft.SettingsError, match="Nothing was stored"):
        weft.publish_sync("orders", {"id": 1}, idempotency_key="a")
    assert ids() == []


def test_the_key_of_a_publish_at_once_with_other_events(streams: Project) -> None:
    """Of those that wait for one commit, the first is stored."""
    declare(fields={"id": "int64"})

    async def publish_all() -> list[Any]:
        publishes = [weft.publish("orders", {"id": n // 2}, idempotency_key="a") for n in range(8)]
        return await asyncio.gather(*publishes, return_exceptions=True)

    results = asyncio.run(publish_all())
    refused = [each for each in results if isinstance(each, weft.SettingsError)]
    assert (len(refused), sum(each["rows_deduplicated"] for each in results if isinstance(each, dict))) == (6, 1)
    assert len(ids()) == 1


def test_the_key_of_a_publish_that_went_to_quarantine(streams: Project) -> None:
    declare(fields={"id": "int64"}, on_schema_drift="quarantine")
    weft.publish_sync("orders", {"id": "x"}, idempotency_key="a")
    assert weft.publish_sync("orders", {"id": "x"}, idempotency_key="a")["rows_quarantined"] == 1
    with pytest.raises(weft.SettingsError, match="Nothing was stored"):
        weft.publish_sync("orders", {"id": 1}, idempotency_key="a")
    assert ids() == []
    assert len(drain("orders__quarantine")) == 1
