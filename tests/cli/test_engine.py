"""The warm engine: commands that it carries out, what it keeps from them, and what becomes of them when it is killed.

One engine serves the tests of this module, in a project of its own. It is stopped in the end."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from servers import wait_until
from weft.engine import cleaning, warm

pytestmark = pytest.mark.timing

_WORK = """
import os
import sys
import time

import weft
from helper import VALUE, in_worker

FOLDER = os.path.dirname(os.path.abspath(__file__))


@weft.pipeline(target="copies", source_connection="source", target_connection="target")
def copy():
    return "SELECT id, name FROM raw"


@weft.pipeline(target="inside", source_connection="source", target_connection="source")
def push():
    return "SELECT id, name FROM raw"


@weft.pipeline(target="seen", target_connection="target", mode="truncate")
def look():
    context = weft.spark().sparkContext
    there = context.parallelize([0], 1).map(in_worker).collect()[0]
    print("é")
    return [{"driver": VALUE, "color": os.environ.get("COLOR"), "worker": there[0], "worker_color": there[1]}]


@weft.pipeline(target="left", target_connection="target")
def leave():
    spark = weft.spark()
    found = [len(spark.catalog.listTables()), spark.conf.get("spark.sql.shuffle.partitions")]
    spark.range(3).createOrReplaceTempView("a_view")
    spark.range(3).createOrReplaceGlobalTempView("a_global_view")
    spark.range(3).cache().count()
    spark.conf.set("spark.sql.shuffle.partitions", "7")
    if os.environ.get("COLOR") == "table":
        spark.sql("CREATE TABLE IF NOT EXISTS kept (id BIGINT) USING parquet")
    return [{"views": found[0], "partitions": found[1], "application": spark.sparkContext.applicationId}]


@weft.pipeline(target="called", target_connection="target")
def called():
    calls = []

    def carry_out(frame, number):
        calls.append(number)
        # What Spark called in the command before has ended with it. Now the JVM tells that it needs it no more.
        frame.sparkSession._jvm.System.gc()
        frame.sparkSession._jvm.System.runFinalization()

    rows = weft.spark().readStream.format("rate").load()
    query = rows.writeStream.foreachBatch(carry_out).start()
    while len(calls) < 3 and query.isActive:
        query.awaitTermination(0.1)
    query.stop()
    return [{"error": str(query.exception())}]


def _slow(path):
    def beat(_):
        for number in range(3000):
            with open(path, "a") as file:
                file.write(".")
            time.sleep(0.02)
        return 1
    return beat


@weft.pipeline(target="slow", target_connection="target")
def slow():
    path = os.path.join(FOLDER, "beats")
    weft.spark().sparkContext.parallelize([0], 1).map(_slow(path)).collect()
    return [{"id": 1}]


@weft.pipeline(target="once", target_connection="target")
def once():
    # The first time it waits to be killed.
    path = os.path.join(FOLDER, "once")
    weft.spark().range(1).count()
    if not os.path.exists(path):
        open(path, "w").close()
        weft.spark().sparkContext.parallelize([0], 1).map(lambda _: time.sleep(60)).collect()
    return [{"id": 1}]


@weft.stream(fields={"n": "int64"})
def numbers():
    pass


@weft.model(engine="spark", connection="target", materialise="merge", key="n")
def doubled(numbers):
    return "SELECT 2 * n AS n FROM numbers"


@weft.streaming_pipeline(source=numbers, target="target", target_table="numbers")
def numbers_in():
    pass


@weft.udf(args=["Int64"], returns="Int64")
def waiting(n):
    # The first time it waits to be killed.
    path = os.path.join(FOLDER, "begun")
    if not os.path.exists(path):
        open(path, "w").close()
        time.sleep(60)
    return n


@weft.streaming_pipeline(
    source=numbers,
    target="target",
    target_table="held",
    transform_sql="SELECT waiting(n) AS n FROM source",
    udfs=[waiting],
)
def held():
    pass


@weft.pipeline(target="asked", target_connection="target")
def asked():
    width = os.get_terminal_size(1).columns
    print("at a terminal:", sys.stdin.isatty(), sys.stdout.isatty(), width, sys.stdin.readline())
    return [{"id": 1}]
"""
_HELPER = """
import os

