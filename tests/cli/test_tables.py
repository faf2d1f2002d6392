"""Tables fit a terminal, and are plain lines elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

PROGRAM = """
from weft.cli.common import print_table
rows = [
    {"name": "first", "long_text": "word " * 30, "size": 5},
    {"name": "second", "long_text": "[bold]\\x1b[31mred\\n", "size": 12345},
]
print_table(rows, ["name", "long_text", "size"])
print_table([], ["name"])
"""


def on_a_terminal(columns: int) -> list[str]:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    subprocess.run([sys.executable, "-c", PROGRAM], stdin=follower, stdout=follower, env=environment, check=True)
    os.close(follower)
    with os.fdopen(leader, "rb") as screen:
        text = b""
        try:
            while part := screen.read1():
                text += part
        except OSError:  # how Linux ends a terminal
            pass
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("columns", [40, 120])
def test_terminal(project: Path, columns: int) -> None:
    lines = on_a_terminal(columns)
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0] for line in lines if line[:1].strip()] == ["name", "first", "second", "name"]
    assert "".join(lines).count("word") == 30
    assert "12345" in "".join(lines)


def test_elsewhere_nothing_is_wrapped_and_control_characters_are_visible(project: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"name    {'long text':150}   size"
    assert lines[1] == f"first   {'word ' * 30}      5"
    assert lines[2] == f"second  {'[bold]' + chr(92) + 'x1b[31mred' + chr(92) + 'n':150}  12345"
    assert lines[3] == "name"
