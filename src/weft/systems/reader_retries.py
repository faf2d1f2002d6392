"""Readers wait for a server that answered them before and is gone: it is restarted or replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from weft.errors import ConnectionFailedError

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""How long such a server may be gone."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


class Patience:
    """The retries of one request that does not itself wait for events. `stopped` says that
    nobody waits for it any more."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self._gone_since: float | None = None
        self._pause = _FIRST_PAUSE

    def pause_after(self, error: ConnectionFailedError) -> float:
        """Return for how many seconds to pause before the next try; raise the error if there is to be none."""
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        if not error.is_transient or self._stopped() or now - self._gone_since > PATIENCE_SECONDS:
            raise error
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause


def patiently(request: Callable[[], T], stopped: Callable[[], bool] = lambda: False) -> T:
    """Return what a request does, which can be made again without harm."""
    patience = Patience(stopped)
    while True:
        try:
            return request()
        except ConnectionFailedError as error:
            time.sleep(patience.pause_after(error))
