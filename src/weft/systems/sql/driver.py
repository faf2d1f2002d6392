"""Pooled connections to a SQL database, transactions on them, and the driver's errors as errors of Weft."""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, ClassVar, Literal

from weft.errors import WeftError
from weft.systems.base import Connection
from weft.systems.sql.tokens import quote_name, replaced

Role = Literal["publish", "keep", "read"]
"""`publish` commits wait for the disk; `keep` is bookkeeping, whose loss in a crash only redelivers; `read` is
autocommit."""

# A pooled connection that was idle for this long is tried before use: servers and firewalls drop idle ones silently.
_IDLE_SECONDS = 60.0


class MissingTableError(WeftError):
    """A statement named a table that is not there: somebody dropped it, or the whole database."""


class Session:
    """A driver's connection inside one transaction (or autocommit), with `?` as the placeholder everywhere."""

    __slots__ = ("driver", "store", "written")

    def __init__(self, store: SqlDriver, driver: Any) -> None:
        # The caller knows which kind of store opened the session.
        self.store: Any = store
        self.driver = driver
        self.written: set[int] = set()
        """The streams that this transaction has appended to."""

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Execute one statement and return its cursor."""
        # Without parameters nothing is translated: a user's query may hold `?` as an operator, and `%`.
        if not parameters:
            return self.store.execute(self.driver, sql, None)
        return self.store.execute(self.driver, self.store.translate_sql(sql), parameters)

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Execute one statement for each row of parameters, in few round trips."""
        if len(rows) == 1:
            self.run(sql, rows[0])
        elif rows:
            self.driver.cursor().executemany(self.store.translate_sql(sql), rows)

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        return list(self.run(sql, parameters).fetchall())

    def row(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query; `None` where there is no row."""
        row: tuple[Any, ...] | None = self.run(sql, parameters).fetchone()
        return row

    def value(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Return the first column of the first row of a query; `None` where there is no row."""
        row = self.row(sql, parameters)
        return None if row is None else row[0]


class SqlDriver(ABC):
    """A subclass implements how to connect, quote, begin and commit, and what the driver's errors mean."""

    dialect: ClassVar[str]
    driver_error: ClassVar[type[BaseException]]
    """The base class of the driver's errors."""
    takes_question_marks: ClassVar[bool] = False
    """Whether the driver's placeholder is `?`, as everywhere in this code; else it is `%s`."""
    quotation_mark: ClassVar[str] = '"'
    """The mark around identifiers."""
    has_schemas: ClassVar[bool] = True
    """Whether tables are in schemas; else their names begin with that of the schema: `weft.commits`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection.resolved()
        self._lock = threading.RLock()
        self._idle: dict[Role, list[tuple[float, Any]]] = {"publish": [], "keep": [], "read": []}
        self._closed = False
        self.silent_seconds: int | None = None
        """After so long without a statement inside a transaction the server ends it, where it can: a process that was
        stopped there would keep its locks."""

    @abstractmethod
    def connect(self, role: Role) -> Any:
        """Open a connection for a role."""

    @abstractmethod
    def execute(self, driver: Any, sql: str, parameters: Sequence[Any] | None) -> Any:
        """Run a translated statement, or one as it is where `parameters` is `None`; return the cursor."""

    def begin(self, driver: Any, role: Role) -> None:  # noqa: B027 - optional, not forgotten
        """Begin the transaction of a role, where the driver does not with the first statement."""

    def commit(self, driver: Any, role: Role) -> None:
        """Commit the transaction of a role; readers are in autocommit mode."""
        if role != "read":
            driver.commit()

    def rollback(self, driver: Any) -> None:
        """Roll back the open transaction; raise where the connection is broken, which is then dropped."""
        driver.rollback()

    def is_driver_error(self, error: BaseException) -> bool:
        return isinstance(error, self.driver_error)

    @abstractmethod
    def explain(self, error: BaseException) -> WeftError:
        """Return a driver's error as one of Weft, without secrets."""

    def failed(self, error: WeftError) -> WeftError:
        """Return the error to raise where a session failed with this one."""
        return error

    def table(self, schema: str, name: str) -> str:
        return f"{self.quote(schema)}.{self.quote(name)}" if self.has_schemas else self.quote(f"{schema}.{name}")

    def quote(self, name: str) -> str:
        """Return a quoted identifier."""
        return quote_name(name, self.quotation_mark)

    def alive(self, driver: Any) -> bool:
        """Whether a connection that was idle for long, or has something to read, still answers."""
        return True

    def has_input(self, driver: Any) -> bool:
        """Whether an idle connection has something to read: most often the server closed it."""
        return False

    def translate_sql(self, sql: str) -> str:
        """Replace `?` by the driver's placeholder."""
        return sql if self.takes_question_marks else _percent(sql, self.dialect)

    # --------------------------------------------------------------------------------------------------------- sessions

    @contextmanager
    def session(self, role: Role) -> Iterator[Session]:
        """Open a transaction on a connection of that role; every driver error is raised as one of Weft."""
        driver: Any = None
        try:
            driver = self._borrow(role)
            self.begin(driver, role)
            yield Session(self, driver)
            self.commit(driver, role)
        except BaseException as error:
            if driver is not None:
                self._return_or_drop(role, driver)
            if self.is_driver_error(error):
                raise self.failed(self.explain(error)) from None
            if isinstance(error, WeftError) and (failed := self.failed(error)) is not error:
                raise failed from None
            raise
        else:
            self._rest(role, driver)

    def _rest(self, role: Role, driver: Any) -> None:
        self._idle[role].append((time.monotonic(), driver))
        if self._closed:  # while this one was in use
            self.drop_idle()

    def check_open(self) -> None:
        """Raise where this was closed: a caller that still holds it must not open connections that nobody closes."""
        if self._closed:
            raise self.connection.closed()

    def _borrow(self, role: Role) -> Any:
        while True:
            self.check_open()
            try:
                rested, driver = self._idle[role].pop()
            except IndexError:
                return self.connect(role)
            is_fresh = time.monotonic() - rested < _IDLE_SECONDS
            if (is_fresh and not self.has_input(driver)) or self.alive(driver):
                return driver
            self._drop(driver)

    def _return_or_drop(self, role: Role, driver: Any) -> None:
        try:
            self.rollback(driver)
        except Exception:
            # One broken connection means a restarted server: its siblings are broken too.
            self._drop(driver)
            self.drop_idle()
        else:
            self._rest(role, driver)

    def _drop(self, driver: Any) -> None:
        with suppress(Exception):
            driver.close()

    def drop_idle(self) -> None:
        """Close the idle connections."""
        for pool in self._idle.values():
            with suppress(IndexError):
                while True:
                    self._drop(pool.pop()[1])

    def close(self) -> None:
        """Close the idle connections now, and those in use when they are returned."""
        self._closed = True
        self.drop_idle()


@lru_cache(maxsize=4096)
def _percent(sql: str, dialect: str) -> str:
    # Drivers look for `%` in texts too.
    return replaced(sql.replace("%", "%%"), r"\?", "%s", dialect)


@contextmanager
def closed_on_error(connection: Any) -> Iterator[None]:
    """Close a connection that cannot be set up."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def readable(file: int) -> bool:
    """Whether a read would not wait: there is something to read, or the end."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(0))
