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

`server(code, "--workers", "2", toml="[server]…", env={…})`. What is still running ends with the test, and a service that
did not end well fails it. Python code of the test reaches the same streams with `weft.publish_sync("orders", …)` once it
declared them, or by `served.run("publish_sync('orders', …)")`, a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

PATIENCE = 60
_PREFIX = "/api/v1/streams"


class Served:
    """One `weft serve`."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], env: dict[str, str], module: str) -> None:
        self.folder = folder
        self.log_file = folder / "serve.log"
        self.code: int | None = None
        with self.log_file.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft", "serve", "--port", "0", "--module", module, *arguments],
                cwd=folder,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )

    @functools.cached_property
    def url(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for line in self.log:
                if "url" in line:
                    return str(line["url"])
            assert self.process.poll() is None, self.log_file.read_text()
            time.sleep(0.02)
        raise AssertionError(f"it does not serve: {self.log_file.read_text()}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @functools.cached_property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    @property
    def log(self) -> list[dict[str, Any]]:
        """What was logged so far. Lines that are no JSON (a crash, before logging began) are left out."""
        found = []
        for line in self.log_file.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [line for line in found if isinstance(line, dict)]

    def publish(self, stream: str, events: Any, **headers: str) -> dict[str, Any]:
        answer = self.client.post(f"{_PREFIX}/{stream}", json=events, headers=headers)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def events(self, stream: str, **headers: str) -> list[dict[str, Any]]:
        """Everything in a stream."""
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": 10_000}
        while True:
            answer = self.client.get(f"{_PREFIX}/{stream}/events", params=query, headers=headers)
            assert answer.status_code == 200, answer.text
            page = answer.json()
            if not page["events"]:
                return found
            found += page["events"]
            query["after"] = page["next"]

    def workers(self) -> list[int]:
        """The processes that answer."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(each) for each in children]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop, and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.code = self.process.wait(PATIENCE)
        if "client" in self.__dict__:
            self.client.close()
        return self.code


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`server(code, *arguments)` starts a service whose module has that code after `import weft`."""
    started: list[Served] = []

    def start(
        code: str, *arguments: str, toml: str = "", env: dict[str, str] | None = None, folder: Path | None = None
    ) -> Served:
        folder = folder or tmp_path / f"served{len(started)}"
        folder.mkdir(exist_ok=True)
        (folder / "served_streams.py").write_text("import weft\n" + textwrap.dedent(code))
        if toml:
            (folder / "weft.toml").write_text(textwrap.dedent(toml))
        served = Served(folder, arguments, env or {}, "served_streams")
        started.append(served)
        assert served.url  # it answers
        return served

    try:
        yield start
    finally:
        codes = [each.stop() if each.code is None else 0 for each in started]
    assert not any(codes), started[next(i for i, code in enumerate(codes) if code)].log_file.read_text()
