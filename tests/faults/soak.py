"""`make soak`: a streaming pipeline at a steady rate for two hours. In the end every row is there once, and memory,
files, threads, state and bookkeeping have stayed what they were.

SOAK=rows          which pipeline: rows, windows or joins, each in a module of its own
SOAK_MINUTES=120   how long
SOAK_RATE=200      events a second

What is compared are the medians of the second and of the last quarter: the first is spent on compiling, and on filling
what has a limit. Of files that each batch makes and that go later, the lowest tenths are. A run of less than 30 minutes
shows them, and judges the rows alone.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests import servers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as in the processes of the pipeline
MODULE = f"soak_{os.environ.get('SOAK', 'rows')}"
soaked = importlib.import_module(MODULE)
MINUTES, RATE = float(os.environ.get("SOAK_MINUTES", "120")), float(os.environ.get("SOAK_RATE", "200"))
JUDGED_FROM_MINUTES = 30
AT_MOST = 1.10
PATIENCE = 300 + MINUTES * 10
MB = 1 << 20
# What is sampled: what it is called, and the unit in which it is shown.
MEASURES = {
    "driver": ("memory of the driver, MB", MB),
    "workers": ("memory of Python's workers, MB", MB),
    "jvm": ("memory of the JVM, MB", MB),
    "heap": ("what lives in its heap beside pages of rows, MB", MB),
    "classes": ("its classes, MB", MB),
    "files": ("open files of driver and JVM", 1),
    "threads": ("threads of driver and JVM", 1),
    "checkpoint": ("files of the checkpoint", 1),
    "scratch": ("files of Spark's scratch space", 1),
    "log": ("Spark's log, kB", 1024),
    "ledger": ("rows of the ledger", 1),
    "state": ("rows of the state", 1),
    "lag": ("events that wait", 1),
    "seconds": ("seconds a batch", 1),
}
# The log has lines of what happens now and then. The last two follow how busy the machine is with other things.
SHOWN_ONLY = ("log", "lag", "seconds")
_NO_OBJECTS = ("[J", "[Ljdk.internal.vm.FillerElement;", "jdk.internal.vm.FillerObject")
# Spark removes the files of a shuffle at some collection of garbage after it: their median follows how often there is
# one.
COMES_AND_GOES = ("scratch",)
# The ledger keeps the last 1,000 batches, and up to 100 more until it removes some. Few batches emit windows.
KEPT = {"ledger": 1_100}


@dataclass
class Samples:
    """What was seen, each with the share of the run that had passed."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    seen: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    batches: int = 0

    def add(self, name: str, value: float) -> None:
        self.seen[name].append(((time.monotonic() - self.began) / self.seconds, value))

    def quarter(self, name: str, number: int) -> float | None:
        found = [value for at, value in self.seen[name] if int(at * 4) == number]
        if name in COMES_AND_GOES and len(found) > 1:
            return statistics.quantiles(found, n=10)[0]
        return statistics.median(found) if found else None

    def last(self, name: str) -> str:
        return shown(name, self.seen[name][-1][1] if self.seen[name] else None)


def shown(name: str, value: float | None) -> str:
    return "-" if value is None else f"{value / MEASURES[name][1]:,.{2 if name == 'seconds' else 0}f}"


# ------------------------------------------------------------------------------------------------------------ processes


def children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(each) for task in tasks for each in (task / "children").read_text().split()]
    return []


def below(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from below(child)


def status(pid: int, name: str) -> int:
    """A number of /proc/…/status, 0 where the process has ended. Memory is in kB there."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0


def open_files(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def files_below(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def jvm_of(driver: int) -> int | None:
    return next((pid for pid in children(driver) if program_of(pid).endswith("/java")), None)


def program_of(pid: int) -> str:
    """The file that a process runs, empty where it has ended. Not its name: a child that is forked has that of a
    thread."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return ""


def asked(jvm: int, command: str) -> str:
    """What a JVM answers to a command of jcmd's, which a runtime without a development kit does not have."""
    door = Path(tempfile.gettempdir()) / f".java_pid{jvm}"
    if not door.exists():
        request = door.with_name(f".attach_pid{jvm}")
        request.touch()
        os.kill(jvm, signal.SIGQUIT)
        servers.wait_until(door.exists, "the JVM to listen")
        request.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(door))
        connection.sendall(b"1\0jcmd\0" + command.encode() + b"\0\0\0")
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()


