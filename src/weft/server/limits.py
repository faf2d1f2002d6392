"""Limits of what clients may use."""

from __future__ import annotations

import msgspec

from weft.errors import SettingsError, did_you_mean
from weft.project import current
from weft.settings import PROJECT_FILE, read_project_file


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one client, and of all of them together, in one process. `[server]` of weft.toml sets them."""

    body_bytes: int = 16 * 1024 * 1024
    """The size of one request's body, unpacked."""
    body_events: int = 100_000
    """The events of one publish. To parse more would block all requests."""
    body_seconds: float = 30.0
    """How long a body may take to arrive."""
    arriving_bytes: int = 256 * 1024 * 1024
    """All bodies that arrive in parts, until they are answered. Further ones get a 503: memory is limited."""
    connections: int = 10_000
    """Open at once. More are refused."""
    waiting_requests: int = 2_000
    waiting_bytes: int = 64 * 1024 * 1024
    """Requests to one stream that wait for its database. Further ones get a 503."""
    wait_seconds: float = 60.0
    """The longest long poll."""
    page_events: int = 10_000
    page_bytes: int = 16 * 1024 * 1024
    """The size of the events of one answer; it has at least one event."""
    answering_bytes: int = 256 * 1024 * 1024
    """The size of all such answers, until clients received them. Further requests get a 503: memory is limited."""
    send_seconds: float = 30.0
    """In which a client must receive each part of an answer."""
    keep_alive_seconds: float = 15.0
    """After which a subscriber without events gets a comment."""
    history_days: float = 7.0
    """For which samples of the streams are kept in the database of the keys."""

    @classmethod
    def of_project(cls) -> Limits:
        settings = dict(read_project_file(current().root).get("server", {}))
        others = ("keys", "origins")
        known = (*cls.__struct_fields__, *others)
        for name in others:
            settings.pop(name, None)
        for name, value in settings.items():
            if name not in known:
                hint = did_you_mean(name, known, f"There are {', '.join(known)}.")
                raise SettingsError(f"{PROJECT_FILE}: [server] has no setting {name!r}.", hint=hint)
            wanted = type(cls.__struct_defaults__[cls.__struct_fields__.index(name)])
            if isinstance(value, bool) or not isinstance(value, (int, wanted)) or not 0 < value < 2**53:
                number = "whole number" if wanted is int else "number"
                raise SettingsError(f"{PROJECT_FILE}: {name} of [server] must be a {number} above 0, not {value!r}.")
        return cls(**settings)
