"""`weft engine`: the process that keeps Spark warm for the commands of a project."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import click

from weft.cli.common import format_option, plural, print_json, time_text, unused_module_option
from weft.engine import warm
from weft.errors import WeftError

# Modules that commands import, or Spark for them.
_MODULES = (
    "pandas",
    "pyspark.sql",
    "pyspark.sql.datasource",
    "pyarrow.compute",
    "pyarrow.parquet",
    "rich.console",
    "rich.progress",
    "weft.cli.consume",
    "weft.cli.inspect",
    "weft.cli.pipelines",
    "weft.engine.frames",
    "weft.engine.load",
    "weft.engine.preview",
    "weft.engine.run",
    "weft.engine.validate",
    "weft.operate.alerts",
    "weft.operate.runlog",
    "weft.operate.runner",
    "weft.systems.duckdb.tables",
    "weft.systems.mysql.tables",
    "weft.systems.postgres.tables",
    "weft.systems.sqlite.tables",
)


@click.group()
def engine() -> None:
    """Start, show and stop the process that keeps Spark warm for this project.

    The first command that needs Spark starts it by itself. It ends when no command has used it for ten minutes.
    """


@engine.command()
@unused_module_option
def start() -> None:
    """Start the engine, unless one with the settings of this project runs."""
    root = Path.cwd()
    state = warm.ask(root, "status")
    if state is not None and state["fingerprint"] != warm.fingerprint(root):
        warm.ask(root, "stop")
        state = None
    if state is None and not warm.start(root):
        raise WeftError("The engine did not start.", hint=f"Its log is {warm.folder(root) / 'engine.log'}.")
    state = warm.ask(root, "status")
    if state is None:
        raise WeftError("The engine ended.", hint=f"Its log is {warm.folder(root) / 'engine.log'}.")
    click.echo(f"The engine runs (pid {state['pid']}).")


@engine.command()
@unused_module_option
@format_option
def status(output: str) -> None:
    """Show the engine: what it does, since when, and the memory that it holds. Ends with exit code 1 if none runs."""
    root = Path.cwd()
    state = warm.ask(root, "status")
    if output == "json":
        print_json({"state": "none"} if state is None else {**state, "current": _is_current(root, state)})
    elif state is None:
        click.echo("No engine runs here.")
    else:
        began = time_text(datetime.fromtimestamp(state["began"], UTC))
        busy = f" with process {state['client']}" if state["client"] else ""
        click.echo(f"{state['state']}{busy}: pid {state['pid']}, since {began}, {plural(state['commands'], 'command')}")
        click.echo(f"  memory: {state['memory'] / 2**20:,.0f} MB in {plural(state['processes'], 'process', 'es')}")
        if state["state"] == "warm":
            click.echo(
                f"  ends in {max(0, state['ends_after'] - state['idle_seconds']) / 60:.1f} minutes if it is not used"
            )
        if not _is_current(root, state):
            click.echo("  It has other settings, versions or variables: the next command starts another one.")
    if state is None:
        raise SystemExit(1)


def _is_current(root: Path, state: dict[str, object]) -> bool:
    return state["fingerprint"] == warm.fingerprint(root)


@engine.command()
@unused_module_option
def stop() -> None:
    """Stop the engine, after the command that it carries out."""
    state = warm.ask(Path.cwd(), "stop")
    if state is None:
        click.echo("No engine runs here.")
    elif state["busy"]:
        click.echo(f"The engine ends after the command that runs (process {state['busy']}).")
    else:
        click.echo("The engine has stopped.")


@engine.command(hidden=True)
@unused_module_option
def serve() -> None:
    """Be the engine. Commands start it so."""
    from weft.cli import cli
    from weft.engine.keeper import Keeper

    Keeper(Path.cwd(), lambda arguments: cli(arguments, prog_name="weft"), _MODULES).serve()
    os._exit(0)  # the modules are left to the system
