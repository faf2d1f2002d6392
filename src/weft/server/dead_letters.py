"""`/api/v1/dead-letters`: the rows that streaming pipelines could not read, transform or store, as `weft dlq` has them;
and which streams and pipelines put something aside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from heapq import nlargest
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import WeftError
from weft.operate.redaction import clean, project_secrets
from weft.pipelines.streaming.declare import find
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.server.actions import admit_body, start_command
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import in_utc, query_of_all, whole
from weft.server.overview import Overview
from weft.server.problems import Problem, bad_parameter
from weft.server.quarantine import read_counts
from weft.server.run_log import as_problems, in_thread
from weft.server.service import json_response
from weft.streams.rejected import places
from weft.systems.dead_letter_store import STAGES, StoredLetter

if TYPE_CHECKING:
    from weft.engine.streaming.dead_letters import DeadLetterBox

# The most letters of a pipeline that an answer reads, and the most records of a store that pipelines share.
_LETTERS, _RECORDS = 10_000, 50_000
_GROUPS = 20
_LISTED, _MOST_LISTED = 20, 100
_ERROR = 300
_PAYLOAD, _WHOLE_PAYLOAD = 2000, 64 * 1024
_FRESH_SECONDS = 5.0
_LIST_SECONDS = 8.0
# How many stores a list reads at a time; at most four requests wait for a store.
_AT_ONCE = 8
_room = threading.BoundedSemaphore(4)
_WHAT = "The place of the dead letters"


class Chosen(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `/replay` and `/purge`: which letters. `dry_run` answers how many these are."""

    ids: Annotated[list[Annotated[str, Meta(min_length=1, max_length=100)]], Meta(max_length=100)] = []
    all: bool = False
    error: Annotated[str, Meta(min_length=1, max_length=2000)] | None = None
    stage: Annotated[str, Meta(pattern=f"^({'|'.join(STAGES)})$")] | None = None
    group: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None = None
    before: datetime | None = None
    dry_run: bool = False

    def check(self) -> None:
        """Refuse a choice of nothing, so that nobody chooses all by mistake, and one that says two things."""
        has_filter = any(each is not None for each in (self.error, self.stage, self.group))
        if bool(self.ids) + self.all + has_filter != 1:
            raise bad_parameter("Choose letters by ids, by group, error or stage, or all of them.")
        if self.before is not None and self.ids:
            raise bad_parameter("before does not go with ids.", field="before")
        if self.before is not None:
            in_utc(self.before, "before")
        # No process takes an argument with the character 0.
        if any("\0" in each for each in (*self.ids, self.error or "")):
            raise bad_parameter("ids and error must not have the character 0.")

    def words(self) -> list[str]:
        """Return the options of `weft dlq` that choose the same. With `=`: an error may begin with a dash."""
        words = [f"--id={each}" for each in self.ids]
        if self.error is not None:
            words.append(f"--error={self.error}")
        if self.stage is not None:
            words.append(f"--stage={self.stage}")
        if self.group is not None:
            words.append(f"--group={self.group}")
        if self.before is not None:
            words.append(f"--before={in_utc(self.before, 'before').isoformat()}")
        return words or ["--all"]


class DeadLetterCache:
    """What this process last read of the dead letters."""

    def __init__(self) -> None:
        self._each: dict[str, CachedProbe[dict[str, Any]]] = {}
        self._quarantines = CachedProbe(read_counts, fresh_seconds=_FRESH_SECONDS)

    async def quarantines(self) -> list[dict[str, Any]]:
        """Return how many rows the targets of pipelines have put aside; nothing where their databases do not answer."""
        try:
            return await self._quarantines.get(_LIST_SECONDS)
        except TimeoutError:
            return []

    async def of(self, pipeline: StreamingPipeline, seconds: float = _LIST_SECONDS) -> dict[str, Any]:
        """Return the letters of a pipeline by error; where its place does not answer, that it does not."""
        probe = CachedProbe(lambda: read_letters(find(pipeline.name)) or {}, fresh_seconds=_FRESH_SECONDS)
        try:
            return await self._each.setdefault(pipeline.name, probe).get(seconds)
        except TimeoutError:
            return _unknown(f"{_WHAT} does not answer.")

    async def of_all(self, pipelines: Sequence[StreamingPipeline]) -> list[dict[str, Any]]:
        """Return the letters of several pipelines within the time for one. A store that takes longer than its turn is
        in the next list: its thread goes on."""
        turns = asyncio.Semaphore(_AT_ONCE)
        seconds = _LIST_SECONDS / max(1, ceil(len(pipelines) / _AT_ONCE))

        async def one(pipeline: StreamingPipeline) -> dict[str, Any]:
            async with turns:
                return await self.of(pipeline, seconds)

        return await asyncio.gather(*map(one, pipelines))


