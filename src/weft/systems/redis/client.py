"""Clients of redis-py for a connection, and what their errors mean."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from weft import settings
from weft.errors import (
    MAYBE_STORED,
    NOTHING_STORED,
    BusyError,
    ConnectionFailedError,
    DeclarationError,
    StorageError,
    WeftError,
)
from weft.systems.redis import group_member

if TYPE_CHECKING:
    from weft.systems.base import Connection
    from weft.systems.redis.connection import RedisConnection

T = TypeVar("T")
Client = redis.Redis | redis.RedisCluster
AsyncClient = redis.asyncio.Redis | redis.asyncio.RedisCluster

PORT, SENTINEL_PORT = 6379, 26379
CONNECT_SECONDS = 10.0
# Since this version XADD completes ids (`<ms>-*`), and XINFO STREAM counts the entries that were ever added.
OLDEST = 7
ANSWER_SECONDS = 60.0
"""A server that does not answer for this long is taken for gone. No command blocks for nearly as long."""

# Also errors of redis-py that are not of its own base class.
ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
# A client of a cluster also raises this, when it is redirected to a node without slots, which it does not know.
CLUSTER_ERRORS = (*ERRORS, AttributeError)
# Errors that pass by themselves: a server is restarted or replaced, or a cluster changes.
TRANSIENT = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.RedisClusterException,
    exceptions.TryAgainError,
    OSError,
)
_PAUSE_SECONDS = 0.2
NO_SUCH_NODE = "'NoneType' object has no attribute 'redis_connection'"


def arguments(connection: RedisConnection) -> dict[str, Any]:
    """Return the keywords of redis-py's clients for this connection, without the place of the server."""
    options = connection.resolved().options()
    keywords: dict[str, Any] = {
        "username": options.get("username"),
        "password": options.get("password"),
        "socket_connect_timeout": options.get("connect_timeout", CONNECT_SECONDS),
        "socket_timeout": ANSWER_SECONDS,
        "socket_keepalive": True,
        # The shapes of replies, and of errors, that all servers give.
        "protocol": 2,
    }
    if options.get("tls") or options.get("tls_ca") or options.get("tls_cert"):
        verify = options.get("tls_verify", True)
        keywords |= {
            "ssl": True,
            "ssl_ca_certs": options.get("tls_ca"),
            "ssl_certfile": options.get("tls_cert"),
            "ssl_keyfile": options.get("tls_key"),
            "ssl_cert_reqs": "required" if verify else "none",
            "ssl_check_hostname": verify,
        }
    return keywords


def sentinels(connection: RedisConnection) -> list[tuple[str, int]]:
    """Return host and port of each Sentinel."""
    hosts = []
    for each in filter(None, connection.resolved().options()["sentinels"].replace(" ", "").split(",")):
        host, _, port = each.rpartition(":") if ":" in each else (each, "", str(SENTINEL_PORT))
        if not host or not port.isdigit():
            raise DeclarationError(
                f"The sentinels of {connection.label} have the entry {each!r}, which is not host:port.",
                hint='sentinels="a:26379,b:26379"',
            )
        hosts.append((host, int(port)))
    return hosts


def open_client(connection: RedisConnection, **more: Any) -> Client:
    """Return a blocking, thread-safe client of the server, of the cluster, or of the server that the Sentinels name."""
    client: Client = _open(connection, redis, redis.sentinel.Sentinel, Retry(NoBackoff(), 0), more)
    return client


def open_async_client(connection: RedisConnection, **more: Any) -> AsyncClient:
    never = redis.asyncio.retry.Retry(NoBackoff(), 0)
    client: AsyncClient = _open(connection, redis.asyncio, redis.asyncio.sentinel.Sentinel, never, more)
    return client


def _open(connection: RedisConnection, package: Any, sentinel: Any, never: object, more: dict[str, Any]) -> Any:
    # Nothing is tried again unseen: it may have been done before its answer was lost. Who can try again does.
    options, keywords = connection.resolved().options(), {**arguments(connection), "retry": never, **more}
    server = {"host": options.get("host", "localhost"), "port": options.get("port", PORT)}
    if options.get("cluster"):
        return package.RedisCluster(**server, **keywords)
    keywords["db"] = options.get("database", 0)
    if options.get("sentinels"):
        watchers = sentinel(sentinels(connection), sentinel_kwargs=_of_sentinels(keywords))
        return watchers.master_for(options["service"], **keywords)
    return package.Redis(**server, **keywords)


def shut_down(opened: Client) -> None:
    """End the connections of a client that other threads may use: these find theirs ended, and close it themselves.

    redis-py's own `close` would do it for them. The number of a socket that is closed while its thread begins to wait
    for an answer is at once that of another one, and the thread waits a minute for what the other one is sent."""
    clients: list[Any] = [opened]
    if isinstance(opened, redis.RedisCluster):
        clients = [each.redis_connection for each in opened.get_nodes() if each.redis_connection is not None]
    for pool in [each.connection_pool for each in clients]:
        for connection in list(pool._in_use_connections):
            used = connection._sock
            if used is not None:
                with suppress(OSError):  # it ended meanwhile
                    used.shutdown(socket.SHUT_RDWR)
        pool.disconnect(inuse_connections=False)


