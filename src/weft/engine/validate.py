"""Whether a pipeline can run: asked of its databases, without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from weft.engine import inputs, run
from weft.engine.preview import preview
from weft.errors import WeftError
from weft.pipelines.declare import Pipeline, Target
from weft.project import current
from weft.systems.base import Connection


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    pipeline: str
    check: str
    detail: str
    problem: str | None = None
    delivery: str | None = None
    """Of a target of a streaming pipeline: how often a row may reach it."""


def validate(pipeline: Pipeline) -> Iterator[Finding]:
    """Look at everything that a run needs, and go on where something is wrong."""
    name = pipeline.name
    yield look(name, "upstream", lambda: _upstream(pipeline))
    source = run.source_of(pipeline, pipeline.targets[0])
    opened = look(name, "source", lambda: open_connection(current().connection(source)))
    yield opened
    reachable = opened.problem is None
    for target in pipeline.targets:
        if target.connection != source:
            found = look(name, "target", lambda target=target: open_connection(current().connection(target.connection)))  # type: ignore[misc]
            yield found
            if found.problem is not None:
                continue
        if reachable:
            yield look(name, f"load {target.name}", lambda target=target: _load(pipeline, target))  # type: ignore[misc]


def _upstream(pipeline: Pipeline) -> str:
    from weft.pipelines import graph

    graph.refuse_unknown({**current().pipelines, pipeline.name: pipeline})
    return ", ".join(pipeline.depends_on) or "none"


def look(pipeline: str, check: str, at: Callable[[], str], delivery: str | None = None) -> Finding:
    """Look at one thing: what is told of it, or what is wrong."""
    try:
        return Finding(pipeline, check, at(), delivery=delivery)
    except WeftError as error:
        return Finding(pipeline, check, "", str(error), delivery)
    except Exception as error:  # of the pipeline's own function
        return Finding(pipeline, check, "", f"{type(error).__name__}: {error}", delivery)


def open_connection(connection: Connection) -> str:
    """Ask a connection whether it answers, and say where it leads."""
    found = connection.check()
    return f"{connection.target} ({found.get('server', connection.kind)})"


def _load(pipeline: Pipeline, target: Target) -> str:
    given = run.understand(pipeline, run.produce(pipeline))
    if not isinstance(given, inputs.Sql):
        # Frames and rows are made anew by each run: what they hold is known then.
        return f"{type(given).__name__.lower()}, {target.options.get('mode', 'append')}"
    found = preview(pipeline, target, datetime.now(UTC), given=given, rows=0, trial=False)
    if found.refused is not None:
        raise found.refused
    made = "creates the table" if found.creates else "the table is there"
    added = f", adds {', '.join(found.adds)}" if found.adds else ""
    return f"{found.mode} by {found.engine}; {made}{added}; exactly once"
