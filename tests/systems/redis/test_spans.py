"""A lease's spans hold exactly the entries that its token holds, however leases, acks and returns were mixed before."""

from __future__ import annotations

import random
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.systems.log import Release
from weft.systems.redis import ids
from workers import declare, log_of


# The last ones gave events that were acknowledged, when a span went on where another one had been looked up.
@pytest.mark.parametrize("seed", [*range(15), 24, 94, 166, 246, 321, 370])
def test_spans_are_what_is_held(streams: Project, client: Any, seed: int) -> None:
    choose = random.Random(seed)
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(12)])
    log = log_of("orders")
    most = choose.choice([None, None, 3])
    live: list[tuple[Any, str, list[int]]] = []
    for _ in range(30):
        member = choose.choice("abc")
        if choose.random() < 0.5 or not live:
            leased = log.lease("w", member, choose.randint(1, 8), 60, max_deliveries=most)
            spans = [*leased.spans, *leased.exhausted]
            key = log.keys.stream
            found = [
                ids.to_offset(entry[0], key)
                for span in spans
                for entry in client.xrange(key, ids.to_id(span.first), ids.to_id(span.last))
            ]
            books = client.hgetall(log.keys.books("w")[0])
            held = [ids.to_offset(entry, key) for entry, by in books.items() if by.split()[0].decode() == leased.token]
            assert sorted(found) == sorted(held)
            assert len(found) == sum(span.events for span in spans)
            if held:
                live.append((leased, member, sorted(held)))
        else:
            leased, member, offsets = choose.choice(live)
            some = [offset for offset in offsets if choose.random() < 0.5]
            if choose.random() < 0.5:
                log.settle("w", some, token=leased.token, member=member)
            else:
                log.settle("w", some, token=leased.token, member=member, release=Release())


def test_an_empty_span_is_released_by_its_ends(streams: Project, client: Any) -> None:
    """Its entries are gone, and the two ends of it may be far apart: an hour has trillions of offsets."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    log = log_of("orders")
    leased = log.lease("w", "a", 1, 60)
    (span,) = leased.spans
    client.xdel(log.keys.stream, ids.to_id(span.first))
    offsets = range(span.first, span.first + (3_600_000 << 20))
    assert log.settle("w", offsets, token=leased.token, member="a", release=Release()) == 1
