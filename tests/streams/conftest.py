"""The streams of these tests are on Redis too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def system(request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Any]:
    with open_system(request.param) as found:
        yield found
