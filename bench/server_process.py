"""The service in a process of its own, with a route beside its own that answers 202 and stores nothing.

python -m bench.server_process FOLDER    prints its port once it answers, and ends with its standard input
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import weft
from weft.server import app
from weft.server.worker import Server

_ANSWER = b'{"status":"accepted"}'


async def _plain(request: Request) -> Response:
    await request.body()
    return Response(_ANSWER, 202, media_type="application/json")


def main(folder: str) -> None:
    """Serve until the standard input ends."""
    os.chdir(Path(folder))
    weft.stream("orders", fields={"user_id": "string", "action": "string", "amount": "float64", "n": "int64"})(_orders)
    made = app()
    made.router.routes.insert(0, Route("/plain", _plain, methods=["POST"]))
    ours, theirs = socket.socketpair()
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)

    def watch() -> None:
        ours.recv(1)  # it answers
        print(listening.getsockname()[1], flush=True)
        sys.stdin.read()
        ours.close()

    threading.Thread(target=watch, daemon=True).start()
    Server(made, theirs, 10_000).run(sockets=[listening])


def _orders() -> None: ...


if __name__ == "__main__":
    main(sys.argv[1])
