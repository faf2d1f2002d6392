"""`weft.server.app` in a server that is not ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import warm_python

CLOSED = """
import threading, time
import httpx, uvicorn
import weft
from weft.server import app

@weft.stream
def orders(): ...

server = uvicorn.Server(uvicorn.Config(app(), port=0, timeout_graceful_shutdown=1))
serving = threading.Thread(target=server.run)
serving.start()
while not server.started:
    time.sleep(0.01)
url = "http://127.0.0.1:%d/api/v1/streams/orders" % server.servers[0].sockets[0].getsockname()[1]
client = httpx.Client(timeout=60, verify=False)
client.post(url, json={"n": 1})
with client.stream("GET", url + "/subscribe?since=start") as first:
    lines = first.iter_lines()
    assert any("stream.event" in line for line in lines)
    weft.streams.close()
    rest = list(lines)  # it ends
    assert "event: stream.closing" in rest, rest
    assert any("the stream was closed here" in line and '"resume_after":1' in line for line in rest), rest
# Whoever comes back finds it open again.
with client.stream("GET", url + "/subscribe?since=1") as second:
    lines = second.iter_lines()
    assert client.post(url, json={"n": 2}).status_code == 202
    assert any('"n":2' in line for line in lines)
server.should_exit = True
serving.join()
"""


@pytest.mark.timing
def test_streams_that_are_closed_under_it(project: Path) -> None:
    done = warm_python.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "orders was closed, and its subscribers have to come back" in done.stderr
    assert "Traceback" not in done.stderr


UPGRADED = r"""
import socket, threading, time
import uvicorn
import weft
from weft.server import app

@weft.stream
def orders(): ...

server = uvicorn.Server(uvicorn.Config(app(), port=0, http="httptools", ws="none", access_log=False))
serving = threading.Thread(target=server.run)
serving.start()
while not server.started:
    time.sleep(0.01)
head = (
    b"POST /api/v1/streams/orders HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Type: application/x-ndjson\r\n"
)
whole = b'Content-Length: 7\r\n\r\n{"n":1}'
chunked = b'Transfer-Encoding: chunked\r\n\r\n7\r\n{"n":1}\r\n0\r\n\r\n'
for body in (whole, chunked):
    with socket.create_connection(server.servers[0].sockets[0].getsockname()) as connection:
        connection.sendall(head + body)
        print(connection.recv(100).split()[1].decode(), flush=True)
server.should_exit = True
serving.join()
"""


def test_a_server_that_drops_a_body(project: Path) -> None:
    """Plain uvicorn does so where another protocol is asked for. Never is that answered with 202."""
    done = warm_python.run([sys.executable, "-c", UPGRADED], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["400", "400"], done.stderr
