"""A process whose server does not answer ends with Ctrl-C, whatever its readers wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import servers


@pytest.fixture(scope="module", params=["redis", "postgres", "mysql"])
def own_server(request: pytest.FixtureRequest, need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    need_server(request.param)
    server = servers.KINDS[request.param]()
    server.start()
    yield server
    server.kill()


READERS = {
    "consume": "await weft.consume('orders', 'worker', wait=3600)",
    "subscribe": "await anext(weft.subscribe('orders'))",
    "Consumer": "await connection.xconsumer(streams=['orders']).get_entry()",
    "GroupConsumer": "await connection.xconsumer(streams=['orders'], group='g', consumer='c').get_entry()",
    "iter_stream_async": "await anext(weft.iter_stream_async(connection, 'orders'))",
}
READ = """
import asyncio, signal, sys, weft
signal.signal(signal.SIGINT, signal.default_int_handler)
connection = weft.connect(url={url!r})
weft.stream(name="orders", connection=connection)(lambda: None)

async def main():
    asyncio.get_running_loop().call_later(0.5, signal.raise_signal, signal.SIGINT)
    {read}

weft.publish_sync("orders", {{"n": 1}})
weft.ack_sync("orders", "other", weft.consume_sync("orders", "other"))
weft.consume_sync("orders", "other", wait=1)
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


@pytest.mark.timing
@pytest.mark.brief("mysql-consume", "redis-subscribe")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_ctrl_c_ends_a_reader(own_server: servers.Server, read: str) -> None:
    """Python joined the thread that asked the server, and closing waited for the one that watches for new events, which
    `consume_sync` starts here."""
    with own_server.database() as url:
        command = [sys.executable, "-c", READ.format(url=url, read=read)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            _signal(own_server, signal.SIGSTOP)
            _, said = process.communicate("go\n", timeout=25)
            assert said.rstrip().endswith("KeyboardInterrupt")
        finally:
            _signal(own_server, signal.SIGCONT)
            process.kill()
            process.communicate()


def _signal(server: servers.Server, number: signal.Signals) -> None:
    """Send a signal to a server and, of PostgreSQL, its backends."""
    assert server.process is not None
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    for each in [pid, *map(int, children.split())]:
        os.kill(each, number)
