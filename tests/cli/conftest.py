"""The command `weft` as a person runs it: in a process of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import warm_python
from commands import Commands

if TYPE_CHECKING:
    from click.testing import Result

    from weft.project import Project


@dataclass
class Here:
    """The project of the test."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def run(project: Path, commands: Commands) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run("connections", "list")` gives its exit code, output and errors."""

    def run_weft(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        ended = commands.run(Here(Path.cwd()), *arguments, stdin=stdin, is_watched=False)
        return subprocess.CompletedProcess(arguments, ended.code, ended.out, ended.err)

    return run_weft


@pytest.fixture
def run_apart(project: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same, in a process that imports what it needs: for commands that start Spark, which ends with it."""

    def run_weft(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weft", *arguments]
        return warm_python.run(command, capture_output=True, text=True, check=False)

    return run_weft


@pytest.fixture
def call() -> Callable[..., Result]:
    """`call("streams", "list")` runs the command in this process, on the project that the test uses."""
    from weft.cli import cli

    def call_weft(*arguments: object, stdin: str | bytes | None = None, code: int = 0) -> Result:
        done = CliRunner().invoke(cli, [str(each) for each in arguments], input=stdin, prog_name="weft")
        assert done.exit_code == code, (done.exit_code, done.stdout, done.stderr, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        return done

    return call_weft


@pytest.fixture
def checkpoints(call: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """What `weft checkpoints` prints as JSON."""

    def shown(*arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(call("checkpoints", *arguments, "--format", "json").stdout)
        return found

    return shown


@pytest.fixture
def local() -> Iterator[Project]:
    """A fresh project on SQLite, for what does not depend on the database."""
    import weft.streams
    from weft.project import Project, use

    with use(Project()) as fresh:
        yield fresh
        weft.streams.close(fresh)


@pytest.fixture
def start(project: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start("streams", "tail", …)` starts the command in a process of its own, which heeds interrupts."""
    started: list[subprocess.Popen[str]] = []

    def start_weft(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-m", "weft", *arguments]
        process = warm_python.Popen(command, **{**pipes, **options}, text=True)
        started.append(process)
        return process

    yield start_weft
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def on_a_terminal(project: Path) -> Callable[..., tuple[int, str]]:
    """`on_a_terminal("streams", "reset", …, typed="y\\n")` gives the exit code and what the screen showed."""

    def run_weft(*arguments: str, typed: str = "", columns: int = 80) -> tuple[int, str]:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-m", "weft", *arguments]
        # It would count for more than what the terminal says.
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        process = warm_python.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
        os.close(follower)
        os.write(leader, typed.encode())
        shown = b""
        try:
            while part := os.read(leader, 65536):
                shown += part
        except OSError:  # how Linux ends a terminal
            pass
        os.close(leader)
        return process.wait(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")

    return run_weft


SHOP = """
from weft import stream


@stream(fields={"n": "int64", "s": "string?"})
def numbers():
    pass
"""


@pytest.fixture
def shop(project: Path) -> None:
    """A project in the current folder whose module declares the stream `numbers`, for commands in other processes."""
    Path("shop.py").write_text(SHOP)
    Path("weft.toml").write_text('modules = ["shop"]\n')
