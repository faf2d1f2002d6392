"""`/api/v1/graph`: streams, pipelines, models, streaming pipelines and tables, and what flows from which to which."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from weft.project import DEFAULT, Project, current
from weft.server.consuming import query_of_all
from weft.server.service import json_response
from weft.streams.declare import Stream
from weft.systems.base import Connection

if TYPE_CHECKING:
    from weft.pipelines.models import Model
    from weft.pipelines.streaming.spec import Source, Target

Place = str | Connection | None


async def graph(request: Request) -> Response:
    """Answer with the nodes and edges of the project, by its declarations alone: no database is asked."""
    await query_of_all(request)
    return json_response(Graph(current()).answer())


class Graph:
    """Nodes by their ids, and edges between these."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._nodes: dict[str, dict[str, Any]] = {}
        self._edges: dict[tuple[str, str], None] = {}
        for stream in list(project.streams.values()):
            self._node("stream", stream.name)
        if project.pipelines:
            self._add_pipelines()
        for each in list(project.streaming_pipelines.values()):
            node = self._node("streaming", each.name)
            for source in each.sources:
                self._edge(self._source(source), node)
            for target in each.targets:
                self._edge(node, self._target(target))

    def answer(self) -> dict[str, Any]:
        return {
            "nodes": list(self._nodes.values()),
            "edges": [{"from": start, "to": end} for start, end in self._edges],
        }

    def origin(self, table: str, connection: Place) -> dict[str, Any] | None:
        """Return the node that stands for the rows of an input: a stream, a model, or what writes the table; `None`
        where nothing here does."""
        from weft.pipelines.models import by_names, models

        node = self._input(table, connection, by_names(models(self._project)))
        if self._nodes[node]["kind"] == "table":
            node = next((start for start, end in self._edges if end == node), node)
        known = self._nodes[node]
        return None if known["kind"] == "table" else known

    def _node(self, kind: str, name: str, connection: Place = None, *, where: bool = False) -> str:
        """Return the id of a node. Tables of one name in two databases are two nodes: `where`."""
        place = _called(connection) if where else None
        node = f"{kind}:{place}.{name}" if where else f"{kind}:{name}"
        self._nodes.setdefault(node, {"id": node, "kind": kind, "name": name, "connection": place})
        return node

    def _edge(self, start: str, end: str) -> None:
        if start != end:
            self._edges[start, end] = None

    # -------------------------------------------------------------------------------------------- pipelines and models

    def _add_pipelines(self) -> None:
        from weft.pipelines.models import Model, by_names, models

        known = models(self._project)
        called = by_names(known)
        pipelines = list(self._project.pipelines.values())
        for each in pipelines:
            node = self._node("model" if isinstance(each, Model) else "pipeline", each.name)
            if isinstance(each, Model):  # its table has its name: one node stands for both
                continue
            for target in each.targets:
                self._edge(node, self._table(target.name, target.connection or target.table.connection, called))
        for each in pipelines:
            if isinstance(each, Model):
                for one in each.inputs:
                    self._edge(self._input(one.name, each.target.connection, called), f"model:{each.name}")
            else:
                if each.source_table is not None:
                    source = self._input(each.source_table, each.source_connection, called)
                    self._edge(source, f"pipeline:{each.name}")
                for upstream in each.depends_on:
                    if upstream in self._project.pipelines:
                        kind = "model" if upstream in known else "pipeline"
                        self._edge(f"{kind}:{upstream}", f"pipeline:{each.name}")

    def _table(self, name: str, connection: Place, called: dict[str, Model]) -> str:
        model = called.get(f"{_called(connection)}.{name}")
        return f"model:{model.name}" if model is not None else self._node("table", name, connection, where=True)

    def _input(self, name: str, connection: Place, called: dict[str, Model]) -> str:
        """Return the node of what a model calls by a name: another model, a stream, or a table."""
        if name in called:
            return f"model:{called[name].name}"
        for stream in list(self._project.streams.values()):
            if name in (stream.name, f"{stream.schema}.{stream.name}"):
                return f"stream:{stream.name}"
        place, dot, rest = name.partition(".")
        if dot and f"table:{name}" in self._nodes:
            return self._node("table", rest, place, where=True)
        return self._node("table", name, connection, where=True)

    # --------------------------------------------------------------------------------------------- streaming pipelines

    def _source(self, source: Source) -> str:
        return self._stream(source.query, source.connection) or self._node(
            "source", source.name, source.connection, where=True
        )

    def _target(self, target: Target) -> str:
        if target.table is not None:
            from weft.pipelines.models import by_names, models

            return self._table(target.name, target.connection, by_names(models(self._project)))
        if target.stream is not None and (stream := self._stream(target.stream, target.connection)) is not None:
            return stream
        return self._node("target", target.name, target.connection, where=True)

    def _stream(self, named: str | Stream, connection: Place) -> str | None:
        """Return the node of a declared stream; `None` for a topic, a file or a table of that name."""
        name = named if isinstance(named, str) else named.name
        declared = self._project.streams.get(name)
        if declared is None or (isinstance(named, str) and _called(declared.connection) != _called(connection)):
            return None
        return f"stream:{name}"


def _called(connection: Place) -> str:
    """Return the name of a connection, which holds no secret."""
    if isinstance(connection, Connection):
        return connection.name or connection.kind
    return connection or DEFAULT
