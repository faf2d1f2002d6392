"""The service over streams on Redis, one server and a cluster: what it does elsewhere, and entries of other clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest

from served import PREFIX, Served
from servers import wait_until
from weft.project import Project, use
from weft.server.keys import key_table
from weft.systems.redis.client import open_client

ORDERS = """
    @weft.stream(fields={"n": "int64"}, connection=weft.RedisConnection("${REDIS_URL}"))
    def orders(): ...
"""
# In one step, so that nobody reads in between.
ADD_AND_TRIM = "for n = 3, 7 do redis.call('XADD', KEYS[1], 'MAXLEN', '=', 2, '*', 'n', n) end"


@pytest.fixture(params=["redis", "redis-cluster"])
def system(request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Any]:
    with open_system(request.param) as found:
        yield found


@pytest.fixture
def client(system: Any) -> Iterator[Any]:
    with closing(open_client(system.connection)) as opened:
        yield opened


@pytest.fixture
def served(server: Callable[..., Served], system: Any) -> Served:
    return server(ORDERS, env={"REDIS_URL": system.url})


def test_publish_consume_and_acknowledge(served: Served, client: Any) -> None:
    assert served.publish("orders", [{"n": 1}, {"n": 2}])["rows_received"] == 2
    client.xadd("orders", {"n": 3})
    assert [event["n"] for event in served.events("orders")] == [1, 2, 3]
    consumer = {"consumer": "worker"}
    batch = served.client.post(f"{PREFIX}/orders/consume", json=consumer).json()
    assert [event["n"] for event in batch["events"]] == [1, 2, 3]
    settled = {**consumer, "token": batch["token"]}
    assert (
        served.client.post(f"{PREFIX}/orders/ack", json={**settled, "events": batch["events"][:2]}).status_code == 200
    )
    assert (
        served.client.post(f"{PREFIX}/orders/nack", json={**settled, "events": batch["events"][2:]}).status_code == 200
    )
    batch = served.client.post(f"{PREFIX}/orders/consume", json=consumer).json()
    assert [event["n"] for event in batch["events"]] == [3]


def test_rates_and_the_last_events_of_a_page(served: Served, client: Any) -> None:
    served.publish("orders", [{"n": n} for n in range(30)])
    client.xtrim("orders", maxlen=28, approximate=False)
    (stream,) = served.client.get("/api/v1/overview").json()["streams"]
    assert (stream["published"], stream["rows"]) == (30, 28)
    shown = served.client.get(f"{PREFIX}/orders/events?after={stream['tail']}").json()
    assert [event["n"] for event in shown["events"]] == list(range(5, 30))


def test_follow_lose_and_come_back(served: Served, client: Any) -> None:
    with served.subscribe("orders") as live:
        next(live)
        first = served.publish("orders", {"n": 1})["last_rowid"]
        assert next(live)[1]["id"] == first
        client.xadd("orders", {"n": 2})
        kind, data = next(live)
        assert (kind, data["event"]["n"]) == ("stream.event", 2)
        client.eval(ADD_AND_TRIM, 1, "orders")
        kind, data = next(live)
        assert (kind, data["lost"]) == ("stream.lost", 3)
        assert [next(live)[1]["event"]["n"] for _ in range(2)] == [6, 7]
    with served.subscribe("orders", headers={"last-event-id": str(first)}) as live:
        next(live)
        assert next(live)[1]["lost"] == 4
        assert [next(live)[1]["event"]["n"] for _ in range(2)] == [6, 7]


def test_a_service_on_redis_alone(server: Callable[..., Served], system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are there too."""
    soon = {"weft.server.keys.CACHED_SECONDS": 1.0, "weft.server.keys._REFRESH_SECONDS": 0.2}
    served = server("@weft.stream\ndef clicks(): ...", env={"WEFT_DSN": system.url}, constants=soon)
    served.publish("clicks", {"n": 1})
    monkeypatch.setenv("WEFT_DSN", system.url)
    with use(Project()), key_table() as table:
        _, token = table.create(name=None, scopes=["read"])
    url = f"{PREFIX}/clicks"
    wait_until(lambda: served.client.get(url).status_code == 401, "the service to notice its first key")
    assert served.client.get(url, headers={"Authorization": f"Bearer {token}"}).status_code == 200
