"""The table `[spark]` of weft.toml: its settings, and the defaults of Spark's own settings."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from weft.errors import SettingsError, did_you_mean
from weft.settings import PROJECT_FILE, interpolate, read_project_file

Profile = Literal["quick", "throughput"]
LogLevel = Literal["ERROR", "WARN", "INFO", "DEBUG"]
_PROFILE_VARIABLE = "WEFT_SPARK_PROFILE"
MASTER_VARIABLE = "WEFT_SPARK_MASTER"
CONF_VARIABLE = "WEFT_SPARK_CONF"
NEEDED_CONF = {
    # Else a Python data source that takes filters is refused.
    "spark.sql.python.filterPushdown.enabled": "true",
}
SESSION_CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    **NEEDED_CONF,
}
_ENGINE_KEYS = ("daemon", "idle_minutes")
_KEYS = ("archive", "conf", "jars", "log_level", "master", "profile")


@dataclass(frozen=True)
class SparkSettings:
    """What a project says about its session."""

    root: Path
    master: str = "local[*]"
    profile: Profile = "quick"
    """How the JVM is tuned: to start soon, or to run for long."""
    conf: Mapping[str, str] = field(default_factory=dict)
    jars: tuple[Path | str, ...] = ()
    log_level: LogLevel = "WARN"
    archive: bool = True
    """Whether the archive of loaded classes is used, and made where there is none."""

    @property
    def is_local(self) -> bool:
        """Whether Spark runs in this process's own JVM, so that it sees this machine's files."""
        return is_local(self.master)


def is_local(master: str) -> bool:
    """Return whether that master is this process's own JVM."""
    return master == "local" or master.startswith("local[")


def read_settings(root: Path) -> SparkSettings:
    """Return what `[spark]` in the project's weft.toml and the environment say."""
    table = read_project_file(root).get("spark", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{PROJECT_FILE}: spark must be a table.", hint='Write [spark] and master = "…" below.')
    for key in table:
        if key not in _KEYS:
            raise _unknown_key(key)
    master = os.environ.get(MASTER_VARIABLE) or _text(table, "master", "local[*]")
    profile = os.environ.get(_PROFILE_VARIABLE)
    where = _PROFILE_VARIABLE if profile else "profile"
    return SparkSettings(
        root=root,
        master=master,
        profile=_one_of(get_args(Profile), profile or _text(table, "profile", "") or "quick", where),
        conf={**_conf(table.get("conf", {}), master), **_given_conf(master)},
        jars=_jars(table.get("jars", []), root),
        log_level=_one_of(get_args(LogLevel), _text(table, "log_level", "WARN").upper(), "log_level"),
        archive=_boolean(table, "archive", True),
    )


@dataclass(frozen=True)
class EngineSettings:
    """What `[engine]` says about the process that keeps Spark warm."""

    daemon: bool = True
    idle_minutes: float = 10.0


def read_engine_settings(root: Path) -> EngineSettings:
    """Return what `[engine]` in the project's weft.toml says."""
    table = read_project_file(root).get("engine", {})
    if not isinstance(table, dict):
        raise SettingsError(f"{PROJECT_FILE}: engine must be a table.", hint="Write [engine] and daemon = false below.")
    for key in table:
        if key not in _ENGINE_KEYS:
            hint = did_you_mean(key, _ENGINE_KEYS, f"Known: {', '.join(_ENGINE_KEYS)}.")
            raise SettingsError(f"{PROJECT_FILE}: unknown key {key!r} in [engine].", hint=hint)
    daemon, minutes = table.get("daemon", True), table.get("idle_minutes", EngineSettings.idle_minutes)
    if not isinstance(daemon, bool):
        raise SettingsError(f"{PROJECT_FILE}: engine.daemon must be true or false, not {type(daemon).__name__}.")
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes < math.inf:
        raise SettingsError(f"{PROJECT_FILE}: engine.idle_minutes must be a number above 0.")
    return EngineSettings(daemon, float(minutes))


def session_conf(settings: SparkSettings) -> dict[str, str]:
    """Return the settings of Spark: our defaults, and over them those of `[spark.conf]`."""
    weft_folder = settings.root.absolute() / ".weft"
    conf = {
        "spark.app.name": settings.root.absolute().name or "weft",
        "spark.ui.enabled": "false",
        # Spark's progress bar goes to the JVM's stderr, which is a file here. Ours is in weft.engine.progress.
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": (weft_folder / "warehouse").as_uri(),
        **SESSION_CONF,
    }
    if settings.is_local:
        cores = local_cores(settings.master)
        conf |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(cores),
            # The default looks for a python3 on the PATH, which is another one in most virtual environments.
            "spark.pyspark.python": sys.executable,
            "spark.pyspark.driver.python": sys.executable,
            "spark.python.daemon.module": "weft.engine.python_daemon",
        }
    else:
        # Where this driver listens is for Spark to find out: workers elsewhere cannot reach a loopback address. Ones on
        # this machine can, and then nobody else should.
        hosts = {host for host, _ in masters(settings.master)}
        if hosts and hosts <= {"127.0.0.1", "localhost", "::1"}:
            conf |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # Data sources are planned here, by a Python that has what this one has.
        conf["spark.pyspark.driver.python"] = sys.executable
    return {**conf, "spark.master": settings.master, **settings.conf}