VALUE = {value!r}


def in_worker(_):
    return VALUE, os.environ.get("COLOR")
"""
_SETTINGS = """
modules = ["work"]
[connections.source]
url = "sqlite:///source.db"
[connections.target]
url = "sqlite:///target.db"
"""


class Engine:
    """A project, and the commands that are run in it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        folder.joinpath("weft.toml").write_text(_SETTINGS)
        folder.joinpath("work.py").write_text(_WORK)
        self.write_helper("one")
        with closing(sqlite3.connect(folder / "source.db")) as database, database:
            database.execute("CREATE TABLE raw (id BIGINT, name TEXT)")
            database.executemany("INSERT INTO raw VALUES (?, ?)", [(each, f"name {each}") for each in range(10)])
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "CI"))}
        self.environment = {
            **kept,
            "HOME": str(folder),
            "WEFT_CACHE": str(cache),
            "PYTHONIOENCODING": "ascii:xmlcharrefreplace",
            "WEFT_SPARK_MASTER": "local[2]",
            "JDK_JAVA_OPTIONS": "-Dspark.sql.codegen.factoryMode=NO_CODEGEN -Dspark.sql.codegen.wholeStage=false",
        }

    def write_helper(self, value: str) -> None:
        file = self.folder / "helper.py"
        file.write_text(_HELPER.format(value=value))
        # Python compares whole seconds and the size with what it compiled before.
        changed = time.time() + len(list(self.folder.iterdir())) + len(value)
        os.utime(file, (changed, changed))

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**self.environment, **options.pop("env", {})}
        command = [sys.executable, "-m", "weft", *arguments]
        files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, **files)

    def run(self, *arguments: str, code: int = 0, **env: str) -> str:
        with self.start(*arguments, env=env) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == code, out + err
        return out + err

    def status(self) -> dict[str, Any]:
        """How it is, asked by this process: a command would take longer to start than the engine to be ready."""
        return warm.ask(self.folder, "status") or {"state": "none"}

    def told(self) -> dict[str, Any]:
        """What `weft engine status` says."""
        with self.start("engine", "status", "--format", "json") as process:
            return json.loads(process.communicate(timeout=60)[0])  # type: ignore[no-any-return]

    def ready(self) -> dict[str, Any]:
        """Wait until it is warm, started where none runs."""
        if self.status()["state"] == "none":
            self.run("engine", "start")
        self.wait_for("warm")
        return self.status()

    def wait_for(self, state: str) -> None:
        deadline = time.monotonic() + 60
        while (found := self.status())["state"] != state:
            assert time.monotonic() < deadline, (found, (self.folder / ".weft" / "engine.log").read_text())
            time.sleep(0.05)  # to answer takes it a few milliseconds

    def rows(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self.folder / "target.db")) as database:
            return database.execute(query).fetchall()

    def jvm(self) -> int:
        return next(pid for pid in cleaning.children(self.status()["pid"]) if "java" in _command_of(pid))


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("engine"), pytestconfig.rootpath / ".cache" / "weft")
    try:
        yield made
    finally:
        pid = made.status().get("pid")
        made.run("engine", "stop")
        if pid is not None and os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_a_pushdown_run_starts_none_and_the_first_across_databases_does_when_it_ends(engine: Engine) -> None:
    engine.run("engine", "stop")
    assert "pushdown" in engine.run("run", "push")
    for env in ({"WEFT_ENGINE": "0"}, {"CI": "true"}):
        assert engine.run("validate", "copy", **env)
    engine.run("validate", "copy", "--no-engine")
    assert engine.told() == {"state": "none"}
    assert "10 inserted (process)" in engine.run("run", "copy")
    engine.wait_for("warm")
    first = engine.status()
    assert first["commands"] == 0 and first["memory"] > 100 << 20
    ((stored,),) = engine.rows("SELECT count(*) FROM copies")
    assert "10 inserted (spark)" in engine.run("run", "copy")
    assert "inserted (pushdown)" in engine.run("run", "push")
    assert (engine.status()["pid"], engine.status()["commands"]) == (first["pid"], 2)
    assert engine.rows("SELECT count(*) FROM copies") == [(stored + 10,)]
    found = (engine.folder / ".weft" / "engine.sock").stat()
    assert (found.st_mode & 0o777, found.st_uid) == (0o600, os.getuid())


