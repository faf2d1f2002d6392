"""Fixtures for all tests: an empty project, a fresh database on each system, and how much to repeat.

def test_something(system):      runs on SQLite, PostgreSQL and MariaDB (-k sqlite: on that one)
    system.kind                  "sqlite", "postgres" or "mysql"
    system.url                   an empty database, as for WEFT_DSN
    system.connection            weft.connect(url=system.url)

def test_something(streams):     the same, with that database as the connection `default` of a fresh project
    streams                      the project; `streams.clock` moves SQLite's time

def test_something(s3):          a server that speaks S3
    s3.fields()                  what a connection to a new bucket needs

def test_something(kinesis):     a server that speaks Kinesis
    kinesis.create_stream()      the name of a new, empty stream

def test_something(pubsub):      a server that speaks Pub/Sub
    pubsub.create_queue()        the names of a new topic and of its subscription

def test_something(kafka):       a broker of Kafka
    kafka.create_topic()         the name of a new, empty topic

def test_something(rabbitmq):    a broker of RabbitMQ
    rabbitmq.create_queue()      the name of a new, empty queue

def test_something(registry):    a schema registry
    registry.api                 its URL

def test_something(spark):       the run's Spark session, with Delta and S3 (`plain_spark`: without jars)
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers

import debezium_process  # noqa: F401 - so that there is Debezium
import kafka_server
import pubsub_server
import rabbitmq_server
import redis_server  # noqa: F401 - so that there are servers of Redis
import registry_server
import servers
import warm_python
from commands import Commands
from kinesis_streams import Kinesis

if TYPE_CHECKING:
    from weft.project import Project

pytest_plugins = ["selection", "shares", "reruns", "costs"]

# A shell without job control starts what runs in its background deaf to Ctrl-C, and so would be all that tests start.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

servers.WAITS_FOR_DISK = False
SYSTEMS = ["sqlite", "postgres", "mysql"]
# Every Spark of a test compiles no code for queries, which takes two fifths of a merge of three rows into Delta.
_NO_COMPILING = "-Dspark.sql.codegen.factoryMode=NO_CODEGEN -Dspark.sql.codegen.wholeStage=false"
FEW_ROWS = {
    # Tasks to list the files of a Delta table, which each load does.
    "spark.databricks.delta.snapshotPartitions": "1",
    # Each plan is written as a text for Spark's pages, which are off, and checked after each rule.
    "spark.sql.maxPlanStringLength": "1000",
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.lightweightPlanChangeValidation": "false",
    # Each function of PySpark notes where it was called, by several calls to the JVM and a search for IPython.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Plans are much garbage: with the room that Java gives them, collecting it takes a tenth of the time.
    "spark.driver.extraJavaOptions": "-Xms3g -Xmn1g",
}
"""Settings of Spark for tests: a query takes them longer to plan than to run."""


_MEMORY = "/dev/shm"
_MEMORY_BYTES = 12 << 30

_missing_packages: set[str] = set()


def _keep_files_in_memory() -> None:
    """Where there is room, the temporary files of a run, of its servers too, are in memory: to wait for the disk takes
    longer than the rest of a publish, and what a killed process has written is there without it too."""
    if not os.path.isdir(_MEMORY) or "--full" in sys.argv:  # which writes more than memory holds
        return
    found = os.statvfs(_MEMORY)
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(memory["MemAvailable"].removesuffix("kB")) << 10
    is_large = min(found.f_bavail * found.f_frsize, available) >= _MEMORY_BYTES
    if is_large and not found.f_flag & os.ST_NOEXEC:  # some tests start what they wrote
        tempfile.tempdir = os.environ["TMPDIR"] = _MEMORY


if "TMPDIR" not in os.environ:
    _keep_files_in_memory()


def pytest_configure(config: pytest.Config) -> None:
    is_full = config.getoption("--full")
    # By its full path, because tests change the current folder.
    examples = DirectoryBasedExampleDatabase(config.rootpath / ".hypothesis" / "examples")
    hypothesis.settings.register_profile(
        "weft",
        max_examples=1000 if is_full else 30,
        deadline=None,
        print_blob=True,
        # A change must not fail by a value that was drawn by chance: `make faults` looks for those.
        derandomize=not is_full,
        database=examples if is_full else None,
    )
    hypothesis.settings.load_profile("weft")
    if not is_full:
        # It also draws the constants of all modules that are imported, which depends on the tests that ran before.
        providers._get_local_constants = lambda: providers._local_constants


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _missing_packages:
        packages = " ".join(sorted(_missing_packages, reverse=True))
        terminalreporter.section("tests were skipped because servers are not installed", yellow=True)
        terminalreporter.line("To run them too:")
        terminalreporter.line(f"    sudo apt-get install --no-install-recommends {packages}")


@pytest.fixture(scope="session")
def count(pytestconfig: pytest.Config) -> Callable[..., int]:
    """`count(300)` is 300 with --full (make faults), else 30, and `count(300, 5)` is 5 then."""

    def chosen(full: int, brief: int | None = None) -> int:
        return full if pytestconfig.getoption("--full") else brief or max(1, full // 10)

    return chosen


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the home of each test: pytest looks at all folders beside a new one of its own."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def project(
    tmp_path: Path,
    _homes: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> Iterator[Path]:
    """An empty project, and the current folder. No setting of the user's own and nothing of another test reaches it."""
    for name in list(os.environ):
        if name.startswith("WEFT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", tempfile.mkdtemp(dir=_homes))
    # Not in that home: each test that starts Spark would make an archive of its classes anew.
    monkeypatch.setenv("WEFT_CACHE", str(pytestconfig.rootpath / ".cache" / "weft"))
    # Whichever test starts the run's one session, it is the session that the others expect.
    monkeypatch.setenv("WEFT_SPARK_MASTER", "local[2]")
    # No test leaves a process behind: those of the engine start their own, and stop it.
    monkeypatch.setenv("WEFT_ENGINE", "0")
    if not pytestconfig.getoption("--full"):
        monkeypatch.setenv("JDK_JAVA_OPTIONS", _NO_COMPILING)
    monkeypatch.chdir(tmp_path)
    import weft.streams
    from weft.project import Project, current, use

    of_modules, own = current(), Project()
    for kind in ("connections", "streams", "pipelines", "streaming_pipelines"):
        getattr(own, kind).update(getattr(of_modules, kind))
    imported = set(sys.modules)
    with use(own):
        yield tmp_path
    weft.streams.close(own)
    # A test that has a module of the same name would get this one, whose declarations are of another project.
    for name in sys.modules.keys() - imported:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def need_server() -> Callable[[str], None]:
    """`need_server("postgres")` skips the test when that server is not on this machine."""

    def need(kind: str) -> None:
        server = servers.KINDS[kind]
        if server.is_missing():
            _missing_packages.add(server.package)
            pytest.skip(str(servers.MissingServerError(server.name, server.package)))

    return need


