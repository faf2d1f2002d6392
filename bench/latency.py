"""From publish to a visible row, one event at a time: `python -m bench.latency [--events 200] [--profile low_latency]`.

A stream and a table of one PostgreSQL server, a pipeline that runs, a machine that does nothing else. Another
connection looks for the row again and again, so that the time it takes to look is in the number too. With `--messages`
a message of JSON in a topic of Kafka, to the row of a table, with `--changes` one of Debezium's form, to the row of a
mirror.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import weft
from bench.cdc import Published, topic_of_changes, topic_of_messages
from bench.engine_loads import Pair
from weft.engine.streaming.query import Query
from weft.pipelines.streaming.declare import make

BARS = {50: 150.0, 95: 300.0}
_OF_TOPICS = {50: 300.0}
_WARM_UP = 30
_PATIENCE_SECONDS = 60.0


def main() -> int:
    """Measure and print; the exit code says whether both bars were reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--profile", default="low_latency")
    of_topics = parser.add_mutually_exclusive_group()
    of_topics.add_argument("--messages", action="store_true")
    of_topics.add_argument("--changes", action="store_true")
    options = parser.parse_args()
    kind, bars, what = _events, BARS, "one event, publish to row"
    if options.messages:
        kind, bars, what = topic_of_messages, _OF_TOPICS, "one message, topic to row"
    if options.changes:
        kind, bars, what = topic_of_changes, _OF_TOPICS, "one change, topic to row of a mirror"
    found = latencies(options.events, options.profile, kind)
    marks = statistics.quantiles(found, n=100)
    print(f"| {what}, {len(found)} of them | at most | ms | |\n| --- | --- | --- | --- |")
    for percent, bar in bars.items():
        print(
            f"| p{percent} | {bar:.0f} | **{marks[percent - 1]:.0f}** | {'✓' if marks[percent - 1] <= bar else '✗'} |"
        )
    print(f"| least, most | | {min(found):.0f}, {max(found):.0f} | |")
    return 0 if all(marks[percent - 1] <= bar for percent, bar in bars.items()) else 1


def _events(pair: Pair) -> Published:
    """A stream as the source of a pipeline, and what publishes an event."""
    stream = weft.stream(name="clicks", connection=weft.connect(url=pair.here), fields={"id": "int64"})(lambda: None)

    def publish(number: int) -> None:
        weft.publish_sync(stream, [{"id": number}])

    return {"source": stream}, publish


def latencies(
    events: int, profile: str, kind: Callable[[Pair], tuple[dict[str, Any], Callable[[int], None]]]
) -> list[float]:
    """Milliseconds of each event, after some that do not count."""
    import psycopg

    pair = Pair(10)
    source, publish = kind(pair)
    publish(-1)
    query = Query(
        make(
            name=f"latency {uuid.uuid4().hex}",
            target=weft.connect(url=pair.there),
            target_table=("public", "clicks"),
            profile=profile,
            **source,
        )
    )
    query.start()
    made = []
    try:
        with psycopg.connect(pair.there, autocommit=True) as driver:
            for number in range(_WARM_UP + events):
                begun = time.perf_counter()
                publish(number)
                while not _is_there(driver, number):
                    if time.perf_counter() - begun > _PATIENCE_SECONDS:
                        query.wait(0.001)  # which raises what made it fail
                        raise TimeoutError(f"event {number} is not there")
                made.append((time.perf_counter() - begun) * 1000)
                time.sleep(random.uniform(0.0, 0.2))
                if sys.stderr.isatty():
                    print(f"\r… event {number + 1} of {_WARM_UP + events}", end="", file=sys.stderr)
    finally:
        query.stop()
    return made[_WARM_UP:]


def _is_there(driver: object, number: int) -> bool:
    import psycopg

    assert isinstance(driver, psycopg.Connection)
    if driver.execute("SELECT to_regclass('public.clicks')").fetchone() == (None,):
        return False
    return driver.execute("SELECT 1 FROM public.clicks WHERE id = %s", (number,)).fetchone() is not None


if __name__ == "__main__":
    sys.exit(main())
