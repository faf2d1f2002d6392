"""Carries out loads in processes of their own, each of which may kill itself (-9) at a step of the commit protocol.

Reads one job a line as JSON, answers with the signal that ended its process (0: none). Each job is a fork: nothing is
open before.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from datetime import datetime
from typing import Any

import pyarrow as pa

import weft
from duckdb_file import opened
from weft.systems.base import system_for, systems
from weft.systems.load import Load
from weft.systems.sql import commit as sql_commit


class KilledAt(logging.Handler):
    """Ends this process at a step, as a power cut would."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def carry_out(job: dict[str, Any]) -> None:
    """One load of rows that this process has."""
    connection = weft.connect(url=job["url"])
    tables = system_for(connection.kind).load_tables()(connection)
    options = {**job["load"], "moment": datetime.fromisoformat(job["load"]["moment"])}
    load = Load.declare(**options)
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    rows = [{**row, "at": datetime.fromisoformat(row["at"])} for row in job["rows"]]
    table = pa.Table.from_pylist(rows, schema=schema)
    with opened(job["url"]):
        sql_commit.prepare(tables, load, schema)
        sql_commit.commit(tables, load, sql_commit.BatchedRows(schema, table.to_batches(max_chunksize=50)))
        tables.close()


def main() -> None:
    """Fork, and tell how it ended."""
    steps = logging.getLogger("weft.commit")
    for system in systems().values():
        if system.tables:
            # Once here, not in each fork.
            system.load_tables()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                steps.setLevel(logging.DEBUG)
                steps.addHandler(KilledAt(job["step"]))
                carry_out(job)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"signal": os.WTERMSIG(status), "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
