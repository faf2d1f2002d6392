"""The service as a process of its own, in a project folder of its own, on a free port.

def test_something(server):
    served = server('''
        @weft.stream(fields={"n": "int64"})
        def orders(): ...
    ''')
    served.url                       http://127.0.0.1:PORT
    served.client                    an httpx.Client for it
    served.publish("orders", {"n": 1})
    served.log                       what it logged, a dict a line
    served.workers()                 the process ids of its workers

`server(code, "--workers", "2", toml="[server]…", env={…}, constants={…})`: see `served.start`. What is still running
ends with the test, and a service that did not end well fails it.

def test_something(streams, http):   the service in the test's own process, on each system
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from browser import browser, open_page  # noqa: F401 - fixtures
from served import PATIENCE, Served, frames, start
from weft.project import Project
from weft.server import app


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`server(code, *arguments)` starts a service whose module has that code after `import weft`."""
    started: list[Served] = []

    def serve(code: str, *arguments: str, folder: Path | None = None, **options: Any) -> Served:
        served = start(folder or tmp_path / f"served{len(started)}", code, *arguments, **options)
        started.append(served)
        assert served.url  # it answers
        return served

    yield from _ended(started, serve)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    """The one service of a module's tests: of the code in its `STREAMS`, with its `ARGUMENTS` and `CONSTANTS`."""
    module = request.module
    served = start(
        tmp_path_factory.mktemp("service"),
        module.STREAMS,
        *getattr(module, "ARGUMENTS", ()),
        constants=getattr(module, "CONSTANTS", None),
    )
    assert served.url
    yield from _ended([served], served)


def _ended(started: list[Served], given: Any) -> Iterator[Any]:
    try:
        yield given
    finally:
        codes = [each.stop() if each.code is None else 0 for each in started]
    for served, code in zip(started, codes, strict=True):
        assert code == 0, served.log_file.read_text()


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def system(request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Any]:
    """As for all tests, and Redis too."""
    with open_system(request.param) as found:
        yield found


@pytest.fixture
def http(streams: Project, project: Path) -> Iterator[Any]:
    """`http.request(method, path, …)` asks the service of the streams that a test declares, in its own process.
    `http.follow(path, 3)` gives the first three events that a subscriber gets."""
    # Redis holds no keys.
    (project / "weft.toml").write_text('[server]\nkeys = "safe"\n[connections.safe]\nurl = "sqlite:///safe.db"\n')
    application = app()
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost")

        def request(method: str, path: str, **options: Any) -> httpx.Response:
            return runner.run(client.request(method, path, **options))

        def follow(path: str, count: int) -> list[dict[str, Any]]:
            return runner.run(_followed(application, path, count))

        get, post = partial(request, "GET"), partial(request, "POST")
        yield SimpleNamespace(request=request, get=get, post=post, follow=follow)
        runner.run(client.aclose())
        runner.run(application.state.service.stop())


async def _followed(application: Any, path: str, count: int) -> list[dict[str, Any]]:
    """Events of an answer that has no end, for which the client of httpx would wait."""
    route, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http"}
    scope |= {"path": route, "raw_path": route.encode(), "root_path": "", "query_string": query.encode()}
    scope |= {"headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("localhost", 80)}
    body, left = bytearray(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        body.extend(message.get("body", b""))
        if body.count(b"\nevent: stream.event\n") >= count:
            left.set()

    await asyncio.wait_for(application(scope, receive, send), PATIENCE)
    found = frames(iter(body.decode().split("\n")))
    return [data["event"] for kind, data in found if kind == "stream.event"]
