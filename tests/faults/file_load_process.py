"""Carries out one load into files or a Delta table, and kills itself (-9) at a step of it.

python file_load_process.py '{"kind": …, "fields": …, "rows": …, "load": …, "step": "staged", "way": "task"}'

The way that the rows take: from this process (`here`), through a query of Spark's (`spark`), or from a database, in a
task that reads and writes (`task`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import datetime

import weft


class KilledAt(logging.Handler):
    """Ends this process at a step, or a while after it, as a power cut would."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step, _, later = step.partition("+")
        self.seconds = float(later or 0)
        self.later: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() != self.step:
            return
        if not self.seconds:
            os.kill(os.getpid(), signal.SIGKILL)
        self.later = threading.Thread(target=self._later, daemon=True)
        self.later.start()

    def _later(self) -> None:
        time.sleep(self.seconds)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    job = json.loads(sys.argv[1])
    options = {**job["load"], "moment": datetime.fromisoformat(job["load"]["moment"])}
    rows = job["rows"]
    if job["way"] == "spark":
        options["transform_sql"] = "SELECT * FROM source"
    elif job["way"] == "task":
        options["source"] = weft.SQLiteConnection(f"{job['fields']['path']}.db")
        weft.load(rows, target="rows", connection=options["source"])
        rows = "SELECT * FROM rows"
    # From now on: that load had steps too.
    steps = logging.getLogger("weft.commit")
    steps.setLevel(logging.DEBUG)
    killed = KilledAt(job["step"])
    steps.addHandler(killed)
    weft.load(rows, connection=weft.connect(kind=job["kind"], **job["fields"]), **options)
    if killed.later is not None:
        killed.later.join()  # the load was faster than its end


if __name__ == "__main__":
    main()