def test_each_command_has_its_own_code_and_environment(engine: Engine) -> None:
    """Also in Spark's Python workers, which stay."""
    pid = engine.ready()["pid"]
    for value, color in (("two", "red"), ("two", None), ("three", "red")):
        engine.write_helper(value)
        assert "&#233;" in engine.run("run", "look", **({"COLOR": color} if color else {}))
        assert engine.rows("SELECT * FROM seen") == [(value, color, value, color)]
    assert engine.status()["pid"] == pid


@pytest.mark.full
def test_spark_calls_what_the_command_has_beside_that_of_one_before(engine: Engine) -> None:
    engine.ready()
    for _ in range(2):
        engine.run("run", "called")
    assert engine.rows("SELECT DISTINCT error FROM called") == [("None",)]


@pytest.mark.full
def test_a_command_finds_nothing_that_others_left(engine: Engine) -> None:
    engine.ready()
    for color in ("", "table", ""):
        engine.run("run", "leave", COLOR=color)
    seen = engine.rows("SELECT views, partitions, application FROM left ORDER BY rowid")
    assert [each[:2] for each in seen] == [(0, "2")] * 3
    # A table is in the session's catalog until its context ends.
    assert seen[0][2] == seen[1][2] != seen[2][2]


@pytest.mark.full
def test_consume_once(engine: Engine) -> None:
    """The JVM calls functions of the command that runs, not of those before."""
    served = engine.ready()["commands"]
    for number in range(2):
        (engine.folder / "numbers.ndjson").write_text(f'{{"n": {number}}}\n')
        engine.run("streams", "publish", "numbers", "numbers.ndjson")
        engine.run("consume", "numbers_in", "--once")
    assert engine.rows("SELECT n FROM numbers ORDER BY n") == [(0,), (1,)]
    assert engine.status()["commands"] == served + 2


_CASE = """
model = "doubled"
inputs.numbers = [{ n = 21 }]
expected = [{ n = 42 }]
"""


@pytest.mark.full
def test_models_are_planned_built_and_tested_by_it(engine: Engine) -> None:
    served = engine.ready()["commands"]
    (engine.folder / "case.toml").write_text(_CASE)
    (engine.folder / "numbers.ndjson").write_text('{"n": 100}\n')
    engine.run("streams", "publish", "numbers", "numbers.ndjson")
    assert "200" in engine.run("plan", "--sample", "100")
    for command in ("apply", "backfill doubled --since 1d", "test case.toml"):
        engine.run(*command.split())
    assert engine.rows("SELECT n FROM doubled WHERE n = 200") == [(200,)]
    assert engine.status()["commands"] == served + 4


@pytest.mark.full
def test_a_pipeline_that_was_killed_goes_on(engine: Engine) -> None:
    """Its JVM stays, and is not waited for."""
    engine.ready()
    (engine.folder / "numbers.ndjson").write_text('{"n": 7}\n')
    engine.run("streams", "publish", "numbers", "numbers.ndjson")
    begun = engine.folder / "begun"
    begun.unlink(missing_ok=True)
    process = engine.start("consume", "held", "--once")
    wait_until(begun.exists, "the batch")
    process.kill()
    process.communicate()
    engine.wait_for("warm")
    assert "WARNING" not in engine.run("consume", "held", "--once")
    assert engine.rows("SELECT n FROM held WHERE n = 7") == [(7,)]


def test_a_command_has_the_terminal_and_its_exit_code_is_its_own(engine: Engine) -> None:
    engine.ready()
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "77"], stdin=theirs, check=True)
    process = engine.start("run", "asked", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"an answer\n")
    assert process.wait(60) == 0
    assert select.select([ours], [], [], 0)[0]
    assert b"at a terminal: True True 77 an answer" in os.read(ours, 10_000)
    os.close(ours)
    assert "There is no pipeline" in engine.run("run", "unknown", code=1)


