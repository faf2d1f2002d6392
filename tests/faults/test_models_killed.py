"""Workers, services and databases that are killed (-9) while models are built: the tables equal the events in the end,
and no event is in an incremental one twice."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import servers
import warm_python
import weft
from commands import Commands
from served import start
from servers import wait_until
from tests.engine.models.built import query
from weft.errors import WeftError
from weft.project import Project, use

pytestmark = pytest.mark.timing

MODELS = """
import weft

@weft.stream(fields={"id": "int64", "shop": "string"})
def orders(): ...

@weft.model(materialise="incremental")
def kept(orders):
    return "SELECT id, shop FROM orders"

@weft.model(materialise="merge", key="shop")
def newest(orders):
    return orders.group_by("shop").aggregate(id=orders.id.max())

@weft.model
def shops(kept):
    return kept.group_by("shop").aggregate(orders=kept.count())

@weft.model
def total(shops, newest):
    return shops.aggregate(total=shops.orders.sum())
"""


@dataclass
class Place:
    """A project with models, and what was published in it."""

    folder: Path
    environment: dict[str, str]
    shops: dict[str, list[int]] = field(default_factory=dict)
    published: int = 0

    def publish(self, events: int) -> None:
        new = [{"id": self.published + n, "shop": f"s{random.randrange(4)}"} for n in range(events)]
        weft.publish_sync("orders", new)
        for each in new:
            self.shops.setdefault(str(each["shop"]), []).append(int(each["id"]))
        self.published += events

    def is_complete(self) -> bool:
        with suppress(WeftError):
            return query("SELECT total FROM total") == [(self.published,)]
        return False

    def check(self) -> None:
        """Each table is what the events make of it."""
        found = sorted((shop, int(id)) for id, shop in query("SELECT id, shop FROM kept"))
        assert found == sorted((shop, id) for shop, ids in self.shops.items() for id in ids)
        assert sorted(query("SELECT shop, id FROM newest")) == sorted((s, max(ids)) for s, ids in self.shops.items())
        assert sorted(query("SELECT shop, orders FROM shops")) == sorted((s, len(i)) for s, i in self.shops.items())
        assert query("SELECT total FROM total") == [(self.published,)]


@pytest.fixture
def place(streams: Project, project: Path) -> Place:
    return _place(project)


def _place(folder: Path) -> Place:
    (folder / "shop.py").write_text(MODELS)
    (folder / "weft.toml").write_text('modules = ["shop"]\n')
    weft.stream(name="orders", fields={"id": "int64", "shop": "string"})(lambda: None)
    return Place(folder, {"WEFT_DSN": os.environ["WEFT_DSN"]})


@pytest.mark.brief("sqlite")
def test_worker_killed_between_any_two_steps(place: Place, commands: Commands, count: Callable[..., int]) -> None:
    place.publish(5)
    ended = commands.run(place, "worker", "--once", "--threads", "1")
    assert ended.code == 0, ended
    place.check()
    steps = len(ended.steps)
    for _ in range(count(50, 3)):
        place.publish(random.randrange(1, 4))
        ended = commands.run(place, "worker", "--once", "--threads", "1", at=random.randrange(steps))
        assert ended.code in (0, -9), ended
        if ended.code == 0:
            place.check()
    ended = commands.run(place, "worker", "--once")
    assert ended.code == 0, ended
    place.check()


@dataclass
class Worker:
    """`weft worker` in a process of its own."""

    place: Place
    process: Any = None

    def start(self) -> None:
        self.process = warm_python.Popen(
            [sys.executable, "-m", "weft", "worker", "--format", "json"],
            cwd=self.place.folder,
            env={**os.environ, **self.place.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def workers(place: Place) -> Iterator[list[Worker]]:
    made = [Worker(place), Worker(place)]
    yield made
    for each in made:
        each.kill()


@pytest.mark.full
def test_two_workers_killed_during_bursts(place: Place, workers: list[Worker], count: Callable[..., int]) -> None:
    stopping, failures = threading.Event(), []

    def publish() -> None:
        while not stopping.wait(0.02):
            try:
                place.publish(random.randrange(1, 20))
            except Exception as error:
                failures.append(error)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for each in workers:
            each.start()
        for number in range(count(50, 2)):
            stopping.wait(random.uniform(1.0, 3.0))
            workers[number % 2].kill()
            workers[number % 2].start()
    finally:
        stopping.set()
        publisher.join()
    assert failures == []
    wait_until(place.is_complete, "the tables", 60)
    place.check()


@pytest.mark.full
@pytest.mark.parametrize("own_server", ["postgres"], indirect=True)
def test_database_killed_during_bursts(
    own_server: servers.Server, project: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[..., int]
) -> None:
    with own_server.database() as url, use(Project()) as fresh:
        monkeypatch.setenv("WEFT_DSN", url)
        place = _place(project)
        worker = Worker(place)
        worker.start()
        try:
            for _ in range(count(50, 1)):
                place.publish(random.randrange(1, 20))
                own_server.kill()
                own_server.start()
                wait_until(_answers, "an answer")
                weft.streams.close(fresh)  # with the connections of before
            wait_until(place.is_complete, "the tables", 90)
            place.check()
        finally:
            worker.kill()
            weft.streams.close(fresh)


def _answers() -> bool:
    try:
        query("SELECT 1")
    except WeftError:
        return False
    return True


@pytest.mark.full
def test_service_killed_during_bursts(tmp_path: Path, count: Callable[..., int]) -> None:
    """The worker of models ends with its service, and the next service builds what is left."""
    published = 0
    served = None
    try:
        for _ in range(count(50, 1)):
            served = start(tmp_path / "served", MODELS)
            assert served.url
            for _ in range(random.randrange(1, 30)):
                served.publish("orders", {"id": published, "shop": f"s{published % 3}"})
                published += 1
            children = served.workers()
            served.stop(signal.SIGKILL)
            wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in children), "the end of its processes")  # noqa: B023
        served = start(tmp_path / "served", MODELS)
        assert served.url
        database = tmp_path / "served" / ".weft" / "weft.db"
        wait_until(lambda: _rows(database, "SELECT total FROM total") == [(published,)], "the tables", 60)
        assert sorted(_rows(database, "SELECT id FROM kept")) == [(number,) for number in range(published)]
    finally:
        if served is not None:
            served.stop()


def _rows(file: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as database, suppress(sqlite3.OperationalError):
        return database.execute(sql).fetchall()
    return []
