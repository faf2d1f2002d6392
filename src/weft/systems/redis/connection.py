"""How to reach a Redis server, a cluster, or a server that Sentinels watch over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from weft import settings
from weft.errors import DeclarationError, SettingsError
from weft.systems.base import Connection, measured, require
from weft.systems.endpoint import StoreEndpoint
from weft.systems.redis.ids import to_offset
from weft.systems.url_parameters import flag, url_parameters

# The parameters after the `?` of a URL, each a field of the connection, and how its text is read.
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "cluster": flag,
    "sentinels": str,
    "service": str,
    "tls_ca": str,
    "tls_cert": str,
    "tls_key": str,
    "tls_verify": flag,
    "connect_timeout": float,
}


_LONGEST_CONNECT = 3600


@dataclass(frozen=True)
class RedisConnection(Connection):
    """A Redis server: `RedisConnection("redis://user:${PASSWORD}@host:6379/0")`, or with fields in the place of a URL:
    `RedisConnection(host="cache", password="${PASSWORD}")`.

    `rediss://` is TLS, as is `tls=True`. `cluster=True` takes the server for one node of a cluster and finds the
    others. `sentinels="a:26379,b:26379"` with `service="mymaster"` asks these Sentinels for the server. These options
    can follow the `?` of a URL too: `redis://node/?cluster=true`.
    """

    kind: ClassVar[str] = "redis"

    url: str | None = field(default=None, metadata={"url": True})
    host: str | None = field(default=None, kw_only=True)
    port: int | None = field(default=None, kw_only=True)
    username: str | None = field(default=None, kw_only=True)
    password: str | None = field(default=None, kw_only=True, metadata={"secret": True})
    database: int | None = field(default=None, kw_only=True)
    cluster: bool | None = field(default=None, kw_only=True)
    sentinels: str | None = field(default=None, kw_only=True)
    service: str | None = field(default=None, kw_only=True)
    tls: bool | None = field(default=None, kw_only=True)
    tls_ca: str | None = field(default=None, kw_only=True)
    tls_cert: str | None = field(default=None, kw_only=True)
    tls_key: str | None = field(default=None, kw_only=True)
    tls_verify: bool | None = field(default=None, kw_only=True)
    connect_timeout: float | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        """Raise for fields that contradict each other. A URL is parsed once it has no `${VAR}` left."""
        super().validate()
        if self.url is not None:
            for name in ("host", "port", "username", "password", "database", "tls"):
                if getattr(self, name) is not None:
                    raise DeclarationError(
                        f"RedisConnection: {name} is part of the URL, and is a field too.",
                        hint="Give a URL, or fields: not both. TLS is rediss:// in a URL.",
                    )
        if self.is_known("url"):
            self._check(self.options())

    def _check(self, options: dict[str, Any]) -> None:
        if bool(options.get("sentinels")) != bool(options.get("service")):
            raise DeclarationError(
                f"{self.label} needs both sentinels and service.",
                hint='sentinels="a:26379,b:26379", service="mymaster"',
            )
        if options.get("cluster") and (options.get("sentinels") or options.get("database")):
            other = "sentinels" if options.get("sentinels") else f"database {options['database']}"
            raise DeclarationError(f"A cluster of Redis has no {other} ({self.label}).", hint="Leave one of them out.")
        if options.get("sentinels") and options.get("host"):
            raise DeclarationError(
                f"{self.label} has both a host and sentinels.", hint="The Sentinels know the host: leave it out."
            )
        if options.get("tls_key") and not options.get("tls_cert"):
            raise DeclarationError(f"A tls_key needs a tls_cert ({self.label}).")
        seconds = options.get("connect_timeout")
        if seconds is not None and not 0 < seconds <= _LONGEST_CONNECT:
            raise DeclarationError(
                f"The connect_timeout of {self.label} must be a number of seconds from above 0 to "
                f"{_LONGEST_CONNECT:,}, not {seconds!r}."
            )
        host = options.get("host", "")
        try:  # as Python's sockets do, whose error is none of a connection
            _ = settings.has_references(host) or host.encode("idna")
        except UnicodeError:
            raise DeclarationError(f"The host of {self.label} is {host!r}, which is not a name.") from None

    def options(self) -> dict[str, Any]:
        """Return the fields that are set, with those of the URL."""
        options = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("url", "name") and getattr(self, each.name) is not None
        }
        return options if self.url is None else {**self._parts_of(self.url), **options}

    def _parts_of(self, url: str) -> dict[str, Any]:
        try:
            parts = urlsplit(url)
            host, port, path = parts.hostname, parts.port, unquote(parts.path.strip("/"), errors="strict")
            username, password = (unquote(text or "", errors="strict") for text in (parts.username, parts.password))
        except ValueError:
            # Without the cause, which would quote a piece of the URL.
            raise self._malformed(
                "cannot be read", "A special character in it must be percent-encoded: %40 for @."
            ) from None
        if path and not (path.isascii() and path.isdigit()):
            raise self._malformed(
                "has something else than a number after the host", "Databases of Redis have numbers: redis://host/0"
            )
        if parts.fragment:
            raise self._malformed("has a # after the host", "Encode # as %23.")
        in_url = {"host": host, "port": port, "username": username or None, "password": password or None}
        in_url |= {"database": int(path) if path else None, "tls": parts.scheme.lower() == "rediss" or None}
        options = {name: value for name, value in in_url.items() if value is not None}
        return options | url_parameters(parts.query, _PARAMETERS, self._malformed)

    def identity(self) -> object:
        """Return the server and its database: one place has many URLs and users."""
        options = {"host": "localhost", "port": 6379, "database": 0, **self.options()}
        names = ("sentinels", "service") if options.get("sentinels") else ("host", "port")
        return [options[name] for name in (*names, "database")]

    def secrets(self) -> set[str]:
        """Return the password also as it is decoded: a driver's message may quote it."""
        password = self.resolved().options().get("password")
        return super().secrets() | ({password} if password else set())

    def check(self) -> dict[str, Any]:
        """Connect, ask for the server's version, and say when it is too old or keeps nothing on disk."""
        require("redis", self.kind)
        from weft.systems.redis import client

        report: dict[str, Any] = {}
        options = self.resolved().options()
        try:
            patience = options.get("connect_timeout", client.CONNECT_SECONDS)
            with closing(client.open_client(self, socket_timeout=patience)) as opened:
                with measured(report):
                    opened.ping()
                version = client.version(opened)
                warning = client.version_warning(version) or client.durability_warning(opened)
        except client.ERRORS as error:
            raise client.unreachable(self, error) from None
        what = "Redis cluster" if options.get("cluster") else "Redis"
        report = {
            "server": f"{what} {version}".strip(),
            "database": options.get("database", 0),
            **report,
        }
        return {**report, "warning": warning} if warning else report

    def _malformed(self, what: str, hint: str | None) -> SettingsError:
        secrets = settings.url_secrets(self.url or "")
        return SettingsError(f"The URL of {self.label} {settings.redact(what, secrets)}.", hint=hint)


class RedisEndpoint(StoreEndpoint):
    """A stream. A source may start at the id of an entry, which is kept as its offset."""

    start_forms: ClassVar = {**StoreEndpoint.start_forms, r"\d+-\d+": "an id of Redis"}

    def parse_start(self, start: str, connection: Connection, query: str) -> str:
        """Return an offset, `earliest` or `latest`."""
        start = super().parse_start(start, connection, query)
        return str(to_offset(start, query)) if "-" in start else start
