"""The one session of a process: when it starts, what it is told, and what it leaves alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weft
from tests.engine.conftest import Python, finish
from weft import SettingsError
from weft.engine import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_there_is_one(plain_spark: SparkSession, tmp_path: Path) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(weft.spark())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [plain_spark] * 4
    # Also when another project comes into use.
    with weft.project.use(weft.project.Project(tmp_path)):
        assert weft.spark() is plain_spark
    assert session.running() is plain_spark
    assert session.is_local()


def test_settings_reach_spark(plain_spark: SparkSession) -> None:
    conf = plain_spark.sparkContext.getConf()
    assert conf.get("spark.master") == "local[2]"
    assert conf.get("spark.driver.host") == "127.0.0.1"
    assert plain_spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert plain_spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert plain_spark.conf.get("spark.sql.catalogImplementation") == "in-memory"


def test_workers_run_this_python(plain_spark: SparkSession) -> None:
    import sys

    def executable(_: int) -> str:
        return sys.executable

    assert plain_spark.sparkContext.parallelize([1], 1).map(executable).collect() == [sys.executable]


def test_nothing_is_left_for_children(plain_spark: SparkSession) -> None:
    assert not {name for name in os.environ if name.startswith("PYSPARK_")}


@pytest.mark.full
@pytest.mark.timing
def test_one_that_ended_is_replaced(python: Python) -> None:
    """Stopping ends the JVM and calls what is to be closed. Of a JVM that was killed nothing is left; that another one
    follows it is shown by a daemon in tests/cli/test_consume.py."""
    lines = finish(
        python("""
        from weft.engine import session
        weft.spark()
        session.at_stop(lambda: print("closed"))
        process = session._running.jvm.process
        session.stop()
        print(process.poll(), session.running())
        session.stop()

        spark = weft.spark()
        print(spark.range(4).count())
        session._running.jvm.process.kill()
        session._running.jvm.process.wait()
        try:
            spark.range(3).count()
        except Exception:
            print("died", session.running())
        print(os.listdir(), sorted(os.listdir(".weft")))
        """)
    )
    assert lines == ["closed", "0 None", "4", "died None", "['.weft'] ['spark.log']"]


def test_a_session_of_ones_own_is_used(python: Python) -> None:
    """Of whoever made one before, with settings of their own; a thread that never saw it finds it too."""
    lines = finish(
        python("""
        import threading
        from weft.engine import archive_files, java, jvm, session
        from weft.engine.log import EngineLog
        from pathlib import Path

        conf = {"spark.master": "local[1]", "spark.ui.enabled": "false", "spark.sql.session.timeZone": "Asia/Tokyo"}
        runtime = java.find_java()
        flags = [*jvm.PROFILES["quick"], *archive_files.archive_flags(runtime)]
        machine = jvm.start_jvm(runtime, conf, flags=flags, log=EngineLog(Path("own.log")))
        own, _ = session.connect(machine, conf)
        print(weft.spark() is own, weft.spark().conf.get("spark.sql.session.timeZone"))
        thread = threading.Thread(target=lambda: print(weft.spark() is own))
        thread.start()
        thread.join()
        session.stop()
        print(own.range(2).count(), session.is_local())
        own.stop()
        """)
    )
    assert lines == ["True Asia/Tokyo", "True", "2 True"]


def test_what_keeps_it_from_starting_is_told(python: Python, project: Path) -> None:
    (project / "weft.toml").write_text('[spark.conf]\nspark.driver.extraJavaOptions = "-XX:+Nonsense -Xmx1q"\n')
    process = python("weft.spark()")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Spark's JVM ended with code 1 before it was ready. It said:" in err
    assert "Invalid maximum heap size: -Xmx1q" in err
    assert str(project / ".weft" / "spark.log") in err


def test_a_setting_that_spark_refuses(python: Python, project: Path) -> None:
    (project / "weft.toml").write_text('[spark.conf]\nspark.task.cpus = "s3cret"\nspark.my.password = "s3cret"\n')
    process = python("weft.spark()")
    _, err = process.communicate(timeout=60)
    last = err[err.rindex("ConnectionFailedError") :]
    assert "A Spark session on local[2] cannot be made: " in last
    assert "spark.task.cpus" in last
    assert "s3cret" not in last
    assert "\tat " not in last


def test_spark_connect_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "running", lambda: None)
    monkeypatch.setattr(session, "_discard", lambda: None)
    monkeypatch.setenv("SPARK_REMOTE", "sc://host")
    with pytest.raises(SettingsError, match=r"SPARK_REMOTE is set(.|\n)*Unset SPARK_REMOTE"):
        weft.spark()


def test_jars_of_a_running_session(plain_spark: SparkSession, tmp_path: Path) -> None:
    """A class path that grows while the session runs: the driver, Hadoop and tasks find what is in the jar."""
    import zipfile

    jar = tmp_path / "with space, and comma.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr("weft-test-resource.txt", "found")
    with pytest.raises(SettingsError, match=r"nowhere\.jar is not there"):
        weft.spark(jars=[tmp_path / "nowhere.jar"])
    for _ in range(2):
        assert weft.spark(jars=[jar]) is plain_spark
    context = plain_spark.sparkContext
    assert context._jsc is not None
    for loader in (
        context._jvm.java.lang.Thread.currentThread().getContextClassLoader(),  # type: ignore[union-attr]
        context._jsc.hadoopConfiguration().getClassLoader(),
    ):
        assert loader.getResource("weft-test-resource.txt") is not None
    urls = [url.toString() for url in loader.getURLs()]
    assert len([url for url in urls if "with%20space" in url]) == 1


def test_code_has_room(plain_spark: SparkSession) -> None:
    """Where it has none, nothing is compiled any more, and threads die that need a method for the first time."""
    machine: Any = plain_spark.sparkContext._jvm
    pools = machine.java.lang.management.ManagementFactory.getMemoryPoolMXBeans()
    code = [each for each in pools if each.getName().startswith("Code")]
    assert sum(each.getUsage().getMax() for each in code) >= 200 * 1024 * 1024


def test_classes_are_looked_for_once(plain_spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JVM looks for a class in every jar."""
    from py4j.clientserver import ClientServerConnection
    from pyspark.errors import AnalysisException

    send, sent = ClientServerConnection.send_command, []
    monkeypatch.setattr(ClientServerConnection, "send_command", lambda *args: sent.append(args[1]) or send(*args))
    for _ in range(2):
        sent.clear()
        with pytest.raises(AnalysisException, match="nowhere"):
            plain_spark.range(3).select("id", "nowhere")
    assert len(sent) > 10
    assert not [each for each in sent if each.startswith("r\nu\n")]


def test_packages_are_there_too(plain_spark: SparkSession) -> None:
    machine: Any = plain_spark._jvm
    assert machine.py4j.GatewayServer.DEFAULT_PORT == 25333
    assert machine.java.util.ArrayList().size() == 0
