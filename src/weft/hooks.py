"""Functions that a lower package calls and a higher one implements. `weft/__init__.py` puts them here, so that no
import points upwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

open_consumer: Callable[..., Any]
"""`weft.consumers.consumer.xconsumer`, for the method `xconsumer` of connections and of clients."""
