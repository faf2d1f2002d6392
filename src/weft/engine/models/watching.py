"""Learns that something may have been published to a stream that models read, by any process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from weft.engine import relations
from weft.errors import WeftError
from weft.pipelines.models import Model
from weft.streams import runtime

_WAIT_SECONDS = 1.0


class Watcher:
    """Calls `changed` after a publish to a stream that one of the models reads."""

    def __init__(self, models: Iterable[Model], changed: Callable[[], None]) -> None:
        self._changed = changed
        self._closed = threading.Event()
        hubs = {}
        for model in models:
            for each in model.inputs:
                try:
                    relation = relations.find(each.name, model.target.connection)
                except WeftError:  # the build says what is wrong with it
                    continue
                if relation.stream is not None:
                    hub = runtime.open_hub(relation.connection)
                    hubs[id(hub)] = hub
        self._threads = [
            threading.Thread(target=self._watch, args=(hub,), name="weft-models-watch", daemon=True)
            for hub in hubs.values()
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self, hub: runtime.Hub) -> None:
        version = hub.watch.version
        while not self._closed.is_set() and not hub.watch.closed:
            hub.watch.wait(version, _WAIT_SECONDS)
            if hub.watch.version != version:
                version = hub.watch.version
                self._changed()

    def close(self) -> None:
        """End the threads, within a second."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * _WAIT_SECONDS)
