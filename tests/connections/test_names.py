"""`weft.connections` and `weft` have the connection class of every built-in system."""

from __future__ import annotations

import pytest

import weft
from weft import connections
from weft.systems.base import systems


@pytest.mark.parametrize("kind", systems())
def test_every_connection_class_has_its_name(kind: str) -> None:
    cls = systems()[kind].load_connection()
    assert getattr(connections, cls.__name__) is getattr(weft, cls.__name__) is cls
    assert cls.__name__ in connections.__all__
