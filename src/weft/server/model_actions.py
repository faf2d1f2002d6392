"""`/api/v1/pipelines/NAME/plan` and `/backfill`: what has changed in a model, and a range of time built again."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.operate.redaction import clean
from weft.pipelines.models import Model, find
from weft.server.actions import admit_body, start_command
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import in_utc, query_of_all
from weft.server.problems import bad_parameter
from weft.server.run_log import answered, as_problems, in_thread
from weft.server.service import json_response

# Limits the requests that wait for the inputs of models.
_room = threading.BoundedSemaphore(4)
_STEP = ("change", "rows", "full", "because", "added", "dropped", "retyped", "unknown", "outcome")


class Backfill(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `/backfill`: the times of publication. `dry_run` answers how many events these are."""

    since: datetime
    until: datetime | None = None
    dry_run: bool = False

    def check(self) -> None:
        since = in_utc(self.since, "since")
        if self.until is not None and in_utc(self.until, "until") <= since:
            raise bad_parameter("until must be after since.", field="until")

    def words(self) -> list[str]:
        """Return the options of `weft backfill`."""
        times = {"since": self.since, "until": self.until}
        return [f"--{name}={in_utc(at, name).isoformat()}" for name, at in times.items() if at is not None]


class Plans:
    """What reads the plans of models: each once for all who ask at the same time."""

    def __init__(self) -> None:
        self._each: dict[str, CachedProbe[dict[str, Any] | None]] = {}

    def of(self, model: Model) -> CachedProbe[dict[str, Any] | None]:
        """Return the probe of one: it asks the databases of all models, which may hang."""
        read = as_problems(lambda: _step(find(model.name)))
        return self._each.setdefault(model.name, CachedProbe(read, fresh_seconds=0))


async def plan(request: Request) -> Response:
    """Show what has changed in a model since it was built, and what `weft apply` would do; nothing is changed."""
    await query_of_all(request)
    model = find(request.path_params["pipeline"])
    known: Plans = request.app.state.plans
    return json_response({"model": model.name, "step": await answered(known.of(model), "The plan")})


def _step(model: Model) -> dict[str, Any] | None:
    from weft.engine.models.inputs import Observer
    from weft.engine.models.planning import make_plan
    from weft.engine.models.survey import Survey

    with Observer() as observer:
        plan = make_plan(Survey(observer, is_watched=True), with_removed=False)
    steps = [each for each in plan if each.model == model.name]
    if not steps:
        return None
    problem = steps[0].problem
    shown = {name: getattr(steps[0], name) for name in _STEP}
    return shown | {"problem": None if problem is None else clean(problem)}


async def backfill(request: Request) -> Response:
    """Build again what came to a model in a range of time."""
    key, asked = await admit_body(request, Backfill)
    asked.check()
    model = find(request.path_params["pipeline"])
    if asked.dry_run:
        return json_response(
            await in_thread(as_problems(lambda: _planned(model, asked)), "The inputs of the model", _room)
        )
    # Refused here as at a terminal, before anything is started.
    await in_thread(as_problems(lambda: _planned(model, asked)), "The inputs of the model", _room)
    words = ["backfill", model.name, *asked.words()]
    return await start_command(request, key, "backfill", " ".join(words[1:]), words, model.name)


def _planned(model: Model, asked: Backfill) -> dict[str, Any]:
    """Return how many events a backfill reads again."""
    from weft.engine.models.build import ModelRun
    from weft.engine.models.inputs import Observer
    from weft.engine.readers import StreamReader

    now = datetime.now(UTC)
    with Observer() as observer:
        _, sources = ModelRun(model, "plan", now).backfilled(observer, (asked.since, asked.until))
        readers = {each.input.name: each.reader for each in sources}
    events = {name: each.upto - each.after for name, each in readers.items() if isinstance(each, StreamReader)}
    others = [name for name in readers if name not in events]
    return {"at": now, "pipeline": model.name, "events": events, "others": others, "target": model.target.name}
