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

from weft.cli.common import print_table

PROGRAM = """
from weft.cli.common import print_table
rows = [
    {"name": "first", "long_text": "word " * 30, "size": 5},
    {"name": "second", "long_text": "[bold]\\x1b[31mred\\n", "size": 12345},
]
print_table(rows, ["name", "long_text", "size"])
print_table([], ["name"])
"""


def on_a_terminal(columns: int, program: str = PROGRAM) -> list[str]:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    subprocess.run([sys.executable, "-c", program], stdin=follower, stdout=follower, env=environment, check=True)
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


def test_an_id_of_digits_is_no_number(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"letter": "8349", "group_id": "8349"}]
    print_table(rows, ["letter", "group_id"], whole=["letter"])
    assert capsys.readouterr().out.splitlines() == ["letter  group id", "8349        8349"]


NOTES = """
from weft.cli.common import print_table
rows = [
    {"run": "f" * 24, "pipeline": "a_long_name_of_it", "status": "failed", "read_rows": 5, "why": "no table: t " * 4},
    {"run": "e" * 24, "pipeline": "short", "status": "succeeded", "read_rows": 7, "why": None},
]
print_table(rows, ["run", "pipeline", "status", "read_rows", "why"], ["read_rows"], below="why", whole=["run"])
print_table([{"order_id": 1}], ["order_id"], is_data=True)
"""


@pytest.mark.parametrize("columns", [60, 80])
def test_what_does_not_fit_is_below_its_row(project: Path, columns: int) -> None:
    lines = on_a_terminal(columns, NOTES)
    assert all(len(line) <= columns for line in lines)
    (first,) = [number for number, line in enumerate(lines) if line.startswith("f" * 24)]
    (second,) = [number for number, line in enumerate(lines) if line.startswith("e" * 24)]
    between = lines[first + 1 : second]
    assert any(line.startswith("  no table") for line in between)
    assert " ".join(" ".join(between).split()).count("no table: t") == 4
    assert "why" not in lines[0]
    assert ("read rows" in lines[0]) == (columns == 80)


def test_what_fits_is_a_column(project: Path) -> None:
    lines = on_a_terminal(160, NOTES)
    assert lines[0].split() == ["run", "pipeline", "status", "read", "rows", "why"]
    assert lines[1].rstrip().endswith("no table: t no table: t no table: t no table: t")
    assert lines[3].strip() == "order_id"
