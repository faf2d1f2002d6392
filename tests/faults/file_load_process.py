"""Carries out one load into files or a Delta table, and kills itself (-9) at a step of it.

python file_load_process.py '{"kind": "delta_local", "fields": {…}, "rows": […], "load": {…}, "step": "created"}'
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

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() != self.step:
            return
        if not self.seconds:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=self._later, daemon=True).start()

    def _later(self) -> None:
        time.sleep(self.seconds)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    job = json.loads(sys.argv[1])
    steps = logging.getLogger("weft.commit")
    steps.setLevel(logging.DEBUG)
    steps.addHandler(KilledAt(job["step"]))
    options = {**job["load"], "moment": datetime.fromisoformat(job["load"]["moment"])}
    weft.load(job["rows"], connection=weft.connect(kind=job["kind"], **job["fields"]), **options)


if __name__ == "__main__":
    main()
