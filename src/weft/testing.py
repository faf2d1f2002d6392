"""What users test their own streams with: a project in memory and a clock to move. No server, no files, no waiting.

def test_refund():
    with weft.testing.project() as project:
        weft.publish_sync("orders", {"order_id": 1, "total": 9.5})
        project.clock.move(days=1)
        assert [event["order_id"] for event in project.events("orders")] == [1]
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from weft.errors import DeclarationError, unknown
from weft.project import DEFAULT, Definition, Project, build_connection, current, use
from weft.streams.declare import Stream
from weft.streams.events import to_dicts
from weft.streams.retention import aware
from weft.streams.runtime import close, open_stream
from weft.systems.base import AnyConnection, Connection
from weft.systems.file_connection import MEMORY
from weft.systems.log import PUBLISHED_AT
from weft.types import to_json

if TYPE_CHECKING:
    from weft.pipelines.declare import Pipeline
    from weft.pipelines.models import Model

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Where every clock starts: the same moment in every run, so that a test can name the times that it expects."""


class Clock:
    """A clock that stands still until it is moved.

    Times of publication, leases, delays, ages for retention and the horizon of idempotency keys follow it. What a call
    itself waits for (`wait=`, `timeout=`) does not: that is real time.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = aware(start)

    def __call__(self) -> float:
        return self._now.timestamp()

    def now(self) -> datetime:
        """Return the time, in UTC."""
        return self._now

    def move(self, by: float | timedelta = 0, /, **units: float) -> datetime:
        """Go on by seconds, a `timedelta` or its units: `move(90)`, `move(days=2, hours=1)`. Gives the new time."""
        self._now += (by if isinstance(by, timedelta) else timedelta(seconds=by)) + timedelta(**units)
        return self._now

    def set(self, moment: datetime) -> None:
        """Go to a moment; one without a zone is UTC."""
        self._now = aware(moment)


class MemoryProject(Project):
    """A project whose every connection is a database in memory, unless the test itself registers another."""

    def __init__(self, outer: Project) -> None:
        super().__init__(outer.root)
        self.clock: Clock = Clock()
        self._folder: TemporaryDirectory[str] | None = None
        self.one_file: str | None = None
        """The SQLite file that all connections lead to, where one query reads them all."""
        self._process = os.getpid()
        self.streams = dict(outer.streams)
        self.pipelines = dict(outer.pipelines)
        known = (*_declared_connections(outer), *outer.connections.values())
        self._replaced = {each for each in known if isinstance(each, Connection)}

    def connection(self, name: AnyConnection | None = None) -> Connection:
        """As for every project, except that what was declared outside leads to memory as well."""
        if isinstance(name, Connection) and name in self._replaced and name not in self.connections.values():
            # An unnamed one is known by its hash, which is the same for equal connections.
            name = name.name or f"unnamed-{abs(hash(name))}"
        return super().connection(name)

    def for_tables(self, connection: Connection) -> Connection:
        """Return a file for what is in memory that one connection alone sees: a load opens several."""
        if not connection.is_private_memory:
            return connection
        if self._folder is None:
            memory = Path("/dev/shm")
            place = memory if os.access(memory, os.W_OK) else None
            self._folder = TemporaryDirectory(prefix="weft-testing-", dir=place)
        file = {"kind": connection.kind, "path": os.path.join(self._folder.name, f"{connection.name}.db")}
        return build_connection(connection.name, file, "weft.testing")

    def forget(self) -> None:
        """Remove those files; not in a child, which would take them from its parent."""
        if self._folder is not None and os.getpid() == self._process:
            self._folder.cleanup()

    def events(self, stream: str | Stream) -> list[dict[str, Any]]:
        """Return everything that a stream holds, in order, as `consume` would give it."""
        log = open_stream(stream, to_read=True).log
        return to_dicts(log.read(0, log.head(), log.count()))

    def _from_outside(self, name: str) -> Iterator[Definition]:
        return iter(())

    def _definitions(self, name: str) -> Iterator[Definition]:
        registered = self.connections.get(name)
        if registered is not None:
            yield "code", lambda: registered
        fields = {"kind": "sqlite", "path": self.one_file or MEMORY}
        yield "weft.testing", lambda: build_connection(name if self.one_file is None else None, fields, "weft.testing")

    def connection_names(self) -> list[str]:
        """Return the names that were declared."""
        declared = (name for name in _declared_connections(self) if isinstance(name, str))
        return sorted({DEFAULT, *self.connections, *declared})


def _declared_connections(project: Project) -> Iterator[str | Connection | None]:
    for stream in project.streams.values():
        yield stream.connection
    for pipeline in project.pipelines.values():
        yield pipeline.source_connection
        yield from (target.connection for target in pipeline.targets)


@contextmanager
def project() -> Iterator[MemoryProject]:
    """Yield a fresh project in memory, in use until the block ends; also the body of a fixture.

        @pytest.fixture(autouse=True)
        def project():
            with weft.testing.project() as project:
                yield project

    Streams that were declared before are there, all of them empty. Every connection's name leads to a database in
    memory, one a name, whatever the environment, `weft.toml` or the user's files say, unless the block registers it.
    """
    outer = current()
    inner = MemoryProject(outer)
    with use(inner):
        try:
            yield inner
        finally:
            close(inner)
            inner.forget()
            # A module that was first imported inside is not imported again: what it declared is kept for the next test.
            for name, stream in inner.streams.items():
                if "<locals>" not in getattr(stream, "origin", "<locals>"):
                    outer.streams.setdefault(name, stream)
            for name, pipeline in inner.pipelines.items():
                if "<locals>" not in pipeline.origin:
                    outer.pipelines.setdefault(name, pipeline)


def run_pipeline(pipeline: Pipeline | str, rows: object = None, *, target: str | None = None) -> list[dict[str, Any]]:
    """Run a pipeline on given rows in the place of what its function gives, and hand back the target's rows.

        def test_emails_are_lower_case():
            with weft.testing.project():
                assert weft.testing.run_pipeline(sync_customers, [{"id": 1, "email": " A@X.ORG "}]) == [
                    {"id": 1, "email": "a@x.org"}
                ]

    `rows` is anything that `weft.load` takes; without it the function is called, and reads its connections in memory.
    Of several targets, `target` names the one whose rows are wanted, by default the first.
    """
    from weft.engine.run import PipelineRun
    from weft.pipelines.declare import find
    from weft.systems.load import SCD2_COLUMNS

    declared = find(pipeline) if isinstance(pipeline, str) else pipeline
    project = current()
    wanted = [each for each in declared.targets if target in (None, each.name, each.table.name)]
    if not wanted:
        raise unknown("target", str(target), [each.name for each in declared.targets])
    PipelineRun(declared, f"testing {uuid4()}", datetime.fromtimestamp(project.clock(), UTC), data=rows).execute()
    return table_rows(wanted[0].table.full_name, connection=wanted[0].connection, order_by=SCD2_COLUMNS[:1])


Rows = Sequence[Mapping[str, Any]]


def build(
    model: Model | str, inputs: Mapping[str, Rows] | None = None, /, *, this: Rows | None = None, **rows: Rows
) -> list[dict[str, Any]]:
    """Build a model on sample rows of its inputs, without a server, and return the rows of its table.

        def test_revenue():
            rows = weft.testing.build(daily_revenue, orders=[{"day": date(2026, 1, 1), "total": 9.5}])
            weft.testing.assert_rows(rows, [{"revenue": 9.5}])

    Each input is called by its parameter or by its name; `inputs` takes names that are no words of Python. A stream
    without rows is empty; rows of one may say when they were published (`_weft_published_at`). `this` is the last
    result. Every connection leads to one SQLite file that is removed at the end; what SQLite cannot do runs on Spark.
    """
    from weft.engine.models.build import ModelRun
    from weft.pipelines.models import Model, find
    from weft.systems.load import SCD2_COLUMNS

    declared = find(model) if isinstance(model, str) else model
    if not isinstance(declared, Model):
        raise DeclarationError(f"{declared.name!r} is a pipeline, not a model.", hint="Use weft.testing.run_pipeline.")
    contents = {**(inputs or {}), **rows}
    with project() as inner, TemporaryDirectory(prefix="weft-testing-") as folder:
        inner.one_file = os.path.join(folder, "test.db")
        _fill(declared, contents, inner.clock)
        if this is not None:
            _fill_last(declared, this)
        ModelRun(declared, f"testing {uuid4()}", inner.clock.now()).execute()
        target = declared.target
        rows_built = table_rows(target.name, connection=target.connection, order_by=SCD2_COLUMNS[:1])
        close(inner)
        return rows_built


def _fill(model: Model, contents: Mapping[str, Rows], clock: Clock) -> None:
    """Publish or load the rows of each input."""
    from weft.engine import relations
    from weft.engine.load import load

    names = {each.parameter or each.name: each for each in model.inputs} | {each.name: each for each in model.inputs}
    for name in contents:
        if name not in names:
            raise unknown(f"input of {model.name}", name, [each.parameter or each.name for each in model.inputs])
    for each in model.inputs:
        rows = contents.get(each.parameter or each.name) or contents.get(each.name)
        relation = relations.find(each.name, model.target.connection)
        if relation.stream is not None:
            _publish(relation.stream, rows or (), clock)
        elif rows:
            assert relation.table is not None  # of a SQLite file, as all are here
            load([dict(row) for row in rows], target=relation.table, connection=relation.connection)
        elif each.parameter is not None:
            raise DeclarationError(
                f"The input {each.name} of {model.name} needs at least one row, which shows its columns.",
                hint=f"weft.testing.build({model.name}, {each.parameter}=[{{…}}])",
            )


def _publish(stream: Stream, rows: Rows, clock: Clock) -> None:
    """Publish rows, each at its `_weft_published_at` where it has one."""
    from weft.streams import publish_sync

    start = clock.now()
    for moment, events in groupby(rows, lambda row: row.get(PUBLISHED_AT, start)):
        clock.set(datetime.fromisoformat(moment) if isinstance(moment, str) else moment)
        publish_sync(stream, [{name: row[name] for name in row if name != PUBLISHED_AT} for row in events])
    clock.set(start)


def _fill_last(model: Model, rows: Rows) -> None:
    """Load rows as the last result of a model that has read nothing yet."""
    from weft.engine.load import load
    from weft.engine.models import state
    from weft.engine.models.inputs import Observer

    target = model.target
    load([dict(row) for row in rows], target=(target.table.schema, target.table.name), connection=target.connection)
    with Observer() as observer:
        last = state.State("testing", model.fingerprint, model.materialise)
        state.write(observer.tables(target.connection), model, state.StoredModel().following(last))


def assert_rows(actual: Rows, expected: Rows) -> None:
    """Raise `AssertionError` with the rows that differ, in whatever order they come. Only the columns that `expected`
    names are compared; one that a row of it leaves out is null there."""
    if text := differing_rows(actual, expected):
        raise AssertionError(f"The rows differ (- expected, + found):\n{text}")


def differing_rows(actual: Rows, expected: Rows) -> str:
    """Return the rows that are only in one of two lists, as lines; empty where there are none."""
    columns = list(dict.fromkeys(name for row in expected for name in row))
    left = [{name: row.get(name) for name in columns} if columns else dict(row) for row in actual]
    lines = []
    for row in expected:
        wanted = {name: row.get(name) for name in columns}
        same = next((each for each in left if all(_is_same(each[name], wanted[name]) for name in columns)), None)
        if same is None:
            lines.append(f"- {_shown(wanted)}")
        else:
            left.remove(same)
    missing = [name for name in columns if actual and not any(name in row for row in actual)]
    lines += [f"+ {_shown(row)}" for row in left]
    lines += [f"There is no column {name!r}: there are {', '.join(actual[0])}." for name in missing if lines]
    return "\n".join(lines)


def _is_same(actual: Any, wanted: Any) -> bool:
    """Whether two values are equal: floats but for their last digits, and what JSON has no type for by its text."""
    if isinstance(actual, float) and isinstance(wanted, int | float):
        return math.isclose(actual, wanted, rel_tol=1e-9) or (actual != actual and wanted != wanted)
    if isinstance(wanted, str) and not isinstance(actual, str) and actual is not None:
        if isinstance(actual, datetime):
            with suppress(ValueError):
                return aware(datetime.fromisoformat(wanted)) == aware(actual)
        return str(_plain(actual)) == wanted
    if isinstance(actual, datetime) and isinstance(wanted, datetime):
        return aware(actual) == aware(wanted)
    if isinstance(actual, Decimal) and isinstance(wanted, float):
        return math.isclose(float(actual), wanted, rel_tol=1e-9)
    return bool(actual == wanted)


def _shown(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_plain(value)!r}" for name, value in row.items())


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | list | dict) else to_json(value)


def table_rows(
    table: str, *, connection: str | Connection | None = None, order_by: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Everything that a table holds (`"schema.table"`), ordered by the values of its first columns, nulls last."""
    from weft.engine.readers import opened_tables
    from weft.systems.sql.tables import Slice

    schema, dot, name = table.rpartition(".")
    with opened_tables(current().connection(connection)) as tables:
        sql = f"SELECT * FROM {tables.table(schema if dot else None, name)}"
        columns = tables.describe(sql)
        rows = [row for batch in tables.read(Slice(sql), columns) for row in batch.to_pylist()]
    first = [*columns.names[:1], *(each for each in order_by if each in columns.names), *columns.names[1:]]
    return sorted(rows, key=lambda row: [_place(row[each]) for each in first])


def _place(value: Any) -> tuple[int, Any]:
    """Return where a value comes among those of its column. Those that cannot be compared are ordered as texts."""
    if value is None:
        return 2, ""
    if value != value:  # a float that is not a number, which is neither less nor more than any other
        return 1, ""
    return 0, str(value) if isinstance(value, dict | list) else value
