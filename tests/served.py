"""`weft serve` in a process of its own, in a project folder of its own. See tests/server/conftest.py."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import warm_python

PATIENCE = 60
PREFIX = "/api/v1/streams"


def apikey(folder: Path, *arguments: str) -> str:
    """Return what `weft apikey` prints in a folder."""
    done = warm_python.run(
        [sys.executable, "-m", "weft", "apikey", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return str(done.stdout).strip()


def create_key(folder: Path, *arguments: str) -> dict[str, str]:
    """Return the headers with a new key."""
    return {"Authorization": f"Bearer {apikey(folder, 'create', *arguments)}"}


class Served:
    """One `weft serve`."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], env: dict[str, str], module: str) -> None:
        self.folder = folder
        self.log_file = folder / "serve.log"
        self.code: int | None = None
        with self.log_file.open("w") as stderr:
            self.process = warm_python.Popen(
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
        return self.new_client()

    def new_client(self) -> httpx.Client:
        """A client with connections of its own. Without certificates: to load those takes a while, and none is used."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)

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
        answer = self.client.post(f"{PREFIX}/{stream}", json=events, headers=headers)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def events(self, stream: str, **headers: str) -> list[dict[str, Any]]:
        """Everything in a stream."""
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": 10_000}
        while True:
            answer = self.client.get(f"{PREFIX}/{stream}/events", params=query, headers=headers)
            assert answer.status_code == 200, answer.text
            page = answer.json()
            if not page["events"]:
                return found
            found += page["events"]
            query["after"] = page["next"]

    def workers(self) -> list[int]:
        """The processes that answer."""
        found = []
        for each in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if Path(f"/proc/{each}/comm").read_text().strip() != warm_python.NAME:
                    found.append(int(each))
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop, and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.code = self.process.wait(PATIENCE)
        if "client" in self.__dict__:
            self.client.close()
        return self.code

    def subscribe(self, stream: str, **query: Any) -> contextlib.AbstractContextManager[Iterator[tuple[str, Any]]]:
        """What a subscriber gets: pairs of kind and data, with `id` in the data of events. `:` is a comment's kind."""
        return subscribe(self.client, f"{PREFIX}/{stream}/subscribe", **query)

    def raw(self, request: bytes) -> bytes:
        """Everything that is answered to these bytes, until the service closes the connection."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def subscribe(
    client: httpx.Client, path: str, headers: dict[str, str] | None = None, **query: Any
) -> Iterator[Iterator[tuple[str, Any]]]:
    with client.stream("GET", path, params=query, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield frames(answer.iter_lines())


def frames(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Server-Sent Events of lines."""
    kind, data, number = "message", "", None
    for line in lines:
        if line.startswith(":"):
            yield ":", line[1:].strip()
        elif not line:
            if data:
                yield kind, json.loads(data) | ({} if number is None else {"id": number})
            kind, data = "message", ""
        else:
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                data += value
            elif name == "id":
                number = int(value)


# The module of a worker is also its program.
_SET_CONSTANTS = """
import importlib, sys
for name, value in {constants}.items():
    place, _, constant = name.rpartition(".")
    module, program = importlib.import_module(place), sys.modules["__main__"]
    for each in (module, program) if program.__spec__ and program.__spec__.name == place else (module,):
        assert hasattr(each, constant), name
        setattr(each, constant, value)
"""


def start(
    folder: Path,
    code: str,
    *arguments: str,
    toml: str = "",
    env: dict[str, str] | None = None,
    constants: dict[str, float] | None = None,
) -> Served:
    """Start a service whose module has that code after `import weft`. `constants` are other values for times that no
    setting names: {"weft.server.keys.CACHED_SECONDS": 1}."""
    folder.mkdir(exist_ok=True)
    setting = _SET_CONSTANTS.format(constants=constants) if constants else ""
    (folder / "served_streams.py").write_text("import weft\n" + setting + textwrap.dedent(code))
    if toml:
        (folder / "weft.toml").write_text(textwrap.dedent(toml))
    return Served(folder, arguments, env or {}, "served_streams")
