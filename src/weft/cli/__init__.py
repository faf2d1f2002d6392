"""The command `weft`. Each group of commands is a module of its own, imported only when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module

import click

from weft.errors import WeftError, did_you_mean, stop_behind

# name: (module:command, what `weft --help` says of it)
_COMMANDS = {
    "init": ("weft.cli.init:init", "Start a project in a folder."),
    "connections": ("weft.cli.connections:connections", "List, check, set and remove connections."),
    "streams": ("weft.cli.streams:streams", "Publish to streams, read them, and manage their consumers."),
    "sql": ("weft.cli.sql:sql", "Query streams, tables, Delta tables and files by name."),
    "shell": ("weft.cli.shell:shell", "Type queries at a prompt that keeps Spark running."),
    "serve": ("weft.cli.serve:serve", "Serve streams over HTTP."),
    "apikey": ("weft.cli.apikey:apikey", "Create, list and revoke keys of the service."),
    "list": ("weft.cli.pipelines:list_", "List the declared pipelines."),
    "run": ("weft.cli.pipelines:run", "Run pipelines now."),
    "run-due": ("weft.cli.pipelines:run_due", "Run what is due by its schedule."),
    "scheduler": ("weft.cli.scheduler:scheduler", "Start pipelines when they are due, on one host or several."),
    "worker": ("weft.cli.worker:worker", "Build models when their inputs change."),
    "models": ("weft.cli.models:models", "List and show models, and draw what they are built of."),
    "plan": ("weft.cli.plan:plan", "Show what has changed in the models, and what that leads to."),
    "apply": ("weft.cli.plan:apply", "Build the models that have changed."),
    "backfill": ("weft.cli.plan:backfill", "Build again what came to a model in a range of time."),
    "test": ("weft.cli.model_tests:test", "Build models on sample rows, and compare the results."),
    "consume": ("weft.cli.consume:consume", "Run a streaming pipeline until it is stopped."),
    "checkpoints": ("weft.cli.checkpoints:checkpoints", "Show, reset and rewind streaming pipelines."),
    "state": ("weft.cli.state:state", "Show and remove the state of streaming pipelines with windows."),
    "cdc": ("weft.cli.cdc:cdc", "Compare mirrors of change data capture with their sources."),
    "dlq": ("weft.cli.dlq:dlq", "List, show, replay and remove dead letters of streaming pipelines."),
    "quarantine": ("weft.cli.quarantine:quarantine", "List, load again and remove rows that pipelines put aside."),
    "status": ("weft.cli.pipelines:status", "Show how each pipeline stands."),
    "preview": ("weft.cli.inspect:preview", "Show what a run would do."),
    "validate": ("weft.cli.inspect:validate", "Check pipelines against their databases."),
    "dry-run": ("weft.cli.inspect:dry_run", "Say what run-due would do now."),
    "runs": ("weft.cli.runs:runs", "List and cancel runs, and show what became of one."),
    "pause": ("weft.cli.runs:pause", "Stop following the schedule of pipelines, or the inputs of models."),
    "resume": ("weft.cli.runs:resume", "Follow them again."),
    "logs": ("weft.cli.runs:logs", "Print what a run wrote."),
    "consume-list": ("weft.cli.pipelines:consume_list", "List the declared streaming pipelines."),
    "doctor": ("weft.cli.doctor:doctor", "Look for what is wrong with this project and this machine."),
    "engine": ("weft.cli.engine:engine", "Start, show and stop the process that keeps Spark warm."),
    "jars": ("weft.cli.jars:jars", "Fetch, list and verify the jars of Spark's connectors."),
}

# The commands that a warm engine carries out where one runs; of `consume` only with --once.
_WARM = ("run", "preview", "validate", "consume", "sql", "plan", "apply", "backfill", "test")


class _CommandError(click.ClickException):
    """A `WeftError` as a person reads it: what failed, then what to do, and no traceback."""

    def __init__(self, error: WeftError) -> None:
        super().__init__(error.what)
        self.hint = error.hint
        self.notes = getattr(error, "__notes__", ())

    def show(self, file: object = None) -> None:
        show_error(self.message, self.hint, self.notes)


def show_error(what: str, hint: str | None = None, notes: Iterable[str] = ()) -> None:
    """Print what failed, then what to do."""
    if os.environ.get("WEFT_LOG_FORMAT") == "json":
        from weft.operate.log_format import command_line

        click.echo(command_line(" ".join((what, *notes)), hint=hint), err=True)
        return
    click.echo(f"{click.style('error:', fg='red', bold=True)} {what}", err=True)
    for note in notes:
        click.echo(f"  ({note})", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. {did_you_mean(args[0], _COMMANDS, '')}".rstrip())
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (WeftError, KeyboardInterrupt) as error:
            if stop_behind(error) is None:
                assert isinstance(error, WeftError)
                raise _CommandError(error) from error
            click.echo(err=True)  # ends the line on which the terminal shows ^C
            ctx.exit(130)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="weft", message="weft %(version)s", help="Show the version.")
def cli() -> None:
    """Durable streams of events on the database you already have, and the tables made from them."""
    if os.environ.get("WEFT_LOG_FORMAT") == "json":
        import logging

        from weft.cli.common import log_to_stderr

        log_to_stderr("", logging.WARNING)  # commands that log more say so themselves


def main() -> None:
    """Run the command that the arguments of this process name."""
    arguments = sys.argv[1:]
    # Before anything else is imported: where an engine runs, it carries out the command.
    if os.path.exists(os.path.join(".weft", "engine.sock")) and _is_for_engine(arguments):
        from weft.engine import warm

        try:
            code = warm.run(arguments)
        except KeyboardInterrupt:
            code = 130
        if code is not None:
            sys.exit(code)
    cli(prog_name="weft")


def _is_for_engine(arguments: list[str]) -> bool:
    if not arguments or arguments[0] not in _WARM or not {"-h", "--help"}.isdisjoint(arguments):
        return False
    return arguments[0] != "consume" or "--once" in arguments
