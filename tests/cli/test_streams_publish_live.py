"""`weft streams publish` from a pipe: stored as it comes, in bounded memory, and an interrupt says how to go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEASURE = """
import resource, sys
from weft.cli import cli
try:
    cli(sys.argv[1:])
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def count(run) -> int:
    return json.loads(run("streams", "show", "numbers", "--format", "json").stdout)["events"]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("layout", ["ndjson", "csv"])
def test_silent_pipe_holds_nothing_back(run, start, shop, layout: str) -> None:
    process = start("streams", "publish", "numbers", "-")
    process.stdin.write('{"n": 1}\n{"n": 2}\n{"n"' if layout == "ndjson" else "n\n1\n2\n")
    process.stdin.flush()
    wait_for(lambda: count(run) == 2)
    process.stdin.write(": 3}\n" if layout == "ndjson" else "3\n")
    shown, errors = process.communicate(timeout=60)
    assert (process.returncode, shown, errors) == (0, "published 3 events to numbers\n", "")
    assert count(run) == 3


@pytest.mark.timing
def test_interrupt_tells_where_to_go_on(run, start, shop) -> None:
    process = start("streams", "publish", "numbers", "-")
    process.stdin.write('{"n": 1}\n{"n": 2}\n')
    process.stdin.flush()
    wait_for(lambda: count(run) == 2)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert (process.returncode, shown) == (130, "")
    assert errors.strip() == "Published before that: 2 events. Go on with --skip 2."


@pytest.mark.timing
def test_interrupt_in_the_middle_loses_and_repeats_nothing(run, start, shop) -> None:
    """The rows have no end, so no process has published all of them before it is interrupted."""
    skip = 0
    for _ in range(5):
        before = count(run)
        with subprocess.Popen(["sh", "-c", "echo n; exec seq 0 1000000000"], stdout=subprocess.PIPE) as rows:
            options = ("--batch-size", "50", "--skip", str(skip))
            process = start("streams", "publish", "numbers", "-", *options, stdin=rows.stdout)
            wait_for(lambda: count(run) > before)  # noqa: B023 - called at once
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            rows.kill()
        assert process.returncode == 130, errors
        skip = int(re.search(r"--skip (\d+)", errors)[1])
        assert count(run) == skip


@pytest.mark.full
@pytest.mark.parametrize("name", ["a.ndjson", "a.csv"])
def test_memory_does_not_grow_with_the_file(shop, name: str) -> None:
    text = "x" * 2000
    line = f'{{"n": 1, "s": "{text}"}}\n' if name == "a.ndjson" else f"1,{text}\n"

    def peak(lines: int) -> int:
        with open(name, "w") as file:
            file.write("n,s\n" if name == "a.csv" else "")
            for _ in range(lines):
                file.write(line)
        command = [sys.executable, "-c", MEASURE, "streams", "publish", "numbers", name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"published {lines:,} events" in shown
        return int(re.search(r"peak (\d+)", shown)[1])

    small, large = peak(3_000), peak(40_000)  # 6 MB and 80 MB
    assert large - small < 30


def test_named_pipe(run, shop, project: Path) -> None:
    os.mkfifo("pipe")
    writer = subprocess.Popen(["sh", "-c", "echo '{\"n\": 1}' > pipe"])
    done = run("streams", "publish", "numbers", "pipe")
    writer.wait()
    assert (done.returncode, done.stdout) == (0, "published 1 event to numbers\n")


def test_progress_is_for_terminals(on_a_terminal, run, shop) -> None:
    Path("a.csv").write_text("n\n" + "1\n" * 30_000)
    code, shown = on_a_terminal("streams", "publish", "numbers", "a.csv")
    assert code == 0
    assert re.search(r"\d+% [\d,]+ events [\d,]+/s", shown)
    assert "published 30,000 events to numbers in " in shown
    assert run("streams", "publish", "numbers", "a.csv").stderr == ""
    code, shown = on_a_terminal("streams", "publish", "numbers", "--data", "{}")
    assert shown == "published 1 event to numbers\n"


def test_terminal_without_input(on_a_terminal, shop) -> None:
    code, shown = on_a_terminal("streams", "publish", "numbers")
    assert code == 2
    assert "Give FILE, - for standard input, or --data" in shown
