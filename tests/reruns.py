"""What becomes of tests that fail.

With `--rerun-list FILE`, a run in which few tests failed writes their names to FILE; tools/run-tests then runs them
again, alone. A virtual machine that is moved stands still for a minute or two: leases run out, and whatever waits gives
up. `--repeat N` runs each test N times (make flaky).
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

# More than this many at once are not a matter of a moment: the machine or the code is broken.
MOST = 20

_failed: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rerun-list", metavar="FILE", help="write the tests to FILE that failed and may be run again")
    parser.addoption("--repeat", metavar="N", type=int, default=1, help="run each test N times")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Round by round, so that what a test leaves behind meets the other tests too.
    rounds = range(1, config.getoption("--repeat"))
    items += [_again(item, number) for number in rounds for item in list(items)]


def _again(item: pytest.Item, number: int) -> pytest.Item:
    copied = copy.copy(item)
    copied._initrequest()  # type: ignore[attr-defined]
    copied._id = type(item.id).parse(f"{item.nodeid}#{number}")  # type: ignore[attr-defined]
    return copied


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--rerun-list")
    if path and 0 < len(_failed) <= MOST:
        Path(path).write_text("".join(f"{each}\n" for each in sorted(_failed)))
