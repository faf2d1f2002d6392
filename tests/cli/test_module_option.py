"""`--module M` may be added to every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from weft.cli import cli


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands(cli)])
def test_every_command_takes_it(path: tuple[str, ...], command: click.Command) -> None:
    assert "--module" in [name for parameter in command.params for name in parameter.opts]


def test_what_needs_no_module_does_not_fail_for_one(project: Path, call: Any) -> None:
    call("init", "new", "--module", "missing")
    assert (project / "new" / "weft.toml").exists()
    call("connections", "set", "lake=sqlite:///lake.db", "--module", "missing", "--module", "also_missing")
    call("connections", "remove", "lake", "--module", "missing")
