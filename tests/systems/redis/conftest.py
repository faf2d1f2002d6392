"""Streams on a Redis server, and a plain client beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from weft.systems.redis.client import open_client


@pytest.fixture(params=["redis"])
def system(request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Any]:
    with open_system(request.param) as found:
        yield found


@pytest.fixture
def client(system: Any) -> Iterator[Any]:
    opened = open_client(system.connection)
    yield opened
    opened.close()
