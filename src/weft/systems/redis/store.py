"""Streams on Redis: a group of publishes is one script, so that all of it is there or nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

import msgspec
import redis

from weft.errors import ConnectionFailedError, DeclarationError, SchemaError, SettingsError, WeftError
from weft.systems.log import EXTRA, QUARANTINE_SUFFIX, Appended, Batch, StreamSample, reused_key
from weft.systems.redis import client, ids, scripts, values
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.log import RedisLog
from weft.systems.stream_fields import declare
from weft.types import FieldType

_log = logging.getLogger("weft.streams")
# The error of the publish script when it wrote nothing.
_NOTHING_STORED = "NOTSTORED"
_REUSED_KEY = "NOTSTORED an idempotency key"
# Redis takes no longer texts, and this leaves room for its own settings.
_MOST_BYTES = 500_000_000
# A call in Lua takes no more words than this.
_MOST_FIELDS = 3_500
# A wait ends this often, because a stream that was opened meanwhile is not waited for yet.
_WAIT_SECONDS = 0.25
# On a cluster no request can wait for streams of several nodes: they are polled this often.
_POLL_SECONDS = 0.02


class RedisStore:
    """A Redis server, or a cluster, as one process sees it. See `weft.systems.log.Store`."""

    def __init__(self, connection: RedisConnection, clock: Callable[[], float] = time.time) -> None:
        self.connection = connection.resolved()
        self._lock = threading.RLock()
        self._logs: dict[tuple[str, str], RedisLog] = {}
        self._client: client.Client | None = None
        self._watcher: client.Client | None = None
        self._watching = threading.Lock()
        self._closed = False

    # --------------------------------------------------------------------------------------------------------- commands

    def check_open(self) -> None:
        """Raise where this was closed."""
        if self._closed:
            raise self.connection.closed()

    def _open_client(self) -> client.Client:
        self.check_open()
        return client.open_client(self.connection)

    def _connected(self) -> client.Client:
        opened = self._client
        if opened is None:
            with self._lock:
                opened = self._client
                if opened is None:
                    opened = self._open_client()
                    too_old = client.version_warning(client.version(opened))
                    if too_old is not None:
                        raise SettingsError(f"{self.connection.label} ({self.connection.target}): {too_old}")
                    warning = client.durability_warning(opened)
                    if warning is not None:
                        _log.warning("%s: %s", self.connection.label, warning)
                    self._client = opened
        return opened  # not the attribute: `close` may have emptied it meanwhile

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Give the client for one command; every error is raised as a `WeftError`."""
        opened = None
        try:
            opened = self._connected()
            yield opened
        except client.CLUSTER_ERRORS as error:
            raise self._explain(error) from None
        finally:
            # A connection that a command still used came back to the pool after `close` had emptied the pool.
            if self._closed and opened is not None:
                with suppress(*client.ERRORS):
                    client.shut_down(opened)

    def command(self, *words: Any) -> Any:
        with self._connection() as opened:
            return opened.execute_command(*words)

    def entries(self, *words: Any) -> list[values.Entry]:
        """Return the answer to XRANGE as it came: redis-py would keep one field of each name."""
        while True:
            opened: Any = self._connected()
            nodes = opened.get_primaries() if isinstance(opened, redis.RedisCluster) else []
            for each in [opened, *(opened.get_redis_connection(node) for node in nodes)]:
                each.set_response_callback("XRANGE", lambda reply, **_: reply)
            reply = self.command("XRANGE", *words)
            if not reply or not isinstance(reply[0][1], dict):  # not of a node that is new
                return list(reply)

    def script(self, name: str, keys: list[str], *arguments: Any) -> Any:
        with self._connection() as opened:
            return scripts.run(opened, name, keys, *arguments)

    def _explain(self, error: BaseException) -> BaseException:
        if isinstance(error, WeftError):
            return error
        if isinstance(error, AttributeError) and client.NO_SUCH_NODE not in str(error):
            return error
        if self._closed:
            return ConnectionFailedError(f"{self.connection.label} was closed.", is_transient=False)
        explained = client.explain(self.connection, error)
        if self._client is None and type(explained) is ConnectionFailedError:
            return client.unreachable(self.connection, error)
        return explained

    # -------------------------------------------------------------------------------------------------------- catalogue

    def open(self, schema: str, name: str, fields: dict[str, FieldType]) -> RedisLog:
        """Return the stream's log. A Redis stream that others made becomes a Weft stream, unchanged."""
        with self._lock:
            log = self._logs.get((schema, name))
            if log is None or not log.is_enlisted:
                log, _ = self._look(schema, name)
                log.enlist()
            if not log.declared.items() >= fields.items():
                declare(log, fields)
                log.declared.update(fields)
            return log

    def find(self, schema: str, name: str, fields: dict[str, FieldType]) -> RedisLog | None:
        """Return the stream's log, also of a stream that others made; `None` where there is none. `changed` reports the
        stream from now on, also one that is made later."""
        log = self._logs.get((schema, name))
        if log is None or not log.is_enlisted:
            log, is_there = self._look(schema, name)
            if not is_there and not self.command("SISMEMBER", ids.CATALOGUE, f"{schema}.{name}"):
                return None
        log.read_as(fields)
        return log

    def _look(self, schema: str, name: str) -> tuple[RedisLog, bool]:
        """Return the log, and whether its stream is there."""
        log = self._logs.setdefault((schema, name), RedisLog(self, schema, name))
        kind = self.command("TYPE", log.keys.stream).decode()
        if kind not in ("none", "stream"):
            raise DeclarationError(
                f"{log.keys.stream} is a {kind} in this Redis database, not a stream.",
                hint="Give the stream another name or schema.",
            )
        return log, kind == "stream"

    def names(self) -> list[tuple[str, str]]:
        full_names = sorted(full.decode() for full in self.command("SMEMBERS", ids.CATALOGUE))
        return [(full.partition(".")[0], full.partition(".")[2]) for full in full_names]

    def delete(self, schema: str, name: str) -> bool:
        """Remove all keys of a stream, and its name."""
        log, is_there = self._look(schema, name)
        is_known = self.command("SREM", ids.CATALOGUE, f"{schema}.{name}")
        if is_there or is_known:
            log.delete()
        return bool(is_there or is_known)

    def sample(self, names: Sequence[tuple[str, str]]) -> list[StreamSample | None]:
        """Return the sizes of streams, by two scripts for each."""
        return [self._sample(self._logs.get(name) or RedisLog(self, *name)) for name in names]

    def _sample(self, log: RedisLog) -> StreamSample | None:
        try:
            return log.sample()
        except ConnectionFailedError:
            raise
        except WeftError:  # its key is of another type, or not for this user
            return None

    # ----------------------------------------------------------------------------------------------------------- append

    def append(self, batches: Sequence[Batch]) -> list[list[Appended] | WeftError]:
        """Store batches in one script; on a cluster in one for each slot, which is as far as its transactions go."""
        turns = [self._turn(batch) for batch in batches]
        by_index: dict[int, list[Appended] | WeftError] = {}
        refused: dict[str, WeftError] = {}
        for _, group in groupby(sorted(range(len(batches)), key=turns.__getitem__), key=turns.__getitem__):
            members = list(group)
            # In one transaction the error of one is that of all.
            by_index |= {i: error for i in members if (error := refused.get(batches[i].publishes[0][0])) is not None}
            members = [i for i in members if i not in by_index]
            appended: Sequence[list[Appended] | WeftError]
            try:
                appended = self._append([batches[i] for i in members]) if members else []
            except WeftError as error:
                if len(set(turns)) == 1 or (not by_index and isinstance(error, ConnectionFailedError)):
                    raise
                # Batches of other slots are stored, so the caller cannot retry each alone.
                is_one_to_blame = _is_unstored(error) or isinstance(error, SchemaError)
                appended = [self._append_alone(batches[i]) if is_one_to_blame else error for i in members]
            by_index.update(zip(members, appended, strict=True))
            for i in members:
                if isinstance(result := by_index[i], WeftError):
                    refused |= dict.fromkeys((publish_id for publish_id, _ in batches[i].publishes), result)
        return [by_index[i] for i in range(len(batches))]

    def _append_alone(self, batch: Batch) -> list[Appended] | WeftError:
        try:
            return self._append([batch])[0]
        except WeftError as error:
            return error

    def _turn(self, batch: Batch) -> tuple[bool, int]:
        """Return what batches of one script share. Quarantines come last: what a publish puts there is not stored if
        the publish is refused."""
        opened = self._connected()
        if not isinstance(opened, redis.RedisCluster):
            return False, 0
        return batch.log.name.endswith(QUARANTINE_SUFFIX), opened.keyslot(_log_of(batch).keys.stream)

    def _append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        keys = [key for batch in batches for key in _keys_of(batch)]
        try:
            replies = self.script("append", keys, *map(_packed, batches))
        except WeftError as error:
            if _REUSED_KEY in error.what:
                raise reused_key(next(_log_of(batch).name for batch in batches if batch.publish_keys)) from None
            if type(error) is not WeftError or _is_unstored(error):
                raise
            # It failed in the middle, at an unknown place: a retry could store some events twice.
            raise ConnectionFailedError(error.what, hint="Some of these events may be stored.") from None
        for batch, (is_known, went_back, _) in zip(batches, replies, strict=True):
            _log_of(batch).note_loss(is_behind=bool(went_back))
            if not is_known:
                with suppress(WeftError):  # the events are stored; the next publish comes here again
                    _log_of(batch).fields(fresh=True)
                    _log_of(batch).enlist()
        results = []
        for batch, (_, _, reply) in zip(batches, replies, strict=True):
            log, stream = _log_of(batch), _log_of(batch).keys.stream
            outcomes = [
                Appended(
                    first and ids.to_offset(first, stream), last and ids.to_offset(last, stream), stored, count - stored
                )
                for (first, last, stored), (_, count) in zip(reply, batch.publishes, strict=True)
            ]
            log.highest = max(log.highest, *(each.last or 0 for each in outcomes))
            results.append(outcomes)
        return results

    def appended(self) -> None:
        """Nothing to do: readers of other processes wait in the server."""

    # ---------------------------------------------------------------------------------------------------------- waiting

    def changed(self, seen: object, timeout: float) -> object:
        """Wait in the server for entries after the last ids that were seen. One thread calls this."""
        deadline = time.monotonic() + min(timeout, _WAIT_SECONDS)
        with self._watching:
            streams = sorted({log.keys.stream for log in list(self._logs.values())})
            try:
                if self._watcher is None:
                    self._watcher = self._open_client()
                while True:
                    state = self._last_ids(self._watcher, streams)
                    left = deadline - time.monotonic()
                    if state != seen or left <= 0:
                        return state
                    self._wait(self._watcher, state, left)
            except client.ERRORS as error:
                self._drop_watcher()
                raise self._explain(error) from None

    def _last_ids(self, opened: client.Client, streams: list[str]) -> dict[str, bytes]:
        together = [[stream] for stream in streams] if isinstance(opened, redis.RedisCluster) else [streams]
        known: dict[str, bytes] = {}
        for names in filter(None, together):
            keys = [key for name in names for key in (name, ids.Keys(name).meta)]
            # A key that is not a stream any more has no last id: its next use raises.
            last_ids = zip(names, scripts.run(opened, "last_ids", keys), strict=True)
            known |= {name: last for name, last in last_ids if last is not None}
        return known

    def _wait(self, opened: client.Client, state: dict[str, bytes], seconds: float) -> None:
        if isinstance(opened, redis.RedisCluster) or not state:
            time.sleep(min(seconds, _POLL_SECONDS))
        else:
            streams: dict[Any, Any] = dict(state)
            opened.xread(streams, count=1, block=max(1, int(seconds * 1000)))

    def _drop_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            with suppress(*client.ERRORS):
                watcher.close()

    def unwatch(self) -> None:
        with self._watching:
            self._drop_watcher()

    def make_room(self) -> bool:
        """Nothing is kept back: a server whose memory is full still removes entries."""
        return False

    def now(self) -> float:
        with self._connection() as opened:
            seconds, micros = client.ask_any_node(opened, "TIME")
        return int(seconds) + int(micros) / 1e6

    def close(self) -> None:
        self._closed = True
        opened, self._client = self._client, None
        for each in (self._watcher, opened):  # a thread that still waits for an answer gets none
            if each is not None:
                with suppress(*client.ERRORS):
                    client.shut_down(each)
        self.unwatch()


