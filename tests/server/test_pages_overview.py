"""`GET /api/v1/overview`: what the first page shows, and what it costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import warm_python
import weft
from servers import wait_until
from weft.project import Project
from weft.server import app, overview
from weft.server.cached_probe import CachedProbe
from weft.streams.runtime import find
from workers import declare

PIPELINES = """
from typing import Annotated
from weft import pk
from weft.types import BigInt

@weft.stream
def clicks(): ...

@weft.table
class Totals:
    id: Annotated[BigInt, pk()]

@weft.pipeline(target=Totals, mode="append", schedule="0 2 * * *", description="Once a night")
def nightly(conn):
    return "SELECT 1 AS id"
"""
CLOSED = """
@weft.stream(auth={"type": "bearer", "token": "s3cret"})
def closed(): ...
"""
RUNS = """
from weft.operate.runlog import open_run_log

with open_run_log() as log:
    log.finish(log.claim("nightly"), "succeeded", counts={"rows_read": 7, "inserted": 5})
    log.finish(log.claim("nightly", resume=False), "failed", error="no luck")
"""
# What a process of the service has loaded once it showed pipelines.
LOADED = """
import asyncio, sys
import httpx
from weft.server import app

async def ask():
    transport = httpx.ASGITransport(app(["served_streams"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/api/v1/overview")).json()["pipelines"][0]["name"] == "nightly"

asyncio.run(ask())
print(*(name for name in sys.modules if name.startswith(("pyspark", "py4j", "weft.engine"))))
"""


def run(code: str, folder: Path, runner: Callable[..., Any] = warm_python.run) -> str:
    done = runner([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True)
    return str(done.stdout).strip()


def test_pipelines_with_their_last_runs(server: Callable[..., Any]) -> None:
    served = server(PIPELINES + CLOSED)
    run(RUNS, served.folder)
    shown = served.client.get("/api/v1/overview", headers={"authorization": "Bearer s3cret"}).json()
    assert [stream["name"] for stream in shown["streams"]] == ["clicks", "closed"]
    (pipeline,) = shown["pipelines"]
    assert (pipeline["name"], pipeline["status"], pipeline["schedule"]) == ("nightly", "failed", "0 2 * * * UTC")
    assert pipeline["last"]["error"] == "no luck"
    assert [each["status"] for each in pipeline["runs"]] == ["succeeded", "failed"]
    # Who may not read every stream does not see them.
    shown = served.client.get("/api/v1/overview").json()
    assert [stream["name"] for stream in shown["streams"]] == ["clicks"]
    assert (shown["pipelines"], shown["complete"]) == ([], False)


SEEN = """
from weft.operate.runlog import open_run_log
from weft.project import current
from weft.server.overview import read_pipelines

current().load_modules(["served_streams"])
timelines = {}

def seen():
    (pipeline,) = read_pipelines(log, (), timelines)
    return [each["status"] for each in pipeline["runs"]]

def run(name, status):
    log.finish(log.claim(name, resume=False), status)

with open_run_log() as log:
    for status in ("succeeded", "failed", "succeeded"):
        run("nightly", status)
    for _ in range(501):
        run("every_second", "succeeded")
    print(*seen())
    run("nightly", "failed")
    print(*seen())
    for _ in range(501):
        run("every_second", "succeeded")
    print(*seen())
"""


@pytest.mark.full
def test_runs_of_a_pipeline_that_seldom_runs(server: Callable[..., Any]) -> None:
    """Those of others are the newest, and more than are read at once."""
    served = server(PIPELINES)
    assert run(SEEN, served.folder).splitlines() == [
        "succeeded failed succeeded",
        "succeeded failed succeeded failed",
        "succeeded failed succeeded failed",
    ]


def test_one_answer_for_all_watchers_of_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer a reading took, the longer its answer is given, so that watching costs no more than a share."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(overview, "time", clock)
    now, known = 100.0, overview.Overview()
    assert known.answer() is None
    known.keep(b"{}")
    now = 100.9
    assert known.answer() == b"{}"
    now = 101.1
    assert known.answer() is None
    known._streams[None] = CachedProbe(lambda: None, fresh_seconds=3.0)
    known.keep(b"[]")
    now = 104.0
    assert known.answer() == b"[]"
    now = 104.2
    assert known.answer() is None


@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
def test_streams_with_their_consumers(server: Callable[..., Any], system: Any) -> None:
    served = server(PIPELINES, env={"WEFT_DSN": system.url})
    url = "/api/v1/streams/clicks"
    served.publish("clicks", [{"n": n} for n in range(10)])
    served.client.post(f"{url}/consume", json={"consumer": "slow", "batch_size": 2})
    taken = served.client.post(f"{url}/consume", json={"consumer": "fast", "batch_size": 9}).json()
    served.client.post(f"{url}/ack", json={"consumer": "fast", "events": taken["events"]})
    shown = served.client.get("/api/v1/overview").json()
    (stream,) = shown["streams"]
    assert (stream["head"], stream["floor"], stream["rows"], stream["lag"]) == (10, 0, 10, 8)
    assert (stream["published"], stream["tail"]) == (10, "0")
    assert sorted((each["consumer"], each["lag"], each["pending"], each["lost"]) for each in stream["consumers"]) == [
        ("fast", 1, 0, 0),
        ("slow", 8, 2, 0),
    ]
    assert (stream["problem"], shown["problem"]) == (None, None)


REJECTING = """
@weft.stream(fields={"n": "int64"}, on_schema_drift="quarantine", max_deliveries=1, tags=["web", "odd"])
def clicks(): ...

@weft.stream(tags=["web"])
def plain(): ...
"""


def test_what_was_put_aside_is_counted(server: Callable[..., Any], system: Any) -> None:
    served = server(REJECTING, env={"WEFT_DSN": system.url})
    url = "/api/v1/streams/clicks"
    shown = served.client.get(url).json()
    assert (shown["dead_letters"], shown["quarantined"]) == (0, 0)
    served.publish("clicks", [{"n": 1}, {"n": 2}, {"n": "three"}, {"n": 4, "more": 5}])
    taken = served.client.post(f"{url}/consume", json={"consumer": "c", "batch_size": 1}).json()
    served.client.post(f"{url}/nack", json={"consumer": "c", "events": taken["events"], "delay": 0})
    served.client.post(f"{url}/consume", json={"consumer": "c"})
    shown = served.client.get(url).json()
    assert (shown["row_count"], shown["dead_letters"], shown["quarantined"]) == (2, 1, 2)
    found = {each["name"]: each for each in served.client.get("/api/v1/overview").json()["streams"]}
    assert (found["clicks"]["dead_letters"], found["clicks"]["quarantined"]) == (1, 2)
    assert shown["size_bytes"] > 0
    assert (found["plain"]["dead_letters"], found["plain"]["quarantined"]) == (None, None)
    metrics = served.client.get("/metrics").text.splitlines()
    assert 'weft_stream_dead_letters{stream="clicks"} 1.0' in metrics
    assert 'weft_stream_quarantined{stream="clicks"} 2.0' in metrics
    assert not any(line.startswith('weft_stream_quarantined{stream="plain"}') for line in metrics)


@pytest.mark.timing
def test_the_service_keeps_a_history_from_its_start(server: Callable[..., Any], system: Any) -> None:
    # As many are kept as come in an hour: of those of two seconds, the first may be gone before this looks.
    constants = {"weft.server.history.SECONDS": 0.05, "weft.server.history._KEPT": 100_000}
    served = server(REJECTING, env={"WEFT_DSN": system.url}, constants=constants)
    served.publish("clicks", [{"n": 1}, {"n": 2}, {"n": "three"}])
    taken = served.client.post("/api/v1/streams/clicks/consume", json={"consumer": "c", "batch_size": 1}).json()
    first_look = time.time()
    history: list[Any] = []

    def has_it() -> bool:
        streams = served.client.get("/api/v1/overview?history=true").json()["streams"]
        history[:] = next(each["history"] for each in streams if each["name"] == "clicks")
        return bool(history) and history[-1][1:] == [2, 1, 0, 1]

    wait_until(has_it, "a sample of what was published")
    assert len(taken["events"]) == 1
    assert history[0][0] < first_look
    moments = [at for at, *_ in history]
    assert moments == sorted(set(moments))


async def test_a_mounted_service_keeps_a_history_from_its_first_request(streams: Project) -> None:
    """Whatever is asked for: nobody starts an application that is mounted in another one."""
    declare("clicks")
    await weft.publish("clicks", [{"n": 1}, {"n": 2}])
    mounted = app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(mounted), base_url="http://localhost") as client:
        await client.get("/healthz")
        history = mounted.state.service.history
        await asyncio.to_thread(wait_until, lambda: history.of(find("clicks")), "a sample")
        (stream,) = (await client.get("/api/v1/overview?history=true")).json()["streams"]
        assert [point[1:] for point in stream["history"]] == [[2, 0, None, None]]
        await mounted.state.service.stop()
        await client.get("/healthz")  # a request that still comes begins no other
        assert history._keeping is not None
        assert history._keeping.done()


def test_streams_by_their_tags(server: Callable[..., Any]) -> None:
    client = server(REJECTING).client

    def found(query: str) -> list[str]:
        return [each["name"] for each in client.get(f"/api/v1/streams{query}").json()["streams"]]

    assert found("") == found("?tag=web") == ["clicks", "plain"]
    assert found("?tag=web&tag=odd") == ["clicks"]
    assert found("?tag=none") == []
    assert [each["tags"] for each in client.get("/api/v1/overview").json()["streams"]] == [["web", "odd"], ["web"]]


@pytest.mark.full
def test_many_streams_that_are_opened_at_once_are_no_trouble_of_the_database(server: Callable[..., Any]) -> None:
    served = server("for number in range(300):\n    weft.stream(f's{number}')(lambda: None)\n")
    while True:
        streams = served.client.get("/api/v1/overview").json()["streams"]
        assert {each["problem"] for each in streams} == {None}
        if all(each["head_at"] for each in streams):
            break


def test_the_service_loads_no_spark(server: Callable[..., Any]) -> None:
    served = server(PIPELINES)
    assert run(LOADED, served.folder, subprocess.run) == ""


async def test_one_looks_for_all_who_ask() -> None:
    looks = 0
    may_end = threading.Event()

    def look() -> int:
        nonlocal looks
        looks += 1
        may_end.wait()
        return looks

    probe = CachedProbe(look, fresh_seconds=3600)
    with pytest.raises(TimeoutError):
        await probe.get(0.01)
    asked = [asyncio.create_task(probe.get(60)) for _ in range(50)]
    may_end.set()
    assert set(await asyncio.gather(*asked)) == {1}
    assert await probe.get(60) == 1


async def test_what_is_old_is_looked_at_again_and_an_error_is_told_to_all() -> None:
    answers = iter([1, ValueError("no"), 3])

    def look() -> int:
        found = next(answers)
        if isinstance(found, ValueError):
            raise found
        return found

    probe = CachedProbe(look, fresh_seconds=0)
    assert await probe.get(60) == 1
    with pytest.raises(ValueError, match="no"):
        await probe.get(60)
    assert await probe.get(60) == 3