def _of_sentinels(keywords: dict[str, Any]) -> dict[str, Any]:
    """Sentinels have passwords of their own, or none: the server's would be refused. They answer at once, or never."""
    kept = {name: value for name, value in keywords.items() if name.startswith(("socket_", "ssl", "retry"))}
    return {**kept, "socket_timeout": keywords["socket_connect_timeout"]}


def ask_any_node(client: Any, *words: str) -> Any:
    """Return the reply to a command; of one node where there are several, as they run the same."""
    node = {"target_nodes": client.get_random_primary_node()} if isinstance(client, redis.RedisCluster) else {}
    return client.execute_command(*words, **node)


def info(client: Client, section: str) -> dict[str, Any]:
    return dict(ask_any_node(client, "INFO", section))


def version(opened: Client) -> str:
    return str(info(opened, "server").get("redis_version", ""))


def version_warning(version: str) -> str | None:
    """Return why a server is too old to hold streams; `None` where it is not."""
    major = version.partition(".")[0]
    is_old = major.isdecimal() and int(major) < OLDEST
    return f"This server is Redis {version}: streams of Weft need Redis {OLDEST} or newer." if is_old else None


def durability_warning(opened: Client) -> str | None:
    """Return a warning about a server that would lose acknowledged events; `None` where it keeps them."""
    warnings = []
    persistence = {name: str(value) for name, value in info(opened, "persistence").items()}
    # While a server loads its append-only file, it says that it has none.
    if persistence.get("aof_enabled") != "1" and persistence.get("loading") != "1":
        warnings.append(
            "This Redis server has no append-only file: events that it acknowledged are gone when it stops. "
            "Set appendonly yes, and appendfsync always where not even the last second may be lost."
        )
    memory = info(opened, "memory")
    policy = str(memory.get("maxmemory_policy"))
    if int(memory.get("maxmemory", 0)) > 0 and policy.startswith("allkeys-"):  # the others spare keys without an end
        warnings.append(
            f"This Redis server removes keys when its memory is full ({policy}), whole streams among them. "
            "Set maxmemory-policy noeviction."
        )
    return " ".join(warnings) or None


def run_with_retries(connection: RedisConnection, work: Callable[[Client], T]) -> T:
    """Return the result of `work`. If the connection is lost, run it again, for as long as a restart of the server may
    take; not if the server never answered."""
    gone_since: float | None = None
    has_answered = False
    while True:
        began = time.monotonic()
        try:
            with closing(open_client(connection)) as opened:
                opened.ping()
                has_answered = True
                return work(opened)
        except ERRORS as error:
            now = time.monotonic()
            # Not from each answer to a ping on: a replica answers, and never takes the work.
            if gone_since is None or now - began > group_member.PATIENCE_SECONDS:
                gone_since = now
            if not has_answered:
                raise unreachable(connection, error) from None
            if refuses(error) or not isinstance(error, TRANSIENT) or now - gone_since > group_member.PATIENCE_SECONDS:
                raise explain(connection, error) from None
        time.sleep(_PAUSE_SECONDS)


def refuses(error: BaseException) -> bool:
    """Return whether a server did not let us in, which does not pass by itself."""
    refused = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    return isinstance(error, refused) or isinstance(error.__cause__, refused)


def answered(error: BaseException) -> bool:
    """Return whether a server said this, rather than the way to it; of a cluster's nodes, the last that was asked."""
    kinds = (exceptions.ResponseError, exceptions.AuthenticationError)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def unreachable(connection: Connection, error: BaseException) -> ConnectionFailedError:
    """Return the error for a server that never answered, or did not let us in."""
    return connection.unreachable(error, answered=answered(error), denied=refuses(error))


def explain(connection: Connection, error: BaseException) -> WeftError:
    """Return an error of redis-py as a `WeftError`, without secrets."""
    message = settings.redact(group_member.server_message(error), connection.secrets())
    text = " ".join(message.split()) or type(error).__name__
    if text == NO_SUCH_NODE:
        text = "TRYAGAIN the slot moves to a node that had none"
    what = f"Redis ({connection.target}): {text}"
    if isinstance(error, exceptions.BusyLoadingError) or text.startswith(_BUSY):
        hint = f"{NOTHING_STORED} The server is busy, or moves this slot; try again."
        return BusyError(what, hint=hint, is_transient=True)
    if refuses(error) or isinstance(error, exceptions.NoPermissionError):
        hint = "Check username and password, and what the user may do (ACL)."
        return ConnectionFailedError(what, hint=hint, is_transient=False)
    if isinstance(error, (exceptions.OutOfMemoryError, exceptions.ReadOnlyError)) or text.startswith(_FULL):
        return StorageError(what, hint=f"{NOTHING_STORED} Free memory or disk, or use a server that can be written.")
    if isinstance(error, exceptions.ResponseError) and not isinstance(error, exceptions.ClusterError):
        return WeftError(what)
    return ConnectionFailedError(what, hint=f"The connection is lost. {MAYBE_STORED}")


# The last is what redis-py says: every node that it asked sent it on to another, and none of them did anything.
_BUSY = ("LOADING", "BUSY ", "TRYAGAIN", "CLUSTERDOWN", "TTL exhausted")
_FULL = ("MISCONF", "NOREPLICAS")
