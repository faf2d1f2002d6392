"""A user with the rights that the guide names, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import weft
from consumers.rights import rights_of
from weft.systems.redis.pages import RedisPages

GUIDE = Path(__file__).parents[2] / "docs" / "dataframes.md"
KINDS = ("all", "groups", "quarantine", "spark", "many", "hashes")


@pytest.fixture
def user(url: str, client: Any) -> Iterator[Callable[..., str]]:
    """`user("all", "groups")` is the URL of a user with these rights."""
    rights = dict(zip(KINDS, rights_of(GUIDE), strict=True))

    def url_of(*kinds: str) -> str:
        words = [word for kind in kinds for word in rights[kind]]
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">hunter2", "~events*", *words)
        return url.replace("redis://", "redis://app:hunter2@")

    yield url_of
    client.execute_command("ACL", "DELUSER", "app")


def test_what_each_kind_of_frame_needs(user: Callable[..., str], add: Callable[..., list[str]]) -> None:
    ids = add("events", *({"n": i} for i in range(3)), {"n": "bad"})
    schema = {"n": pl.Int64}
    url = user("all")
    assert weft.read_stream(url, "events")["_id"].to_list() == ids
    assert len(weft.read_stream(url, "events", start_id="$", block_ms=1)) == 0
    assert len(weft.scan_stream(url, "events", schema=schema).collect()) == 4
    url = user("all", "quarantine")
    for _ in range(2):
        assert len(weft.read_stream(url, "events", schema=schema, on_error="quarantine")) == 3
    url = user("all", "many")
    assert set(weft.read_streams(url, "events*")["_stream"]) == {"events"}
    url = user("all", "spark")
    assert len(RedisPages(weft.connect(url)).partition("events", "-", "+", 2)) > 0  # type: ignore[arg-type]
    url = user("all", "hashes")
    frame = pl.DataFrame({"key": ["1", "2"], "a": ["x", None], "b": ["y", "z"]})
    assert weft.write_hashes(url, frame, key_prefix="events:") == 2


def test_what_a_group_needs(user: Callable[..., str], add: Callable[..., list[str]], client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(5)))
    url = user("all", "groups")
    one: dict[str, Any] = {"group": "g", "consumer": "one"}
    assert len(weft.read_stream(url, "events", count=3, **one)) == 3
    assert weft.ack_entries(url, "events", "g", ids[:1]) == 1
    with weft.iter_stream(url, "events", group="g", consumer="two", claim_idle=0, auto_ack=True, count=4) as batches:
        assert sum(map(len, batches)) == 4
    assert client.xpending("events", "g")["pending"] == 0
    with pytest.raises(weft.ConnectionFailedError, match=r"(?s)'events'.*ACL"):
        weft.read_stream(user("all"), "events", **one)
