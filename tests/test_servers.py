"""The servers that other tests rely on: they come back after a crash with what was committed, and end with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import servers

pytestmark = pytest.mark.timing


@pytest.fixture(params=["postgres", "mysql"])
def server(request: pytest.FixtureRequest, need_server) -> Iterator[servers.Server]:
    need_server(request.param)
    server = servers.KINDS[request.param]()
    server.start()
    yield server
    server.kill()


def run(server: servers.Server, statement: str) -> list[tuple]:
    with contextlib.closing(server.connect("crash")) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


@pytest.mark.full
def test_committed_rows_survive_a_kill(server: servers.Server) -> None:
    url = server.create_database("crash")
    run(server, "CREATE TABLE t (n int)")
    for n in range(3):
        run(server, f"INSERT INTO t VALUES ({n})")
        with contextlib.closing(server.connect("crash")):  # a backend that is alive when its server dies
            server.kill()
            assert not server.is_running
            assert list(servers.servers_in(server.folder)) == []
        server.restart()
        assert server.url("crash") == url
        assert sorted(run(server, "SELECT n FROM t")) == [(i,) for i in range(n + 1)]


@pytest.mark.full
def test_stop_ends_every_process(server: servers.Server) -> None:
    with contextlib.closing(server.connect()):
        server.stop()
    assert list(servers.servers_in(server.folder)) == []
    server.start()
    assert server.is_running


@pytest.mark.full
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_servers_end_with_the_process_that_started_them(kind: str, need_server) -> None:
    need_server(kind)
    program = f"""
        import servers, time
        server = servers.shared({kind!r})
        print(servers.run_folder(), flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(Path(servers.__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert list(servers.servers_in(folder))
        owner.send_signal(signal.SIGKILL)
    servers.wait_until(lambda: not folder.exists(), f"{folder} to be removed")
    assert list(servers.servers_in(folder)) == []
