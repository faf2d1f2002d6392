"""Files that one may read and not write, also where the tests run as root.

def test_something(folder, stranger):
    folder                 a folder that everybody may read
    with stranger():       as somebody who may read what others made, and write nothing
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

_STRANGER = 65534

Stranger = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that others may read, which those of a test are not."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stranger() -> Stranger:
    """Somebody else, for a while."""
    if os.geteuid():
        pytest.skip("only root can be somebody else")

    @contextmanager
    def somebody() -> Iterator[None]:
        os.seteuid(_STRANGER)
        try:
            yield
        finally:
            os.seteuid(0)

    return somebody
