"""How to reach a DuckDB database."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

from weft.systems.base import measured, require
from weft.systems.file_connection import FileConnection


@dataclass(frozen=True)
class DuckDBConnection(FileConnection):
    """A DuckDB database in a file: `DuckDBConnection("warehouse.duckdb")`.

    A relative path is relative to the working directory at use. `url="duckdb:///warehouse.duckdb"` says the same; an
    absolute path in a URL has a fourth slash. One process at a time may write it, or several may read it. `":memory:"`
    is there as long as the process, and only for it.
    """

    kind: ClassVar[str] = "duckdb"
    product: ClassVar[str] = "DuckDB"
    example: ClassVar[str] = "warehouse.duckdb"

    def check(self) -> dict[str, Any]:
        """Read the file. One that is not there yet is no failure when it can be made at first use."""
        duckdb = require("duckdb", self.kind)
        report: dict[str, Any] = {"server": f"DuckDB {duckdb.__version__}", "database": self.resolved().path}
        if (missing := self.not_there_yet(report)) is not None:
            return missing
        from weft.systems.duckdb.sessions import DuckDBSessions

        with closing(DuckDBSessions(self)) as driver, measured(report), driver.session("read") as session:
            session.rows("SELECT count(*) FROM duckdb_tables()")
        return report
