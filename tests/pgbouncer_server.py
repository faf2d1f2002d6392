"""PgBouncer in front of the run's PostgreSQL: each transaction may be in another session of the server. `make faults`
installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import servers


class PgBouncerServer(servers.Server):
    """It has fewer sessions than its clients have connections, and hands them out for single transactions."""

    name = "PgBouncer"
    package = "pgbouncer"
    user = "postgres"

    @classmethod
    def programs(cls) -> list[str]:
        return ["pgbouncer"]

    def initialise(self) -> None:
        users, settings = self.folder / "users", self.folder / "pgbouncer.ini"
        users.write_text('"weft" ""\n')
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={servers.shared('postgres').port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\ndefault_pool_size = 2\n"
        )

    def command(self) -> list[str]:
        return [self.program, str(self.folder / "pgbouncer.ini")]

    def connect(self, database: str | None = None) -> Any:
        import psycopg

        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=5)

    def url(self, database: str | None = None) -> str:
        return f"postgresql://weft@127.0.0.1:{self.port}/{database or 'postgres'}"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        with servers.shared("postgres").database() as url:
            yield self.url(url.rpartition("/")[2])


servers.KINDS |= {"pgbouncer": PgBouncerServer}