@pytest.mark.brief("15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_work(engine: Engine, number: int, code: int) -> None:
    pid = engine.ready()["pid"]
    beats = engine.folder / "beats"
    beats.unlink(missing_ok=True)
    process = engine.start("run", "slow")
    wait_until(beats.exists, "the first beat")
    assert engine.status()["state"] == "busy"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    engine.wait_for("warm")
    size = beats.stat().st_size
    engine.run("run", "copy")
    assert beats.stat().st_size == size
    assert engine.status()["pid"] == pid


def test_while_it_is_busy_another_command_goes_without(engine: Engine) -> None:
    engine.ready()
    beats = engine.folder / "beats"
    beats.unlink(missing_ok=True)
    process = engine.start("run", "slow")
    wait_until(beats.exists, "the first beat")
    served = engine.status()["commands"]
    assert "inserted (pushdown)" in engine.run("run", "push")
    assert "inserted (process)" in engine.run("run", "copy")
    assert engine.status()["commands"] == served
    process.kill()
    process.communicate()


@pytest.mark.full
def test_a_command_with_other_limits_goes_without(engine: Engine) -> None:
    served = engine.ready()["commands"]
    for before in ("nice -n 1", "ulimit -S -v 99000000;", "ulimit -S -f 99000000;"):
        command = ["sh", "-c", f"{before} {sys.executable} -m weft run push"]
        subprocess.run(command, cwd=engine.folder, env=engine.environment, check=True, capture_output=True)
    assert engine.status()["commands"] == served
    engine.run("run", "push")
    assert engine.status()["commands"] == served + 1


_PROGRAM = """
import sys
import weft
spark = weft.spark()
assert "pandas" not in sys.modules  # it takes as long to import as all else here
print(spark.range(10).count(), spark.sparkContext.applicationId, spark.sparkContext.parallelize([1]).map(abs).collect())
"""


@pytest.mark.full
def test_a_test_of_users_uses_the_engine_that_is_there(engine: Engine) -> None:
    served = engine.ready()["commands"]
    command = [sys.executable, "-c", "import pytest" + _PROGRAM]
    outputs = [
        subprocess.run(command, cwd=engine.folder, env=engine.environment, check=True, capture_output=True).stdout
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    assert engine.status()["commands"] == served + 2


@pytest.mark.full
def test_the_work_of_a_killed_program_ends(engine: Engine) -> None:
    engine.ready()
    beats = engine.folder / "beats"
    beats.unlink(missing_ok=True)
    program = "import work; work.slow()"
    environment = {**engine.environment, "WEFT_ENGINE": "1"}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=engine.folder, env=environment)
    wait_until(beats.exists, "the first beat")
    assert engine.status()["state"] == "busy"
    process.kill()
    process.wait()
    engine.wait_for("warm")
    size = beats.stat().st_size
    engine.run("run", "copy")
    assert beats.stat().st_size == size


def _kill_engine(engine: Engine) -> None:
    os.kill(engine.status()["pid"], signal.SIGKILL)


def _kill_jvm(engine: Engine) -> None:
    os.kill(engine.jvm(), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("kill", [_kill_engine, _kill_jvm])
def test_a_run_whose_engine_is_killed_is_carried_out(engine: Engine, kill: Callable[[Engine], None]) -> None:
    before = engine.ready()["pid"]
    note = engine.folder / "once"
    note.unlink(missing_ok=True)
    table = engine.rows("SELECT count(*) FROM sqlite_master WHERE name = 'once'") == [(1,)]
    rows = engine.rows("SELECT count(*) FROM once")[0][0] if table else 0
    process = engine.start("run", "once")
    try:
        wait_until(note.exists, "the run", 120)
    except TimeoutError:
        process.kill()
        print(*process.communicate())
        raise
    kill(engine)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert engine.rows("SELECT count(*) FROM once") == [(rows + 1,)]
    assert engine.ready()["pid"] != before


@pytest.mark.full
def test_other_settings_start_another_engine(engine: Engine) -> None:
    """And it ends when nobody has used it for long."""
    before = engine.ready()["pid"]
    settings = engine.folder / "weft.toml"
    settings.write_text(_SETTINGS + "[engine]\nidle_minutes = 0.05\n[spark.conf]\nspark.sql.shuffle.partitions = 3\n")
    try:
        assert engine.told()["current"] is False
        engine.run("run", "leave")
        assert engine.rows("SELECT partitions FROM left ORDER BY rowid DESC LIMIT 1") == [("3",)]
        wait_until(lambda: not os.path.exists(f"/proc/{before}"), "the end of the engine", 30)
        engine.wait_for("none")
    finally:
        settings.write_text(_SETTINGS)


@pytest.mark.full
@pytest.mark.parametrize("stdin", ["pipe", "file"])
def test_a_query_of_the_input_outlives_the_engine(tmp_path: Path, stdin: str) -> None:
    (tmp_path / ".weft").mkdir()
    (tmp_path / "query.sql").write_text("SELECT 6 * 7 AS answer")
    (tmp_path / "weft.toml").write_text('[connections.default]\nurl = "sqlite:///some.db"\n')
    sqlite3.connect(tmp_path / "some.db").close()
    command = [sys.executable, "-m", "weft", "sql", "-", "--pushdown", "--format", "csv"]
    with ExitStack() as opened:
        given: Any = subprocess.PIPE
        if stdin == "file":
            given = opened.enter_context((tmp_path / "query.sql").open())
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(tmp_path / ".weft" / "engine.sock"))
        listening.listen()
        environment = {**os.environ, "WEFT_ENGINE": "1"}
        process = opened.enter_context(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=given, stdout=subprocess.PIPE)
        )
        if process.stdin is not None:
            process.stdin.write((tmp_path / "query.sql").read_bytes())
            process.stdin.close()
        asked, _ = listening.accept()
        with asked:
            assert warm.receive(asked) == {"do": "ready"}
            warm.send(asked, {"ready": True})
        connection, _ = listening.accept()
        with connection:  # as an engine that is killed when the command has read its input
            _, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            assert os.read(files[0], 100)
            warm.send(connection, {"began": 1})
            for each in files:
                os.close(each)
        assert process.stdout is not None and process.stdout.read() == b"answer\n42\n"


