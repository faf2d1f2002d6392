"""Reads of the run log for requests: each in a thread of its own, a few at once, none for longer than a page waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from weft.errors import ConnectionFailedError, NotFoundError, StorageError, WeftError
from weft.server.cached_probe import CachedProbe
from weft.server.problems import Problem, later

if TYPE_CHECKING:
    from weft.operate.runlog import RunLog

logger = logging.getLogger("weft.server")
T = TypeVar("T")

_SECONDS = 10.0
_RETRY_SECONDS = 5.0
# A database that hangs holds no more threads than this.
_MOST = 8
_free = threading.BoundedSemaphore(_MOST)


def open_log(*, read_only: bool = True) -> RunLog:
    """Open the run log of the project, the same as commands do."""
    from weft.operate.runlog import open_run_log, project_log_url

    return open_run_log(project_log_url(), read_only=read_only)


async def with_run_log(work: Callable[[RunLog], T]) -> T:
    """Return what `work` finds in the run log; 503 where it does not answer."""

    def run() -> T:
        with open_log() as log:
            return work(log)

    return await in_thread(run, "The run log")


async def in_thread(work: Callable[[], T], what: str, room: threading.BoundedSemaphore = _free) -> T:
    """Return the result of `work`, which asks another system; 503 where that does not answer. `what` it is, for the
    answer; `room` limits the threads that wait for it, so that a slow one takes none from others."""
    if not room.acquire(blocking=False):
        raise _unavailable(f"{what} does not answer: too many requests wait already.")

    def run() -> T:
        try:
            return work()
        finally:
            room.release()

    return await answered(CachedProbe(run, fresh_seconds=0), what)


async def answered(probe: CachedProbe[T], what: str) -> T:
    """Return the result of a probe of another system; 503 where that does not answer."""
    try:
        return await probe.get(_SECONDS)
    except (Problem, NotFoundError):
        raise
    except TimeoutError:
        raise _unavailable(f"{what} does not answer.") from None
    except (ConnectionFailedError, StorageError) as error:
        logger.warning("%s cannot be read: %s", what, error)
        raise _unavailable(f"{what} cannot be read now. The log of the service has the reason.") from None
    except WeftError as error:
        logger.error("%s failed: %s", what, error)
        raise _unavailable(f"{what} cannot be used. The log of the service has the reason.") from None


async def answered_or_not(probe: CachedProbe[list[T]], what: str) -> tuple[list[T], str | None]:
    """Do the same for a part of a page that shows more: return nothing and why, where the other system is away."""
    try:
        return await answered(probe, what), None
    except Problem as error:
        return [], str(error)


def as_problems(work: Callable[[], T]) -> Callable[[], T]:
    """Return `work` with its errors as problems that the client gets, in the words of the command."""

    def run() -> T:
        try:
            return work()
        except (ConnectionFailedError, NotFoundError, StorageError):
            raise
        except WeftError as error:
            from weft.operate.redaction import clean

            more: dict[str, Any] = {} if error.hint is None else {"hint": clean(error.hint)}
            raise Problem(409, "refused", "Refused", clean(error.what), **more) from None

    return run


def _unavailable(text: str) -> Problem:
    return later(503, "unavailable", "Not available", text, _RETRY_SECONDS)
