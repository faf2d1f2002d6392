"""A fresh run log on each database, and a stream for streaming pipelines.

def test_something(log):         runs on SQLite, PostgreSQL, MariaDB, DuckDB, S3 and memory (-k duckdb: on that one)
def test_something(log_url):     the same without memory: an empty database that several processes can open
def test_something(numbers):     a stream of a fresh project
def test_something(clock):       a fresh project whose clock the test moves
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import object_servers
import pgbouncer_server  # noqa: F401 - a kind of server
import servers
import weft
from tests.operate.scheduling import Clock
from weft.operate.runlog import RunLog, open_run_log
from weft.project import Project, use

KINDS = [
    *("sqlite", "postgres", "mysql", "duckdb", "s3"),
    *(pytest.param(kind, marks=pytest.mark.full) for kind in ("azure", "gcs", "seaweed", "pgbouncer")),
]


def url_of(kind: str, folder: Path, shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    if kind == "memory":
        yield "memory://"
    elif kind in ("s3", "seaweed"):
        server: Any = shared_server(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "me")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
            yield f"s3://{server.create_bucket()}/a/b?region=us-east-1&endpoint={server.url()}"
    elif kind == "azure":
        server = shared_server("azure")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", object_servers.KEY)
            account = object_servers.ACCOUNT
            yield f"azureblob://{account}/{server.create_container()}/a?endpoint={server.url()}/{account}"
    elif kind == "gcs":
        server = shared_server("gcs")
        yield f"gcs://{server.create_bucket()}/a/b?endpoint={server.url()}"
    elif kind in ("sqlite", "duckdb"):
        yield f"{kind}:///{folder / 'log.db'}"
    else:
        with shared_server(kind).database() as url:
            yield url


@pytest.fixture(params=KINDS)
def log_url(
    request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[str]:
    yield from url_of(request.param, tmp_path, shared_server)


@pytest.fixture(params=[*KINDS, "memory"])
def log(
    request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[RunLog]:
    for url in url_of(request.param, tmp_path, shared_server):
        with open_run_log(url) as opened:
            yield opened


@pytest.fixture
def numbers() -> Iterator[Any]:
    """A stream of a fresh project."""
    with use(Project()) as project:

        @weft.stream(fields={"n": "int64"})
        def numbers() -> None:
            pass

        yield numbers
        weft.streams.close(project)


@pytest.fixture
def clock(project: Path) -> Iterator[Clock]:
    made = Clock()
    with use(Project()) as fresh:
        fresh.clock = lambda: made.now.timestamp()
        yield made
