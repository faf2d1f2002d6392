"""What tests of models share."""

from __future__ import annotations

import pytest

import weft
from weft.project import Project


@pytest.fixture
def orders(streams: Project) -> object:
    return weft.stream(name="orders", schema="events", fields={"order_id": "string", "total": "float64"})(lambda: None)
