"""Private database servers for the tests: real ones, on free loopback ports, with their files in a temporary folder.

    server = PostgresServer()
    server.start()
    url = server.create_database("orders")
    server.kill()        # -9: what is committed must be there after
    server.restart()

The servers of a run share one folder. They go when the run ends, however it ends: at its exit, and by a watcher
process that ends them and removes the folder when the process that started them is gone, even by SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

STARTUP_SECONDS = 120
# Whether databases wait for the disk at each commit. What a killed server had committed is there after without it too:
# only a machine that loses its power needs it.
WAITS_FOR_DISK = True
EXECUTABLES = {
    *("postgres", "mariadbd", "redis-server", "redis-check-rdb", "java", "beam.smp", "epmd", "erl_child_setup"),
    *("pgbouncer", "weed"),
    Path(sys.executable).resolve().name,
}


class MissingServerError(Exception):
    """The server's programs are not on this machine. `package` is the Debian package that has them."""

    def __init__(self, name: str, package: str) -> None:
        super().__init__(f"{name} is not installed (sudo apt-get install --no-install-recommends {package})")
        self.package = package


class Server:
    """One private server. A subclass says where its programs are, how to start one and how to talk to it."""

    name: ClassVar[str]
    package: ClassVar[str]
    user: ClassVar[str]  # whom the server runs as when the tests run as root
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self) -> None:
        self.program = self.find(self.programs()[0])
        self.folder = run_folder() / f"{self.package}-{len(_servers)}"
        self.data = self.folder / "data"
        self.log = self.folder / "server.log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.numbers = itertools.count(1)
        self._admin: Any = None
        self.folder.mkdir()
        if os.geteuid() == 0:
            os.chown(self.folder, pwd.getpwnam(self.user).pw_uid, pwd.getpwnam(self.user).pw_gid)
        _servers.append(self)
        self.initialise()

    # What a kind of server defines.

    @classmethod
    def programs(cls) -> list[str]:
        raise NotImplementedError

    @classmethod
    def search_path(cls) -> list[str]:
        return []

    def initialise(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def connect(self, database: str | None = None) -> Any:
        """A plain driver connection in autocommit mode."""
        raise NotImplementedError

    def url(self, database: str | None = None) -> str:
        raise NotImplementedError

    def create_database(self, name: str) -> str:
        """Make an empty database and give its url."""
        raise NotImplementedError

    def drop_database(self, name: str) -> None:
        """Remove a database, also from under open connections."""
        raise NotImplementedError

    # What all of them do.

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The url of an empty database for one test, with a name that no other test has."""
        name = f"test_{next(self.numbers)}"
        yield self.create_database(name)
        self.start()  # nothing, unless the test left it dead
        self.drop_database(name)

    def admin(self) -> Any:
        """A connection that stays open until the server ends: two of each test would take longer than what they do."""
        if self._admin is None:
            self._admin = self.connect()
        return self._admin

    def _end_admin(self) -> None:
        ended, self._admin = self._admin, None
        if ended is not None:
            with contextlib.suppress(Exception):  # the server is gone already
                ended.close()

    @classmethod
    def find(cls, program: str) -> str:
        path = os.pathsep.join([*cls.search_path(), os.environ.get("PATH", os.defpath), "/usr/sbin"])
        found = shutil.which(program, path=path)
        if found is None:
            raise MissingServerError(cls.name, cls.package)
        return found

    @classmethod
    def is_missing(cls) -> bool:
        try:
            for program in cls.programs():
                cls.find(program)
        except MissingServerError:
            return True
        return False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers, after a crash also for its recovery."""
        if self.is_running:
            return
        self._end_admin()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self.as_user(),
            )
        deadline = time.monotonic() + STARTUP_SECONDS
        while True:
            try:
                self.connect().close()
                return
            except Exception as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    ended = self.process.poll() is not None
                    self.kill()
                    what = "ended at its start" if ended else f"did not answer in {STARTUP_SECONDS} s"
                    raise RuntimeError(f"{self.name} {what}: {error}\n{self.log_tail()}") from error
            time.sleep(0.02)

    def stop(self) -> None:
        """Shut down in order; connections are cut."""
        self._end_admin()
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STARTUP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """End every process of the server with SIGKILL, as a crash would, and wait until all of them are gone."""
        self._end_admin()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        kill_servers_in(self.folder)

    def restart(self) -> None:
        """Start again on the same port and files, after `kill` or, if the server runs, after `stop`."""
        self.stop()
        self.start()

    def as_user(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam(self.user)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def run(self, *command: str) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **self.as_user(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} gave status {done.returncode}\n{done.stdout}{done.stderr}")

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


class PostgresServer(Server):
    name = "PostgreSQL"
    package = "postgresql"
    user = "postgres"
    stop_signal = signal.SIGINT  # "fast": does not wait for clients

    def __init__(self) -> None:
        super().__init__()
        self.spare: list[str] = []  # empty databases

    @classmethod
    def programs(cls) -> list[str]:
        return ["postgres", "initdb"]

    @classmethod
    def search_path(cls) -> list[str]:
        installed = [p for p in Path("/usr/lib/postgresql").glob("*/bin") if p.parent.name.isdigit()]
        return [str(p) for p in sorted(installed, key=lambda p: int(p.parent.name), reverse=True)]

    def initialise(self) -> None:
        locale = ["--encoding=UTF8", "--locale=C.UTF-8"]
        self.run(self.find("initdb"), "-D", str(self.data), "-U", "weft", "-A", "trust", "--no-sync", *locale)

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "wal_level": "logical",
            "max_connections": "200",
            "timezone": "UTC",
            "fsync": "on" if WAITS_FOR_DISK else "off",
            # Tables without statistics look large, so that even a statement over ten rows may be compiled first.
            "jit": "off",
            # In its folder, which goes with it. What a killed server has in /dev/shm would stay there.
            "dynamic_shared_memory_type": "mmap",
        }
        return [self.program, "-D", str(self.data), *(f"--{key}={value}" for key, value in settings.items())]

    def kill(self) -> None:
        super().kill()
        # Nothing of it is left, so the file can only mislead: its number may belong to another process by now.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def connect(self, database: str | None = None) -> Any:
        import psycopg

        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5)

    def url(self, database: str | None = None) -> str:
        return f"postgresql://weft@127.0.0.1:{self.port}/{database or 'postgres'}"

    # CREATE DATABASE copies 7 MB, which takes ten times as long as to empty one and give it a new name.

    def create_database(self, name: str) -> str:
        if self.spare:
            self.admin().execute(f'ALTER DATABASE "{self.spare.pop()}" RENAME TO "{name}"')
        else:
            self.admin().execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        spare = f"spare_{next(self.numbers)}"
        wait_until(lambda: self._rename(self.admin(), name, spare), f"the connections to {name} to end")
        with contextlib.closing(self.connect(spare)) as connection:
            of_users = "nspname !~ '^pg_' AND nspname <> 'information_schema'"
            found = connection.execute(f"SELECT quote_ident(nspname) FROM pg_namespace WHERE {of_users}").fetchall()
            connection.execute(f"DROP SCHEMA {', '.join(schema for (schema,) in found)} CASCADE")
            connection.execute("CREATE SCHEMA public")
        self.spare.append(spare)

    def _rename(self, connection: Any, name: str, new_name: str) -> bool:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        try:
            connection.execute(f'ALTER DATABASE "{name}" RENAME TO "{new_name}"')
        except Exception as error:
            if getattr(error, "sqlstate", None) != "55006":  # object in use
                raise
            return False
        return True


