"""What the contracts of systems share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_name(systems: Iterable[str]) -> list[Any]:
    """The parameters of a contract. Those that need the broker are marked, because a run has one."""
    return [pytest.param(name, marks=[pytest.mark.kafka] if name == "topic" else []) for name in systems]
