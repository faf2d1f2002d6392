"""`weft consume-list`: the declared streaming pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import format_option, module_option, none_declared, print_json, print_table
from weft.errors import NotFoundError
from weft.project import current

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline
    from weft.systems.base import Connection


@click.command("consume-list")
@module_option
@format_option
def consume_list(modules: tuple[str, ...], output: str) -> None:
    """List the declared streaming pipelines: what each reads, where its rows go, and how often one may arrive."""
    rows = [_listed(each) for each in declared(modules).values()]
    if output == "json":
        print_json(rows)
        return
    shown = [
        {
            "name": row["name"],
            "sources": ", ".join(each["name"] for each in row["sources"]),
            "targets": ", ".join(each["name"] for each in row["targets"]),
            **{key: ", ".join(dict.fromkeys(each[key] for each in row["targets"])) for key in ("mode", "delivery")},
        }
        for row in rows
    ]
    print_table(shown, ["name", "sources", "targets", "mode", "delivery"], spare=["mode", "delivery"])


def declared(modules: tuple[str, ...]) -> dict[str, StreamingPipeline]:
    """Return the streaming pipelines of the project and of these modules; raise where there are none."""
    project = current()
    project.load_modules(modules)
    if not project.streaming_pipelines:
        if project.pipelines:
            raise NotFoundError(
                "None of the declared pipelines is a streaming one.", hint="weft list lists them, weft run runs them."
            )
        raise none_declared("streaming pipeline")
    return project.streaming_pipelines


def _listed(pipeline: StreamingPipeline) -> dict[str, Any]:
    from weft.pipelines.streaming.endpoints import delivery_to

    return {
        "name": pipeline.name,
        "sources": [{"name": each.name, "connection": _named(each.connection)} for each in pipeline.sources],
        "targets": [
            {
                "name": each.name,
                "connection": _named(each.connection),
                "mode": each.mode,
                "keys": list(each.primary_key),
                "delivery": delivery_to(pipeline, each),
            }
            for each in pipeline.targets
        ],
        "declared": pipeline.place,
        "description": pipeline.description,
    }


def _named(connection: str | Connection | None) -> str:
    """Return the name of a connection; of one without a name its target, which holds no secret."""
    if connection is None or isinstance(connection, str):
        return connection or "default"
    return connection.name or f"{connection.kind} {connection.target}"