class MariaDBServer(Server):
    name = "MariaDB"
    package = "mariadb-server"
    user = "mysql"
    own: ClassVar[frozenset[str]] = frozenset({"information_schema", "mysql", "performance_schema", "sys"})

    def __init__(self) -> None:
        super().__init__()
        self.databases: set[str] = set()

    @classmethod
    def programs(cls) -> list[str]:
        return ["mariadbd", "mariadb-install-db"]

    def initialise(self) -> None:
        self.run(
            self.find("mariadb-install-db"),
            "--no-defaults",
            f"--datadir={self.data}",
            f"--tmpdir={self.folder}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )

    def command(self) -> list[str]:
        return [
            self.program,
            "--no-defaults",
            f"--datadir={self.data}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--socket=server.sock",  # inside datadir: a full path may be longer than a socket's name can be
            f"--pid-file={self.folder / 'server.pid'}",
            # Not the machine's: at its start a server removes what looks like an old temporary table, whosever it is.
            f"--tmpdir={self.folder}",
            "--log-bin=binlog",
            "--binlog-format=ROW",
            "--server-id=1",
            "--max-connections=200",
            "--character-set-server=utf8mb4",
            "--skip-name-resolve",
            *([] if WAITS_FOR_DISK else ["--innodb-flush-log-at-trx-commit=2", "--sync-binlog=0"]),
        ]

    def connect(self, database: str | None = None) -> Any:
        import pymysql

        # Without TLS, because to read the machine's certificates takes 30 times as long as to connect.
        where = {"host": "127.0.0.1", "port": self.port, "user": "root", "database": database}
        return pymysql.connect(**where, autocommit=True, connect_timeout=5, ssl_disabled=True)

    def url(self, database: str | None = None) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/{database or 'mysql'}"

    def create_database(self, name: str) -> str:
        with self.admin().cursor() as cursor:
            cursor.execute(f"CREATE DATABASE `{name}`")
        self.databases.add(name)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        with self.admin().cursor() as cursor:
            # A connection that a test left open in a transaction would make the DROP wait for it.
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (name,))
            for (number,) in cursor.fetchall():
                with contextlib.suppress(Exception):
                    cursor.execute(f"KILL {number}")
            self.databases.discard(name)
            # A schema is a database of its own here: those that the test made would be there for the next one.
            cursor.execute("SHOW DATABASES")
            for (each,) in cursor.fetchall():
                if each not in self.databases | self.own:
                    cursor.execute(f"DROP DATABASE `{each}`")


