"""The offsets of a stream, for Spark's query, and positions that are offsets. Spark's Python processes import this
module, so it imports little."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from weft.errors import DeclarationError, StorageError
from weft.spark_support.sessions import read_source
from weft.systems.awaited_log import open_to_read
from weft.systems.base import Connection, system_for
from weft.systems.log import Log, Store
from weft.types import FieldType

# In turns: a session keeps every name, and each query of a pipeline has the session of the one before.
_numbers = itertools.cycle(range(100))


@dataclass
class Offsets:
    """The offsets of a stream, opened in the process in which Spark asks for them."""

    connection: Connection
    schema: str
    name: str
    start: str = "earliest"
    max_rows: int = 1_000_000
    wait_seconds: float = 0.1
    """How long to wait for new events: meanwhile the query cannot end, and its other sources wait too."""

    end: int | None = None
    """Where to stop, if anywhere."""
    fields: ClassVar[dict[str, FieldType]] = {}
    """The columns of a stream that is not declared."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: the reader is copied to tasks, which read nothing but their range."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def store(self) -> Store:
        opened: Store = system_for(self.connection.kind).load_log()(self.connection)
        return opened

    @cached_property
    def log(self) -> Log:
        self._seen: object = None
        return open_to_read(self.store, self.schema, self.name, self.fields)

    def first(self) -> int:
        """Return the offset after which a new checkpoint begins."""
        if self.start == "earliest":
            return self.log.floor()
        if self.start == "latest":
            return self.log.head()
        if self.start.isdecimal():
            after = int(self.start) - 1
            head = self.log.head(after)
            if after > head:
                raise DeclarationError(
                    f"The stream {self.name!r} cannot start at {self.start}: its last event is {head}.",
                    hint="latest begins with what comes next.",
                )
            return after
        raise DeclarationError(
            f"The stream {self.name!r} cannot start at {self.start!r}.",
            hint="earliest, latest, or the offset of an event.",
        )

    def following(self, after: int) -> int:
        """Return the last offset of the next batch; `after` itself where nothing new came within `wait_seconds`."""
        log = self.log
        head = log.head(after) if self.end is None else self.end
        if head <= after and self.end is None:
            self._seen = self.store.changed(self._seen, self.wait_seconds)
            head = log.head(after)
        if head < after and log.head(after) < after:
            raise StorageError(
                f"The stream {self.name!r} ends at offset {head}, and was read up to {after}: it is another "
                "one, or an older copy. To start again: weft checkpoints reset.",
            )
        return after if head <= after else log.bound(after, head, self.max_rows)

    def stop_at_head(self) -> None:
        """Have `following` go no further than what the stream has now."""
        self.end = self.log.head()


def ranges(spark: Any, offsets: Offsets) -> Any:
    """Return a streaming DataFrame of ranges of offsets."""
    from pyspark.sql.datasource import SimpleDataSourceStreamReader
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    class OffsetRanges(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
        def __init__(self) -> None:
            self.offsets = offsets

        def initialOffset(self) -> dict[str, int]:
            return {"offset": self.offsets.first()}

        def prepareForTriggerAvailableNow(self) -> None:
            self.offsets.stop_at_head()

        def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[int, int]], dict[str, int]]:
            after = start["offset"]
            upto = self.offsets.following(after)
            return iter([] if upto == after else [(after, upto)]), {"offset": upto}

        def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[int, int]]:
            return iter([(start["offset"], end["offset"])])

        def commit(self, end: dict[str, int]) -> None:
            pass

    return read_source(
        spark, f"weft_offsets_{next(_numbers)}", "first_after BIGINT, upto BIGINT", OffsetRanges, follow=True
    )
