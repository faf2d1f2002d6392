"""`weft connections`: where names lead, whether they answer, and setting and removing them."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress
from pathlib import Path

import click

from weft import settings
from weft.cli.common import common_options, print_json, print_table, unused_module_option
from weft.errors import NotFoundError, nearest
from weft.project import DEFAULT, build_connection, check_name, current
from weft.systems.base import url_scheme


@click.group()
def connections() -> None:
    """List, check, set and remove connections.

    A name leads to the first of: WEFT_DSN_<NAME> (and WEFT_DSN for "default") in the environment, ./weft.toml,
    ~/.weft/connections.toml, what the project's modules register, and for "default" SQLite at .weft/weft.db.
    """


@connections.command("list")
@common_options
def list_(output: str) -> None:
    """List the connections, and which source defines each."""
    infos = current().describe_connections()
    if output == "json":
        print_json(infos)
        return
    rows = [{**dataclasses.asdict(info), "kind": info.kind or "?"} for info in infos]
    print_table(rows, ["name", "kind", "target", "source", "shadows"], seldom=["shadows"])
    for info in infos:
        if info.problem:
            click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {info.name}: {info.problem}", err=True)


@connections.command()
@click.argument("name", default=DEFAULT, metavar="[NAME]")
@common_options
def check(name: str, output: str) -> None:
    """Open the connection NAME ("default", if none is given) and run a trivial query."""
    project = current()
    connection = project.connection(name)
    source = project.where(name).source
    report = connection.check()
    if output == "json":
        print_json({"name": name, "kind": connection.kind, "source": source, **report})
        return
    latency, warning = report.pop("latency_ms", None), report.pop("warning", None)
    answer = "can be used" if latency is None else f"answers in {latency} ms"
    click.echo(f"{click.style('ok:', fg='green', bold=True)} {name} {answer}")
    for key, value in {**report, "source": source}.items():
        if value is not None:
            click.echo(f"  {key + ':':<10}{value}")
    if warning:
        click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {warning}", err=True)


@connections.command("set")
@click.argument("definition", metavar="NAME=DSN")
@click.option("--project", "in_project", is_flag=True, help="Write ./weft.toml, not ~/.weft/connections.toml.")
@unused_module_option
def set_(definition: str, in_project: bool) -> None:
    """Let NAME lead to DSN.

    For example: weft connections set warehouse='postgres://me:${PASSWORD}@host/db'

    Each ${VAR} is read from the environment when the connection is used. Quote it, or the shell replaces it now.
    """
    name, equals, url = definition.partition("=")
    if not equals or not url:
        # Not quoted: what was given may be a DSN without a name.
        raise click.UsageError("Give NAME=DSN, for example warehouse='postgres://me:${PASSWORD}@host/db'.")
    check_name(name)
    if url_scheme(url) or not settings.has_references(url):
        connection = build_connection(name, {"url": url}, "weft connections set")
        if not settings.has_references(url):
            connection.resolved()  # checks the rest of the URL
    project = current()
    shown = settings.PROJECT_FILE if in_project else settings.USER_FILE
    before = settings.write_connection(_file(in_project), name, url)
    click.echo(f"{name} = {settings.redact_url(url)} in {shown}")
    if before is not None and before != {"url": url}:
        was = before.get("url") if isinstance(before, dict) else None
        replaced = settings.redact_url(was) if isinstance(was, str) else "another definition"
        click.echo(f"note: it replaces {replaced}", err=True)
    if in_project and settings.redact_url(url) != url:
        variable = f"{re.sub('[^A-Z0-9]', '_', name.upper())}_PASSWORD"
        click.echo(
            f"note: a password is now in {shown}, in plain text. Write ${{{variable}}} in its place and keep it in the "
            "environment.",
            err=True,
        )
    winner = project.where(name).source
    if winner != shown:
        click.echo(f"note: {name} is also defined by {winner}, which wins.", err=True)
    click.echo(f"Try it: weft connections check {name}")


@connections.command()
@click.argument("name")
@click.option("--project", "in_project", is_flag=True, help="Edit ./weft.toml, not ~/.weft/connections.toml.")
@unused_module_option
def remove(name: str, in_project: bool) -> None:
    """Take the connection NAME out of the file."""
    project = current()
    shown, other = settings.USER_FILE, settings.PROJECT_FILE
    if in_project:
        shown, other = other, shown
    if not settings.remove_connection(_file(in_project), name):
        file = settings.read_project_file(project.root) if in_project else settings.read_user_file()
        close = nearest(name, file.get("connections", {}))
        source = project.where(name).source if close is None else None  # raises for a name that nothing defines
        hint = f"Did you mean {close!r}?" if close else f"It is defined by {source}."
        if source == other:
            hint += f" Try {'without' if in_project else 'with'} --project."
        raise NotFoundError(f"There is no connection named {name!r} in {shown}.", hint=hint)
    click.echo(f"{name} is removed from {shown}")
    with suppress(NotFoundError):
        click.echo(f"note: {name} is still defined by {project.where(name).source}.", err=True)


def _file(in_project: bool) -> Path:
    return settings.project_file(current().root) if in_project else settings.user_file()
