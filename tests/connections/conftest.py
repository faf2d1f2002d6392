"""What a test registers is gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.project import Project, use


@pytest.fixture(autouse=True)
def fresh(project: Path) -> Iterator[Project]:
    with use(Project()) as fresh:
        yield fresh


@pytest.fixture
def write_settings(project: Path, monkeypatch: pytest.MonkeyPatch):
    """Write ./weft.toml and, with `user=`, ~/.weft/connections.toml."""
    from weft.settings import user_file

    def write(text: str = "", *, user: str | None = None) -> None:
        (project / "weft.toml").write_text(text)
        if user is not None:
            user_file().parent.mkdir(exist_ok=True)
            user_file().write_text(user)

    return write