@pytest.fixture
def own_server(request: pytest.FixtureRequest, need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    """A server that a test may kill: of Redis, or of the kinds that it is parametrized with, `indirect=True`."""
    kind = getattr(request, "param", "redis")
    need_server(kind)
    server = servers.KINDS[kind]()
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_server(need_server: Callable[[str], None]) -> Callable[[str], servers.Server]:
    """`shared_server("postgres")` is the run's server of that kind. A test that kills servers makes its own one."""

    def shared(kind: str) -> servers.Server:
        need_server(kind)
        server = servers.shared(kind)
        server.start()  # nothing, unless a test left it dead
        return server

    return shared


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """The command `weft`, in forks of a process in which all is imported."""
    made = Commands()
    yield made
    made.close()


@dataclass
class System:
    """A fresh, empty database on one of the systems."""

    kind: str
    url: str

    @functools.cached_property
    def connection(self) -> Any:
        import weft

        return weft.connect(url=self.url)


@pytest.fixture
def open_system(
    tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> Callable[[str], AbstractContextManager[System]]:
    """`open_system("redis")` is a fresh, empty database on that system."""

    @contextmanager
    def opened(kind: str) -> Iterator[System]:
        if kind == "sqlite":
            yield System(kind, f"sqlite:///{tmp_path / 'test.db'}")
            return
        with shared_server(kind).database() as url:
            yield System(kind, url)

    return opened


@pytest.fixture(params=SYSTEMS)
def system(
    request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[System]]
) -> Iterator[System]:
    with open_system(request.param) as found:
        yield found


@dataclass
class S3:
    """A server that speaks S3."""

    server: Any

    @property
    def endpoint(self) -> str:
        return str(self.server.url())

    def bucket(self) -> str:
        """The name of a new, empty bucket."""
        return str(self.server.create_bucket())

    def fields(self) -> dict[str, str]:
        """What a connection to a new bucket needs."""
        return {
            "bucket": self.bucket(),
            "endpoint": self.endpoint,
            "access_key_id": "me",
            "secret_access_key": "hunter2",
        }

    def keys(self, bucket: str) -> list[str]:
        """What is in a bucket, seen by another client than ours."""
        from pyarrow import fs

        found = self.files.get_file_info(fs.FileSelector(bucket, recursive=True))
        return sorted(each.path.partition("/")[2] for each in found if each.type == fs.FileType.File)

    @functools.cached_property
    def files(self) -> Any:
        from pyarrow import fs

        at = self.endpoint.partition("://")[2]
        return fs.S3FileSystem(
            endpoint_override=at, scheme="http", access_key="me", secret_key="hunter2", region="us-east-1"
        )


@pytest.fixture(scope="session")
def s3(shared_server: Callable[[str], servers.Server]) -> S3:
    return S3(shared_server("s3"))


@pytest.fixture(scope="session")
def kinesis(shared_server: Callable[[str], servers.Server]) -> Kinesis:
    pytest.importorskip("boto3")
    return Kinesis(shared_server("s3"))


@pytest.fixture(scope="session")
def kafka(shared_server: Callable[[str], servers.Server], pytestconfig: pytest.Config) -> kafka_server.KafkaServer:
    """The run's broker. A test that kills it makes its own one."""
    pytest.importorskip("confluent_kafka")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(pytestconfig.rootpath / ".cache" / "weft"))
        found = shared_server("kafka")
    assert isinstance(found, kafka_server.KafkaServer)
    return found


