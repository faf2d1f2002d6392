"""A connection to the run's broker of RabbitMQ."""

from __future__ import annotations

from typing import Any

import pytest

from weft import RabbitMQConnection


@pytest.fixture
def connection(rabbitmq: Any) -> RabbitMQConnection:
    return RabbitMQConnection(rabbitmq.url(), name="broker")
