"""A disk that is really full: publish says so, nothing acknowledged is lost, and once there is space it goes on.

A small tmpfs is the disk, which needs root. SQLite is also tested with a limit to its files' size, which does not.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import resource
import shutil
import string
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest

import servers
from faults.actors import actor, declared, said
from served import PREFIX, start
from weft.errors import ConnectionFailedError, StorageError
from weft.project import Project, connect, use
from weft.streams import ack_sync, consume_sync, publish_sync, trim_sync
from weft.streams.events import to_dicts
from weft.streams.runtime import close, open_stream
from weft.systems.base import Connection

STREAM = "full"
MB = 1_000_000
# PostgreSQL would compress a long or a simple text.
PAYLOAD = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=1_800))


class Disk:
    """A mounted folder of a few megabytes, and a file in it that takes up what is free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ballast = folder / "ballast"

    def fill(self, leave: int) -> None:
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        with self.ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(free - leave, 1))

    def free(self) -> None:
        self.ballast.unlink()


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int, owner: str = "root") -> Iterator[Disk]:
    """A tmpfs on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    account = pwd.getpwnam(owner)
    options = f"size={megabytes}m,mode=0700,uid={account.pw_uid},gid={account.pw_gid}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk can only be mounted as root, with the right to: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Publisher:
    """Publishes numbered events of 2 kB, and knows which of them were acknowledged."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.stream = declared(STREAM)
        self.acknowledged: list[int] = []
        self.refused: list[int] = []
        self.in_doubt: list[int] = []
        self.n = 0

    def publish(self, size: int = 10) -> None:
        numbers = list(range(self.n, self.n + size))
        self.n += size
        events = [{"writer": PAYLOAD, "n": n} for n in numbers]
        try:
            publish_sync(self.stream, events, connection=self.connection)
        except (StorageError, ConnectionFailedError) as error:
            if "Nothing was stored." in str(error):
                self.refused += numbers
            else:
                assert "may or may not be stored" in str(error) or "Cannot open" in str(error)
                self.in_doubt += numbers
            raise
        self.acknowledged += numbers

    def publish_until_refused(self, megabytes: float) -> None:
        """Until the disk is full, which it must be before so much was published."""
        with pytest.raises(StorageError):
            for _ in range(int(megabytes * MB / 20_000)):
                self.publish()

    def check(self) -> None:
        log = open_stream(self.stream, self.connection).log
        stored = [event["n"] for event in to_dicts(log.read(0, log.head(), 1_000_000))]
        assert stored == sorted(set(stored)), "twice, or out of order"
        assert set(self.acknowledged) <= set(stored), "an acknowledged event is lost"
        assert not set(self.refused) & set(stored), "stored, though the error said that nothing was"
        assert set(stored) <= {*self.acknowledged, *self.in_doubt}

    def consume(self) -> list[int]:
        numbers: list[int] = []
        while events := consume_sync(self.stream, "reader", 1000, self.connection, "one"):
            ack_sync(self.stream, "reader", events, connection=self.connection)
            numbers += [event["n"] for event in events]
        return numbers


def fill_and_free(publisher: Publisher, fill: Callable[[], None], free: Callable[[], None], megabytes: float) -> None:
    publisher.publish()
    for _ in range(3):
        before = len(publisher.acknowledged)
        fill()
        publisher.publish_until_refused(megabytes)
        # It stays so, for small events too, as soon as what was left is used up.
        publisher.publish_until_refused(megabytes)
        with pytest.raises(StorageError):
            for _ in range(1000):
                publisher.publish(1)
        publisher.check()
        free()
        publisher.publish()
        publisher.publish(100)
        publisher.check()
        assert len(publisher.acknowledged) > before
    assert set(publisher.acknowledged) <= set(publisher.consume())


