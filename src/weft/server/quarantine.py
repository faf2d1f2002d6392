"""`/api/v1/pipelines/{pipeline}/quarantine`: the rows that the targets of a pipeline rejected, by their errors."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.operate.redaction import clean, project_secrets
from weft.pipelines.declare import Pipeline, find
from weft.project import current
from weft.server.consuming import query
from weft.server.run_log import in_thread, told
from weft.server.service import json_response, service_of
from weft.systems.base import system_for
from weft.systems.sql.tables import SqlTables

# The newest so many are grouped.
_GROUPED, _GROUPS = 2000, 20
_ERROR, _PAYLOAD = 300, 2000
# So many requests wait for targets: one that hangs takes no thread from the run log.
_room = threading.BoundedSemaphore(4)
_COLUMNS = ("_weft_error", "_weft_pipeline", "_weft_quarantined_at")


async def quarantine(request: Request) -> Response:
    """Group the rows that were put aside by their errors, the commonest first, for each target."""
    query(request)
    await service_of(request).access.admit_to_all(request)
    pipeline = find(request.path_params["pipeline"])
    found = await in_thread(told(lambda: read_quarantine(pipeline)), "The database of a target", _room)
    return json_response({"at": datetime.now(UTC), "pipeline": pipeline.name, "grouped": _GROUPED, "tables": found})


def read_quarantine(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return what each target of a pipeline has put aside of its rows; targets without a quarantine are left out."""
    found = []
    for target in pipeline.targets:
        connection = current().connection(target.connection or target.table.connection)
        system = system_for(connection.kind)
        # Files and Delta tables have none. A database that is not there yet is not made by a look at it.
        if system.tables is None or connection.is_missing():
            continue
        with closing(system.load_tables()(connection)) as tables:
            table = _read(tables, target.table.schema, f"{target.table.name}__quarantine", pipeline.name)
        if table is not None:
            found.append(table)
    return found


def _read(tables: SqlTables, schema: str | None, name: str, pipeline: str) -> dict[str, Any] | None:
    error, owner, at = map(tables.quote, _COLUMNS)
    with tables.driver.session("read") as session:
        if tables.columns(session, schema, name) is None:
            return None
        of_pipeline = f"FROM {tables.table(schema, name)} WHERE {owner} = ?"
        count = int(session.value(f"SELECT count(*) {of_pipeline}", (pipeline,)))
        newest = f"SELECT {error}, payload {of_pipeline} ORDER BY {at} DESC LIMIT {_GROUPED}"
        rows = session.rows(newest, (pipeline,))
    groups: dict[str, dict[str, Any]] = {}
    secrets = project_secrets()
    for text, payload in rows:
        # Without secrets before it is cut: of half a secret nobody knows that it is one.
        reason = clean(str(text)[:10_000].partition("\n")[0], known=secrets)[:_ERROR]
        group = groups.setdefault(reason, {"error": reason, "count": 0, "payload": str(payload)[:_PAYLOAD]})
        group["count"] += 1
    common = sorted(groups.values(), key=lambda each: -each["count"])
    full = name if schema is None else f"{schema}.{name}"
    return {"table": full, "count": count, "groups": common[:_GROUPS]}
