"""What the functions for frames are told, checked, and the stream that they are told about, opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from weft.dataframes.feed import Feed
from weft.dataframes.layout import Layout, OnError
from weft.errors import SettingsError
from weft.project import connect, current
from weft.streams.declare import Stream
from weft.systems.base import Connection, require
from weft.systems.redis.connection import RedisConnection


def find_connection(url: str | Connection) -> Connection:
    """The connection that a URL, a name or a connection stands for."""
    return connect(url) if isinstance(url, str) and "://" in url else current().connection(url)


def find_redis(url: str | Connection, what: str) -> RedisConnection:
    """The same for what only Redis has."""
    found = find_connection(url)
    if not isinstance(found, RedisConnection):
        raise SettingsError(f"{what} needs Redis; {found.label} is {found.kind}.")
    for package in ("redis", "hiredis"):
        require(package, found.kind)
    return found


def layout_of(
    schema: Mapping[str, Any] | None,
    *,
    include_id: bool,
    id_column: str,
    include_timestamp: bool,
    timestamp_column: str,
    include_sequence: bool,
    sequence_column: str,
    on_error: OnError,
    include_delivery: bool = False,
    stream_column: str | None = None,
) -> Layout:
    """The columns of a frame."""
    return Layout(
        schema,
        id_column=id_column if include_id else None,
        timestamp_column=timestamp_column if include_timestamp else None,
        sequence_column=sequence_column if include_sequence else None,
        delivery_column="_deliveries" if include_delivery else None,
        stream_column=stream_column,
        on_error=on_error,
    )


def open_feed(
    url: str | Connection,
    stream: str | bytes | Stream,
    layout: Layout,
    *,
    start_id: str = "-",
    end_id: str = "+",
    group: str | None = None,
    consumer: str | None = None,
    auto_ack: bool = False,
    create_group: bool = True,
    claim_idle: int | None = None,
    iterates: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Feed:
    """The stream, at the place from which it is to be read."""
    connection = find_connection(url)
    if group is None:
        for name, given in (("consumer", consumer), ("auto_ack", auto_ack), ("claim_idle", claim_idle is not None)):
            if given:
                raise SettingsError(f"{name} needs a group.", hint='group="analytics", consumer="worker-1"')
        if layout.delivery_column is not None:
            raise SettingsError("include_delivery needs a group.", hint="Only a group counts deliveries.")
    else:
        if not consumer:
            raise SettingsError(f"The group {group!r} needs a consumer.", hint='consumer="worker-1"')
        for what, name in (("group", group), ("consumer", consumer)):
            if not isinstance(name, str | bytes) or not name:
                raise SettingsError(f"{what} must be a name, not {name!r}.")
        if end_id != "+":
            raise SettingsError("A group has no end_id: it is given what no other member has.", hint="Leave one out.")
        if claim_idle is not None:
            whole_number("claim_idle", claim_idle)
    if is_declared(stream, connection):
        from weft.dataframes.log_feed import LogGroupFeed, LogRangeFeed

        if group is None:
            return LogRangeFeed(connection, stream, layout, start_id, end_id)
        if start_id != "-" or not create_group:
            raise SettingsError(
                "start_id and create_group are for groups of Redis: one of a declared stream is there when it is used.",
                hint="weft.reset_sync(stream, group, …) moves it.",
            )
        assert consumer is not None
        return LogGroupFeed(connection, stream, layout, group, consumer, claim_idle)
    redis = find_redis(connection, "A key")
    # Here, so that the other systems need no package of Redis.
    from weft.dataframes.redis_feed import GroupFeed, RangeFeed
    from weft.systems.redis.wire import Wire

    key = stream_key(stream)
    wire = Wire(redis, key, stopped)
    if group is None:
        return RangeFeed(wire, key, layout, start_id, end_id)
    assert consumer is not None
    return GroupFeed(
        wire,
        key,
        layout,
        group,
        consumer,
        start=start_id,
        create_group=create_group,
        claim_idle=claim_idle,
        iterates=iterates,
        confirms=auto_ack,
    )


def is_declared(stream: object, connection: Connection) -> TypeGuard[str | Stream]:
    """Whether this is a declared stream. Other names, on a connection to Redis, are keys, which may be bytes."""
    if isinstance(stream, bytes) and connection.kind != "redis":
        raise SettingsError(f"A declared stream has a name, not {stream!r}.")
    named = isinstance(stream, str) and stream in current().streams
    return named or isinstance(stream, Stream) or connection.kind != "redis"


def stream_key(stream: object) -> str | bytes:
    """The key of a stream of Redis."""
    if not isinstance(stream, str | bytes) or not stream:
        raise SettingsError(f"A stream of Redis is named by its key, not by {stream!r}.")
    return stream


def whole_number(name: str, value: object, least: int = 0) -> int:
    """The value, which must be a whole number that is not below `least`."""
    if type(value) is not int or value < least:
        raise SettingsError(f"{name} must be a whole number from {least}, not {value!r}.")
    return value


def wait_of(block_ms: int | None) -> float | None:
    """How many seconds to wait; `None` is for ever, which Redis calls 0."""
    if block_ms is None:
        return 0.0
    return whole_number("block_ms", block_ms) / 1000 or None
