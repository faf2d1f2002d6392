"""`/api/v1/streams/{name}/rejected`: the dead letters of a stream and the events that did not fit, by their reasons;
`/replay` publishes them again, `/purge` removes them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.operate.redaction import clean, project_secrets
from weft.server import bodies
from weft.server.actions import admit_body, start_command
from weft.server.consuming import query, whole
from weft.server.problems import Problem, bad_parameter
from weft.server.service import json_response, service_of
from weft.streams.declare import Stream
from weft.streams.events import in_rounds
from weft.streams.rejected import common, count_group, group_id, owners, places, whose
from weft.streams.runtime import OpenedStream, open_stream_async
from weft.systems.log import PUBLISHED_AT, ROWID

# The newest so many are grouped.
_GROUPED = 2000
_GROUPS = 20
_REASON = 300
_PAYLOAD = 2000
# How much of a reason is searched for secrets: a consumer may give one of any length.
_LOOKED_AT = 20_000


async def rejected(request: Request) -> Response:
    """Group what was rejected of a stream by its reason, the commonest first."""
    query(request)
    service = service_of(request)
    ready = await service.open(request, "read", to_read=True)
    groups: list[dict[str, Any]] = []
    for kind, stream in zip(("dead letter", "quarantined"), places(ready.stream), strict=True):
        if stream is None:
            continue
        # Several streams may share one place, whose letters are for those who may read all of them.
        await service.access.admit(request, stream, "read")
        with service.room(stream):
            opened = await open_stream_async(stream, to_read=True)
            groups += await opened.hub.in_thread(_grouped, opened, ready.stream, kind)
    groups.sort(key=lambda each: -each["count"])
    return json_response({"stream": ready.stream.name, "grouped": _GROUPED, "groups": groups[:_GROUPS]})


class UpTo(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `/replay` and `/purge`: the last offset, as a text, and the group; without one all. `dry_run` answers
    how many events there are."""

    group: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None = None
    upto: Annotated[str, Meta(pattern="^[0-9]{1,19}$")] | None = None
    dry_run: bool = False


async def replay(request: Request) -> Response:
    """Publish rejected events to their streams again."""
    return await _act(request, "replay")


async def purge(request: Request) -> Response:
    """Remove rejected events for good, from the quarantine or dead letters of a stream; never of a stream itself."""
    return await _act(request, "purge")


async def _act(request: Request, action: str) -> Response:
    key, asked = await admit_body(request, UpTo)
    ready = await service_of(request).open(request, "admin", to_read=True)
    name = ready.stream.name
    of = [each.name for each in owners(name)]
    if not of:
        text = f"{name} holds no rejected events of a stream."
        raise Problem(409, "refused", "Refused", text, hint="Name a quarantine or dead letters of a stream.")
    if asked.dry_run:
        count, head = await ready.hub.in_thread(_counted, ready, asked.group)
        plan = {"at": datetime.now(UTC), "stream": name, "of": of, "letters": count, "upto": str(head)}
        return json_response(plan)
    if asked.upto is None:
        raise bad_parameter("upto is the last offset: dry_run has it.", field="upto")
    chosen = [name, f"--before={whole(asked.upto, 'upto', 0) + 1}"]
    if asked.group is not None:
        chosen.append(f"--group={asked.group}")
    words = ["streams", action, *chosen, "--yes"]
    return await start_command(request, key, f"streams {action}", " ".join(chosen), words, name)


def _counted(place: OpenedStream, group: str | None) -> tuple[int, int]:
    """Return how many events a place has, or a group there, and the last offset."""
    head = place.log.head()
    return place.log.count() if group is None else count_group(place.log, group, head), head


def _grouped(opened: OpenedStream, owner: Stream, kind: str) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    secrets = project_secrets()
    for event in _newest(opened):
        if kind == "dead letter" and event.get("stream") != owner.name:
            continue
        # Without secrets before it is cut: of half a secret nobody knows that it is one.
        who, reason = whose(event), str(event.get("reason") or "no reason was given")[:_LOOKED_AT]
        known = {"group": group_id(event), "kind": kind, "of": who}
        known["reason"] = common(clean(reason, known=secrets), who)[:_REASON]
        group = groups.setdefault(known["group"], known | {"count": 0})
        group["count"] += 1
        group |= {
            "stream": opened.stream.name,
            "newest": event[PUBLISHED_AT],
            "rowid_text": str(event[ROWID]),
            # Cut now: each of many groups may have a large one.
            "payload": bodies.encode(event.get("event"))[:_PAYLOAD].decode("utf-8", "ignore"),
        }
    return list(groups.values())


def _newest(opened: OpenedStream) -> Iterator[dict[str, Any]]:
    """Yield the newest events of a stream, the oldest of them first."""
    log = opened.log
    first = log.nth_last(_GROUPED)
    yield from in_rounds(log, log.floor() if first is None else first - 1, log.head(), _GROUPED)
