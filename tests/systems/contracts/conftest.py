"""What the contracts of systems share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_MARKS = {
    "topic": pytest.mark.kafka,
    "rabbitmq": pytest.mark.queues,
    "pubsub": pytest.mark.queues,
    "delta": pytest.mark.delta,
}


def by_name(systems: Iterable[str]) -> list[Any]:
    """The parameters of a contract. Those that need a broker of the run are marked, because it has one of each."""
    return [pytest.param(name, marks=_MARKS.get(name, ())) for name in systems]