def _is_unstored(error: WeftError) -> bool:
    """Whether the server refused something in a script that stores all or nothing."""
    return isinstance(error, SettingsError) or _NOTHING_STORED in error.what


def _log_of(batch: Batch) -> RedisLog:
    assert isinstance(batch.log, RedisLog)
    return batch.log


def _keys_of(batch: Batch) -> tuple[str, str, str]:
    keys = _log_of(batch).keys
    # While a cluster moves a slot, a script waits for the end of that if one of its keys is not there.
    return keys.stream, keys.meta, keys.stream if batch.keys is None else keys.seen


_pack = msgspec.msgpack.Encoder().encode


def _raw(column: Sequence[bytes | None]) -> list[Any]:
    """Bytes as the texts of MessagePack: Redis does not know its type for bytes."""
    return [None if v is None else msgspec.Raw(b"\xdb" + len(v).to_bytes(4, "big") + v) for v in column]


def _packed(batch: Batch) -> bytes:
    if len(batch.columns) > _MOST_FIELDS:
        raise SchemaError(f"An event of a stream on Redis may have {_MOST_FIELDS:,} fields.")
    packed = _pack_batch(batch)
    if len(packed) > _MOST_BYTES:
        raise SchemaError(
            f"A publish to a stream on Redis may have {_MOST_BYTES:,} bytes, not {len(packed):,}.",
            hint="Nothing was stored. Publish the events in parts.",
        )
    return packed


