"""Ticks of the scheduler over 10,000 pipelines, its run log in PostgreSQL: `python -m bench.scheduler [--rounds 5]`.

Where nothing is due, the bar is about processor time, of the scheduler and of PostgreSQL: a tick comes every ten
seconds. Where something is due, it is about the time until all of it was started.

All pipelines have run for their last slot. Then nothing is due; or a hundred are, each of which starts a process that
ends at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import servers
import weft
from weft.operate.claims import slot_id
from weft.operate.executors import Dispatch
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runlog_tables import LogTables, insert_row
from weft.operate.scheduler import Scheduler
from weft.project import Project, use

PIPELINES, DUE = 10_000, 100
BARS = {"nothing due": 1.5, f"{DUE} due": 5.0}
"""The most seconds of a tick."""


class Took(NamedTuple):
    """Seconds of a tick, and processor seconds of the scheduler and of the server."""

    wall: float
    scheduler: float
    server: float


class _Started:
    tells_end = True

    def __init__(self) -> None:
        self._process = subprocess.Popen(["true"])

    def ended(self) -> int | None:
        return self._process.poll()


class _Processes:
    def start(self, dispatch: Dispatch) -> Any:
        return _Started()


def main() -> int:
    """Measure and print; the exit code says whether both bars were reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = servers.shared("postgres")
    url = server.create_database("bench_scheduler")
    now = datetime.now(UTC)
    times: dict[str, list[Took]] = {name: [] for name in BARS}
    with use(Project()) as project, open_run_log(url) as log:
        project.clock = lambda: now.timestamp()
        _declare()
        for _ in range(options.rounds):
            _fill(log, project, now)
            made = Scheduler(log, _Processes(), most_running=PIPELINES)
            made.tick()
            times["nothing due"].append(_timed(made, server, 0))
            _forget_slots(log, DUE)
            times[f"{DUE} due"].append(_timed(made, server, DUE))
            made.hand_over()
    print(f"| a tick over {PIPELINES:,} pipelines | at most s | s | processor s of the scheduler | of PostgreSQL | |")
    print("| --- | --- | --- | --- | --- | --- |")
    are_reached = []
    for name, bar in BARS.items():
        took = Took(*(statistics.median(each) for each in zip(*times[name], strict=True)))
        measured = took.scheduler + took.server if name == "nothing due" else took.wall
        are_reached.append(measured <= bar)
        numbers = f"{took.wall:.2f} | {took.scheduler:.2f} | {took.server:.2f}"
        print(f"| {name} | {bar} | {numbers} | {'✓' if measured <= bar else '✗'} |")
    return 0 if all(are_reached) else 1


def _declare() -> None:
    for number in range(PIPELINES):
        # Each has a minute of its own, as in a project that spreads its work.
        schedule = f"{number % 60} {number // 60 % 24} * * *"
        declare = weft.pipeline(name=f"pipeline_{number}", target=f"t_{number}", schedule=schedule, expect_within="2d")
        declare(lambda: "SELECT 1 AS id")


def _fill(log: RunLog, project: Project, now: datetime) -> None:
    """Record that each pipeline has run for its last slot."""
    book = log._book
    assert isinstance(book, LogTables)
    began = now - timedelta(minutes=1)
    with book.session("publish") as session:
        for table in (book.runs_table, book.claims):
            session.run(f"DELETE FROM {table}")
        for name, pipeline in project.pipelines.items():
            assert pipeline.schedule is not None
            slot = pipeline.schedule.latest(now)
            run = slot_id(name, slot)
            metrics = {
                "targets": [{"target": name, "engine": "pushdown", "rows_read": 10, "warnings": []}],
                "steps": [],
            }
            attempt = {"run_id": run, "attempt": 1, "pipeline": name, "slot": slot, "status": "succeeded"}
            times = {"started_at": began, "finished_at": now, "rows_read": 10, "metrics": metrics}
            insert_row(book.tables, session, book.runs_table, attempt | times)
            claim = {"pipeline": name, "fence": 1, "failures": 0, "succeeded_at": now, "run_id": run, "attempt": 1}
            insert_row(book.tables, session, book.claims, claim | {"slot_run_id": run, "slot_attempt": 1})
        session.run("ANALYZE")


def _forget_slots(log: RunLog, count: int) -> None:
    book = log._book
    assert isinstance(book, LogTables)
    with book.session("publish") as session:
        for number in range(count):
            session.run(f"UPDATE {book.claims} SET slot_run_id = NULL WHERE pipeline = ?", (f"pipeline_{number * 97}",))


def _timed(made: Scheduler, server: servers.Server, due: int) -> Took:
    began, worked, served = time.perf_counter(), time.process_time(), _processor_seconds(server)
    assert len(made.tick()) == due
    return Took(time.perf_counter() - began, time.process_time() - worked, _processor_seconds(server) - served)


def _processor_seconds(server: servers.Server) -> float:
    """Return the processor time of the processes of a server that run now."""
    assert server.process is not None
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = file.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[1]) == server.process.pid else 0
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
