"""`[spark]` in weft.toml: what it may say, and what Spark is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weft import SettingsError
from weft.engine import config
from weft.engine.jvm import heap_for


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SPARK_MASTER")


def settings(root: Path, text: str = "") -> config.SparkSettings:
    (root / "weft.toml").write_text(text)
    return config.read_settings(root)


def test_defaults_are_local_and_on_loopback(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert found.is_local
    conf = config.session_conf(found)
    assert conf["spark.master"] == "local[*]"
    assert conf["spark.driver.host"] == conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert conf["spark.ui.enabled"] == "false"
    assert conf["spark.sql.session.timeZone"] == "UTC"
    assert conf["spark.sql.shuffle.partitions"] == str(len(os.sched_getaffinity(0)))
    assert conf["spark.pyspark.python"] == sys.executable
    assert conf["spark.sql.warehouse.dir"] == (tmp_path / ".weft" / "warehouse").as_uri()


def test_any_setting_of_spark_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "s3cret")
    found = settings(
        tmp_path,
        """
        [spark.conf]
        "spark.ui.enabled" = true
        spark.sql.shuffle.partitions = 7
        spark.hadoop.fs.s3a.access.key = "${KEY}"
        """,
    )
    conf = config.session_conf(found)
    assert conf["spark.ui.enabled"] == "true"
    assert conf["spark.sql.shuffle.partitions"] == "7"
    assert conf["spark.hadoop.fs.s3a.access.key"] == "s3cret"


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SPARK_MASTER", "local[3]")
    monkeypatch.setenv("WEFT_SPARK_PROFILE", "throughput")
    found = settings(tmp_path, '[spark]\nmaster = "yarn"\nprofile = "quick"\n')
    assert (found.master, found.profile) == ("local[3]", "throughput")


@pytest.mark.parametrize(
    ("master", "local", "host"),
    [
        ("local", True, "127.0.0.1"),
        ("local[2,4]", True, "127.0.0.1"),
        ("spark://127.0.0.1:7077", False, "127.0.0.1"),
        ("spark://10.0.0.5:7077,10.0.0.6:7077", False, None),
        ("k8s://https://host:443", False, None),
        ("yarn", False, None),
    ],
)
def test_the_driver_listens_where_workers_reach_it(tmp_path: Path, master: str, local: bool, host: str | None) -> None:
    found = settings(tmp_path, f'[spark]\nmaster = "{master}"\n')
    assert found.is_local is local
    conf = config.session_conf(found)
    assert conf.get("spark.driver.host") == conf.get("spark.driver.bindAddress") == host
    # Another machine has its own Python.
    assert ("spark.pyspark.python" in conf) is local
    # Executors elsewhere start their workers before they have our package.
    assert ("spark.python.daemon.module" in conf) is local


def test_jars_are_files_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "mine.jar").touch()
    found = settings(tmp_path, '[spark]\njars = ["mine.jar", "hdfs://host/other.jar"]\n')
    assert found.jars == (tmp_path / "mine.jar", "hdfs://host/other.jar")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[spark]\nmastr = "x"', r"unknown key 'mastr' in \[spark\]\.\n.*Did you mean 'master'"),
        ("[spark]\nspark.ui.enabled = true", r"unknown key 'spark'.*\n.*\[spark\.conf\]"),
        ("[spark]\nmaster = 4", "spark.master must be a text, not int"),
        ('[spark]\nmaster = "local[many]"', "'local\\[many\\]' is not understood"),
        ('[spark]\nmaster = "spark://host"', "'spark://host' is not understood.\n.*host:port"),
        ('[spark]\nprofile = "quik"', "profile cannot be 'quik'.\n.*'quick'"),
        ('[spark]\nlog_level = "LOUD"', "log_level cannot be 'LOUD'"),
        ('[spark]\narchive = "no"', "spark.archive must be true or false, not str"),
        ('[spark]\njars = "a.jar"', "spark.jars must be a list"),
        ('[spark]\njars = ["nowhere.jar"]', r"nowhere\.jar is not there"),
        ('[spark.conf]\n"ui.enabled" = true', r"'ui\.enabled' is not a setting of Spark"),
        ("[spark.conf]\nspark.jars = []", r"spark\.jars must be a text, a number or true or false"),
        ('[spark.conf]\nspark.master = "yarn"', r"spark\.master is not set here"),
        ("spark = 1", "spark must be a table"),
        ("[spark]\nconf = 1", "spark.conf must be a table"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        config.session_conf(settings(tmp_path, text))


@pytest.mark.parametrize(
    ("megabytes", "heap"),
    [(512, "512m"), (1024, "512m"), (1536, "768m"), (2048, "1024m"), (6144, "1536m"), (65_536, "4096m")],
)
def test_the_heap_is_bounded_by_the_memory_there_is(megabytes: int, heap: str) -> None:
    assert heap_for(megabytes << 20) == heap


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("engine = 1", "engine must be a table"),
        ("[engine]\ndeamon = true", "unknown key 'deamon' in [engine]"),
        ("[engine]\ndaemon = 1", "engine.daemon must be true or false"),
        ("[engine]\nidle_minutes = 0", "engine.idle_minutes must be a number above 0"),
        ("[engine]\nidle_minutes = true", "engine.idle_minutes must be a number above 0"),
    ],
)
def test_wrong_settings_of_the_engine(project: Path, table: str, message: str) -> None:
    (project / "weft.toml").write_text(table)
    with pytest.raises(SettingsError) as raised:
        config.read_engine_settings(project)
    assert message in str(raised.value)
