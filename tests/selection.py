"""Which tests a run has, and which process runs them.

@pytest.mark.brief("sqlite", "postgres-merge")   of this test's parameters, `make test` runs these alone
@pytest.mark.full                                `make test` does not run this test at all
@pytest.mark.every_system                        of these databases, all that it has
@pytest.mark.spark                               runs Spark in the test's own process
@pytest.mark.delta                               uses Delta without the fixture `spark`: needs `spark` as well
@pytest.mark.kafka                               uses the broker of the run, or its schema registry
@pytest.mark.queues                              uses its RabbitMQ or Pub/Sub

A test on several of SQLite, PostgreSQL, MariaDB, DuckDB and Redis runs on one of them in `make test`. Which one depends
on its name and its other parameters: of thousands of tests, each of the five has hundreds. Where the database is what a
test is about it has the mark `every_system`; a mark `brief` says itself what runs.

`--full` (make faults) runs what `make test` leaves out or runs in brief, in full: these tests, and those that take a
count or examples of Hypothesis. Tests that use one of the fixtures of Spark or Kafka are marked by themselves. They
are two groups, each in one process, so that a run has two Spark sessions, and one broker of each kind; the other files
are shared out among the processes, each as a whole, because the tests of a file may share a service.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

import servers

FIXTURES = {
    **dict.fromkeys(("spark", "plain_spark"), "spark"),
    **dict.fromkeys(("kafka", "registry"), "kafka"),
    **dict.fromkeys(("rabbitmq", "pubsub"), "queues"),
}
DATABASES = ("duckdb", "mysql", "postgres", "redis", "sqlite")
SLOW = (
    *("tests/faults/", "tests/docs/", "tests/engine/", "tests/cli/test_consume.py", "tests/cli/test_stopping.py"),
    "tests/systems/tables/",
)
# The tests of Spark are two groups, each with a session, which take about the same time: no run is shorter than the
# longer one. Kafka is with these, and so are all of its tests. Delta, S3, RabbitMQ and Pub/Sub are with the others: a
# JVM takes ten seconds for its first loads into Delta. A test of Delta has the fixture `spark` or the mark, and not
# Kafka.
STREAMING = (
    "tests/cli/test_checkpoints.py",
    "tests/engine/streaming/",
    "tests/engine/test_udf.py",
    "tests/faults/",
    "tests/operate/",
    "tests/seeds/",
    "tests/systems/contracts/",
    "tests/systems/kafka/",
)
STREAMING_GROUP = "spark, streaming"
_HAD_SPARK, _HAD_KAFKA = pytest.StashKey[bool](), pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run what is run in brief else, in full")
    parser.addoption("--on", choices=DATABASES, help="the database of each test that has it")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the collector of garbage from the tests, which stay: to look at all of them takes a third of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure() -> None:
    # Some libraries complain of what is left of them when the process ends. Not before that: pytest collects garbage
    # when a run ends, and would look at all tests.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any, name: str) -> Generator[None, Any, Any]:
    """Fail the collection of a module in which a `brief` mark names a parameter that its test does not have."""
    collected = yield
    tests = [each for each in collected or () if isinstance(each, pytest.Function)] if name.startswith("test") else []
    for mark in tests[0].iter_markers("brief") if tests else ():
        known = {each.callspec.id for each in tests if hasattr(each, "callspec")}
        if unknown := sorted(set(mark.args) - known):
            raise collector.CollectError(
                f"{collector.nodeid}::{name} has no parameters {', '.join(unknown)}, which its mark `brief` names. "
                f"It has: {', '.join(sorted(known))}."
            )
        if not mark.args:
            raise collector.CollectError(f"{collector.nodeid}::{name}: `brief` names no parameters; use `full`.")
    return collected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = _on_other_databases(items, config.getoption("--on"))
    # A test that is named with its parameters is the one that is wanted, whatever else a run of this kind has.
    named = {each.rpartition("::")[2] for each in config.args if "::" in each and "[" in each}

    def is_chosen(item: pytest.Item) -> bool:
        if item.name in named:
            return True
        if config.getoption("--full"):
            return item in others or _is_shortened(item)
        return item not in others and _is_brief(item)

    chosen = [each for each in items if is_chosen(each)]
    config.hook.pytest_deselected(items=[each for each in items if not is_chosen(each)])
    items[:] = chosen
    for item in items:
        for fixture in FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURES[fixture])
    items.sort(key=_turn)


def _is_of_spark(item: pytest.Item) -> bool:
    """Whether a process with Spark's tests runs it."""
    return any(item.get_closest_marker(name) is not None for name in FIXTURES.values())


