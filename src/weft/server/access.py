"""Who may do what: the credentials of streams, the keys of the service, tickets, and how often each may come."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Network, ip_address
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from weft.errors import NotFoundError, SettingsError, unknown
from weft.project import current
from weft.server import webhooks
from weft.server.bodies import Bodies
from weft.server.keys import PREFIX, ApiKey, KnownKeys, Scope, key_table, verified
from weft.server.problems import Problem, later
from weft.server.rates import Buckets, Rate
from weft.server.tickets import Tickets
from weft.settings import interpolate
from weft.streams.declare import Stream
from weft.streams.runtime import derived_streams, find

logger = logging.getLogger("weft.server")

# Wrong credentials of one address for one stream.
_FAILURES = Rate(0.2, 20)
# Tickets for one stream. Each is a file for a while: so many there are at most.
_TICKETS = Rate(50, 200)
_UNSET_SECONDS = 30.0
# Where a request's scope has what admitted it. By what a stream was opened: one of these two, or the id of a key.
_WEBHOOK_ID, _OPENED_BY = "weft.webhook_id", "weft.opened_by"
_NOTHING, _ITS_OWN = "nothing", "its own credential"
_KEY = f"a key of this service, in the header Authorization: Bearer {PREFIX}…"


class _Place(NamedTuple):
    """What a stream is closed by."""

    guards: tuple[Stream, ...]
    """The streams whose credentials open it: itself, or those whose rejected events it holds."""
    owners: frozenset[str]
    """Those whose rejected events it holds."""


class Access:
    """Decides about requests. What it counts is in files of `folder`, which all processes of a service share."""

    def __init__(self, folder: Path, bodies: Bodies) -> None:
        self._bodies = bodies
        self._keys = KnownKeys()
        self._requests = Buckets(folder / "requests")
        self._failures = Buckets(folder / "failures")
        self._tickets = Tickets(folder / "tickets")
        self._places: dict[str, _Place] = {}
        self._declarations = -1

    async def start(self) -> None:
        """Read the keys before the first request needs them: to open their database takes a while."""
        await self._keys.look()

    def close(self) -> None:
        """Close files and connections."""
        self._keys.close()
        self._requests.close()
        self._failures.close()

    async def find(self, request: Request, name: str) -> Stream:
        """The stream of that name. Where there is none, only names are told that this request may know."""
        try:
            return find(name)
        except NotFoundError:
            known = [stream.name for stream in await self.readable(request)]
            raise unknown("stream", name, known, otherwise="GET /api/v1/streams lists those there are.") from None

    async def admit(self, request: Request, stream: Stream, scope: Scope, *, ticket: str | None = None) -> None:
        """Let a request to a stream pass, or raise 401, 403 or 429."""
        key = None
        if ticket is None:
            key = await self._key(request)
            problem = await self._refusal(request, key, stream, scope)
            if problem is not None:
                raise self._counted(request, key, stream, problem)
            its_own = _ITS_OWN if self._place(stream).guards else _NOTHING
            request.scope[_OPENED_BY] = key.id if key is not None and self._opens(key, stream, scope) else its_own
        else:
            await self._redeem(request, stream, ticket)
        self._limit(key)
        if stream.rate_limit is not None:
            # Apart, so that those who publish cannot keep those who read from reading.
            what = "publishes" if scope == "write" else "requests that read"
            self._take(f"{stream.name} {what}", Rate.of(stream.rate_limit), f"{stream.name!r} takes {{}} {what}")

    async def readable(self, request: Request) -> list[Stream]:
        """The declared streams that a request may read, by name; 401 for a credential that opens none of them."""
        key = await self._key(request)
        self._limit(key)
        is_keyed = bool(await self._keys.get())
        streams = {stream: self._headers(request, stream) for stream in current().streams.values()}
        given = set().union(*streams.values())
        if is_keyed and "authorization" in request.headers:
            given.add("authorization")
        right = set() if key is None else {"authorization"}
        if given - right:
            self._refuse_guesses(request)
        found: list[Stream] = []
        for stream, headers in sorted(streams.items(), key=lambda each: each[0].name):
            try:
                problem = await self._refusal(request, key, stream, "read")
            except Problem as trouble:  # of one stream
                problem = trouble
            if problem is None:
                found.append(stream)
                right |= headers
        if given - right:
            raise self._failed(request, [""], unauthorized("What was sent opens no stream."))
        if not found and is_keyed:
            raise unauthorized(f"This needs {_KEY}.") if key is None else _forbidden(key, "read", "these streams")
        return found

    async def issue_ticket(self, stream: Stream, opened_by: str) -> str:
        """A ticket for whoever was admitted to read."""
        self._take(f"{stream.name} tickets", _TICKETS, f"{stream.name!r} gives {{}} tickets")
        return await asyncio.to_thread(self._tickets.issue, stream.name, opened_by)

    async def ended(self, opened_by: str) -> str | None:
        """Why what once opened a stream does so no longer. Who stays for long is asked again."""
        if opened_by == _ITS_OWN:
            return None
        keys = await self._keys.get()
        if opened_by == _NOTHING:
            return f"This needs {_KEY}." if keys else None
        key = keys.get(opened_by)
        ended = "gone" if key is None else key.ended
        return None if ended is None else f"The key {opened_by!r} is {ended}."

    async def _redeem(self, request: Request, stream: Stream, ticket: str) -> None:
        opened_by = self._tickets.redeem(ticket, stream.name)
        if opened_by is None:
            text = f"This ticket does not open {stream.name!r}: each does once, within seconds of its issue."
            # Counted apart: nobody can guess one, and pages that come back with theirs must not lock out the others.
            raise self._failed(request, [f"{stream.name} tickets"], unauthorized(text))
        ended = await self.ended(opened_by)
        if ended is not None:
            raise unauthorized(ended)
        request.scope[_OPENED_BY] = opened_by

    # ----------------------------------------------------------------------------------------------------- credentials

    async def _key(self, request: Request) -> ApiKey | None:
        """The key that a request came with, if it is one."""
        token = _bearer(request)
        if not token.startswith(PREFIX):
            return None
        key = verified(token, await self._keys.get())
        if key is not None and key.ended is not None:
            raise unauthorized(f"The key {key.id!r} is {key.ended}.")
        return key

    async def _refusal(self, request: Request, key: ApiKey | None, stream: Stream, scope: Scope) -> Problem | None:
        """Why a request may not do that with a stream."""
        place = self._place(stream)
        if key is not None and self._opens(key, stream, scope):
            return None
        text = f"This needs {_KEY}."
        if place.guards:
            lacks = [lack for guard in place.guards if (lack := await self._lacks(request, guard))]
            if not lacks:
                return None
            text = f"The stream {stream.name!r} {lacks[0]}."
        elif not await self._keys.get():
            return None
        return unauthorized(text) if key is None else _forbidden(key, scope, repr(stream.name))

    def _opens(self, key: ApiKey, stream: Stream, scope: Scope) -> bool:
        return key.has(scope) and _is_for(key, stream, self._place(stream).owners)

    async def _lacks(self, request: Request, guard: Stream) -> str | None:
        """What a request lacks of the credential of a stream."""
        auth = guard.auth
        assert auth is not None
        if auth["type"] == "hmac":
            return await self._lacks_signature(request, guard, auth)
        if auth["type"] == "bearer":
            given, secret = _bearer(request), _secret(auth["token"], guard)
            lack = "needs its token in the header Authorization: Bearer …"
        else:
            given, secret = request.headers.get(auth["header"].lower(), ""), _secret(auth["key"], guard)
            lack = f"needs its key in the header {auth['header']}"
        if not given:
            return lack
        # Before it is compared: else the one right guess among many would pass.
        self._refuse_guesses(request, guard.name)
        return None if _same(given, secret) else lack

    async def _lacks_signature(self, request: Request, guard: Stream, auth: Mapping[str, object]) -> str | None:
        where = _where(guard)
        given = auth["secret"]
        texts = (given,) if isinstance(given, str) else given
        assert isinstance(texts, tuple)
        try:
            secrets = [webhooks.secret_bytes(_secret(text, guard), where) for text in texts]
        except SettingsError as error:
            raise _unset(guard, error) from None
        lack = webhooks.problem(request.headers)
        if lack is not None:
            return lack
        body = await self._bodies.hold(request)
        if not webhooks.is_signed(request.headers, body, secrets):
            return f"needs the signature of id, timestamp and body in the header {webhooks.SIGNATURE}"
        request.scope[_WEBHOOK_ID] = request.headers[webhooks.ID]
        return None

    def _place(self, stream: Stream) -> _Place:
        project = current()
        if self._declarations != project.declarations:
            self._places, self._declarations = {}, project.declarations
        place = self._places.get(stream.name)
        if place is None:
            place = self._places[stream.name] = _place(stream)
        return place

    # ---------------------------------------------------------------------------------------------------------- counts

    def _counted(self, request: Request, key: ApiKey | None, stream: Stream, problem: Problem) -> Problem:
        """What to answer to a request that is refused. It counts as a failure if it brought a wrong credential."""
        tried = self._headers(request, stream) | ({"authorization"} & set(request.headers))
        if not (tried if key is None else tried - {"authorization"}):
            return problem
        # Of the stream whose secret it is: what that one rejected is no second place to guess it.
        return self._failed(request, [guard.name for guard in self._place(stream).guards] or [stream.name], problem)

    def _headers(self, request: Request, stream: Stream) -> set[str]:
        """The headers of a request that may have a credential of a stream."""
        return {header for guard in self._place(stream).guards if (header := _header(guard)) in request.headers}

    def _refuse_guesses(self, request: Request, stream: str = "") -> None:
        wait = self._failures.wait(_who(request, stream), _FAILURES)
        if wait:
            raise _too_many_failures(wait)

    def _failed(self, request: Request, streams: list[str], problem: Problem) -> Problem:
        wait = max(self._failures.take(_who(request, stream), _FAILURES) for stream in streams)
        return _too_many_failures(wait) if wait else problem

    def _limit(self, key: ApiKey | None) -> None:
        if key is not None and key.rate is not None:
            self._take(f"key {key.id}", key.rate, f"The key {key.id!r} is good for {{}} requests")

    def _take(self, bucket: str, rate: Rate, text: str) -> None:
        wait = self._requests.take(bucket, rate)
        if wait:
            detail = f"{text.format(f'{rate.per_second:g}')} a second, {rate.burst:g} at once."
            raise later(429, "rate-limited", "Too many requests", detail, wait)


def open_streams() -> list[str]:
    """The declared streams that need no credential over HTTP."""
    with key_table() as table:
        if table.all():
            return []
    return sorted(name for name, stream in current().streams.items() if not _place(stream).guards)


def webhook_id(request: Request) -> str | None:
    """The id of a request that was admitted by its signature."""
    found: str | None = request.scope.get(_WEBHOOK_ID)
    return found


def opened_by(request: Request) -> str:
    """What opened its stream to a request that was admitted, for `Access.ended`."""
    found: str = request.scope[_OPENED_BY]
    return found


def unauthorized(text: str) -> Problem:
    """401, with what HTTP wants it to say."""
    return Problem(401, "unauthorized", "Unauthorized", text, headers={"www-authenticate": "Bearer"})


def _place(stream: Stream) -> _Place:
    owners, seen, guards = _owners(stream.name), {stream.name}, []
    pending = [stream] if stream.auth is not None else list(owners)
    while pending:
        each = pending.pop()
        if each.auth is not None:
            guards.append(each)
        elif each.name not in seen:
            seen.add(each.name)
            pending += _owners(each.name)
    return _Place(tuple(guards), frozenset(owner.name for owner in owners))


def _owners(name: str) -> list[Stream]:
    """The streams whose quarantine or dead letters have that name."""
    return [
        declared
        for declared in current().streams.values()
        if name == declared.dead_letter or name in (each.name for each in derived_streams(declared))
    ]


def _is_for(key: ApiKey, stream: Stream, owners: frozenset[str]) -> bool:
    """Whether a key is for that stream, or for all whose rejected events it holds."""
    return not key.streams or stream.name in key.streams or (bool(owners) and owners.issubset(key.streams))


def _header(guard: Stream) -> str:
    """The header of a stream's credential."""
    auth = guard.auth or {}
    if auth.get("type") == "api_key":
        return str(auth["header"]).lower()
    return webhooks.SIGNATURE if auth.get("type") == "hmac" else "authorization"


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _where(guard: Stream) -> str:
    return f"the auth of the stream {guard.name!r}"


