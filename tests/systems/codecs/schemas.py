"""A schema registry of a dict, for tests of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from weft.systems.codec import Registered


class AllSchemas:
    """Schemas with the ids 1, 2 …"""

    def __init__(self, kind: str, schemas: Iterable[Any]) -> None:
        texts = (each if isinstance(each, str) else json.dumps(each) for each in schemas)
        self.schemas = {number: Registered(number, kind, text) for number, text in enumerate(texts, 1)}

    def schema(self, number: int) -> Registered | None:
        return self.schemas.get(number)
