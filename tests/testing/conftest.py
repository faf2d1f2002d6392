"""Nothing that these tests declare stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.project import Project, use


@pytest.fixture(autouse=True)
def outer(project: Path) -> Iterator[Project]:
    """The project that a user's modules declare into."""
    with use(Project()) as fresh:
        yield fresh