def _pack_batch(batch: Batch) -> bytes:
    fields = _log_of(batch).fields()
    nulls = batch.nulls or [None in column for column in batch.values]
    joined = [fields[name].base in values.NUMBERS and not has for name, has in zip(batch.columns, nulls, strict=True)]
    columns = [
        values.join_numbers(column) if is_joined else _pack_column(column, fields[name])
        for name, column, is_joined in zip(batch.columns, batch.values, joined, strict=True)
    ]
    names = batch.columns
    if batch.extra is not None:
        names = (*names, EXTRA)
        columns.append(_pack_values(batch.extra))
    if batch.keys is not None:
        columns.append(_pack_values(_raw(batch.keys)))
    header = (
        names,
        [publish_id for publish_id, _ in batch.publishes],
        [count for _, count in batch.publishes],
        batch.extra is None and not any(nulls),
        int(batch.key_horizon * 1e6),
        ids.to_id(_log_of(batch).highest),
        list(map(len, columns)),
        joined,
        _raw(batch.publish_keys or ()),
    )
    return b"".join((_pack(header), *columns))


def _pack_column(column: list[Any], kind: FieldType) -> memoryview:
    return _pack_values(_raw(column) if kind.base == "bytes" else values.to_texts(column, kind))


def _pack_values(values: Sequence[Any]) -> memoryview:
    """Values one after the other: a list's, without what it begins with."""
    return memoryview(_pack(values))[1 if len(values) < 16 else 3 if len(values) < 1 << 16 else 5 :]
