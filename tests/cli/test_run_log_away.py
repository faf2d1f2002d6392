"""A run log that is away, of each kind: what `on_run_log_failure` says is done with runs that cannot be claimed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import servers
from faults.schedulers import Wire
from operate.conftest import KINDS, url_of
from weft.operate.executors import Dispatch
from weft.operate.runlog import open_run_log
from weft.operate.scheduler import LEADER
from weft.operate.spool import FILE

PIPELINE = """
import pathlib
import weft

@weft.pipeline(target="ones", mode="append", schedule="@yearly")
def ones():
    with pathlib.Path("done").open("a") as file:
        file.write("x")
    return [{"id": 1}]
"""


@dataclass
class Log:
    """A run log that can be away, in a project with one pipeline."""

    url: str
    cut: Callable[[], None]
    mend: Callable[[], None]

    def runs(self) -> list[tuple[str, bool]]:
        with open_run_log(self.url) as log:
            return [(each.status, each.slot is not None) for each in log.runs()]


def done() -> int:
    """How often the pipeline was run."""
    return len(Path("done").read_text()) if Path("done").exists() else 0


def declare(log: Log, on_failure: str | None) -> None:
    Path("work.py").write_text(PIPELINE)
    settings = f'modules = ["work"]\nrun_log = "{log.url}"\n'
    Path("weft.toml").write_text(settings + (f'on_run_log_failure = "{on_failure}"\n' if on_failure else ""))


@pytest.fixture(params=KINDS)
def away(
    request: pytest.FixtureRequest, project: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[Log]:
    kind = request.param
    for url in url_of(kind, project / "logs", shared_server):
        with _of_file(url, project / "logs") if kind in ("sqlite", "duckdb") else _by_wire(url) as log:
            log.cut()
            yield log


@contextmanager
def _of_file(url: str, folder: Path) -> Iterator[Log]:
    def cut() -> None:
        folder.write_text("no folder")

    def mend() -> None:
        folder.unlink()

    yield Log(url, cut, mend)


@contextmanager
def _by_wire(url: str) -> Iterator[Log]:
    (port,) = set(re.findall(r"127\.0\.0\.1:(\d+)", url))
    wire = Wire(int(port))
    try:
        yield Log(url.replace(f":{port}", f":{wire.port}"), wire.cut, wire.mend)
    finally:
        wire.close()


def test_warn_runs_and_records_later(away: Log, run: Any) -> None:
    """Each slot once, whatever the log knows meanwhile."""
    declare(away, None)
    for _ in range(2):
        ended = run("run-due")
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("cannot be used, and this process keeps its own") == 1
        assert done() == 1
    assert run("run", "ones").returncode == 0
    assert done() == 2 and Path(FILE).exists()
    away.mend()
    ended = run("run-due")
    assert ended.returncode == 0 and "has now the 2 attempts" in ended.stderr
    assert done() == 2 and not Path(FILE).exists()
    assert sorted(away.runs()) == [("succeeded", False), ("succeeded", True)]


def test_fail_starts_nothing(away: Log, run: Any) -> None:
    declare(away, "fail")
    for command in (("run-due",), ("run-due", "ones"), ("run", "ones"), ("run", "--all", "--full")):
        ended = run(*command)
        assert ended.returncode == 1 and "error: " in ended.stderr, (command, ended)
        assert done() == 0, command
    assert not Path(FILE).exists()
    away.mend()
    assert run("run-due").returncode == 0
    assert (done(), away.runs()) == (1, [("succeeded", True)])


def test_what_a_scheduler_starts_needs_the_log(project: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be started again: where the first one ran, only that host's spool knows."""
    with _of_file(f"sqlite:///{project / 'logs' / 'log.db'}", project / "logs") as log:
        log.cut()
        declare(log, "warn")
        monkeypatch.setenv("WEFT_ON_RUN_LOG_FAILURE", "fial")
        assert "WEFT_ON_RUN_LOG_FAILURE is 'warn' or 'fail', not 'fial'" in run("run-due", "ones").stderr
        for name, value in Dispatch("ones").environment.items():
            monkeypatch.setenv(name, value)
        ended = run("run-due", "ones")
        assert (ended.returncode, done()) == (1, 0), ended
        log.mend()
        assert (run("run-due", "ones").returncode, done()) == (0, 1)


@pytest.mark.brief("postgres", "s3")
@pytest.mark.parametrize("kind", ["postgres", "mysql", "s3", "azure", "gcs"])
def test_a_scheduler_waits_for_its_log(
    kind: str, project: Path, start: Any, shared_server: Callable[[str], servers.Server]
) -> None:
    """As one does whose log goes away later: after a power cut all of them start at once."""
    for url in url_of(kind, project, shared_server):
        with _by_wire(url) as log:
            _start_without(log, start)