def look_inside(samples: Samples, jvm: int) -> None:
    """What lives in the heap. What the first collection finds unused, Spark's own cleaner lets go of after it.

    Without arrays of long: they are the pages in which a batch has its rows, 32 MB each, of which a batch has none or
    eleven at the moment when somebody looks. Nor with the gaps that the collector leaves between what lives: it calls
    them objects, now and then 35 MB of them.
    """
    asked(jvm, "GC.class_histogram")
    time.sleep(2)
    lines = [line.split() for line in asked(jvm, "GC.class_histogram").splitlines()]
    (total,) = (int(line[2]) for line in lines if line[:1] == ["Total"])
    beside = sum(int(line[2]) for line in lines if len(line) > 3 and line[3] in _NO_OBJECTS)
    samples.add("heap", total - beside)
    used = asked(jvm, "GC.heap_info").split("Metaspace")[1].split()
    samples.add("classes", int(used[1].strip("K,")) * 1024)


def look(samples: Samples, driver: int, jvm: int, project: Path, database: Any) -> None:
    samples.add("driver", status(driver, "VmRSS") * 1024)
    samples.add("jvm", status(jvm, "VmRSS") * 1024)
    samples.add("workers", sum(status(pid, "VmRSS") for pid in below(jvm)) * 1024)
    samples.add("files", open_files(driver) + open_files(jvm))
    samples.add("threads", status(driver, "Threads") + status(jvm, "Threads"))
    samples.add("checkpoint", files_below(project / ".weft" / "checkpoints"))
    samples.add("scratch", files_below(project / "scratch"))
    samples.add("log", (project / ".weft" / "spark.log").stat().st_size)
    samples.add("ledger", one(database, "SELECT count(*) FROM weft.commits"))
    samples.add("state", sum(one(database, f"SELECT count(*) FROM weft.{name}") for name in state_tables(database)))


# -------------------------------------------------------------------------------------------------------------- the end


def one(database: Any, sql: str) -> int:
    """A single number; 0 while its table is not there."""
    import psycopg

    try:
        return int(database.execute(sql).fetchone()[0])
    except psycopg.errors.UndefinedTable:
        return 0


def state_tables(database: Any) -> list[str]:
    import psycopg

    with suppress(psycopg.errors.UndefinedTable):
        return [name for (name,) in database.execute("SELECT table_name FROM weft.state").fetchall()]
    return []


def is_done(database: Any, steps: int) -> bool:
    """Return whether the target has what was published; not while its table is not there."""
    import psycopg

    with suppress(psycopg.errors.UndefinedTable):
        return bool(soaked.is_done(database, steps))
    return False


def swollen(samples: Samples, console: Console) -> list[str]:
    """Show the quarters, and name what has grown from the second to the last."""
    table = Table("", *(f"{each} quarter" for each in ("1st", "2nd", "3rd", "4th")), "4th / 2nd", "")
    found = []
    for name, (title, _) in MEASURES.items():
        quarters = [samples.quarter(name, number) for number in range(4)]
        second, last = quarters[1], quarters[3]
        ratio = None if second is None or last is None else 1.0 if second == last else last / max(second, 0.01)
        is_flat = ratio is not None and (ratio <= AT_MOST or (last or 0) <= KEPT.get(name, 0))
        mark = "" if name in SHOWN_ONLY else "✓" if is_flat else "✗"
        table.add_row(title, *(shown(name, each) for each in quarters), f"{ratio:.2f}" if ratio else "", mark)
        if mark == "✗":
            found.append(f"{title}: {f'{ratio:.2f} times what it was' if ratio else 'not seen'}")
    console.print(table)
    return found


# ------------------------------------------------------------------------------------------------------------- the soak


