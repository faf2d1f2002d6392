"""How the command ends: its exit codes, and what it says of errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import weft


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["connections", "--help"], ["init", "--help"]])
def test_help(run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: weft")


def test_the_installed_program() -> None:
    program = Path(sys.executable).with_name("weft")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: weft")


def test_help_names_every_group(run) -> None:
    shown = run("--help").stdout
    assert all(f"\n  {name} " in shown for name in ("init", "connections", "streams"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conections"], "No such command 'conections'. Did you mean 'connections'?"),
        (["zzz"], "No such command 'zzz'."),
        (["--nope"], "No such option"),
        (["connections", "list", "--format", "xml"], "xml"),
    ],
)
def test_wrong_usage_is_2(run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_error_is_1_without_a_traceback(run) -> None:
    Path("weft.toml").write_text("modules = [")
    done = run("connections", "list")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: weft.toml is not valid TOML")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["weft", "weft.cli"])
def test_it_is_also_a_module(project: Path, module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"weft {weft.__version__}\n"


@pytest.mark.timing
def test_interrupt_is_130(project: Path) -> None:
    Path("slow.py").write_text("import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "weft", "connections", "list", "--module", "slow"]

    def heed_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored, where the tests run in a shell's background

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts) as process:
        while not Path("started").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.strip() == ""


def test_reader_that_went_away_is_no_traceback(project: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        command = [sys.executable, "-m", "weft", "connections", "list", "--format", "json"]
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""
