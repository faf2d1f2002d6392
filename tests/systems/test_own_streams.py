"""A system of a third party has streams of its own: consumers and frames read them as they do keys of Redis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pytest

import weft
from weft.project import Project, use
from weft.systems import Connection, System, base
from weft.systems.entries import Membership, Part, StreamEntry
from weft.systems.pages import FeedPage, FieldNames, PageFeed, Rejected, name_columns

BOOKS: dict[str, list[dict[str, str]]] = {}
BOOKS_ASIDE: list[Rejected] = []


@dataclass(frozen=True)
class ShelfConnection(Connection):
    """A shelf of books; a book is a stream, and its pages are entries."""

    kind: ClassVar[str] = "shelf"


class ShelfClient:
    """A client as the shelf's own driver makes them."""


class ShelfReader:
    """Reads books for consumers and members of groups. See `weft.systems.entries`."""

    held_for = None
    recovered = skipped = 0

    def __init__(self) -> None:
        self._read: dict[str, int] = {}

    def name(self, stream: Any) -> str:
        return str(stream)

    def parts(self, streams: Sequence[Any]) -> list[Part]:
        return [(stream,) for stream in streams]

    async def begin(self, stream: str, identifier: Any) -> None:
        self._read[stream] = int(identifier or 0)

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        (stream,) = part
        begin = self._read[stream]
        entries = [StreamEntry(begin + i, each) for i, each in enumerate(BOOKS[stream][begin : begin + count])]
        for entry in entries:
            entry.stream = stream
        self._read[stream] += len(entries)
        return entries

    async def ack(self, entries: Sequence[StreamEntry]) -> int:
        return len(entries)

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        return len(entries)

    async def close(self) -> None: ...


class ShelfEntries:
    noun: ClassVar[str] = "a book"
    clients: ClassVar[str] = "ShelfClient()"

    @staticmethod
    def takes(client: object) -> bool:
        return isinstance(client, ShelfClient)

    @staticmethod
    def open(client: Any, membership: Membership | None) -> ShelfReader:
        return ShelfReader()


class ShelfPage(FeedPage):
    def times(self) -> tuple[pa.Array, pa.Array]:
        return self.ids.cast(pa.int64()), pa.array([0] * len(self), pa.int64())


class ShelfFeed(PageFeed):
    page_size = 2

    def __init__(self, books: list[str], names: FieldNames, start: str) -> None:
        self._books, self._names, self._begin = books, names, 0 if start == "-" else int(start)

    @property
    def name(self) -> str:
        return self._books[0]

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        while self._books and self._begin >= len(BOOKS[self.name]):
            del self._books[0]
            self._begin = 0
        if not self._books:
            self.drained = self.finished = True
            return None
        ids = range(self._begin, min(self._begin + limit, len(BOOKS[self.name])))
        self._begin += len(ids)
        rows = [BOOKS[self.name][i] for i in ids]
        fields = list(dict.fromkeys(field for row in rows for field in row))
        columns = zip(name_columns([field.encode() for field in fields], self._names.reserved), fields, strict=True)
        values = {column: pa.array([row.get(field) for row in rows]).cast(pa.binary()) for column, field in columns}
        return ShelfPage(pa.array(map(str, ids), pa.string()), values)

    def reject(self, rejected: Sequence[Rejected]) -> None:
        BOOKS_ASIDE.extend(rejected)


class ShelfPages:
    def __init__(self, connection: ShelfConnection) -> None: ...

    def read_range(self, stream: str, names: FieldNames, start: str, end: str, stopped: Any = None) -> PageFeed:
        return ShelfFeed([stream], names, start)

    def read_group(self, stream: str, names: FieldNames, membership: Membership, **_: Any) -> PageFeed:
        return ShelfFeed([stream], names, membership.group_start)

    def read_matching(self, pattern: str, names: FieldNames, start: str, end: str) -> PageFeed:
        return ShelfFeed([each for each in sorted(BOOKS) if each.startswith(pattern.rstrip("*"))], names, start)

    def acknowledge(self, stream: str, group: str, ids: Sequence[str]) -> int:
        return len(ids)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShelfConnection]:
    system = System(
        kind="shelf",
        connection=f"{__name__}:ShelfConnection",
        entries=f"{__name__}:ShelfEntries",
        pages=f"{__name__}:ShelfPages",
        describes="Shelf: books",
    )
    monkeypatch.setattr(base, "_third_party", lambda: ({"shelf": system}, {}))
    BOOKS.update({"book:a": [{"n": "1"}, {"n": "2"}, {"n": "three"}], "book:b": [{"n": "4", "_id": "x"}]})
    yield ShelfConnection()
    BOOKS.clear()
    BOOKS_ASIDE.clear()


async def test_consumers(shelf: ShelfConnection) -> None:
    async with shelf.xconsumer(streams=["book:a", "book:b"], **{"book:a": {"identifier": "1"}}) as consumer:
        entries = [(stream, entry.identifier, entry.field_values["n"]) async for stream, entry in consumer]
    assert sorted(entries) == [("book:a", 1, "2"), ("book:a", 2, "three"), ("book:b", 0, "4")]
    async with weft.GroupConsumer(ShelfClient(), ["book:a"], "g", "c", buffer_size=9) as member:
        assert await member.ack(await member.get_batch()) == 3


async def test_clients_that_no_system_takes(shelf: ShelfConnection) -> None:
    with pytest.raises(weft.SettingsError, match=r"(?s)not a object.*weft\.Redis.*ShelfClient\(\)"):
        await weft.Consumer(object(), ["book:a"]).get_entry()


async def test_declared_streams_are_not_its_own(shelf: ShelfConnection) -> None:
    with use(Project()):
        weft.stream("declared", fields={"n": "int64"}, connection=shelf)(lambda: None)
        with pytest.raises(weft.SettingsError, match="'declared' is a declared stream and 'book:a' a book"):
            await shelf.xconsumer(streams=["declared", "book:a"]).get_entry()


def test_frames(shelf: ShelfConnection) -> None:
    schema = {"n": "int64"}
    frame = weft.read_stream(shelf, "book:a", schema=schema, on_error="quarantine", to="arrow")
    assert frame.to_pydict() == {"_id": ["0", "1"], "_ts": [0, 1], "n": [1, 2]}
    assert [each.id for each in BOOKS_ASIDE] == ["2"]
    lazy = weft.scan_stream(shelf, "book:a", schema={"n": "string"}, start_id="1")
    assert lazy.collect()["n"].to_list() == ["2", "three"]
    every = weft.read_streams(shelf, "book:*", count=9)
    assert every.select("_stream", "n", "_id#2").rows()[2:] == [("book:a", "three", None), ("book:b", "4", "x")]
    with weft.iter_stream(shelf, "book:a", group="g", consumer="c", start_id="2", auto_ack=True, count=1) as batches:
        assert [batch["n"].to_list() for batch in batches] == [["three"]]
    assert weft.ack_entries(shelf, "book:a", "g", every["_id"]) == 4


def test_what_it_cannot_do(shelf: ShelfConnection) -> None:
    with pytest.raises(weft.SettingsError, match="write_hashes needs Redis; a shelf connection is shelf"):
        weft.write_hashes(shelf, pa.table({"key": ["a"], "n": [1]}))
    with pytest.raises(weft.SettingsError, match="needs Redis or Shelf"):
        weft.read_streams("sqlite:///x.db")