def _start_without(log: Log, start: Any) -> None:
    log.cut()
    _declare_nothing_due(log.url)
    scheduler = start("scheduler", "--poll-interval", "0.1")
    assert _line_with(scheduler, "is tried again every 0.1 seconds")
    log.mend()
    with open_run_log(log.url) as opened:
        servers.wait_until(
            lambda: scheduler.poll() is not None or opened.latest([LEADER])[LEADER].is_live, "a leader", 120
        )
    scheduler.terminate()
    assert scheduler.wait(120) == 0
    log.cut()
    stopped = start("scheduler", "--poll-interval", "200")
    assert _line_with(stopped, "is tried again every 200 seconds")
    stopped.terminate()
    assert stopped.wait(120) == 0


MODEL = """
import weft

@weft.stream(fields={"id": "int64"})
def orders(): pass

@weft.model(debounce=0)
def copies(orders):
    return orders.select("id")
"""


@pytest.mark.brief("postgres")
@pytest.mark.parametrize("kind", ["postgres", "mysql", "s3", "azure", "gcs"])
def test_a_worker_waits_for_its_log(
    kind: str, project: Path, start: Any, run: Any, shared_server: Callable[[str], servers.Server]
) -> None:
    for url in url_of(kind, project, shared_server):
        with _by_wire(url) as log, open_run_log(url) as known:
            _work_without(log, start, run, lambda: len(known.runs("copies", "succeeded")))


def _work_without(log: Log, start: Any, run: Any, built: Callable[[], int]) -> None:
    Path("work.py").write_text(MODEL)
    Path("weft.toml").write_text(f'modules = ["work"]\nrun_log = "{log.url}"\n')
    log.cut()
    worker = start("worker")
    assert _line_with(worker, "is tried again every 5 seconds")
    log.mend()
    servers.wait_until(lambda: worker.poll() is not None or built() == 1, "the first build", 120)
    log.cut()
    assert run("streams", "publish", "orders", stdin='{"id": 1}').returncode == 0
    assert _line_with(worker, "cannot be claimed, so it was not run")
    log.mend()
    servers.wait_until(lambda: worker.poll() is not None or built() == 2, "the second build", 120)
    worker.terminate()
    assert worker.wait(120) == 0
    log.cut()
    ended = run("worker", "--once")
    assert ended.returncode == 1 and "error: " in ended.stderr
    # What `weft serve` starts ends with it, also where it was killed.
    left, stopped = (start("worker", "--while-stdin-is-open") for _ in range(2))
    for each in (left, stopped):
        assert _line_with(each, "is tried again every 5 seconds")
    left.stdin.close()
    left.stdin = None
    stopped.terminate()
    assert (left.wait(120), stopped.wait(120)) == (0, 0)


def _declare_nothing_due(url: str) -> None:
    Path("work.py").write_text(MODEL.replace("(debounce=0)", "(trigger='manual')"))
    Path("weft.toml").write_text(f'modules = ["work"]\nrun_log = "{url}"\n')


def _line_with(process: Any, text: str) -> bool:
    return any(text in line for line in process.stderr)


@pytest.mark.brief("postgres", "s3")
@pytest.mark.parametrize("kind", ["postgres", "mysql", "s3", "azure", "gcs"])
def test_no_log_that_refuses_them_is_waited_for(
    kind: str, project: Path, run: Any, shared_server: Callable[[str], servers.Server]
) -> None:
    """They would wait for ever, and nobody would look for the reason."""
    for url in url_of(kind, project, shared_server):
        for wrong in _wrong(kind, url):
            _declare_nothing_due(wrong)
            for command in ("scheduler", "worker"):
                ended = run(command)
                assert ended.returncode == 1 and "error: " in ended.stderr and "tried again" not in ended.stderr, ended


def _wrong(kind: str, url: str) -> Iterator[str]:
    """URLs of another database or bucket, and of another user where the URL names one."""
    if kind in ("postgres", "mysql"):
        yield re.sub(r"/[^/?]+(\?|$)", r"/nothing_here\1", url)
        yield re.sub(r"://[^@/]*@", "://nobody:wrong@", url)
    else:
        yield re.sub(r"://([^/]+)/" if kind != "azure" else r"(?<=devstoreaccount1)/([^/]+)/", _renamed, url, count=1)


def _renamed(found: re.Match[str]) -> str:
    return found[0].replace(found[1], f"not-{found[1]}")
