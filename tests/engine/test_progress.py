"""The bar: on a terminal only, and gone afterwards."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import weft
from weft import ConnectionFailedError
from weft.engine.progress import Counter, progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Terminal:
    """A terminal to put in the place of stderr, and what was written to it."""

    def __init__(self) -> None:
        self.ours, theirs = pty.openpty()
        self.file = os.fdopen(theirs, "w")
        self.text = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                self.text += os.read(self.ours, 10_000).decode()
            except OSError:  # the other end is closed
                return

    def close(self) -> str:
        """What was written to it in all."""
        if not self.file.closed:
            self.file.close()
            self._thread.join()
            os.close(self.ours)
        return self.text


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    opened = Terminal()
    yield opened
    opened.close()


def slow(number: int) -> int:
    import time

    time.sleep(0.4)
    return number


@pytest.mark.timing
def test_tasks_are_counted_on_a_terminal(plain_spark: SparkSession, terminal: Terminal) -> None:
    with redirect_stderr(terminal.file), progress("loading [orders]"), progress("inside"):
        plain_spark.sparkContext.parallelize(range(8), 8).map(slow).collect()
    text = terminal.close()
    assert "loading [orders]" in text
    assert "/8" in text
    assert "inside" not in text
    # The last that is written removes the bar.
    assert text.rstrip().endswith(("\x1b[2K", "\x1b[?25h"))


def test_an_error_passes_and_the_bar_goes(terminal: Terminal) -> None:
    for _ in range(2):
        with redirect_stderr(terminal.file), pytest.raises(ZeroDivisionError), progress("dividing"):
            _ = 1 // 0
    assert "dividing" in terminal.close()


def test_silent_elsewhere() -> None:
    program = "from weft.engine.progress import progress\nwith progress('x'): print('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_rows_are_counted_across_processes(tmp_path: Path) -> None:
    """By a task in another process; and an error of the source goes through, whatever its kind."""
    import pyarrow as pa

    file = tmp_path / "rows"
    file.write_bytes(bytes(8))
    counter = Counter(str(file))
    batch = pa.RecordBatch.from_pydict({"a": [1, 2, 3]})

    def broken() -> Iterator[pa.RecordBatch]:
        yield batch
        yield batch
        raise ConnectionFailedError("gone")

    passed = []
    with pytest.raises(ConnectionFailedError):
        passed.extend(counter.counted(broken()))
    assert counter.rows() == 6
    assert list(Counter(str(tmp_path / "nowhere")).counted([batch])) == [batch]


def test_a_load_shows_rows(terminal: Terminal, plain_spark: SparkSession, tmp_path: Path) -> None:
    from weft.engine import load, progress

    source = weft.SQLiteConnection(str(tmp_path / "a.db"))
    weft.load([{"n": number} for number in range(1000)], target="numbers", connection=source)
    seen: list[int] = []
    with redirect_stderr(terminal.file), pytest.MonkeyPatch.context() as patch:
        real = progress.Counter.rows
        patch.setattr(progress.Counter, "rows", lambda self: seen.append(real(self)) or seen[-1])
        patch.setattr(progress, "_INTERVAL", 0.01)
        target = weft.SQLiteConnection(str(tmp_path / "b.db"))
        result = load.load("SELECT n FROM numbers", source=source, target="numbers", connection=target)
    assert (result.engine, result.inserted) == ("spark", 1000)
    assert max(seen) == 1000
    assert "1,000 rows" in terminal.close()
