"""One family of errors: what failed, where, what was expected, and what to do next.

Nothing else is imported here, so that every module may raise these without a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# One of the two is in each error of a database that a publish may end with.
NOTHING_STORED = "Nothing was stored."
MAYBE_STORED = "If this was a publish, its events may or may not be stored."


class WeftError(Exception):
    """The base of every error that Weft raises on purpose.

    `what` says what failed and where; `hint` says what to do about it. No secret may be in either:
    texts that come from a driver go through `weft.settings.redact` first.
    """

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        self.what = what
        self.hint = hint
        super().__init__(what if hint is None else f"{what}\n  {hint}")


class DeclarationError(WeftError, ValueError):
    """A decorator or a configuration file declares something that cannot be."""


class CycleError(DeclarationError):
    """Pipelines wait for each other in a ring. `ring` names them; the first is also the last."""

    def __init__(self, what: str, *, ring: tuple[str, ...], hint: str | None = None) -> None:
        self.ring = ring
        super().__init__(what, hint=hint)


class SettingsError(WeftError, ValueError):
    """A setting, a connection's field or an environment variable is missing or malformed."""


class NotFoundError(WeftError, LookupError):
    """A name that nothing declares. The hint carries the nearest valid name."""


class MissingExtraError(WeftError, ImportError):
    """A package that an optional system needs is not installed."""


class ConnectionFailedError(WeftError, ConnectionError):
    """An outside system could not be reached, or went away in the middle of an operation.

    A publish that ends so was not acknowledged: the event may or may not have been stored. `is_transient` says that a
    reader who tries again may get on soon, as when a server is restarted.
    """

    def __init__(self, what: str, *, hint: str | None = None, is_transient: bool = True) -> None:
        self.is_transient = is_transient
        super().__init__(what, hint=hint)


class BusyError(ConnectionFailedError):
    """The database answers, but another process holds a lock and did not release it in time."""

    def __init__(self, what: str, *, hint: str | None = None, is_transient: bool = False) -> None:
        super().__init__(what, hint=hint, is_transient=is_transient)


class StorageError(WeftError, OSError):
    """The database cannot store more: the disk is full, or it is read-only."""


class SchemaError(WeftError, ValueError):
    """An event does not fit its stream. Names the event's index, the field and the value."""

    def __init__(
        self,
        what: str,
        *,
        index: int | None = None,
        field: str | None = None,
        value: object = None,
        hint: str | None = None,
    ) -> None:
        self.index = index
        self.field = field
        self.value = value
        super().__init__(what, hint=hint)


class LeaseLostError(WeftError):
    """An ack or nack of events that the caller no longer holds. They are, or were, delivered again."""

    def __init__(self, what: str, *, rowids: tuple[int, ...] = (), hint: str | None = None) -> None:
        self.rowids = rowids
        super().__init__(what, hint=hint)


class EventsLostError(WeftError):
    """Retention removed events before this reader saw them, or the stream ends before what a subscriber had seen: then
    `lost` is 0. Raised once; reading goes on after it."""

    def __init__(self, what: str, *, lost: int, hint: str | None = None) -> None:
        self.lost = lost
        super().__init__(what, hint=hint)


class LoadRefusedError(WeftError, ValueError):
    """A load was not carried out because of its rows or its target's: nothing was written.

    `can_quarantine` says that `on_bad_rows="quarantine"` would put the rows aside and load the others.
    """

    def __init__(self, what: str, *, can_quarantine: bool = False, hint: str | None = None) -> None:
        self.can_quarantine = can_quarantine
        super().__init__(what, hint=hint)


def installing(extra: str) -> str:
    """Return how to get the packages of an extra."""
    return f"pip install 'weft[{extra}]', or in a clone of its repository: pip install '.[{extra}]'"


def nearest(name: str, candidates: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the candidate that looks most like `name`, if any comes close."""
    known = list(candidates)
    alike = [each for each in known if each.lower() == name.lower()]
    return next(iter(alike or get_close_matches(name, known, n=1, cutoff=likeness)), None)


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return a hint with the candidate that looks most like `name`; `otherwise` where none comes close."""
    close = nearest(name, candidates)
    return otherwise if close is None else f"Did you mean {close!r}?"


def listed(name: str, candidates: Iterable[str], listing: str) -> str:
    """Return a hint with the candidate that looks most like `name`, if any comes close, and the list of all."""
    return " ".join(filter(None, (did_you_mean(name, candidates), listing)))


def unknown(kind: str, name: str, candidates: Iterable[str], *, otherwise: str | None = None) -> NotFoundError:
    """Return a `NotFoundError` for `name` that names the nearest candidate, or lists the few there are."""
    names = sorted(candidates)
    if names:
        hint = did_you_mean(name, names, f"Known: {', '.join(names[:20])}{' …' if len(names) > 20 else ''}.")
        hint = f"{hint} {otherwise}" if otherwise else hint
    else:
        hint = otherwise or f"No {kind} is declared."
    return NotFoundError(f"There is no {kind} named {name!r}.", hint=hint)


def stop_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt or SIGTERM that led to an error. Spark's client fails with another error when a call is
    interrupted, and that must not look like a failure of the run."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause
