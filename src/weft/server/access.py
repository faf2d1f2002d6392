"""Access: the credentials of streams, the keys of the service, tickets, and rate limits."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Network, ip_address
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request

from weft.errors import SettingsError
from weft.project import current
from weft.server import webhooks
from weft.server.bodies import Bodies
from weft.server.keys import PREFIX, ApiKey, KnownKeys, Scope, key_table, verified
from weft.server.problems import Problem, later
from weft.server.rates import Buckets, Rate
from weft.server.tickets import Tickets
from weft.settings import interpolate
from weft.streams.declare import Stream
from weft.streams.rejected import owners as owners_of

logger = logging.getLogger("weft.server")

# The limit of wrong credentials from one address for one stream.
_FAILURES = Rate(0.2, 20)
# The limit of tickets for one stream: each is a file for a while.
_TICKETS = Rate(50, 200)
_UNSET_SECONDS = 30.0
# The keys of a request's scope for what admitted it. A stream was opened by one of the last two, or the id of a key.
_WEBHOOK_ID, _OPENED_BY = "weft.webhook_id", "weft.opened_by"
_NOTHING, _ITS_OWN = "nothing", "its own credential"
_KEY = f"a key of this service, in the header Authorization: Bearer {PREFIX}…"


class _Protection(NamedTuple):
    """The streams that decide who may use a stream."""

    guards: tuple[Stream, ...]
    """The streams whose credentials open it: itself, or those whose rejected events it holds."""
    owners: frozenset[str]
    """The streams whose rejected events it holds."""


class Access:
    """Decides about requests. What it counts is in files of `folder`, which all processes of a service share."""

    def __init__(self, folder: Path, bodies: Bodies) -> None:
        self._bodies = bodies
        self.keys = KnownKeys()
        self._requests = Buckets(folder / "requests")
        self._failures = Buckets(folder / "failures")
        self._tickets = Tickets(folder / "tickets")
        self._protections: dict[str, _Protection] = {}
        self._declarations = -1

    def close(self) -> None:
        self.keys.close()
        self._requests.close()
        self._failures.close()

    async def admit(self, request: Request, stream: Stream, scope: Scope, *, ticket: str | None = None) -> None:
        """Admit a request to a stream, or raise 401, 403 or 429."""
        key = None
        if ticket is None:
            key = await self._key(request)
            problem = await self._refusal(request, key, stream, scope)
            if problem is not None:
                raise self._counted(request, key, stream, problem)
            its_own = _ITS_OWN if self._protection(stream).guards else _NOTHING
            request.scope[_OPENED_BY] = key.id if key is not None and self._opens(key, stream, scope) else its_own
        else:
            await self._redeem(request, stream, ticket)
        self._limit(key)
        if stream.rate_limit is not None:
            # Counted separately, so that publishers cannot keep readers from reading.
            what = "publishes" if scope == "write" else "requests that read"
            self._count(f"{stream.name} {what}", Rate.of(stream.rate_limit), f"{stream.name!r} takes {{}} {what}")

    async def readable(self, request: Request) -> list[Stream]:
        """Return the declared streams that a request may read, by name; 401 for a credential that opens none."""
        key = await self._key(request)
        self._limit(key)
        return await self._readable(request, key)

    async def _readable(self, request: Request, key: ApiKey | None) -> list[Stream]:
        is_keyed = bool(await self.keys.get())
        streams = sorted(current().streams.values(), key=attrgetter("name"))
        headers = {each.name: self._headers(request, each) for each in streams if self._protection(each).guards}
        sent = set().union(*headers.values())
        if is_keyed and "authorization" in request.headers:
            sent.add("authorization")
        right = set() if key is None else {"authorization"}
        if sent - right:
            self._refuse_guesses(request)
        # Pages ask every two seconds, of hundreds of streams: most have no credential of their own.
        opens_unguarded = not is_keyed if key is None else _is_for_all(key, "read")
        readable: list[Stream] = []
        for stream in streams:
            if opens_unguarded and stream.name not in headers:
                readable.append(stream)
                continue
            try:
                problem = await self._refusal(request, key, stream, "read")
            except Problem as trouble:  # of one stream
                problem = trouble
            if problem is None:
                readable.append(stream)
                right |= headers.get(stream.name, set())
        if sent - right:
            raise self._failed(request, [""], unauthorized("What was sent opens no stream."))
        if not readable and is_keyed and not _is_for_all(key, "read"):
            raise unauthorized(f"This needs {_KEY}.") if key is None else _forbidden(key, "read", "these streams")
        return readable

    async def admit_to_all(self, request: Request) -> None:
        """Admit a request to facts about the whole service, which are for callers who may read every stream."""
        if len(await self.readable(request)) < len(current().streams):
            key = await self._key(request)
            raise unauthorized(f"This needs {_KEY}.") if key is None else _forbidden(key, "read", "every stream")

    async def admit_action(self, request: Request) -> ApiKey:
        """Admit a request to an action on pipelines, and return its key. It needs a key of the scope admin for all
        streams: without keys, there are no actions. A page of another site cannot send one: browsers add no
        Authorization header by themselves, and ask first whether a page may."""
        key = await self._key(request)
        if key is None:
            text = f"Actions need {_KEY}, with the scope admin."
            if "authorization" in request.headers:
                self._refuse_guesses(request)
                raise self._failed(request, [""], unauthorized(text))
            raise unauthorized(text)
        self._limit(key)
        if not _is_for_all(key, "admin"):
            raise _forbidden(key, "admin", "every stream")
        return key

    async def actor(self, request: Request) -> tuple[ApiKey | None, str | None]:
        """Return the key of a request, and why it may not act; a wrong one is refused and counted as for actions. The
        token of a stream is no wrong key."""
        if not _bearer(request).startswith(PREFIX):
            return None, f"Actions need {_KEY}, with the scope admin."
        try:
            return await self.admit_action(request), None
        except Problem as problem:
            if problem.status != 403:
                raise
            return await self._key(request), str(problem)

    async def reads_all(self, request: Request) -> bool:
        """Return whether a caller who was asked for as `actor` may read every stream. The token of a stream is no wrong
        key, and does not."""
        if "authorization" in request.headers and not _bearer(request).startswith(PREFIX):
            return False
        try:
            # It counts once for the limit of its key.
            return len(await self._readable(request, await self._key(request))) == len(current().streams)
        except Problem as problem:
            if problem.status not in (401, 403):
                raise
            return False

    async def issue_ticket(self, stream: Stream, opened_by: str) -> str:
        """Issue a ticket to a caller who was admitted to read."""
        self._count(f"{stream.name} tickets", _TICKETS, f"{stream.name!r} gives {{}} tickets")
        return await asyncio.to_thread(self._tickets.issue, stream.name, opened_by)

    async def ended(self, opened_by: str) -> str | None:
        """Return why a credential that opened a stream does not any more. Long requests ask again."""
        if opened_by == _ITS_OWN:
            return None
        keys = await self.keys.get()
        if opened_by == _NOTHING:
            return f"This needs {_KEY}." if keys else None
        key = keys.get(opened_by)
        ended = "gone" if key is None else key.ended
        return None if ended is None else f"The key {opened_by!r} is {ended}."

    async def _redeem(self, request: Request, stream: Stream, ticket: str) -> None:
        opened_by = self._tickets.redeem(ticket, stream.name)
        if opened_by is None:
            text = f"This ticket does not open {stream.name!r}: each does once, within seconds of its issue."
            # Counted separately: tickets cannot be guessed, and pages that reuse theirs must not lock out others.
            raise self._failed(request, [f"{stream.name} tickets"], unauthorized(text))
        ended = await self.ended(opened_by)
        if ended is not None:
            raise unauthorized(ended)
        request.scope[_OPENED_BY] = opened_by

    # ----------------------------------------------------------------------------------------------------- credentials

    async def _key(self, request: Request) -> ApiKey | None:
        token = _bearer(request)
        if not token.startswith(PREFIX):
            return None
        key = verified(token, await self.keys.get())
        if key is not None and key.ended is not None:
            raise unauthorized(f"The key {key.id!r} is {key.ended}.")
        return key

    async def _refusal(self, request: Request, key: ApiKey | None, stream: Stream, scope: Scope) -> Problem | None:
        """Return why a request may not do that with a stream."""
        protection = self._protection(stream)
        if key is not None and self._opens(key, stream, scope):
            return None
        text = f"This needs {_KEY}."
        if protection.guards:
            lacks = [lack for guard in protection.guards if (lack := await self._lacks(request, guard))]
            if not lacks:
                return None
            text = f"The stream {stream.name!r} {lacks[0]}."
        elif not await self.keys.get():
            return None
        return unauthorized(text) if key is None else _forbidden(key, scope, repr(stream.name))

    def _opens(self, key: ApiKey, stream: Stream, scope: Scope) -> bool:
        return key.has(scope) and _is_for(key, stream, self._protection(stream).owners)

    async def _lacks(self, request: Request, guard: Stream) -> str | None:
        """Return what a request lacks of the credential of a stream."""
        auth = guard.auth
        assert auth is not None
        if auth["type"] == "hmac":
            return await self._lacks_signature(request, guard, auth)
        if auth["type"] == "bearer":
            sent, secret = _bearer(request), _secret(auth["token"], guard)
            lack = "needs its token in the header Authorization: Bearer …"
        else:
            sent, secret = request.headers.get(auth["header"].lower(), ""), _secret(auth["key"], guard)
            lack = f"needs its key in the header {auth['header']}"
        if not sent:
            return lack
        # Before it is compared: else the one right guess among many would pass.
        self._refuse_guesses(request, guard.name)
        return None if _same(sent, secret) else lack

    async def _lacks_signature(self, request: Request, guard: Stream, auth: Mapping[str, Any]) -> str | None:
        texts = (auth["secret"],) if isinstance(auth["secret"], str) else auth["secret"]
        try:
            secrets = [webhooks.secret_bytes(_secret(text, guard), _where(guard)) for text in texts]
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

    def _protection(self, stream: Stream) -> _Protection:
        project = current()
        if self._declarations != project.declarations:
            self._protections, self._declarations = {}, project.declarations
        protection = self._protections.get(stream.name)
        if protection is None:
            protection = self._protections[stream.name] = _protection(stream)
        return protection

    # ---------------------------------------------------------------------------------------------------------- counts

    def _counted(self, request: Request, key: ApiKey | None, stream: Stream, problem: Problem) -> Problem:
        """Return the answer to a request that is refused. It counts as a failure if it had a wrong credential."""
        tried = self._headers(request, stream) | ({"authorization"} & set(request.headers))
        if not (tried if key is None else tried - {"authorization"}):
            return problem
        # Counted for the stream whose secret it is: its dead letters are no second place to guess it.
        return self._failed(
            request, [guard.name for guard in self._protection(stream).guards] or [stream.name], problem
        )

    def _headers(self, request: Request, stream: Stream) -> set[str]:
        """Return the headers of a request that may have a credential of a stream."""
        return {header for guard in self._protection(stream).guards if (header := _header(guard)) in request.headers}

    def _refuse_guesses(self, request: Request, stream: str = "") -> None:
        wait = self._failures.wait(_who(request, stream), _FAILURES)
        if wait:
            raise _too_many_failures(wait)

    def _failed(self, request: Request, streams: list[str], problem: Problem) -> Problem:
        wait = max(self._failures.take(_who(request, stream), _FAILURES) for stream in streams)
        return _too_many_failures(wait) if wait else problem

    def _limit(self, key: ApiKey | None) -> None:
        if key is not None and key.rate is not None:
            self._count(f"key {key.id}", key.rate, f"The key {key.id!r} is good for {{}} requests")

    def _count(self, bucket: str, rate: Rate, text: str) -> None:
        wait = self._requests.take(bucket, rate)
        if wait:
            detail = f"{text.format(f'{rate.per_second:g}')} a second, {rate.burst:g} at once."
            raise later(429, "rate-limited", "Too many requests", detail, wait)


def open_streams() -> list[str]:
    """Return the declared streams that need no credential over HTTP."""
    with key_table() as table:
        if table.all():
            return []
    return sorted(name for name, stream in current().streams.items() if not _protection(stream).guards)


def webhook_id(request: Request) -> str | None:
    """Return the id of a request that was admitted by its signature."""
    admitted: str | None = request.scope.get(_WEBHOOK_ID)
    return admitted


def opened_by(request: Request) -> str:
    """Return what opened its stream to a request that was admitted, for `Access.ended`."""
    opener: str = request.scope[_OPENED_BY]
    return opener


def unauthorized(text: str) -> Problem:
    """Return a 401 with the header that HTTP requires."""
    return Problem(401, "unauthorized", "Unauthorized", text, headers={"www-authenticate": "Bearer"})


def _protection(stream: Stream) -> _Protection:
    owners, seen, guards = owners_of(stream.name), {stream.name}, []
    pending = [stream] if stream.auth is not None else list(owners)
    while pending:
        each = pending.pop()
        if each.auth is not None:
            guards.append(each)
        elif each.name not in seen:
            seen.add(each.name)
            pending += owners_of(each.name)
    return _Protection(tuple(guards), frozenset(owner.name for owner in owners))


def _is_for(key: ApiKey, stream: Stream, owners: frozenset[str]) -> bool:
    """Return whether a key is for that stream, or for all whose rejected events it holds."""
    return not key.streams or stream.name in key.streams or (bool(owners) and owners.issubset(key.streams))


def _is_for_all(key: ApiKey | None, scope: Scope) -> bool:
    """Return whether a key is for every stream."""
    return key is not None and not key.streams and key.has(scope)


def _header(guard: Stream) -> str:
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
    """Return the secret of a stream. One that is missing or empty closes the stream."""
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


def _same(sent: str, secret: str) -> bool:
    """Compare in a time that reveals neither how much of it is right nor how long it is."""
    return hmac.compare_digest(
        sha256(sent.encode("latin-1", "replace")).digest(), sha256(secret.encode("utf-8", "surrogateescape")).digest()
    )


def _who(request: Request, stream: str) -> str:
    return f"{'' if request.client is None else _network(request.client.host)} {stream}"


@lru_cache(maxsize=1024)
def _network(host: str) -> str:
    """Return the network of an address: one customer has at least 2⁶⁴ addresses of IPv6."""
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
