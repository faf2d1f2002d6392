"""A soak of rows: every event into one table, the last of each key into another, with a lookup and dead letters."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from soak_publisher import Events, publish

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


def prepare(database: Any) -> None:
    database.execute("CREATE TABLE countries (id BIGINT, name TEXT)")
    database.execute(f"INSERT INTO countries SELECT i, 'c' || i FROM generate_series(0, {COUNTRIES - 1}) i")


def is_bad(n: int) -> bool:
    return n % 10_000 == 7_777


def events(steps: Iterable[int]) -> Events:
    amounts = {n: "a lot" if is_bad(n) else f"{n % 1000}.50" for n in steps}
    return {"numbered": [{"n": n, "country": n % COUNTRIES, "amount": each} for n, each in amounts.items()]}


def is_done(database: Any, steps: int) -> bool:
    # The last may be bad; the one before it is not then.
    return bool(database.execute(f"SELECT count(*) FROM everything WHERE n >= {steps - 2}").fetchone()[0])


def mistakes(database: Any, steps: int) -> list[str]:
    """Return what is not as it must be in the tables."""
    good = [n for n in range(steps) if not is_bad(n)]
    bad = [n for n in range(steps) if is_bad(n)]
    found = []
    copies = "SELECT count(*), count(DISTINCT n), sum(n), sum(twice), sum(amount) FROM everything"
    amounts = sum(n % 1000 for n in good) + len(good) / 2
    sums = list(map(float, database.execute(copies).fetchone()))
    if sums != [len(good), len(good), sum(good), 2 * sum(good), amounts]:
        found.append(f"the table `everything` does not have each of {len(good):,} rows once: {sums}")
    others = f"SELECT count(*) FROM everything WHERE country IS DISTINCT FROM 'c' || (n % {COUNTRIES})"
    if database.execute(others).fetchone()[0]:
        found.append("rows of `everything` have no country, or another's")
    latest = dict(database.execute("SELECT key, n FROM latest").fetchall())
    if latest != {n % KEYS: n for n in good}:
        found.append("the table `latest` does not have the last number of each key")
    letters = database.execute('SELECT payload, "offset", source, stage FROM events.failed').fetchall() if bad else []
    about = sorted((json.loads(payload)["n"], int(offset), *more) for payload, offset, *more in letters)
    if about != [(n, n + 1, "numbered", "transform") for n in bad]:
        found.append(f"the dead letters are not the {len(bad)} bad events: {about[:20]}")
    return found


if __name__ == "__main__":
    publish(events)
