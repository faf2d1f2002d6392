"""What several tests of faults use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Processes that are continued at the end, so that nothing waits for them for ever."""
    found: list[int] = []
    yield found
    for pid in found:
        os.kill(pid, signal.SIGCONT)