def local_cores(master: str) -> int:
    """Return how many threads `local[…]` means."""
    inside = master[len("local[") : -1].partition(",")[0] if master.startswith("local[") else "1"
    if inside == "*":
        return len(os.sched_getaffinity(0))
    try:
        return max(1, int(inside))
    except ValueError:
        raise SettingsError(
            f"The Spark master {master!r} is not understood.", hint="Write local[*], or local[4] for four cores."
        ) from None


def masters(master: str) -> list[tuple[str, int]]:
    """Return hosts and ports of `spark://host:port,host:port`; none for a master of another kind."""
    if not master.startswith("spark://"):
        return []
    addresses = [each.rpartition(":") for each in master.removeprefix("spark://").split(",")]
    if not all(host and port.isdigit() for host, _, port in addresses):
        raise SettingsError(f"The Spark master {master!r} is not understood.", hint="Write spark://host:port.")
    return [(host.strip("[]"), int(port)) for host, _, port in addresses]


def _given_conf(master: str) -> dict[str, str]:
    """Return the settings of Spark that the environment has, as JSON; they win over those of the project."""
    text = os.environ.get(CONF_VARIABLE)
    if not text:
        return {}
    try:
        conf = json.loads(text)
    except ValueError:
        conf = None
    if not isinstance(conf, dict):
        raise SettingsError(f"{CONF_VARIABLE} is not a JSON object.", hint='{"spark.executor.memory": "4g"}')
    return _conf(conf, master, CONF_VARIABLE)


def _conf(table: object, master: str, where: str = f"{PROJECT_FILE}, [spark.conf]") -> dict[str, str]:
    if not isinstance(table, dict):
        raise SettingsError(
            f"{PROJECT_FILE}: spark.conf must be a table.",
            hint='Write [spark.conf] and "spark.sql.ansi.enabled" = false below.',
        )
    conf = dict(_flattened(table, "", where))
    for key in conf:
        if not key.startswith("spark."):
            raise SettingsError(f"{where}: {key!r} is not a setting of Spark.", hint="They begin with spark.")
    if conf.get("spark.master", master) != master:
        raise SettingsError(f"{where}: spark.master is not set here.", hint='Write master = "…" in [spark].')
    return conf


def _flattened(table: Mapping[str, Any], prefix: str, where: str) -> Iterator[tuple[str, str]]:
    """Settings of Spark hold dots; written without quotes, TOML makes tables of them."""
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict):
            yield from _flattened(value, name + ".", where)
        elif isinstance(value, bool | int | float):
            yield name, str(value).lower() if isinstance(value, bool) else str(value)
        elif isinstance(value, str):
            yield name, interpolate(value, f"{where}, {name}")
        else:
            # The value is not shown: it may be a secret.
            raise SettingsError(f"{where}: {name} must be a text, a number or true or false.")


def _jars(files: object, root: Path) -> tuple[Path | str, ...]:
    if not isinstance(files, list) or not all(isinstance(each, str) for each in files):
        raise SettingsError(f"{PROJECT_FILE}: spark.jars must be a list of files.", hint='jars = ["lib/mine.jar"]')
    # Spark fetches URLs with a scheme (hdfs://, s3a://) itself.
    return tuple(each if "://" in each else existing_jar(root / Path(each).expanduser()) for each in files)


def existing_jar(path: Path) -> Path:
    """Return the file, if it is there: Spark itself only logs that it is not."""
    path = path.absolute()
    if not path.is_file():
        raise SettingsError(f"The jar {path} is not there.", hint=f"Correct jars in {PROJECT_FILE}, or the argument.")
    return path


def _text(table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise SettingsError(f"{PROJECT_FILE}: spark.{key} must be a text, not {type(value).__name__}.")
    return interpolate(value, f"{PROJECT_FILE}, [spark], {key}")


def _boolean(table: Mapping[str, Any], key: str, default: bool) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"{PROJECT_FILE}: spark.{key} must be true or false, not {type(value).__name__}.")
    return value


def _one_of(allowed: tuple[str, ...], value: str, where: str) -> Any:
    if value in allowed:
        return value
    hint = did_you_mean(value, allowed, f"Known: {', '.join(allowed)}.")
    raise SettingsError(f"The Spark setting {where} cannot be {value!r}.", hint=hint)


def _unknown_key(key: str) -> SettingsError:
    hint: str | None = "Settings of Spark itself go into [spark.conf]."
    if not key.startswith("spark"):
        hint = did_you_mean(key, _KEYS, f"Known: {', '.join(_KEYS)}; other settings: [spark.conf].")
    return SettingsError(f"{PROJECT_FILE}: unknown key {key!r} in [spark].", hint=hint)