def start(project: Path, url: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "WEFT_DSN": url, "WEFT_SPARK_MASTER": "local[2]"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    command = ["nice", "-n", "10", sys.executable, *arguments]
    return subprocess.Popen(command, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, **options)


def soak(project: Path, url: str, console: Console) -> list[str]:
    import psycopg

    scratch = json.dumps(str(project / "scratch"))
    # Little memory: what piles up ends the run.
    (project / "weft.toml").write_text(
        f'[spark.conf]\n"spark.local.dir" = {scratch}\n"spark.driver.memory" = "1g"\n', encoding="utf-8"
    )
    with closing(psycopg.connect(url, autocommit=True)) as database:
        soaked.prepare(database)
        samples = Samples(MINUTES * 60)
        publisher = start(project, url, str(HERE / f"{MODULE}.py"), str(RATE), stdin=subprocess.PIPE)
        with (project / "consume.log").open("wb") as log:
            consume = ("-m", "weft", "consume", "soak", "--module", MODULE, "--format", "json")
            runner = start(project, url, *consume, stderr=log)
        listener = threading.Thread(target=heed, args=(samples, runner))
        listener.start()
        try:
            follow(samples, publisher, runner, project, database, console)
            out, _ = publisher.communicate("", timeout=PATIENCE)
            steps = int(out)
            console.print(f"The events of {steps:,} steps were published; waiting for the last of them")
            servers.wait_until(lambda: runner.poll() is not None or is_done(database, steps), "the last", PATIENCE)
            runner.terminate()
            code = runner.wait(PATIENCE)
        finally:
            for process in (publisher, runner):
                process.kill()
                process.wait()
            listener.join(10)
        found = [] if code == 0 else [f"the pipeline ended with status {code}:\n{tail(project)}"]
        found += soaked.mistakes(database, steps)
    grown = swollen(samples, console)
    if MINUTES < JUDGED_FROM_MINUTES:
        console.print(f"Less than {JUDGED_FROM_MINUTES} minutes: too short to tell what grows.")
        return found
    return found + grown


def heed(samples: Samples, runner: subprocess.Popen[str]) -> None:
    """Note what the command tells of each batch."""
    assert runner.stdout
    for line in runner.stdout:
        told = json.loads(line)
        samples.batches += 1
        samples.add("seconds", told["seconds"])
        samples.add("lag", sum(told["lag"].values()))


def follow(
    samples: Samples,
    publisher: subprocess.Popen[str],
    runner: subprocess.Popen[str],
    project: Path,
    database: Any,
    console: Console,
) -> None:
    """Look at everything until the time is over, and say how it stands."""
    next_inside = next_line = 30.0
    while (passed := time.monotonic() - samples.began) < samples.seconds:
        for process in (publisher, runner):
            if process.poll() is not None:
                raise RuntimeError(f"{process.args} ended with status {process.returncode}:\n{tail(project)}")
        jvm = jvm_of(runner.pid)
        if jvm is not None:
            look(samples, runner.pid, jvm, project, database)
        # Seldom: what piles up where nobody collects must be seen too.
        if jvm is not None and passed >= next_inside:
            next_inside = passed + max(10.0, samples.seconds / 60)
            look_inside(samples, jvm)
        if passed >= next_line:
            next_line = passed + max(10.0, samples.seconds / 120)
            seen = "  ".join(f"{name} {samples.last(name)}" for name in MEASURES)
            console.print(f"{passed / 60:6.1f} min  batches {samples.batches:,}  {seen}")
        time.sleep(max(1.0, samples.seconds / 720))


def tail(project: Path) -> str:
    return "\n".join((project / "consume.log").read_text(errors="replace").splitlines()[-20:])


def main() -> int:
    console = Console(highlight=False, soft_wrap=True)
    if servers.PostgresServer.is_missing():
        console.print("The soak needs PostgreSQL: sudo apt-get install --no-install-recommends postgresql")
        return 1
    server = servers.PostgresServer()
    server.start()
    with tempfile.TemporaryDirectory(prefix="weft-soak-") as folder:
        console.print(f"{MINUTES:g} minutes at {RATE:g} events a second, in {folder}")
        found = soak(Path(folder), server.create_database("soak"), console)
    for each in found:
        console.print(f"✗ {each}", markup=False)
    console.print("Something is wrong." if found else "All is well: every row is there once.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
