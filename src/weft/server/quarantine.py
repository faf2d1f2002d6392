"""`/api/v1/pipelines/{pipeline}/quarantine`: the rows that the targets of a pipeline rejected, by their errors;
`/replay` loads them once more, `/purge` removes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import WeftError
from weft.operate.redaction import clean, project_secrets
from weft.pipelines.declare import Pipeline, PipelineTarget, find
from weft.project import current
from weft.server.actions import admit_body, start_command
from weft.server.consuming import query_of_all
from weft.server.problems import bad_parameter
from weft.server.run_log import as_problems, in_thread
from weft.server.service import json_response
from weft.systems.base import system_for
from weft.systems.load import full_name
from weft.systems.sql.quarantine import group_of, name_for
from weft.systems.sql.tables import SqlTables

# The newest so many are grouped.
_GROUPED, _GROUPS = 2000, 20
_ERROR, _PAYLOAD = 300, 2000
# Limits the requests that wait for targets: one that hangs takes no thread from the run log.
_room = threading.BoundedSemaphore(4)
_COLUMNS = ("_weft_error", "_weft_pipeline", "_weft_quarantined_at")


async def quarantine(request: Request) -> Response:
    """Group the rows that were put aside by their errors, the commonest first, for each target."""
    await query_of_all(request)
    pipeline = find(request.path_params["pipeline"])
    tables = await in_thread(as_problems(lambda: read_quarantine(pipeline)), "The database of a target", _room)
    return json_response({"at": datetime.now(UTC), "pipeline": pipeline.name, "grouped": _GROUPED, "tables": tables})


class ChosenRows(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `/replay` and `/purge`: which rows, and how many they must be. `dry_run` answers how many."""

    all: bool = False
    group: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None = None
    rows: Annotated[int, Meta(ge=0)] | None = None
    dry_run: bool = False

    def words(self) -> list[str]:
        """Return the options of `weft quarantine` that choose the same."""
        if self.all == (self.group is not None):
            raise bad_parameter("Choose rows by group, or all of them.")
        return ["--all"] if self.group is None else [f"--group={self.group}"]


async def replay(request: Request) -> Response:
    """Load rows once more, in a process of its own: it may need Spark."""
    return await _act(request, "replay")


async def purge(request: Request) -> Response:
    """Remove rows for good."""
    return await _act(request, "purge")


async def _act(request: Request, action: str) -> Response:
    key, asked = await admit_body(request, ChosenRows)
    words = asked.words()
    pipeline = find(request.path_params["pipeline"])
    if asked.dry_run:
        work = as_problems(lambda: _plan(pipeline, action, asked))
        return json_response(await in_thread(work, "The database of a target", _room))
    if asked.rows is None:
        raise bad_parameter("rows is how many rows are meant: dry_run has it.", field="rows")
    named = f"{pipeline.name} {words[0]}"
    words = ["quarantine", action, pipeline.name, *words, f"--expect={asked.rows}"]
    words += ["--yes"] if action == "purge" else []
    return await start_command(request, key, f"quarantine {action}", named, words, pipeline.name)


def _plan(pipeline: Pipeline, action: str, asked: ChosenRows) -> dict[str, Any]:
    """Return what `--dry-run` says."""
    from weft.engine import quarantined

    counted = quarantined.count(pipeline, asked.group, to_replay=action == "replay")
    known = {"at": datetime.now(UTC), "pipeline": pipeline.name, "letters": counted.rows, "held": counted.held}
    return known | {"place": ", ".join(counted.places), "targets": counted.targets}


def read_quarantine(pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return what each target of a pipeline has put aside of its rows; targets without a quarantine are left out."""
    places = []
    for target in pipeline.targets:
        with _opened(target) as tables:
            if tables is not None:
                places.append(_read(tables, target.table.schema, name_for(target.table.name), pipeline.name))
    return [each for each in places if each is not None]


def read_counts() -> list[dict[str, Any]]:
    """Return how many rows each pipeline has in quarantine, of those that have some or whose database is away."""
    rows = []
    for pipeline in list(current().pipelines.values()):
        counts: dict[str, int | None] = {}
        for target in filter(_may_put_aside, pipeline.targets):
            name = full_name(target.table.schema, name_for(target.table.name))
            try:
                with _opened(target) as tables:
                    number = 0 if tables is None else _count(tables, target, pipeline.name)
            except WeftError:
                number = None
            if number != 0:
                counts[name] = number
        if counts:
            known = [each for each in counts.values() if each is not None]
            count = sum(known) if len(known) == len(counts) else None
            rows.append({"pipeline": pipeline.name, "count": count, "tables": list(counts)})
    return rows


def _may_put_aside(target: PipelineTarget) -> bool:
    reactions = (each.reaction or target.on_quality_failure for each in target.expectations)
    return target.options.get("on_bad_rows") == "quarantine" or "quarantine" in reactions


@contextmanager
def _opened(target: PipelineTarget) -> Iterator[SqlTables | None]:
    """Open the tables of a target; `None` where it can have no quarantine."""
    connection = current().connection(target.connection or target.table.connection)
    system = system_for(connection.kind)
    # Files and Delta tables have none. A database that is not there yet is not made by a look at it.
    if system.tables is None or connection.is_missing():
        yield None
        return
    with closing(system.load_tables()(connection)) as tables:
        yield tables


def _count(tables: SqlTables, target: PipelineTarget, pipeline: str) -> int:
    schema, name = target.table.schema, name_for(target.table.name)
    with tables.driver.session("read") as session:
        if tables.columns(session, schema, name) is None:
            return 0
        owner = tables.quote("_weft_pipeline")
        return int(session.value(f"SELECT count(*) FROM {tables.table(schema, name)} WHERE {owner} = ?", (pipeline,)))


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
        group = group_of(str(text))
        entry = {"group": group, "error": reason, "count": 0, "payload": str(payload)[:_PAYLOAD]}
        groups.setdefault(group, entry)["count"] += 1
    common = sorted(groups.values(), key=lambda each: -each["count"])
    return {"table": full_name(schema, name), "count": count, "groups": common[:_GROUPS]}
