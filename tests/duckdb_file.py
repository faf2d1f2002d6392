"""A DuckDB file that stays open in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext

import pytest


@contextmanager
def kept_open(url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Keep the file of a DuckDB URL open; other URLs are left as they are.

    To open a file takes DuckDB 25 ms of processor time, unless the process has it open already. A load opens it several
    times. Tests of faults and of Spark open it in other processes, for which it must be closed.
    """
    is_shared = request.path.parent.name == "faults" or request.node.get_closest_marker("spark") is not None
    with nullcontext() if is_shared else opened(url):
        yield url


@contextmanager
def opened(url: str) -> Iterator[None]:
    """Have the file of a DuckDB URL open; do nothing for others."""
    if not url.startswith("duckdb:"):
        yield
        return
    import duckdb

    from weft.systems.duckdb.sessions import CONFIG

    with closing(duckdb.connect(url.removeprefix("duckdb:///"), config=dict(CONFIG))):
        yield