def _unknown(problem: str) -> dict[str, Any]:
    return {"count": None, "more": False, "newest": None, "place": None, "groups": [], "problem": problem}


def read_letters(pipeline: StreamingPipeline) -> dict[str, Any] | None:
    """Return the dead letters of a pipeline by their errors, the commonest first; `None` where it has no place for
    them."""
    from weft.engine.streaming.dead_letter_selection import summary
    from weft.engine.streaming.dead_letters import DeadLetterBox

    if pipeline.dead_letters is None:
        return None
    secrets = project_secrets()
    try:
        box = DeadLetterBox(pipeline)
        if box.why_unwatched is not None:
            problem = f"They are not read here: {box.why_unwatched}. weft dlq list {pipeline.name}"
            return _unknown(problem) | {"place": box.store.name}
        counted = summary(box.letters(_RECORDS), most=_LETTERS)
        more = counted.more or box.has_more
    except WeftError as error:
        return _unknown(clean(error.what, known=secrets))
    groups = [
        {
            "group": each.group_id,
            "stage": each.stage,
            "error": _first_line(each.newest, secrets),
            "count": each.count,
            "newest": each.newest.failed_at,
            "letter_id": each.newest.letter_id,
            "payload": str(each.newest.payload)[:_PAYLOAD],
        }
        for each in counted.groups[:_GROUPS]
    ]
    # They come in no order: of some of them, none is the newest of all.
    newest = None if more else counted.newest
    known = {"count": counted.count, "more": more, "newest": newest, "place": box.store.name}
    return known | {"groups": groups, "problem": None}


def _first_line(letter: StoredLetter, secrets: set[str]) -> str:
    """Return the beginning of an error. Secrets are removed before it is cut: of half a secret nobody knows that it is
    one."""
    return clean(letter.error.strip().partition("\n")[0], known=secrets)[:_ERROR]


# -------------------------------------------------------------------------------------------------------------- looking


async def dead_letters(request: Request) -> Response:
    """List what was put aside: by streaming pipelines, by streams, and by the targets of pipelines."""
    await query_of_all(request)
    letters: DeadLetterCache = request.app.state.dead_letters
    known: Overview = request.app.state.overview
    declared = [each for each in list(current().streaming_pipelines.values()) if each.dead_letters is not None]
    read, quarantines, _ = await asyncio.gather(letters.of_all(declared), letters.quarantines(), known.update())
    streams = []
    for stream in list(current().streams.values()):
        dead, misfits = places(stream)
        standing = known.standings[stream.name]
        for kind, place, count in (
            ("dead letters", dead, standing.dead_letters),
            ("quarantined", misfits, standing.quarantined),
        ):
            if place is not None:
                streams.append({"stream": stream.name, "kind": kind, "place": place.name, "count": count})
    pipelines = [{"pipeline": each.name, **state} for each, state in zip(declared, read, strict=True)]
    return json_response(
        {"at": datetime.now(UTC), "pipelines": pipelines, "streams": streams, "quarantines": quarantines}
    )