def _secret(text: str, guard: Stream) -> str:
    """What is compared with. One that is not there, or empty, closes the stream."""
    try:
        secret = interpolate(text, _where(guard))
        if not secret:
            raise SettingsError(f"{text} is empty, and {_where(guard)} needs it.")
    except SettingsError as error:
        raise _unset(guard, error) from None
    return secret


def _unset(guard: Stream, error: SettingsError) -> Problem:
    logger.error("the stream %s is closed: %s", guard.name, error.what)
    text = f"The credential of {guard.name!r} is not set up. The log of the service has the reason."
    return later(503, "unconfigured", "Not set up", text, _UNSET_SECONDS)


def _same(given: str, secret: str) -> bool:
    """Compared in a time that tells nothing of how much of it is right, nor how long it is."""
    return hmac.compare_digest(
        sha256(given.encode("latin-1", "replace")).digest(), sha256(secret.encode("utf-8", "surrogateescape")).digest()
    )


def _who(request: Request, stream: str) -> str:
    return f"{'' if request.client is None else _network(request.client.host)} {stream}"


@lru_cache(maxsize=1024)
def _network(host: str) -> str:
    """Whose address it is: one customer has at least 2⁶⁴ addresses of IPv6."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv4Address) or address.ipv4_mapped is not None:
        return host
    return str(IPv6Network((address, 64), strict=False))


def _forbidden(key: ApiKey, scope: Scope, what: str) -> Problem:
    good_for = f" of {', '.join(key.streams)}" if key.streams else ""
    text = f"The key {key.id!r} has the scope {' and '.join(key.scopes)}{good_for}; this needs {scope} of {what}."
    return Problem(403, "forbidden", "Forbidden", text)


def _too_many_failures(wait: float) -> Problem:
    text = "Too many wrong credentials came from this address."
    return later(429, "too-many-failures", "Too many failures", text, wait)
