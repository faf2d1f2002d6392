"""A connection to the server that holds a key, whose replies are raw bytes.

redis-py connects: TLS, users, databases, Sentinels, and which node of a cluster holds the key. What follows goes
past it, so that entries become columns without becoming Python objects first.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import redis
from redis import exceptions

from weft.errors import WeftError
from weft.systems.redis import group_member
from weft.systems.redis.client import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    ERRORS,
    explain,
    open_client,
    refuses,
    unreachable,
)
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.group_member import BEGINNING, server_message, text_of
from weft.systems.redis.resp import Bytes, encode, parse

Key = str | bytes
"""The name of a stream; bytes if it is not UTF-8."""
Word = str | bytes | int

_log = logging.getLogger("weft.dataframes")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_FIRST_BUFFER = 1 << 20
# Never without an end: the handler of signals that polars installs has the system go on with such a call, and Ctrl-C
# would end the wait with the next entry.
_LONGEST_WAIT = 86_400.0
_REDIRECTIONS = 16
# How errors begin of a server that is starting, that is no longer the primary, or whose cluster is changing.
_TRANSIENT = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ")
_REDIRECTED = ("MOVED", "ASK", *_TRANSIENT)
# Redis' errors for an acknowledgement when there is nothing left to acknowledge.
_NOTHING_LEFT = ("NOGROUP", "WRONGTYPE")
_KINDS = {
    "NOPERM": exceptions.NoPermissionError,
    "NOAUTH": exceptions.AuthenticationError,
    "OOM": exceptions.OutOfMemoryError,
}


class ReplyError(Exception):
    """An error that the server answered."""


class Extent(NamedTuple):
    """What a stream was given, and what is left of it."""

    last: str
    """The id that it gave out last, also if that entry is deleted."""
    newest: str
    """The id of its last entry that is still there."""
    added: int
    """How many entries it was ever given."""
    length: int


class Wire:
    """Commands about one key. One that fails because the connection is lost is sent again, on a new one."""

    def __init__(self, connection: RedisConnection, key: Key, stopped: Callable[[], bool] = lambda: False) -> None:
        self.connection = connection
        self.key = key
        self.stopped = stopped
        """Asked while a server that is gone is waited for."""
        self.connected = 0
        """How many times. A reply may have been lost when this grows."""
        self._client: Any = None
        self._link: Any = None
        self._asking = b""
        self._buffer = bytearray(_FIRST_BUFFER)
        self._sent: tuple[Word, ...] | None = None
        self._end = b""
        self._posted: list[tuple[Word, ...]] = []
        self._refused: str | None = None
        self._process = os.getpid()

    def ask(self, *words: Word, wait_seconds: float | None = 0) -> Bytes:
        """Return the reply to a command for which the server may wait. It is valid until the next one."""
        self.send(*words)
        return self.receive(wait_seconds)

    def run(self, *words: Word) -> Any:
        """Return the reply to a command as Python values; an error is raised as `ReplyError`."""
        return parse(self.ask(*words))

    def query(self, *words: Word) -> Any:
        """Return the reply to a command as Python values; raise an error of the server as a `WeftError`."""
        try:
            return self.run(*words)
        except ReplyError as error:
            raise self.explained(error) from None

    def send(self, *words: Word) -> None:
        """Send a command whose reply `receive` returns. Raise first if the server refused a posted one."""
        self._leave_to_parent()
        if self._sent is not None:  # its reply was not read
            with suppress(ReplyError):  # an error, where the page to come was guessed from a value
                self.receive()
        self._raise_refused()
        self._sent = words
        if self._link is not None:
            with suppress(*ERRORS):  # noticed by `receive`, which sends it again
                self._write(words)

    def post(self, *words: Word) -> None:
        """Send a command that can be repeated without harm, and whose reply nobody waits for."""
        self._leave_to_parent()
        self._posted.append(words)
        if self._link is not None:
            with suppress(*ERRORS):  # noticed by the next command, which brings these along
                self._socket().sendall(self._asking + encode(*words))

    def settle(self) -> None:
        """Wait until all that was posted is carried out. What the server refuses is raised."""
        if self._posted:
            self.ask("PING")  # answered after those
        while self._posted:  # by a server that is not, or no longer, the one to ask: this asks until it finds it
            words = self._posted.pop()
            try:
                self.run(*words)
            except ReplyError as error:
                if not str(error).startswith(_NOTHING_LEFT):
                    raise self.explained(error) from None
            except WeftError:
                self._posted.append(words)
                raise
        self._raise_refused()

    def _raise_refused(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise self.explained(ReplyError(refused))

    @property
    def is_own(self) -> bool:
        """Whether this process made it, not the one that it was forked from."""
        return self._process == os.getpid()

    def _leave_to_parent(self) -> None:
        """Drop what belongs to the parent of a forked process: a command on its connection would take its replies."""
        if not self.is_own:
            self._process = os.getpid()
            self._link = self._client = self._refused = None
            self._posted = []

    def receive(self, wait_seconds: float | None = 0) -> Bytes:
        """Return the reply to the command that was sent; `None` is to wait for as long as it takes."""
        assert self._sent is not None
        self._leave_to_parent()
        words, pause, gone_since, redirections = self._sent, _FIRST_PAUSE, None, 0
        while True:
            try:
                if self._link is None:
                    self._connect()
                    self._write(words)
                reply = self._read(_LONGEST_WAIT if wait_seconds is None else wait_seconds + ANSWER_SECONDS)
                self._sent = None
                if reply[:1].tobytes() != b"-":
                    return reply
                message = str(parse(reply))
                kind, _, place = message.partition(" ")
                if kind in ("MOVED", "ASK") and redirections < _REDIRECTIONS:
                    redirections += 1
                    self._connect(place.rpartition(" ")[2], asking=kind == "ASK")
                    self._sent = words
                    self._write(words)
                    continue
                if not message.startswith(_TRANSIENT):
                    raise ReplyError(message)
                failure: BaseException = exceptions.ResponseError(message)
            except ERRORS as error:
                failure = error
            self._drop()
            gone_since = gone_since or time.monotonic()
            refused = refuses(failure) or isinstance(failure, exceptions.NoPermissionError)
            patient = self.connected and time.monotonic() - gone_since < group_member.PATIENCE_SECONDS
            if refused or not patient or self.stopped():
                self._sent = None
                raise self.explained(failure) from None
            self._sent = words
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def explained(self, error: BaseException) -> WeftError:
        """Return the error to raise where Redis, or the way to it, failed."""
        if not self.connected and not isinstance(error, (ReplyError, exceptions.ResponseError)):
            return unreachable(self.connection, error)
        if isinstance(error, ReplyError):
            message = server_message(error)
            in_script = "user executing the script can't" in message
            kind = _KINDS.get("NOPERM" if in_script else message.partition(" ")[0], exceptions.ResponseError)
            error = kind(f"{message} (about {text_of(self.key)!r})")
        return explain(self.connection, error)

    def last_id(self, stream: Key) -> str:
        """Return the id that a stream gave out last, also if that entry is deleted."""
        return self.extent(stream).last

    def extent(self, stream: Key) -> Extent:
        """Return what a stream was given, and what is left of it."""
        try:
            about = self.run("XINFO", "STREAM", stream)
        except ReplyError as error:
            if "no such key" not in str(error):
                raise self.explained(error) from None
            return Extent(BEGINNING, BEGINNING, 0, 0)
        facts = dict(zip(about[::2], about[1::2], strict=True))
        newest = facts[b"last-entry"]
        return Extent(
            text_of(facts[b"last-generated-id"]),
            BEGINNING if newest is None else text_of(newest[0]),
            facts.get(b"entries-added", 0),
            facts[b"length"],
        )

    def close(self) -> None:
        """Wait for the answers to what was posted, and disconnect. What the server refused is raised."""
        self._leave_to_parent()
        try:
            if self._link is not None:
                self.settle()
        except WeftError:
            if self._link is not None:  # it answered
                raise
        finally:
            self._drop()
            if self._posted:
                _log.warning(
                    "%d acknowledgements about %r did not reach Redis: what they are about is delivered again.",
                    len(self._posted),
                    text_of(self.key),
                )
                self._posted = []
        self._raise_refused()

    def _connect(self, place: str | None = None, *, asking: bool = False) -> None:
        if place is None:
            self._drop()
            # Until there is a connection; from then on each read says for itself how long it waits.
            seconds = self.connection.resolved().options().get("connect_timeout", CONNECT_SECONDS)
            self._client = open_client(self.connection, socket_timeout=seconds)
            self._link = self._pool().get_connection()
        else:
            host, _, port = place.rpartition(":")
            pool = self._pool()
            keywords = {**pool.connection_kwargs, "port": int(port)}
            # An empty host is that of the server which said so.
            keywords["host"] = host or keywords["host"]
            self._link.disconnect()
            self._link = pool.connection_class(**keywords)
        self._link.connect()
        self._asking = encode("ASKING") if asking else b""
        self.connected += 1
        # An answer to these may be lost. They are sent again before anything else.
        for words in self._posted:
            self._socket().sendall(self._asking + encode(*words))

    def _socket(self) -> socket.socket:
        """Return the one of redis-py's connection, which has no public name for it; this one since version 6."""
        link: socket.socket = self._link._sock
        return link

    def _pool(self) -> Any:
        if isinstance(self._client, redis.RedisCluster):
            node = self._client.get_node_from_key(self.key)
            return self._client.get_redis_connection(node).connection_pool
        return self._client.connection_pool

    def _drop(self) -> None:
        link, client, self._link, self._client = self._link, self._client, None, None
        with suppress(*ERRORS):
            if link is not None:
                link.disconnect()
            if client is not None:
                client.close()

    def _write(self, words: tuple[Word, ...]) -> None:
        # Where the reply ends is known without reading it: it is followed by the echo of a text that no value can hold,
        # because nobody knew it before.
        token = secrets.token_hex(16).encode()
        self._end = b"$%d\r\n%b\r\n" % (len(token), token)
        self._socket().sendall(self._asking + encode(*words) + encode("ECHO", token))

    def _read(self, timeout: float) -> Bytes:
        link = self._socket()
        link.settimeout(timeout)
        held, end = 0, self._end
        while True:
            if held == len(self._buffer):
                self._buffer = self._buffer + bytearray(held)
            with memoryview(self._buffer) as view:
                received = link.recv_into(view[held:])
                if received == 0:
                    raise ConnectionError("The server closed the connection.")
                held += received
                if held >= len(end) and view[held - len(end) : held] == end:
                    break
        first = self._skip_posted(held)
        first += 5 if self._asking else 0  # +OK
        return np.frombuffer(self._buffer, np.uint8, held - len(end) - first, first)

    def _skip_posted(self, held: int) -> int:
        """Return where the reply begins, after those to posted commands."""
        begin, again = 0, []
        for words in self._posted:
            begin += 5 if self._asking else 0
            end = self._buffer.index(b"\n", begin, held) + 1
            if self._buffer[begin : begin + 1] == b"-":
                message = self._buffer[begin + 1 : end].decode(errors="backslashreplace").strip()
                # Another server has the key: the next command gets the same error, and takes these along to it.
                if message.startswith(_REDIRECTED):
                    again.append(words)
                elif not message.startswith(_NOTHING_LEFT):
                    self._refused = self._refused or message
            begin = end
        self._posted = again
        return begin
