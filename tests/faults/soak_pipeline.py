"""What the soak runs: a stream, a pipeline over it, and as a program a publisher at a steady rate.

weft consume soak --module soak_pipeline
python soak_pipeline.py 200                 events a second, until its stdin ends; then prints how many there were
"""

from __future__ import annotations

import sys
import threading
import time

import weft

KEYS, COUNTRIES = 5_000, 50


@weft.stream(fields={"n": "int64", "country": "int64", "amount": "string"})
def numbered() -> None:
    """Events, numbered from 0 on; the amount of one in ten thousand is no number."""


@weft.streaming_pipeline(
    # Numbers come in order, so that a batch has each key once.
    source=weft.Source(query=numbered, max_rows=KEYS),
    targets=[
        weft.Target(connection="default", table="everything"),
        weft.Target(connection="default", table="latest", mode="merge", primary_key=["key"]),
    ],
    transform_sql=f"""
        SELECT s.n, s.n % {KEYS} AS key, s.n * 2 AS twice, c.name AS country,
            CAST(s.amount AS DECIMAL(10, 2)) AS amount
        FROM source s LEFT JOIN countries c ON s.country = c.id
    """,
    lookups={"countries": weft.Lookup(connection="default", table="countries", refresh_interval_ms=30_000)},
    transform_on_error="dlq",
    dead_letter_stream="failed",
    every="2s",
)
def soak() -> None:
    """Every event into one table, the last of each key into another."""


def is_bad(n: int) -> bool:
    return n % 10_000 == 7_777


def publish(rate: float) -> None:
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    published, began = 0, time.monotonic()
    while not ended.wait(0.1):
        due = range(published, int((time.monotonic() - began) * rate))
        if due:
            amounts = (("a lot" if is_bad(n) else f"{n % 1000}.50") for n in due)
            events = zip(due, amounts, strict=True)
            weft.publish_sync(numbered, [{"n": n, "country": n % COUNTRIES, "amount": each} for n, each in events])
            published = due.stop
    print(published, flush=True)


if __name__ == "__main__":
    publish(float(sys.argv[1]))
