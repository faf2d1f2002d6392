"""What each test costs: `pytest --costs FILE` adds a line of JSON to FILE for each test.

{"test": "tests/…::test_it[sqlite]", "group": "spark", "worker": "process-1", "began": 12.5, "seconds": 1.2, "cpu": 0.8}

`group` is what one process of a run has to run as a whole, `began` counts from the start of the process, and `cpu` is
the processor time of that process and of all that it started, servers and JVMs too: the kernel counts it for a group of
processes (`cpuacct` of cgroup v1), which needs root. Where there is none, `cpu` is null. Other work on the machine
changes `seconds`, and `cpu` much less.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

import selection
import shares

_CPUACCT = Path("/sys/fs/cgroup/cpuacct")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", type=os.path.abspath, help="add what each test costs to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(_Costs(config), "costs of tests")


class _Costs:
    def __init__(self, config: pytest.Config) -> None:
        self._path = config.getoption("--costs")
        self._pid = 0

    def _begin(self) -> None:
        """Count for this process, which may be a fork of the one that has collected the tests."""
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._folder: Path | None = _CPUACCT / f"weft-tests-{os.getpid()}"
        for left in _CPUACCT.glob("weft-tests-*"):  # of runs that ended: their servers ended after them
            with suppress(OSError):  # it is in use
                left.rmdir()
        try:
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._folder = None

    def _cpu(self) -> float | None:
        return self._folder and int((self._folder / "cpuacct.usage").read_text()) / 1e9

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self._pid != os.getpid():
            self._begin()
        cpu, began = self._cpu(), time.monotonic()
        try:
            return (yield)
        finally:
            ended, cpu_after = time.monotonic(), self._cpu()
            line = {
                "test": item.nodeid,
                "group": selection.group(item),
                "worker": item.config.stash.get(shares.PROCESS, None),
                "began": round(began - self._began, 3),
                "seconds": round(ended - began, 3),
                "cpu": None if cpu is None or cpu_after is None else round(cpu_after - cpu, 3),
            }
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")
