"""A connection to a server that speaks Kinesis."""

from __future__ import annotations

from typing import Any

import pytest

from weft import KinesisConnection


@pytest.fixture
def connection(kinesis: Any) -> KinesisConnection:
    return KinesisConnection(name="events", **kinesis.fields())
