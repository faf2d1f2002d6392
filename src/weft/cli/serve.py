"""`weft serve`: streams over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click

from weft.cli.common import metrics_option, module_names_option, run_log_option, traces_of_children_option


@contextmanager
def needs_server() -> Iterator[None]:
    """Around an import of the service: says what to install where that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        from weft.errors import MissingExtraError, installing

        raise MissingExtraError(f"The service needs the package {error.name!r}.", hint=installing("server")) from None


@click.command()
@module_names_option
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 128),
    help=f"How many processes answer. This machine has {os.cpu_count()} cores.",
)
@click.option(
    "--insecure", is_flag=True, help="Serve streams that need no credentials to anyone who reaches the address."
)
@click.option(
    "--log-format",
    type=click.Choice(["json", "text"]),
    default="json",
    show_default=True,
    envvar="WEFT_LOG_FORMAT",
    help="How each request is logged to standard error.",
)
@run_log_option
@metrics_option
@traces_of_children_option
@click.option("--no-worker", is_flag=True, help="Build no models: `weft worker` does it elsewhere.")
def serve(
    modules: tuple[str, ...],
    host: str,
    port: int,
    workers: int,
    insecure: bool,
    log_format: str,
    no_worker: bool,
    run_log: str | None,
    metrics: str | None,
) -> None:
    """Serve the declared streams over HTTP, until Ctrl-C or SIGTERM.

    Requests that were accepted are finished then, and subscriptions are closed; it takes ten seconds at most. Models
    are built by another process beside it when their inputs change.
    """
    with needs_server():
        from weft.server.serve import serve as serve_streams
    serve_streams(
        modules,
        host=host,
        port=port,
        workers=workers,
        insecure=insecure,
        log_format="json" if log_format == "json" else "text",
        models=not no_worker,
        run_log=run_log,
        metrics=metrics,
    )
