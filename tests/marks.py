"""Marks for tests that not every system can pass."""

from __future__ import annotations

import pytest

# For what somebody does to the tables behind a stream.
on_tables = pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
# For what every log does.
on_logs = pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql", "redis"], indirect=True)