async def pipeline_letters(request: Request) -> Response:
    """Show the newest letters of a pipeline: all, or those with a text in their error or of one stage. With `more` they
    are the newest of those that were looked at."""
    parameters = await query_of_all(request, "error", "stage", "limit")
    limit = min(whole(parameters.get("limit", str(_LISTED)), "limit", 1), _MOST_LISTED)
    error, stage = parameters.get("error"), parameters.get("stage")
    if stage is not None and stage not in STAGES:
        raise bad_parameter(f"There is no stage {stage[:40]!r}; there are {', '.join(STAGES)}.", field="stage")
    pipeline = find(request.path_params["pipeline"])
    letters: DeadLetterCache = request.app.state.dead_letters

    def read() -> list[StoredLetter]:
        from weft.engine.streaming.dead_letter_selection import passing

        matching = islice(filter(passing(error, stage), _box(pipeline).letters(_RECORDS)), _LETTERS)
        return nlargest(limit, matching, key=lambda each: (each.failed_at, each.letter_id))

    if pipeline.dead_letters is None:
        known, newest = _unknown(f"{pipeline.name} has no place for dead letters."), []
    else:
        known = await letters.of(pipeline)
        newest = await in_thread(read, _WHAT, _room) if known["problem"] is None else []
    return json_response(
        {
            "at": datetime.now(UTC),
            "pipeline": pipeline.name,
            "targets": [each.name for each in pipeline.targets],
            **known,
            "letters": _described(newest, _PAYLOAD),
        }
    )


async def letter(request: Request) -> Response:
    """Show one letter, by the beginning of its id."""
    await query_of_all(request)
    pipeline, start = find(request.path_params["pipeline"]), request.path_params["letter_id"][:100]

    def read() -> StoredLetter:
        from weft.engine.streaming.dead_letter_selection import named

        return named(_box(pipeline), [start])[start]

    return json_response(_described([await in_thread(as_problems(read), _WHAT, _room)], _WHOLE_PAYLOAD)[0])


def _described(letters: Sequence[StoredLetter], most: int) -> list[dict[str, Any]]:
    """Return letters as `weft dlq show --format json` has them, with so much of their payloads."""
    secrets = project_secrets()
    return [
        each.record()
        | {"error": clean(each.error, known=secrets), "payload": each.payload[:most], "cut": len(each.payload) > most}
        for each in letters
    ]


def _box(pipeline: StreamingPipeline) -> DeadLetterBox:
    from weft.engine.streaming.dead_letters import DeadLetterBox

    box = DeadLetterBox(pipeline)
    if box.why_unwatched is not None:
        text = f"Its letters are not read here: {box.why_unwatched}."
        raise Problem(409, "by-command", "A command reads them", text, hint=f"weft dlq list {pipeline.name}")
    return box


# --------------------------------------------------------------------------------------------------------------- acting


async def replay(request: Request) -> Response:
    """Run letters through the pipeline once more, in a process of its own: it may need Spark."""
    return await _act(request, "replay")


async def purge(request: Request) -> Response:
    """Remove letters for good."""
    return await _act(request, "purge")


async def _act(request: Request, action: str) -> Response:
    key, asked = await admit_body(request, Chosen)
    asked.check()
    if action == "replay" and asked.before is not None:
        raise bad_parameter("A replay knows no before.", field="before")
    pipeline = find(request.path_params["pipeline"])
    if asked.dry_run:
        return json_response(await in_thread(as_problems(lambda: _plan(pipeline, action, asked)), _WHAT, _room))
    words = ["dlq", action, pipeline.name, *asked.words(), *(["--yes"] if action == "purge" else [])]
    named = f"{pipeline.name} {' '.join(asked.words())}"
    return await start_command(request, key, f"dlq {action}", named, words, pipeline.name)


def _plan(pipeline: StreamingPipeline, action: str, asked: Chosen) -> dict[str, Any]:
    """Return what `--dry-run` says."""
    from weft.engine.streaming.dead_letter_selection import wanted
    from weft.engine.streaming.replay import Replay

    box, now = _box(pipeline), datetime.now(UTC)
    chosen = wanted(box, asked.ids, asked.error, asked.stage, asked.before, asked.group)
    held: dict[str, int] = {}
    if action == "replay":
        done = Replay(pipeline, chosen).plan()
        letters = done.letters
        for why in done.held.values():
            held[why] = held.get(why, 0) + 1
    else:
        letters = sum(1 for each in box.letters() if chosen(each))
    targets = [each.name for each in pipeline.targets]
    return {"at": now, "pipeline": pipeline.name, "letters": letters, "held": held} | {
        "place": box.store.name,
        "targets": targets,
    }
