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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from served import Served, start


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
