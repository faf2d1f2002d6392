"""Streams as readers open them: nothing is made, and one that is not there yet is empty until a publisher makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from weft.systems.log import Log, LogPage, Store
from weft.types import FieldType

OF_NO_EVENTS: dict[str, Callable[..., Any]] = {
    "head": lambda reached=0: 0,
    "identity": lambda: None,
    "published": lambda: 0,
    "floor": lambda: 0,
    "removed_after": lambda offset: 0,
    "lost_after": lambda offset, following: (0, 0),
    "count": lambda: 0,
    "size": lambda: None,
    "read": lambda after, upto, limit: LogPage((), []),
    "read_arrow": lambda after, upto, columns=None: iter(()),
    "bound": lambda after, upto, most: upto,
    "extent": lambda after, upto, most: 0,
    "first_since": lambda moment, reached=0: 1,
    "expired": lambda before, now: 0,
    "groups": list,
    "members": lambda consumer: [],
    "nth_last": lambda n: None,
    "forget_consumer": lambda consumer: False,
    "trim": lambda upto, keeps_unread=False: 0,
    "remove": lambda rowids: 0,
    "trim_keys": lambda before, most=None, young=0.0: None,
}
"""What the methods that read a log, or remove events, return for one without events."""


class _AwaitedLog:
    """A log that nobody has made yet. Each call looks for it, until it is there."""

    def __init__(self, store: Store, schema: str, name: str, fields: dict[str, FieldType]) -> None:
        self.schema = schema
        self.name = name
        self._store = store
        self._fields = fields
        self._log: Log | None = None

    def __getattr__(self, method: str) -> Any:
        if method != "fields" and method not in OF_NO_EVENTS:
            raise AttributeError(f"{method} needs a log that is there")

        def call(*arguments: Any, **named: Any) -> Any:
            if self._log is None:
                self._log = self._store.find(self.schema, self.name, self._fields)
            if self._log is not None:
                return getattr(self._log, method)(*arguments, **named)
            return self._fields if method == "fields" else OF_NO_EVENTS[method](*arguments, **named)

        return call


def open_to_read(store: Store, schema: str, name: str, fields: dict[str, FieldType]) -> Log:
    """Return a stream's log for a reader, who needs no right to write. `fields`: those that are declared."""
    return store.find(schema, name, fields) or cast(Log, _AwaitedLog(store, schema, name, fields))