def test_a_command_does_not_wait_for_an_engine_that_starts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ENGINE", "1")
    monkeypatch.setattr("weft.engine.starts_engine", None)
    (project / ".weft").mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(project / ".weft" / "engine.sock"))
        listening.listen()
        assert not warm.lends(project)
        assert warm.run(["run", "copy"]) is None


def test_a_socket_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".weft").mkdir()
    path = tmp_path / ".weft" / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        mine = warm.connect(tmp_path)
        assert mine is not None
        mine.close()
        if os.getuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(path, 65534, 65534)
        assert warm.connect(tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "env", "is_used"),
    [
        ("", {}, True),
        ("", {"WEFT_ENGINE": "0"}, False),
        ("", {"CI": "true"}, False),
        ("", {"CI": "true", "WEFT_ENGINE": "1"}, True),
        ("[engine]\ndaemon = false", {}, False),
        ("[engine]\ndaemon = false", {"WEFT_ENGINE": "1"}, True),
        ("", {"WEFT_SPARK_MASTER": "spark://elsewhere:7077"}, False),
    ],
)
def test_who_goes_without(
    project: Path, monkeypatch: pytest.MonkeyPatch, settings: str, env: dict[str, str], is_used: bool
) -> None:
    (project / "weft.toml").write_text(settings)
    monkeypatch.delenv("WEFT_ENGINE")
    monkeypatch.delenv("CI", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert warm.may_use(project) is is_used


def test_a_program_that_may_run_for_long_goes_without(project: Path) -> None:
    program = "import pathlib; from weft.engine import warm; print(warm.may_use(pathlib.Path.cwd()))"
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "WEFT_ENGINE")}
    for env, expected in ((environment, "False"), ({**environment, "WEFT_ENGINE": "1"}, "True")):
        done = subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == expected


def test_what_needs_another_engine(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = warm.fingerprint(project)
    monkeypatch.setenv("COLOR", "red")
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/elsewhere")
    assert warm.fingerprint(project) == before
    seen = {before}
    for name in ("AWS_PROFILE", "JAVA_HOME", "TZ", "PYTHONPATH", "WEFT_SPARK_PROFILE"):
        monkeypatch.setenv(name, "throughput")
        seen.add(warm.fingerprint(project))
    jar = project / "mine.jar"
    for content in ("a", "ab"):
        jar.write_text(content)
        (project / "weft.toml").write_text('[spark]\njars = ["mine.jar"]')
        seen.add(warm.fingerprint(project))
    assert len(seen) == 8
