"""Where a run log may be, what happens where it cannot be used, and tables that somebody else makes."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import servers
import weft
from weft.errors import (
    ConnectionFailedError,
    DeclarationError,
    NotFoundError,
    SettingsError,
    StorageError,
    WeftError,
)
from weft.operate.records import ClaimedRun, RefusedClaim
from weft.operate.runlog import RunLog, check_url, open_run_log
from weft.operate.runlog_tables import LogTables, ddl
from weft.project import Project, use
from weft.systems.base import system_for
from workers import started

DATABASES = ["sqlite", "postgres", "mysql", "duckdb"]


def claimed(log: RunLog) -> ClaimedRun:
    run = log.claim("orders")
    assert isinstance(run, ClaimedRun)
    return run


# ----------------------------------------------------------------------------------------------------------------- URLs


def test_the_default_is_a_file_of_the_project(project: Path) -> None:
    with open_run_log() as log:
        claimed(log)
        assert repr(log) == f"RunLog('{project / '.weft/runs.db'}')"
    with open_run_log(None, project) as log:
        assert len(log.runs()) == 1


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite://path/to/run_log.db", "path/to/run_log.db"),
        ("sqlite:///runs.db", "runs.db"),
        ("sqlite:////{root}/absolute.db", "absolute.db"),
        ("duckdb://runs.duckdb", "runs.duckdb"),
        ("sqlite://with%20space.db?create_tables=true", "with space.db"),
        ("sqlite://${{NAME}}.db", "from_env.db"),
        ("${{WHOLE}}", "whole.db"),
    ],
)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, file: str) -> None:
    monkeypatch.setenv("NAME", "from_env")
    monkeypatch.setenv("WHOLE", "sqlite://whole.db")
    monkeypatch.chdir("/")
    with open_run_log(url.format(root=tmp_path), tmp_path) as log:
        claimed(log)
    assert (tmp_path / file).exists()


def test_the_name_of_a_connection(tmp_path: Path) -> None:
    with use(Project(tmp_path)):
        weft.connect(url=f"sqlite:///{tmp_path / 'named.db'}", name="logdb")
        with open_run_log("logdb") as log:
            claimed(log)
        with pytest.raises(SettingsError, match="no usable tables"):
            open_run_log("default?create_tables=false")
        with pytest.raises(NotFoundError, match="'logdb'"):
            open_run_log("logbd")
        weft.connect(kind="object_store_local", path=str(tmp_path), name="files")
        with pytest.raises(DeclarationError, match="cannot hold tables"):
            open_run_log("files")
    assert (tmp_path / "named.db").exists()


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("s3:///prefix", SettingsError, "names a bucket"),
        ("s3://me:hunter2@bucket/prefix", SettingsError, "takes no user or password"),
        ("s3://bucket/prefix?regoin=x", SettingsError, r"no option 'regoin'[\s\S]*'region'"),
        ("azureblob://account", SettingsError, "an account and a container"),
        ("postgras://me:hunter2@db/x", NotFoundError, "no run log at postgras://.*\n.*Did you mean postgres://"),
        ("kafka://me:hunter2@db/x", NotFoundError, "no run log at kafka://.*\n.*For example"),
        ("memory://x", SettingsError, "has no path"),
        ("sqlite://", SettingsError, "needs a file"),
        ("duckdb:///", SettingsError, "needs a file"),
        ("sqlite://x.db?mode=ro", SettingsError, "no parameter but create_tables"),
        ("sqlite://x.db?create_tables=maybe", SettingsError, "true or false"),
        ("sqlite:///usr/runs.db", SettingsError, "looks like an absolute one.*\n.*sqlite:////usr/"),
        ("", SettingsError, "needs a URL"),
        ("mysql://me:hunter2@db/x?create_tables=true&tls=1", SettingsError, "unknown parameter 'tls'"),
    ],
)
def test_what_is_no_run_log(url: str, kind: type[WeftError], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        open_run_log(url, or_memory=True)
    assert "hunter2" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.timing
def test_two_first_uses_at_once(log_url: str) -> None:
    code = """
        from weft.operate.runlog import open_run_log
        line()
        open_run_log(args[1]).close()
    """
    with started(4, code, log_url) as workers:
        for worker in workers:
            worker.ready()
        for worker in workers:
            worker.tell()
        for worker in workers:
            worker.answer()
    with open_run_log(log_url) as log:
        claimed(log)


@pytest.mark.every_system
@pytest.mark.parametrize("log_url", ["postgres", "mysql"], indirect=True)
def test_a_first_use_whose_tables_another_made_meanwhile(log_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = LogTables.check

    def late(tables: LogTables, **options: bool) -> None:
        try:
            check(tables, **options)
        except WeftError:
            monkeypatch.undo()
            open_run_log(log_url).close()
            raise

    monkeypatch.setattr(LogTables, "check", late)
    with open_run_log(log_url) as log:
        claimed(log)


def script(tables: Any, text: str) -> None:
    with tables.driver.session("publish") as session:
        for statement in filter(str.strip, text.split(";\n")):
            session.run(statement)


@pytest.mark.parametrize("log_url", DATABASES, indirect=True)
def test_tables_that_may_not_be_made(log_url: str) -> None:
    asked = f"{log_url}?create_tables=false"
    with pytest.raises(SettingsError, match="create_tables=false forbids") as caught:
        open_run_log(asked, or_memory=True)
    assert caught.value.hint is not None
    connection = weft.connect(url=log_url)
    tables = system_for(connection.kind).load_tables()(connection)
    # What the error says to run is enough, also with the parameter afterwards.
    script(tables, caught.value.hint.partition("\n")[2])
    tables.close()
    with open_run_log(asked) as log:
        claimed(log)
        assert len(log.runs()) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb", "duckdb"])
def test_the_ddl_of_a_kind_makes_what_is_needed(
    kind: str, tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> None:
    def check(url: str) -> None:
        connection = weft.connect(url=url)
        tables = system_for(connection.kind).load_tables()(connection)
        script(tables, ddl(kind))
        tables.close()
        with open_run_log(f"{url}?create_tables=false") as log:
            claimed(log)

    if kind in ("sqlite", "duckdb"):
        check(f"{kind}:///{tmp_path / 'log.db'}")
    else:
        with shared_server("mysql" if kind == "mariadb" else kind).database() as url:
            check(url)


def test_ddl_is_made_without_a_server() -> None:
    assert "utf8mb4_0900_bin" in ddl("mysql") and "nopad" in ddl("mariadb")
    with pytest.raises(DeclarationError, match="Did you mean 'postgres'"):
        ddl("postgrs")


@pytest.mark.parametrize("log_url", DATABASES, indirect=True)
def test_reading_makes_nothing(log_url: str) -> None:
    with open_run_log(log_url, read_only=True) as log:
        assert log.runs() == [] and log.latest(["orders"])["orders"].status is None
    with pytest.raises(SettingsError, match="no usable tables"):
        open_run_log(f"{log_url}?create_tables=false")
    with open_run_log(log_url) as log:
        claimed(log)
    with open_run_log(log_url, read_only=True) as log:
        assert len(log.runs()) == 1


def test_reading_makes_no_file(tmp_path: Path) -> None:
    open_run_log(read_only=True).close()
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------------- trouble


@pytest.mark.every_system
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_user_who_may_only_read(kind: str, shared_server: Callable[[str], servers.Server]) -> None:
    """It was told that it may not create what is there."""
    server = shared_server(kind)
    with server.database() as url:
        with open_run_log(url) as log:
            claimed(log)
        name = f"reader_{kind}_{url.rpartition('/')[2]}"[:30]
        database = url.rpartition("/")[2]
        rights = {
            "postgres": [
                f"CREATE ROLE {name} LOGIN",
                f"GRANT USAGE ON SCHEMA weft TO {name}",
                f"GRANT SELECT ON ALL TABLES IN SCHEMA weft TO {name}",
            ],
            "mysql": [f"CREATE USER {name}", f"GRANT SELECT ON {database}.* TO {name}"],
        }
        with server.connect(database) as connection, connection.cursor() as cursor:
            for each in rights[kind]:
                cursor.execute(each)
            connection.commit()
        reading = re.sub("//[^@]*@", f"//{name}@", url)
        with open_run_log(reading, read_only=True) as log:
            assert len(log.runs()) == 1
        for each in (reading, f"{reading}?create_tables=false"):
            with pytest.raises(WeftError, match=r"denied.* table .*claims") as raised:
                open_run_log(each)
            assert "UPDATE and DELETE" in (raised.value.hint or "")


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_folder_that_cannot_be_written(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    url = f"{kind}://file/runs.db"
    with pytest.raises((WeftError, OSError)):
        open_run_log(url, tmp_path)
    with open_run_log(url, tmp_path, or_memory=True) as log:
        assert log.finish(claimed(log), "succeeded")
        assert log.runs()[0].status == "succeeded"
    (warning,) = caplog.records
    assert (warning.name, warning.levelno) == ("weft.operate", logging.WARNING)
    assert re.fullmatch(
        rf"The run log {tmp_path}/file/runs\.db cannot be used, and this process keeps its own: .+",
        warning.getMessage(),
    )


def test_a_bucket_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "nothing"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    check_url("gcs://bucket/prefix")
    with pytest.raises(ConnectionFailedError, match=r"credentials were not found.*\n.*credentials of the environment"):
        open_run_log("gcs://bucket/prefix", tmp_path)
    with open_run_log("gcs://bucket/prefix", tmp_path, or_memory=True) as log:
        assert log.finish(claimed(log), "succeeded")
    (warning,) = [each for each in caplog.records if each.name == "weft.operate"]
    assert "The run log gcs://bucket/prefix cannot be used, and this process keeps its own" in warning.getMessage()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, which root too cannot write once it is mounted so."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if _mount("-t", "tmpfs", "tmpfs", str(folder)).returncode:
        pytest.skip("a disk can only be mounted as root, with the right to")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_read_only_file(kind: str, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{kind}:///{disk / 'runs.db'}"
    with open_run_log(url) as log:
        claimed(log)
    assert _mount("-o", "remount,ro", str(disk)).returncode == 0
    with pytest.raises(WeftError):
        open_run_log(url)
    with open_run_log(url, or_memory=True) as log:
        assert log.finish(claimed(log), "succeeded")
        assert len(log.runs()) == 1
    (warning,) = caplog.records
    assert str(disk / "runs.db") in warning.getMessage() and "cannot be used" in warning.getMessage()


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_server_that_is_not_there(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    url = f"{kind}://me:hunter2@127.0.0.1:{servers.free_port()}/x"
    with pytest.raises(ConnectionFailedError):
        open_run_log(url)
    with open_run_log(url, or_memory=True) as log:
        claimed(log)
    (warning,) = caplog.records
    assert f"{kind}://me:***@127.0.0.1" in warning.getMessage() and "hunter2" not in caplog.text
    assert "\n" not in warning.getMessage()


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_a_database_that_goes_away_does_not_stop_the_work(
    kind: str, need_server: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    need_server(kind)
    server = servers.KINDS[kind]()
    server.start()
    try:
        with open_run_log(server.create_database("runs")) as log:
            run = claimed(log)
            server.kill()
            assert log.heartbeat(run)
            assert log.heartbeat(run)
            assert log.finish(run, "succeeded")
            log.skip("orders", run.started_at, "waiting")
            (warning,) = caplog.records
            assert "the work goes on without it" in warning.getMessage()
            with pytest.raises(ConnectionFailedError, match="orders cannot be claimed, so it was not run"):
                log.claim("orders")
            server.start()
            # It still holds its claim: nobody else came meanwhile.
            assert log.heartbeat(run)
            assert log.finish(run, "succeeded")
            assert [attempt.status for attempt in log.runs()] == ["succeeded"]
    finally:
        server.kill()


@pytest.mark.parametrize("log", [*DATABASES, "memory"], indirect=True)
def test_a_log_that_is_dropped_in_the_middle(log: RunLog, caplog: pytest.LogCaptureFixture) -> None:
    run = claimed(log)
    with log._book.session("publish") as session:
        session.run(f"DROP TABLE {log._book.claims}")
    assert log.heartbeat(run)
    assert log.finish(run, "succeeded")
    assert len(caplog.records) == 1
    with pytest.raises(WeftError):
        log.claim("orders")


def test_a_full_disk_is_told_at_the_claim(tmp_path: Path) -> None:
    with open_run_log(f"sqlite:///{tmp_path / 'runs.db'}") as log:
        run = claimed(log)
        with log._book.session("publish") as session:
            session.run("PRAGMA max_page_count = 1")
        with pytest.raises(StorageError, match="cannot be claimed"):
            for number in range(1000):
                log.claim(f"{number}" * 200)
        assert log.finish(run, "failed", error="x" * 9000)


@pytest.mark.parametrize("log_url", DATABASES, indirect=True)
def test_a_log_of_before(log_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Pauses came later: its columns are added by who writes, and who may not does without."""
    with open_run_log(log_url) as log:
        run = claimed(log)
        drop(log, "paused_at", "cancelled", "watched_at", "stale_at", "lease_seconds")
    with open_run_log(log_url, read_only=True) as log:
        assert log.latest(None)[run.pipeline].paused_at is None
    with open_run_log(f"{log_url}?create_tables=false") as log:
        assert "ALTER TABLE" in caplog.text
        assert log.heartbeat(run)
        with pytest.raises(SettingsError, match=r"cannot note pauses[\s\S]*ALTER TABLE"):
            log.pause(run.pipeline)
    with open_run_log(log_url) as log:
        assert log.pause(run.pipeline)
        assert log.latest(None)[run.pipeline].paused_at is not None


