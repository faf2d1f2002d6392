"""Nothing that goes wrong in the thread that commits leaves a publisher waiting for ever."""

from __future__ import annotations

import pytest

import weft
from weft.streams.runtime import open_stream


async def test_a_defect_is_an_error_and_the_next_publish_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with weft.testing.project():

        @weft.stream
        def jobs() -> None: ...

        weft.publish_sync("jobs", {"id": 1})
        store = open_stream("jobs").hub.store
        with monkeypatch.context() as patch:
            patch.setattr(store, "append", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                weft.publish_sync("jobs", {"id": 2})
            with pytest.raises(ZeroDivisionError):
                await weft.publish("jobs", {"id": 3})
        assert weft.publish_sync("jobs", {"id": 4})["status"] == "accepted"
