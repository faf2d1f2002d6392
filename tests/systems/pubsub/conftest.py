"""A connection to a server that speaks Pub/Sub."""

from __future__ import annotations

from typing import Any

import pytest

from weft import PubSubConnection


@pytest.fixture
def connection(pubsub: Any) -> PubSubConnection:
    return PubSubConnection(name="events", **pubsub.fields())
