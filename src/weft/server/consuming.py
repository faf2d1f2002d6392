"""`/consume`, `/ack`, `/nack`, `/reset`, `/groups`, `/events`: reliable batches for clients without Python."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import EventsLostError, listed
from weft.server import bodies
from weft.server.access import opened_by, unauthorized
from weft.server.answers import AnswerPage
from weft.server.keys import Scope
from weft.server.problems import Problem, bad_parameter
from weft.server.service import json_response, service_of
from weft.streams import consuming
from weft.streams.events import ROWID_TEXT, Lease, as_offset, in_rounds, restore, with_texts
from weft.streams.runtime import OpenedStream
from weft.systems.log import ROWID

_NAME = Annotated[str, Meta(min_length=1, max_length=200)]
_TURN_SECONDS = 1.0


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    consumer: _NAME


class Consume(_Body, kw_only=True):
    """The body of `/consume`."""

    batch_size: Annotated[int, Meta(ge=1)] = 100
    member: _NAME | None = None
    lease: Annotated[float, Meta(gt=0)] = 60
    wait: Annotated[float, Meta(ge=0)] = 0


class Delivered(msgspec.Struct):
    """An event of a batch, by its offset. The rest of it may come back too, in whatever form: it is not read."""

    rowid: int | float | str | None = msgspec.field(name=ROWID, default=None)
    rowid_text: str | None = msgspec.field(name=ROWID_TEXT, default=None)


class Ack(_Body, kw_only=True):
    """The body of `/ack`."""

    events: list[Delivered]
    token: _NAME | None = None
    member: _NAME | None = None


class Nack(Ack, kw_only=True):
    """The body of `/nack`."""

    delay: Annotated[float, Meta(ge=0)] = 0
    reason: str | None = None


class Reset(_Body, kw_only=True):
    """The body of `/reset`."""

    to: Annotated[int, Meta(ge=0, le=2**63 - 1)] | str = "start"


Body = TypeVar("Body", bound=_Body)


async def _open(request: Request, kind: type[Body], scope: Scope = "read") -> tuple[OpenedStream, Body]:
    """Return the stream that a request may use, and its body."""
    service, headers = service_of(request), request.headers
    ready = await service.open(request, scope)
    query(request, body=kind.__struct_fields__)
    bodies.require_json(bodies.media_type(headers))
    body = await service.bodies.read(request)
    return ready, bodies.parse(bodies.unpack(body, headers, service.limits.body_bytes), kind)


def _done(ready: OpenedStream, asked: _Body, **result: Any) -> Response:
    return json_response({"stream": ready.stream.name, "consumer": asked.consumer, **result})


async def consume(request: Request) -> Response:
    """Answer with a batch under a lease. Its `token` fences the ack: with it an ack that comes too late is refused."""
    service = service_of(request)
    ready, asked = await _open(request, Consume)
    # A name that reveals nothing of this machine.
    member = asked.member or f"http:{secrets.token_hex(8)}"
    deadline = time.monotonic() + min(asked.wait, service.limits.wait_seconds)
    # All of it can be sent back with the ack, also by a client that escapes each letter.
    page = AnswerPage(min(service.limits.page_bytes, service.limits.body_bytes // 4))
    service.answers.require_room()
    room: AbstractContextManager[None] | None = service.room(ready.stream)
    events: list[dict[str, Any]] = []
    while True:
        version = ready.hub.watch.version
        if room is not None:
            # Held only while the database is asked: requests that wait for events are no load.
            with room:
                events = await _consume_now(request, ready, asked, page, member)
        left = deadline - time.monotonic()
        if events or left <= 0 or service.feeds.stopping or await request.is_disconnected():
            break
        ended = await service.access.ended(opened_by(request))
        if ended is not None:
            raise unauthorized(ended)
        # In turns: a client that left is noticed, and a service that ends does not wait for events.
        await ready.hub.watch.wait_async(version, min(left, _TURN_SECONDS))
        # One event wakes all requests. Those without room now wait for another turn.
        room = None
        with suppress(Problem):
            room = service.room(ready.stream)
    token = events[0].lease.token if events else None  # type: ignore[attr-defined]
    return service.answers.json(
        {
            "stream": ready.stream.name,
            "consumer": asked.consumer,
            "events": page.events,
            "count": len(events),
            "token": token,
        }
    )


async def _consume_now(
    request: Request, ready: OpenedStream, asked: Consume, page: AnswerPage, member: str
) -> list[dict[str, Any]]:
    """Consume without waiting. If the client has left, its events are for other clients at once, `max_deliveries` does
    not count this delivery, and a loss is reported to the next client."""
    count = min(asked.batch_size, service_of(request).limits.page_events)
    try:
        events = await consuming.consume_now(
            ready, asked.consumer, count, member=member, lease=asked.lease, has_room=page.add
        )
    except EventsLostError as error:
        if await request.is_disconnected():
            await ready.hub.in_thread(ready.log.report_again, asked.consumer, error.lost)
        raise
    if events and await request.is_disconnected():
        await ready.hub.in_thread(consuming.return_undelivered, ready, asked.consumer, events)
        page.clear()
        return []
    return events


async def ack(request: Request) -> Response:
    """Acknowledge events, by their `_weft_rowid`."""
    ready, asked = await _open(request, Ack)
    with service_of(request).room(ready.stream):
        done = await consuming.ack(ready.stream, asked.consumer, _leased(ready, asked), member=asked.member)
    return _done(ready, asked, acknowledged=done)


async def nack(request: Request) -> Response:
    ready, asked = await _open(request, Nack)
    with service_of(request).room(ready.stream):
        done = await consuming.nack(
            ready.stream,
            asked.consumer,
            _leased(ready, asked),
            delay=asked.delay,
            reason=asked.reason,
            member=asked.member,
        )
    return _done(ready, asked, returned=done)


def _leased(ready: OpenedStream, asked: Ack) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{ROWID: each.rowid, ROWID_TEXT: each.rowid_text} for each in asked.events]
    if asked.token is None:
        return events
    lease = Lease(ready.stream.name, asked.consumer, asked.token)
    return [restore(event, lease) for event in events]


async def reset(request: Request) -> Response:
    ready, asked = await _open(request, Reset, "admin")
    offset = as_offset(asked.to)
    if offset is not None:
        whole(str(offset), "to", 0)
    is_known = offset is not None or asked.to in ("start", "end")
    to = asked.to if is_known else moment(str(asked.to), "to", "'start', 'end', an offset or ")
    with service_of(request).room(ready.stream):
        position = await consuming.reset(ready.stream, asked.consumer, to)
    return _done(ready, asked, **with_texts({"position": position}, "position"))


async def groups(request: Request) -> Response:
    service = service_of(request)
    ready = await service.open(request, "read", to_read=True)
    query(request)
    with service.room(ready.stream):
        known = [with_texts(group, "position") for group in await consuming.groups(ready.stream)]
        return json_response({"stream": ready.stream.name, "groups": known})


async def events(request: Request) -> Response:
    """Answer with a page of events, without a consumer: `?after=` the last `_weft_rowid` seen, `&limit=`."""
    service = service_of(request)
    ready = await service.open(request, "read", to_read=True)
    parameters = query(request, "after", "limit")
    after = whole(parameters["after"], "after", 0) if "after" in parameters else None
    limit = min(whole(parameters.get("limit", "100"), "limit", 1), service.limits.page_events)
    page = AnswerPage(service.limits.page_bytes)
    service.answers.require_room()
    with service.room(ready.stream):
        start = await ready.hub.in_thread(_fill, page, ready, after, limit)
    following = start if page.last is None else page.last
    answer = {"stream": ready.stream.name, "events": page.events, "count": len(page.events), "next": following}
    return service.answers.json(with_texts(answer, "next"))


def _fill(page: AnswerPage, ready: OpenedStream, after: int | None, limit: int) -> int:
    """Fill a page, and return the offset that it begins after."""
    log = ready.log
    floor = log.floor()
    if after is not None and after < floor:
        raise EventsLostError(
            f"Events of stream {ready.stream.name!r} up to {floor} were removed by its retention.",
            lost=log.removed_after(after),
            hint=f"Go on with after={floor}.",
        )
    start = floor if after is None else after
    head = log.head(start)
    if start > head:
        text = f"The stream {ready.stream.name!r} ends at {head}, before after={start}: an older state was restored."
        raise bad_parameter(text, hint=f"Go on with after={head}.", field="after")
    # A page ends before a gap, so that the next request reports it: a reader behind the gap would not hear of it.
    for event in in_rounds(log, start, head, limit, gapless=True):
        if not page.add(event):
            break
    return start


def query(request: Request, *known: str, repeated: str | None = None, body: Sequence[str] = ()) -> dict[str, str]:
    """Return the parameters of a query, each but `repeated` at most once; unknown ones are refused. `body`: what a body
    may have, where the options of a request are there."""
    parameters: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            title, there = ("Parameters", known) if known else ("In the body", body)
            raise Problem(
                422,
                "parameter",
                "Unknown parameter",
                f"There is no parameter {name[:60]!r} here.",
                hint=listed(name, there, f"{title}: {', '.join(there)}.") if there else "There are none here.",
                field=name[:60],
            )
        if name in parameters and name != repeated:
            raise Problem(422, "parameter", "Repeated parameter", f"{name} was given twice.", field=name)
        parameters[name] = value
    return parameters


async def query_of_all(request: Request, *known: str) -> dict[str, str]:
    """Return the parameters of a query about the whole service, which is for callers who may read every stream."""
    parameters = query(request, *known)
    await service_of(request).access.admit_to_all(request)
    return parameters


def whole(text: str, name: str, least: int) -> int:
    """Parse a number of a query."""
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) < 2**63):
        raise bad_parameter(f"{name} must be a whole number of at least {least}, not {text[:40]!r}.", field=name)
    return int(text)


def flag(parameters: dict[str, str], name: str) -> bool:
    """Parse a parameter that is true or false; false where it is not given."""
    text = parameters.get(name, "false")
    if text not in ("true", "false"):
        raise bad_parameter(f"{name} must be true or false, not {text[:40]!r}.", field=name)
    return text == "true"


def in_utc(when: datetime, name: str) -> datetime:
    """Return a time of a body in UTC; one without a zone, or outside of the calendar there, is refused."""
    try:
        if when.tzinfo is not None:
            return when.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise bad_parameter(f"{name} must be a time with its zone, such as 2026-01-31T12:00:00Z.", field=name)


def moment(text: str, name: str, others: str = "") -> datetime:
    """Parse a time. `others`: what else the parameter may be."""
    try:
        when = datetime.fromisoformat(text)
        # Raises for a time of the first or last day of the calendar that is outside of it in UTC.
        return when if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        detail = f"{name} must be {others}a time such as 2026-01-31T12:00:00Z, not {text[:40]!r}."
        raise bad_parameter(detail, field=name) from None
