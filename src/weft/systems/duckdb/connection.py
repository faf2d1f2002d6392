"""How to reach a DuckDB database."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import unquote

from weft.errors import DeclarationError
from weft.systems.base import Connection, measured, require

MEMORY = ":memory:"

# Nothing is ever downloaded: what a query needs beyond the package itself is its user's to install.
CONFIG = {"autoinstall_known_extensions": "false"}


@dataclass(frozen=True)
class DuckDBConnection(Connection):
    """A DuckDB database in a file: `DuckDBConnection("warehouse.duckdb")`.

    A relative path is relative to the working directory at use. `url="duckdb:///warehouse.duckdb"` says the same; an
    absolute path in a URL has a fourth slash. One process at a time may write it, or several may read it. `":memory:"`
    is there as long as the process, and only for it.
    """

    kind: ClassVar[str] = "duckdb"

    path: str | None = None
    url: str | None = field(default=None, kw_only=True, metadata={"url": True})

    def validate(self) -> None:
        """Exactly one of path and url, and a URL that names a file."""
        if (not self.path) == (not self.url):
            raise DeclarationError(
                f"Either path or url is needed for {self.label}.",
                hint='For example DuckDBConnection("warehouse.duckdb").',
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
        """Read the file. One that is not there yet is no failure when it can be made at first use."""
        from pathlib import Path

        duckdb = require("duckdb", self.kind)
        path = self.resolved().path or ""
        report: dict[str, Any] = {"server": f"DuckDB {duckdb.__version__}", "database": path}
        if path != MEMORY and not os.path.exists(path):
            folder = next(each for each in Path(path).parents if each.exists())
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise self.failed(OSError(f"the file cannot be made in {folder}"), hint="Choose another path.")
            return report | {"latency_ms": None, "note": "the file is made at first use"}
        from weft.systems.duckdb.driver import DuckDBDriver

        driver = DuckDBDriver(self)
        try:
            with measured(report), driver.session("read") as session:
                session.rows("SELECT count(*) FROM duckdb_tables()")
        finally:
            driver.close()
        return report


def _path_in(url: str, label: str) -> str:
    rest = url.partition("://")[2]
    if rest in ("", "/", "/" + MEMORY):
        return MEMORY
    if not rest.startswith("/"):
        raise DeclarationError(
            f"The URL of {label} needs three slashes before a relative path, four before an absolute one.",
            hint=f"Write duckdb:///{rest}.",
        )
    path, question, _ = rest[1:].partition("?")
    if question:
        raise DeclarationError(
            f"The URL of {label} has parameters, and DuckDB takes none.", hint="A ? in a file's name is %3F."
        )
    return unquote(path)
