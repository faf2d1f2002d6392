"""Real processes for the fault tests: forked from a warm one, so that one costs milliseconds, and killed without mercy.

    with actor(publisher, url, …) as (process, pipe):
        pipe.recv()
        os.kill(process.pid, signal.SIGKILL)

The functions that run in them say what they do before and after they do it. What they said is in the pipe, also when
they are dead.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any

from weft.project import connect
from weft.streams.declare import Stream, stream
from weft.streams.runtime import OpenedStream, open_stream

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["pytest", "faults.actors", "weft.systems.sqlite.store", "weft.systems.postgres.store", "weft.systems.mysql.store"]
)


@contextlib.contextmanager
def actor(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Pipe]]:
    """A process that runs `function(pipe, *arguments)`. It is dead when the block ends."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def said(pipe: Pipe, seconds: float = 60) -> Any:
    """The next thing that an actor says. An exception that it had is raised here."""
    if not pipe.poll(seconds):
        raise TimeoutError(f"an actor said nothing for {seconds:g} s")
    message = pipe.recv()
    if isinstance(message, BaseException):
        raise message
    return message


def last_words(pipe: Pipe) -> list[Any]:
    """What a dead actor had said and nobody had heard."""
    words = []
    with contextlib.suppress(EOFError, ConnectionResetError):
        while pipe.poll():
            words.append(pipe.recv())
    return words


def opened(url: str, name: str, **options: Any) -> OpenedStream:
    """A stream of that name in the database at a URL."""
    return open_stream(declared(name, **options), connect(url=url))


def declared(name: str, **options: Any) -> Stream:
    """A stream with the fields that the tests write."""

    def events() -> None:
        pass

    return stream(name=name, fields={"writer": "string", "n": "int64"}, **options)(events)
