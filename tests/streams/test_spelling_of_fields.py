"""A declared field that differs from the stored column in case or accents only is refused, with the stored name."""

from __future__ import annotations

from typing import Any

import pytest

import weft
import weft.streams
from weft.project import Project, use


@pytest.mark.parametrize("renamed", ["userId", "USERID", "usérid"])
def test_it_names_the_stored_spelling(streams: Any, renamed: str) -> None:
    weft.stream("people", fields={"userid": "string"})(lambda: None)
    weft.publish_sync("people", {"userid": "a"})
    later = Project()
    with use(later):
        weft.stream("people", fields={renamed: "string"})(lambda: None)
        try:
            with pytest.raises(weft.DeclarationError, match="stored as 'userid'"):
                weft.publish_sync("people", {renamed: "b"})
        finally:
            weft.streams.close(later)
    assert [event["userid"] for event in weft.consume_sync("people", "worker")] == ["a"]