def group(item: pytest.Item) -> str:
    """The tests that one process runs: a group of Spark's tests, or a file."""
    if not _is_of_spark(item):
        return item.nodeid.partition("::")[0]
    is_marked = any(item.get_closest_marker(name) is not None for name in ("delta", "queues"))
    is_elsewhere = is_marked or "spark" in getattr(item, "fixturenames", ())
    is_streaming = item.nodeid.startswith(STREAMING) and not is_elsewhere
    return STREAMING_GROUP if is_streaming or item.get_closest_marker("kafka") is not None else "spark"


def _turn(item: pytest.Item) -> int:
    """What takes long comes first, so that the processes end at about the same time: first what starts processes."""
    if _is_of_spark(item):
        return 0
    return 1 if item.nodeid.startswith(SLOW) else 2


def _on_other_databases(items: list[pytest.Item], wanted: str | None = None) -> set[pytest.Item]:
    """Tests that run on another database as well, which is the one that `make test` has: the wanted one, or one of
    them."""
    same: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        database, rest = _database(item)
        if database and not any(item.get_closest_marker(name) for name in ("full", "brief", "every_system")):
            same[rest][database] = item
    left_out: set[pytest.Item] = set()
    for rest, by_database in same.items():
        chosen = wanted if wanted in by_database else sorted(by_database)[zlib.crc32(rest.encode()) % len(by_database)]
        left_out.update(item for database, item in by_database.items() if database != chosen)
    return left_out


def _database(item: Any) -> tuple[str | None, str]:
    """The first of its parameters that is a database, and the test's name without it."""
    parts = item.callspec.id.split("-") if hasattr(item, "callspec") else []
    for number, part in enumerate(parts):
        if part in DATABASES:
            return part, f"{item.nodeid.partition('[')[0]}[{'-'.join([*parts[:number], '', *parts[number + 1 :]])}]"
    return None, item.nodeid


def _is_brief(item: Any) -> bool:
    """Whether `make test` runs it."""
    mark = item.get_closest_marker("brief")
    return item.get_closest_marker("full") is None and (mark is None or item.callspec.id in mark.args)


def _is_shortened(item: Any) -> bool:
    """Whether `make test` leaves it out, or runs less of it."""
    has_mark = any(item.get_closest_marker(name) is not None for name in ("full", "brief"))
    return has_mark or "count" in item.fixturenames or getattr(item.obj, "is_hypothesis_test", False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_HAD_SPARK], item.stash[_HAD_KAFKA] = _has_spark(), _has_kafka()
    if item.config.getoption("--processes") > 1 and not _is_of_spark(item):
        _yield_to_spark()


@functools.cache
def _yield_to_spark() -> None:
    """Let the process with the tests of Spark go before this one: it has the most to do, and ends last."""
    os.nice(5)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that starts Spark without the mark: it would be a second session, in another process. The same of the
    broker, where the test is in another process than those of Kafka, and of Delta, where it is in that one."""
    is_new = _has_spark() and not item.stash[_HAD_SPARK]  # before the last test of a run stops it
    is_one_of_many, is_of_kafka = item.config.getoption("--processes") > 1, group(item) == STREAMING_GROUP
    has_delta = is_one_of_many and is_of_kafka and _has_delta()
    yield
    if has_delta:
        sys.modules["weft.engine.session"].stop()
        pytest.fail("It uses Delta beside tests of Kafka: mark it with pytest.mark.delta.", pytrace=False)
    if is_one_of_many and not is_of_kafka and _has_kafka() and not item.stash[_HAD_KAFKA]:
        pytest.fail("It starts Kafka or the registry: mark it with pytest.mark.kafka.", pytrace=False)
    if is_new and item.get_closest_marker("spark") is None:
        sys.modules["weft.engine.session"].stop()
        pytest.fail("It starts Spark in this process: mark it with pytest.mark.spark.", pytrace=False)


def _has_spark() -> bool:
    engine = sys.modules.get("weft.engine.session")
    return engine is not None and engine.running() is not None


def _has_delta() -> bool:
    """Whether Delta's rules are in the plans of the session."""
    connectors = sys.modules.get("weft.engine.connectors")
    if connectors is None or not _has_spark():
        return False
    context = sys.modules["weft.engine.session"].running().sparkContext
    return context._jsc.hadoopConfiguration().get(connectors._NOTE) is not None


def _has_kafka() -> bool:
    return not servers.shared_servers.keys().isdisjoint(("kafka", "registry"))
