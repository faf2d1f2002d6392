"""A project for the contracts of capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.project import Project, use


@pytest.fixture
def here(project: Path) -> Iterator[Project]:
    """A project on the embedded default."""
    import weft.streams

    fresh = Project()
    with use(fresh):
        yield fresh
        weft.streams.close(fresh)