class MotoServer(Server):
    """S3 and Kinesis, as far as moto does them, in a process of its own. A killed one comes back empty."""

    name = "moto"
    package = "moto"
    user = "root"  # whoever runs the tests: their environment may be closed to others

    @classmethod
    def programs(cls) -> list[str]:
        return ["moto_server"]

    @classmethod
    def search_path(cls) -> list[str]:
        return [str(Path(sys.executable).parent)]

    def initialise(self) -> None:
        pass

    def command(self) -> list[str]:
        program = Path(__file__).with_name("moto_process.py")
        return [sys.executable, str(program), str(self.folder), "-H", "127.0.0.1", "-p", str(self.port)]

    def connect(self, database: str | None = None) -> Any:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def url(self, database: str | None = None) -> str:
        return f"http://127.0.0.1:{self.port}"

    def create_bucket(self) -> str:
        """Make an empty bucket and give its name."""
        from urllib.request import Request, urlopen

        name = f"bucket-{next(self.numbers)}"
        urlopen(Request(f"{self.url()}/{name}", method="PUT")).close()
        return name


KINDS: dict[str, type[Server]] = {
    "postgres": PostgresServer,
    "mysql": MariaDBServer,
    "s3": MotoServer,
}

_servers: list[Server] = []
shared_servers: dict[str, Server] = {}
"""Those that were asked for, by kind."""


def shared(kind: str) -> Server:
    """The server of this kind that the whole run uses, started when a test first asks for it."""
    if kind not in shared_servers:
        server = KINDS[kind]()
        server.start()
        shared_servers[kind] = server
    return shared_servers[kind]


@functools.cache
def run_folder() -> Path:
    """The folder of this run's servers, with the watcher that removes it and them when this process is gone."""
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    folder.chmod(0o755)  # the servers may run as other users
    owner = os.getpid()
    watcher = subprocess.Popen(
        [sys.executable, __file__, str(owner), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def stop_all() -> None:
        if os.getpid() == owner:  # not a fork of it
            for server in _servers:
                server.kill()  # nobody reads the files again, so there is nothing to shut down in order
            shutil.rmtree(folder, ignore_errors=True)
            watcher.kill()
            watcher.wait()

    atexit.register(stop_all)
    return folder


def free_port() -> int:
    """A free port below the range that the kernel gives to clients.

    From inside that range a client that keeps trying a killed server may be given the server's own port, and then talks
    to itself, and the server cannot start again. Other test processes do not find it free until this one ends: the
    server listens some time later, and not while it is dead.
    """
    for port in random.sample(range(15000, 32000), 200):
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                claim.bind(f"\0weft-test-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        claim.detach()  # the process closes it when it ends
        return port
    raise RuntimeError("there is no free port between 15000 and 32000")


def servers_in(folder: Path) -> Iterator[int]:
    """The processes that serve from this folder. They work in it, PostgreSQL's backends too."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                in_folder = Path(os.readlink(entry / "cwd")).is_relative_to(folder)
                if in_folder and Path(os.readlink(entry / "exe")).name in EXECUTABLES:
                    yield int(entry.name)


def kill_servers_in(folder: Path) -> None:
    def none_left() -> bool:
        pids = list(servers_in(folder))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(none_left, f"the processes in {folder} to end")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.01)


def watch(owner: int, folder: Path) -> None:
    """Wait for the owner to be gone, then end what it left. A process that lost its parent is given another one."""
    while os.getppid() == owner and folder.exists():
        time.sleep(0.25)
    kill_servers_in(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]))
