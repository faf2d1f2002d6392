"""`/api/v1/models/{model}`: the status of a model, its columns and their origins, as `weft models show` has it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.pipelines.models import Model, find
from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import query_of_all
from weft.server.graph import Graph
from weft.server.problems import later
from weft.server.service import json_response

_FRESH_SECONDS, _ANSWER_SECONDS = 10.0, 10.0


class Models:
    """What this process last read of the models."""

    def __init__(self) -> None:
        self._each: dict[str, CachedProbe[dict[str, Any]]] = {}

    def one(self, model: Model) -> CachedProbe[dict[str, Any]]:
        """Return the probe of one: it asks the databases of its inputs, which may hang."""
        probe = CachedProbe(lambda: read_model(find(model.name)), fresh_seconds=_FRESH_SECONDS)
        return self._each.setdefault(model.name, probe)


async def model(request: Request) -> Response:
    """Show whether a model is fresh, its rows, its inputs, its columns and where they come from."""
    await query_of_all(request)
    known: Models = request.app.state.models
    try:
        return json_response(await known.one(find(request.path_params["model"])).get(_ANSWER_SECONDS))
    except TimeoutError:
        text = "A database of this model does not answer."
        raise later(503, "unavailable", "Not available", text, _FRESH_SECONDS) from None


def read_model(model: Model) -> dict[str, Any]:
    """Return the status of a model. Blocks."""
    from weft.engine.models.inputs import Observer
    from weft.engine.models.survey import Survey
    from weft.operate.redaction import clean
    from weft.pipelines.models import dependents, models

    with Observer() as observer:
        survey = Survey(observer, is_watched=True)
        status = survey.status(model)
        described = survey.described(model)
    problem, sql, graph = described["problem"], described["sql"], Graph(current())

    def origin(field: str) -> dict[str, Any]:
        table, _, column = field.rpartition(".")
        source = graph.origin(table, model.target.connection) or {"kind": None, "name": None}
        return {"kind": source["kind"], "name": source["name"], "table": table, "column": column}

    return {
        "at": datetime.now(UTC),
        "model": model.name,
        "table": model.target.name,
        "materialise": str(model.materialise),
        "state": status.state,
        "why": clean(status.why) or None,
        "built_at": status.built_at,
        "rows": status.rows,
        "inputs": [{"name": each.name, "kind": each.kind, "new": each.new} for each in status.inputs],
        "left_out": list(map(clean, status.left_out)),
        "dependents": dependents([model.name, model.target.name], models()),
        "engine": described["engine"],
        "sql": None if sql is None else clean(sql, most=100_000),
        "columns": [
            {**each, "comes_from": None if each["comes_from"] is None else list(map(origin, each["comes_from"]))}
            for each in described["columns"]
        ],
        "problem": None if problem is None else clean(problem),
    }
