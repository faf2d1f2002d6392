"""How to reach a SQLite database."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from weft.errors import DeclarationError
from weft.systems.base import Connection, measured

MEMORY = ":memory:"


@dataclass(frozen=True)
class SQLiteConnection(Connection):
    """A SQLite database in a file: `SQLiteConnection("events.db")`, or `":memory:"`.

    A relative path is relative to the working directory at use. `url="sqlite:///events.db"` says the same; an absolute
    path in a URL has a fourth slash.
    """

    kind: ClassVar[str] = "sqlite"

    path: str | None = None
    url: str | None = field(default=None, kw_only=True, metadata={"url": True})

    def validate(self) -> None:
        """Exactly one of path and url, and a URL that names a file."""
        if (not self.path) == (not self.url):
            raise DeclarationError(
                f"Either path or url is needed for {self.label}.",
                hint='For example SQLiteConnection("events.db").',
            )
        super().validate()

    @property
    def target(self) -> str:
        """The path or URL as it was written."""
        return self.path or super().target

    def resolved(self) -> Self:
        """A copy with the path made absolute and no URL, its `${VAR}` references substituted."""
        resolved = super().resolved()
        path = resolved.path or _path_in(resolved.url or "", self.label)
        if path != MEMORY:
            path = os.path.abspath(os.path.expanduser(path))
        object.__setattr__(resolved, "path", path)
        object.__setattr__(resolved, "url", None)
        return resolved

    def check(self) -> dict[str, Any]:
        """Read the file's header. A file that is not there yet is no failure when it can be made at first use."""
        import sqlite3
        from pathlib import Path

        path = self.resolved().path or ""
        report: dict[str, Any] = {"server": f"SQLite {sqlite3.sqlite_version}", "database": path}
        if path != MEMORY and not os.path.exists(path):
            folder = next(each for each in Path(path).parents if each.exists())
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise self.failed(OSError(f"the file cannot be made in {folder}"), hint="Choose another path.")
            return report | {"latency_ms": None, "note": "the file is made at first use"}
        try:
            with measured(report):
                # mode=rw: a check must not make the file.
                location = path if path == MEMORY else f"{Path(path).as_uri()}?mode=rw"
                connection = sqlite3.connect(location, uri=path != MEMORY)
                try:
                    connection.execute("PRAGMA schema_version").fetchone()
                finally:
                    connection.close()
        except sqlite3.Error as error:
            raise self.failed(error, hint="Is it a SQLite file that you may read and write?") from None
        return report


def _path_in(url: str, label: str) -> str:
    rest = url.partition("://")[2]
    if rest in ("", "/", "/" + MEMORY):
        return MEMORY
    if not rest.startswith("/"):
        raise DeclarationError(
            f"The URL of {label} needs three slashes before a relative path, four before an absolute one.",
            hint=f"Write sqlite:///{rest}.",
        )
    path, question, _ = rest[1:].partition("?")
    if question:
        raise DeclarationError(
            f"The URL of {label} has parameters, and SQLite takes none.", hint="A ? in a file's name is %3F."
        )
    return unquote(path)
