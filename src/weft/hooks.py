"""Functions that a lower package calls and a higher one implements. `weft/__init__.py` puts them here, so that no
import points upwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

find_connection: Callable[[Any], Any]
"""The project's connection of a name, or of a connection itself, for a connection that names another one."""
open_store: Callable[[Any], Any]
"""The opened `weft.systems.log.Store` of a connection, which this process shares."""
triggered_models: Callable[[Any], tuple[str, ...]]
"""`weft.pipelines.models.triggered_by`, for the answer to a publish."""
open_consumer: Callable[..., Any]
"""`weft.consumers.consumer.xconsumer`, for the method `xconsumer` of connections and of clients."""
load_models: Callable[..., None]
"""`weft.pipelines.model_files.load_folder`, for the folders of models that `weft.toml` lists."""
