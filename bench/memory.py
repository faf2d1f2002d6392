"""The memory of a streaming pipeline over 1M rows and over 10M, in batches of one size: `python -m bench.memory`."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.engine_loads import _rows
from bench.streaming import FILES, Inbox, Target, _written
from tests.faults.soak import below, jvm_of, name_of, status

BAR = 1.2
_EACH_SECONDS = 0.05
# So many times before it counts: the heap of a JVM grows until it has seen what it needs.
_WARM_UP = 5


class Peaks(threading.Thread):
    """Looks at the driver, the JVM and the workers while something runs, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found = {"driver": 0, "JVM": 0, "workers": 0}
        self._over = threading.Event()

    def run(self) -> None:
        """Look until it is over."""
        driver = os.getpid()
        jvm = jvm_of(driver)
        assert jvm is not None
        while not self._over.wait(_EACH_SECONDS):
            # A process that the JVM forks has all of its memory, and for a moment its name.
            workers = sum(status(pid, "VmRSS") for pid in below(jvm) if name_of(pid) != "java")
            now = {"driver": status(driver, "VmRSS"), "JVM": status(jvm, "VmRSS"), "workers": workers}
            self.found = {name: max(peak, now[name] // 1024) for name, peak in self.found.items()}

    def end(self) -> dict[str, int]:
        """The highest that was seen."""
        self._over.set()
        self.join()
        return self.found


def main() -> int:
    """Measure and print; the exit code says whether the bar was reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    few, many = _rows(options.scale), 10 * _rows(options.scale)
    # In a process of its own: what makes the files takes more memory than what reads them.
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        sizes = [*[(few, FILES)] * _WARM_UP, (few, FILES), (many, 10 * FILES)]
        folders = [pool.submit(_written, *size).result() / "parquet" for size in sizes]
    target = Target(few)
    inbox = Inbox(target, "parquet", "ours", FILES)
    target.job("ours", lambda: None).reset()  # type: ignore[attr-defined]
    found = []
    for (rows, _), folder in zip(sizes, folders, strict=True):
        peaks = Peaks()
        peaks.start()
        inbox.fill(folder, rows)
        found.append(peaks.end())
    less, more = found[_WARM_UP:]
    print(
        f"| peak memory, MB | {few:,} rows | {many:,} rows | at most | ratio | |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in less:
        print(f"| {name} | {less[name]} | {more[name]} | | {more[name] / less[name]:.2f} | |")
    ratio = sum(more.values()) / sum(less.values())
    mark = "✓" if ratio <= BAR else "✗"
    print(f"| all | {sum(less.values())} | {sum(more.values())} | {BAR} | **{ratio:.2f}** | {mark} |")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