@pytest.mark.parametrize("dropped", [("watched_at", "stale_at"), ("stale_at",)], ids=["both", "one"])
@pytest.mark.parametrize("log_url", DATABASES, indirect=True)
def test_a_log_of_before_keeps_its_pauses(
    log_url: str, dropped: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """What is stale came after pauses and cancels, which a log without it has."""
    with open_run_log(log_url) as log:
        log.pause("orders")
        drop(log, *dropped)
    with open_run_log(log_url, read_only=True) as log:
        assert log.latest(None)["orders"].paused_at is not None
    with open_run_log(f"{log_url}?create_tables=false") as log:
        (warning,) = [each.getMessage() for each in caplog.records]
        assert "cannot note what is stale" in warning
        assert [each for each in ("paused_at", "watched_at", "stale_at") if each in warning] == list(dropped)
        assert not log.has_notes
        assert log.latest(None)["orders"].paused_at is not None
        assert isinstance(log.claim("orders", slot=datetime(2026, 1, 1, tzinfo=UTC)), RefusedClaim)
        assert not log.pause("orders")
        assert log.resume("orders") and log.pause("orders")
    with open_run_log(log_url) as log:
        assert log.has_notes and log.latest(None)["orders"].paused_at is not None


def drop(log: RunLog, *columns: str) -> None:
    with log._book.session("publish") as session:
        for column in columns:
            session.run(f"ALTER TABLE {log._book.claims} DROP COLUMN {column}")


# ------------------------------------------------------------------------------------------------- silent transactions


def test_only_transactions_of_the_log_may_not_be_silent(shared_server: Callable[[str], servers.Server]) -> None:
    """A pooler gives the same session to others between two transactions."""
    show = "SHOW idle_in_transaction_session_timeout"
    with shared_server("postgres").database() as url, open_run_log(url) as log:
        claimed(log)
        with log._book.session("publish") as session:
            assert session.value(show) == "10s"
            session.run("COMMIT")
            assert session.value(show) == "0"


def test_a_server_that_does_not_limit_silence(
    shared_server: Callable[[str], servers.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MySQL, and MariaDB before 10.3."""
    from weft.systems.mysql import sessions

    show = "SELECT @@idle_transaction_timeout"
    with shared_server("mysql").database() as url:
        with open_run_log(url) as log, log._book.session("publish") as session:
            assert session.value(show) == 10
        monkeypatch.setattr(sessions, "_SILENCE", "a_variable_that_is_not_there")
        with open_run_log(url) as log:
            claimed(log)
            with log._book.session("publish") as session:
                assert session.value(show) == 0
