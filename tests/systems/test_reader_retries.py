"""How long a server may be gone."""

from __future__ import annotations

import pytest

from weft.errors import ConnectionFailedError
from weft.systems import reader_retries


def test_a_request_that_fails_slowly_is_not_made_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(reader_retries.time, "monotonic", lambda: now[0])
    waiting = reader_retries.Patience()
    assert waiting.pause_after(ConnectionFailedError("gone")) > 0
    now[0] += 2 * reader_retries.PATIENCE_SECONDS
    with pytest.raises(ConnectionFailedError):
        waiting.pause_after(ConnectionFailedError("gone"))
