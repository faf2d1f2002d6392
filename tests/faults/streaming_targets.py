"""Every target of streaming pipelines, empty, and what is in it afterwards.

def test_something(place_of):
    place = place_of("postgres")
    place.declare()                 its targets: a table that is added to, and one that is merged into
    place.check(100)                the numbers 0 to 99 are there, each once where the target can tell
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import S3, System
from engine.streaming.conftest import rows
from faults import streaming_process
from weft.streams.runtime import open_stream

KINDS = (
    *("sqlite", "postgres", "mysql", "duckdb", "delta", "delta_s3", "files", "files_s3"),
    *("kafka", "redis", "stream"),
)
_TABLES: list[dict[str, Any]] = [
    {"table": "copies"},
    {"table": "merged", "mode": "merge", "primary_key": ["n"]},
]
_STREAM: list[dict[str, Any]] = [{"stream": "copies"}]


@dataclass
class Place:
    """A database, a folder, a broker, and the targets there."""

    kind: str
    connection: dict[str, Any]
    targets: list[dict[str, Any]]
    messages: Callable[[str], list[Any]] | None = None

    @property
    def is_stream(self) -> bool:
        return "stream" in self.targets[0]

    @property
    def is_lake(self) -> bool:
        return self.kind.startswith(("delta", "files"))

    @property
    def steps(self) -> int:
        """How many steps there are, at least, while it stores a batch: of a load, or the publishes that a batch is."""
        return {"kafka": 1, "redis": 2, "stream": 2}.get(self.kind, 1 if self.is_lake else 4)

    def described(self) -> list[dict[str, Any]]:
        """As JSON, for another process."""
        return [
            {"connection": {"name": f"{self.kind}_{number}", **self.connection}, "target": each}
            for number, each in enumerate(self.targets)
        ]

    def declare(self) -> list[weft.Target]:
        return streaming_process.declared(self.described())

    def check(self, published: int, in_lakes: dict[str, list[int]] | None = None) -> None:
        """Tables and files have each number once, topics and streams have it. `in_lakes` is what a process with Spark
        has read."""
        in_lakes = streaming_process.in_lakes(self.described()) if in_lakes is None else in_lakes
        for number, found in enumerate(self._found(in_lakes)):
            counted = Counter(found)
            missing = sorted(set(range(published)) - counted.keys())
            twice = sorted(n for n, times in counted.items() if times > 1 and not self.is_stream)
            assert (missing, twice, len(counted)) == ([], [], published), (self.kind, self.targets[number])

    def _found(self, in_lakes: dict[str, list[int]]) -> Iterator[list[int]]:
        connection = weft.connect(name=f"look_{self.kind}", **self.connection)
        for number, (target, declared) in enumerate(zip(self.targets, self.declare(), strict=True)):
            (name,) = (target[key] for key in ("table", "prefix", "stream") if key in target)
            if self.messages is not None:
                yield [json.loads(each.value())["n"] for each in self.messages(name)]
            elif self.is_stream:
                log = open_stream(declared.stream, connection).log
                yield [n for each in log.read_arrow(log.floor(), log.head(), ["n"]) for n in each["n"].to_pylist()]
            elif self.is_lake:
                yield in_lakes[f"{self.kind}_{number}"]
            else:
                yield [n for (n,) in rows(name, "n", connection)]


@pytest.fixture
def place_of(
    request: pytest.FixtureRequest, project: Path, open_system: Callable[[str], AbstractContextManager[System]]
) -> Iterator[Callable[[str], Place]]:
    """`place_of("postgres")` is a new place."""
    with ExitStack() as opened:

        def made(kind: str) -> Place:
            if kind in ("postgres", "mysql", "redis"):
                url = opened.enter_context(open_system(kind)).url
                return Place(kind, {"url": url}, list(_STREAM if kind == "redis" else _TABLES))
            if kind in ("sqlite", "duckdb", "stream"):
                system = "duckdb" if kind == "duckdb" else "sqlite"
                url = f"{system}:///{project}/{kind}.db"
                return Place(kind, {"url": url}, list(_STREAM if kind == "stream" else _TABLES))
            if kind == "kafka":
                kafka = request.getfixturevalue("kafka")
                fields = {"kind": "kafka", "bootstrap_servers": kafka.bootstrap}
                return Place(kind, fields, [{"stream": kafka.create_topic()}], kafka.messages)
            store, _, where = kind.partition("_")
            s3: S3 | None = request.getfixturevalue("s3") if where else None
            system = {"delta": "delta", "files": "object_store"}[store]
            fields = {"kind": f"{system}_{where or 'local'}", **(s3.fields() if s3 else {"path": str(project / store)})}
            if store == "delta":
                return Place(kind, fields, list(_TABLES))
            return Place(kind, {**fields, "format": "parquet"}, [{"prefix": "copies"}])

        yield made
