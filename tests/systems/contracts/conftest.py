"""What the contracts of systems share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_OF_BROKERS = ("topic", "rabbitmq", "pubsub")


def by_name(systems: Iterable[str]) -> list[Any]:
    """The parameters of a contract. Those that need a broker of the run are marked, because it has one of each."""
    return [pytest.param(name, marks=[pytest.mark.kafka] if name in _OF_BROKERS else []) for name in systems]