def test_sqlite_on_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 16) as disk, use(Project()) as project:
        try:
            publisher = Publisher(connect(url=f"sqlite:///{disk.folder / 'test.db'}"))
            fill_and_free(publisher, lambda: disk.fill(leave=MB // 2), disk.free, 4)
        finally:
            close(project)


def trim_when_full(publisher: Publisher, fill: Callable[[], None], megabytes: float) -> int:
    """Fill the disk, and remove all but the last ten events, in a process that has opened nothing yet."""
    publisher.publish()
    publisher.consume()
    fill()
    publisher.publish_until_refused(megabytes)
    with contextlib.suppress(StorageError):
        while True:
            publisher.publish(1)
    close()
    removed = trim_sync(publisher.stream, max_rows=10, connection=publisher.connection)
    log = open_stream(publisher.stream, publisher.connection).log
    assert [event["n"] for event in to_dicts(log.read(0, log.head(), 100))] == publisher.acknowledged[-10:]
    return removed


@pytest.mark.parametrize("leave", [MB // 2, 10 * MB], ids=["small", "large"])
def test_sqlite_trims_on_a_full_disk(tmp_path: Path, leave: int) -> None:
    """The events that were removed make room for as many others."""
    with mounted(tmp_path / "disk", 16) as disk, use(Project()) as project:
        try:
            publisher = Publisher(connect(url=f"sqlite:///{disk.folder / 'test.db'}"))
            removed = trim_when_full(publisher, lambda: disk.fill(leave), 16)
            assert removed > 100
            for _ in range(removed // 20):
                publisher.publish()
            assert trim_sync(publisher.stream, max_rows=10, connection=publisher.connection) > 0
        finally:
            close(project)


def test_the_service_on_a_full_disk(tmp_path: Path) -> None:
    """Which is also that of its temporary files. It answers, and its worker lives."""
    url = f"{PREFIX}/{STREAM}"
    with mounted(tmp_path / "disk", 16) as disk:
        temporary = disk.folder / "tmp"
        temporary.mkdir()
        # Its log is elsewhere: to log to a full disk fails, too.
        toml = f'[connections.default]\nurl = "sqlite:///{disk.folder / "test.db"}"\n'
        code = f'@weft.stream(rate_limit={{"requests_per_second": 1e6}})\ndef {STREAM}(): ...'
        served = start(tmp_path / "served", code, toml=toml, env={"TMPDIR": str(temporary)})
        try:
            served.publish(STREAM, {"n": -1})
            workers, acknowledged = served.workers(), [-1]
            disk.fill(leave=MB)
            answer = served.client.get("/healthz")
            for n in range(1000):
                answer = served.client.post(url, json={"n": n, "writer": PAYLOAD * 10})
                if answer.status_code != 202:
                    break
                acknowledged.append(n)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:weft:problem:storage")
            assert answer.headers["retry-after"] == "30"
            for path in ("/healthz", "/metrics", url, f"{url}/events?limit=1"):
                for _ in range(20):
                    assert served.client.get(path).status_code == 200, path
            disk.free()
            assert served.client.post(url, json={"n": 1000}).status_code == 202
            assert [event["n"] for event in served.events(STREAM)] == [*acknowledged, 1000]
            assert served.workers() == workers
        finally:
            code_of_exit = served.stop()
    assert code_of_exit == 0


def test_sqlite_file_of_limited_size(tmp_path: Path) -> None:
    with actor(reach_the_limit, f"sqlite:///{tmp_path / 'test.db'}", str(tmp_path / "test.db-wal")) as (_, pipe):
        assert said(pipe) == "done"


def reach_the_limit(pipe: Pipe, url: str, wal: str) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(wal) + MB // 4, most))

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        fill_and_free(Publisher(connect(url=url)), fill, free, 8)
        pipe.send("done")
    except BaseException as error:
        free()
        pipe.send(AssertionError(f"{type(error).__name__}: {error}"))


@pytest.fixture
def server(request: pytest.FixtureRequest, need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    """A server for this test alone."""
    need_server(request.param)
    server = servers.KINDS[request.param]()
    yield server
    server.kill()


@contextlib.contextmanager
def small_tablespace(server: servers.Server) -> Iterator[tuple[Disk, Publisher]]:
    """A disk for the tables of PostgreSQL alone, and a publisher to a database there."""
    with mounted(server.folder / "disk", 32, server.user) as disk, use(Project()) as project:
        place = disk.folder / "tables"
        place.mkdir()
        shutil.chown(place, server.user, server.user)
        server.start()
        with contextlib.closing(server.connect()) as driver:
            driver.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
            driver.execute("CREATE DATABASE full_disk TEMPLATE template0 TABLESPACE small")
        try:
            yield disk, Publisher(connect(url=server.url("full_disk")))
        finally:
            close(project)
            server.kill()


@pytest.mark.full
@pytest.mark.parametrize("server", ["postgres"], indirect=True)
def test_postgres_tables_on_a_full_disk(server: servers.Server) -> None:
    with small_tablespace(server) as (disk, publisher):
        fill_and_free(publisher, lambda: disk.fill(leave=MB), disk.free, 8)


@pytest.mark.full
@pytest.mark.parametrize("server", ["postgres"], indirect=True)
def test_postgres_trims_on_a_full_disk(server: servers.Server) -> None:
    """What is removed is free for others once PostgreSQL has vacuumed the table, which it does by itself."""
    with small_tablespace(server) as (disk, publisher):
        assert trim_when_full(publisher, lambda: disk.fill(MB), 8) > 0


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("server", ["postgres"], indirect=True)
def test_postgres_log_on_a_full_disk(server: servers.Server) -> None:
    """Where its write-ahead log cannot grow, PostgreSQL crashes. It is started again, our process is not."""
    with mounted(server.folder / "disk", 80, server.user) as disk, use(Project()) as project:
        server.run("mv", str(server.data / "pg_wal"), str(disk.folder))
        (server.data / "pg_wal").symlink_to(disk.folder / "pg_wal")
        server.start()
        try:
            publisher = Publisher(connect(url=server.create_database("full_disk")))
            publisher.publish()
            for _ in range(2):
                disk.fill(leave=MB)
                publisher.publish_until_refused(40)
                assert publisher.in_doubt, "a server that crashes cannot promise that nothing was stored"
                disk.free()
                server.kill()
                server.start()
                # The first attempt may find out that the old connection is gone.
                with contextlib.suppress(ConnectionFailedError):
                    publisher.publish()
                publisher.publish()
                publisher.check()
            assert set(publisher.acknowledged) <= set(publisher.consume())
        finally:
            close(project)
            server.kill()


@pytest.mark.full
@pytest.mark.parametrize("server", ["mysql"], indirect=True)
def test_mysql_tables_on_a_full_disk(server: servers.Server) -> None:
    server.start()
    url = server.create_database("full_disk")
    with mounted(server.data / "full_disk", 32, server.user) as disk, use(Project()) as project:
        try:
            publisher = Publisher(connect(url=url))
            fill_and_free(publisher, lambda: disk.fill(leave=MB), disk.free, 16)
        finally:
            close(project)
            server.kill()


@pytest.mark.parametrize("server", ["mysql"], indirect=True)
def test_mysql_trims_on_a_full_disk(server: servers.Server) -> None:
    server.start()
    url = server.create_database("full_disk")
    with mounted(server.data / "full_disk", 32, server.user) as disk, use(Project()) as project:
        try:
            assert trim_when_full(Publisher(connect(url=url)), lambda: disk.fill(MB), 16) > 0
        finally:
            close(project)
            server.kill()


def test_redis_trims_when_its_memory_is_full(shared_server: Callable[[str], servers.Server]) -> None:
    import redis

    with shared_server("redis").database() as url, redis.Redis.from_url(url) as client, use(Project()) as project:
        publisher = Publisher(connect(url=url))

        def fill() -> None:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + MB)

        try:
            assert trim_when_full(publisher, fill, 16) > 0
            publisher.publish()
        finally:
            client.config_set("maxmemory", 0)
            close(project)