@pytest.fixture(scope="session")
def pubsub(shared_server: Callable[[str], servers.Server], pytestconfig: pytest.Config) -> pubsub_server.PubSubServer:
    """The run's server of Pub/Sub. A test that kills it makes its own one."""
    pytest.importorskip("google.pubsub_v1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(pytestconfig.rootpath / ".cache" / "weft"))
        try:
            found = shared_server("pubsub")
        except servers.MissingServerError as error:
            pytest.skip(str(error))
    assert isinstance(found, pubsub_server.PubSubServer)
    return found


@pytest.fixture(scope="session")
def rabbitmq(shared_server: Callable[[str], servers.Server]) -> rabbitmq_server.RabbitMQServer:
    """The run's broker of RabbitMQ. A test that kills it makes its own one."""
    pytest.importorskip("pika")
    found = shared_server("rabbitmq")
    assert isinstance(found, rabbitmq_server.RabbitMQServer)
    return found


@pytest.fixture(scope="session")
def registry(
    shared_server: Callable[[str], servers.Server], pytestconfig: pytest.Config
) -> registry_server.RegistryServer:
    """The run's schema registry. A test that kills it makes its own one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(pytestconfig.rootpath / ".cache" / "weft"))
        try:
            found = shared_server("registry")
        except servers.MissingServerError as error:
            pytest.skip(str(error))
    assert isinstance(found, registry_server.RegistryServer)
    return found


@pytest.fixture(scope="session")
def spark_cache(pytestconfig: pytest.Config) -> str:
    """The repository's own cache, which keeps jars and the archive of Spark's classes from run to run. The archive is
    made here if it is not there, so that no test makes one in the background."""
    pytest.importorskip("pyspark")
    from weft.engine import archive
    from weft.engine.java import find_java

    folder = str(pytestconfig.rootpath / ".cache" / "weft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", folder)
        patch.delenv("JAVA_HOME", raising=False)
        patch.delenv("JDK_JAVA_OPTIONS", raising=False)
        archive.build(find_java())
    return folder


@pytest.fixture(scope="session")
def _spark_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The project of the run's session, whose Python processes start warm."""
    from weft.engine import session

    folder = tmp_path_factory.mktemp("spark")
    warm = warm_python.launcher()
    write_spark_conf(folder, {"spark.pyspark.python": warm, "spark.pyspark.driver.python": warm, **FEW_ROWS})
    yield folder
    session.stop()


def write_spark_conf(folder: Path, conf: dict[str, str]) -> None:
    """Write a weft.toml with settings of Spark into the folder of a project."""
    lines = (f'"{name}" = "{value}"\n' for name, value in conf.items())
    (folder / "weft.toml").write_text(f"[spark.conf]\n{''.join(lines)}")


@pytest.fixture
def plain_spark(spark_cache: str, _spark_project: Path) -> Any:
    """The run's one Spark session, without jars beyond Spark's own; started again where a test stopped it."""
    from weft.engine import session
    from weft.project import Project, use

    with pytest.MonkeyPatch.context() as patch, use(Project(_spark_project)):
        patch.setenv("WEFT_CACHE", spark_cache)
        patch.setenv("WEFT_SPARK_MASTER", "local[2]")
        patch.chdir(_spark_project)  # the folder of a test is removed when it ends, and the JVM would start no Python
        return session.spark()


@pytest.fixture
def spark(request: pytest.FixtureRequest, plain_spark: Any, spark_cache: str) -> Any:
    """The run's one Spark session, with Delta and S3. In a test of Kafka the plain one: Delta's rules would then be in
    each plan of all tests of its process."""
    import selection  # not before pytest has it as a plugin
    from weft.engine import connectors

    if selection.group(request.node) == selection.STREAMING_GROUP:
        return plain_spark
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", spark_cache)
        connectors.add(plain_spark, "delta")
        connectors.add(plain_spark, "s3")
        return connectors.with_delta(plain_spark)


@pytest.fixture(autouse=True)
def _session_of_the_run(request: pytest.FixtureRequest, project: Path) -> None:
    """A test that starts Spark in this process finds the run's session."""
    if request.node.get_closest_marker("spark") is not None:
        request.getfixturevalue("plain_spark")


@pytest.fixture
def streams(system: System, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A fresh project whose connection `default` is the system's database. Closed at the end, so that nothing leaks."""
    import weft.streams
    from weft.project import Project, use

    monkeypatch.setenv("WEFT_DSN", system.url)
    fresh = Project()
    with use(fresh):
        try:
            yield fresh
        finally:
            weft.streams.close(fresh)
