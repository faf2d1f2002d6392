"""How to reach a SQLite database."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weft.systems.base import measured
from weft.systems.file_connection import MEMORY, FileConnection
from weft.systems.sql.tokens import quote_name

# How long a check waits for another process that has locked the file.
_CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class SQLiteConnection(FileConnection):
    """A SQLite database in a file: `SQLiteConnection("events.db")`, or `":memory:"`.

    A relative path is relative to the working directory at use. `url="sqlite:///events.db"` says the same; an absolute
    path in a URL has a fourth slash.
    """

    kind: ClassVar[str] = "sqlite"
    product: ClassVar[str] = "SQLite"
    example: ClassVar[str] = "events.db"

    durable_acks: bool | None = field(default=None, kw_only=True)
    """Leases and acks wait for the disk, as publishes do: none is forgotten in a power cut."""

    @property
    def is_private_memory(self) -> bool:
        """Each connection to `:memory:` is a database of its own."""
        return self.path == MEMORY

    def stream_table(self, stream: Any) -> str:
        """SQLite has no schemas: the table is called "schema.name"."""
        return quote_name(f"{stream.schema}.{stream.name}")

    def reports_missing(self, error: str) -> Literal["table", "database"] | None:
        """In SQLite's words, and ours for a file."""
        if re.search("there is no file", error, re.IGNORECASE):
            return "database"
        return "table" if re.search("no such table", error, re.IGNORECASE) else None

    def check(self) -> dict[str, Any]:
        """Read the file's header. A file that is not there yet is no failure when it can be made at first use."""
        import sqlite3

        from weft.systems.sqlite import reading

        path = self.resolved().path or ""
        report: dict[str, Any] = {"server": f"SQLite {sqlite3.sqlite_version}", "database": path}
        if (missing := self.not_there_yet(report)) is not None:
            return missing
        try:
            with measured(report), closing(reading.connect(path, _CHECK_SECONDS)) as connection:
                connection.execute("PRAGMA schema_version").fetchone()
        except sqlite3.Error as error:
            raise self.failed(error, hint="Is it a SQLite file that you may read?") from None
        return report
