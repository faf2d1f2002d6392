"""Change data capture: how a message names a change of a row, and what becomes of it in the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from weft.errors import DeclarationError, did_you_mean
from weft.options import Option
from weft.pipelines.options import connection_option
from weft.pipelines.streaming.windows import Structure, aggregate_in, milliseconds
from weft.systems.base import AnyConnection, Settings
from weft.systems.load import Columns
from weft.systems.log import RESERVED_PREFIX

Envelope = Literal["debezium", "maxwell", "custom"]
DeleteMode = Literal["hard", "soft"]
TimeUnit = Literal["ms", "us", "ns"]
SchemaEvolution = Literal["skip", "fail", "evolve"]
Unrouted = Literal["skip", "fail"]
Snapshot = Literal["debezium", "copy"]
Operation = Literal["create", "update", "delete", "read", "truncate", "skip"]
OPERATIONS: tuple[str, ...] = get_args(Operation)


@dataclass(frozen=True)
class _Paths:
    """Where an envelope has its parts."""

    op: str
    before: str
    after: str
    ts: tuple[str, ...]
    """The first that a message has."""
    positions: tuple[tuple[str, ...], ...]
    """The paths that together say where a change is in the log of its database: the first of these that messages have.
    Texts of other paths would not sort with them."""
    ops: Mapping[str, Operation]
    tables: tuple[tuple[str, ...], ...] = ()
    """The paths that together name the table of a change: the first of these that a message has."""


_ENVELOPES = {
    "debezium": _Paths(
        op="op",
        before="before",
        after="after",
        ts=("source.ts_ms", "ts_ms"),
        # MySQL; PostgreSQL; SQL Server; Oracle; MongoDB.
        positions=(
            ("source.file", "source.pos", "source.row"),
            ("source.lsn",),
            ("source.commit_lsn", "source.change_lsn", "source.event_serial_no"),
            ("source.scn", "source.rs_id", "source.ssn"),
            ("source.ord",),
        ),
        ops={"c": "create", "u": "update", "d": "delete", "r": "read", "t": "truncate", "m": "skip"},
        tables=(("source.schema", "source.table"), ("source.db", "source.table")),
    ),
    "maxwell": _Paths(
        op="type",
        before="old",
        after="data",
        ts=("ts",),
        # The last row of a transaction has `commit` in the place of `xoffset`.
        positions=(("position", "xid", "commit", "xoffset"),),
        ops={
            "insert": "create",
            "update": "update",
            "delete": "delete",
            "bootstrap-insert": "read",
            **dict.fromkeys(("bootstrap-start", "bootstrap-complete"), "skip"),
            **dict.fromkeys((f"table-{each}" for each in ("create", "alter", "drop")), "skip"),
            **dict.fromkeys((f"database-{each}" for each in ("create", "alter", "drop")), "skip"),
        },
        tables=(("database", "table"),),
    ),
}
_PATHS = ("op_field", "before_field", "after_field", "ts_field")


def _path(value: Any, option: str, where: str) -> str:
    if not isinstance(value, str) or not value or not all(value.split(".")):
        raise DeclarationError(
            f"{where}: {option} must be a path in the message, not {value!r}.", hint=f'For example {option}="after.id".'
        )
    return value


def _paths(value: Any, option: str, where: str) -> tuple[str, ...]:
    paths = [each.strip() for each in value.split(",")] if isinstance(value, str) else value
    if not isinstance(paths, list | tuple) or not paths:
        raise DeclarationError(f"{where}: {option} must be a path or a list of paths, not {value!r}.")
    checked = tuple(_path(each, option, where) for each in paths)
    columns = [each.rpartition(".")[2] for each in checked]
    if len(set(columns)) < len(columns):
        raise DeclarationError(f"{where}: {option} names a column twice.")
    return checked


def _key_paths(value: Any, option: str, where: str) -> tuple[str, ...] | Settings:
    if not isinstance(value, Mapping):
        return _paths(value, option, where)
    return Settings({table: _paths(each, f"{option} of {table!r}", where) for table, each in value.items()})


def _route(value: Any, option: str, where: str) -> Settings:
    texts = [*value, *value.values()] if isinstance(value, Mapping) else []
    if not texts or not all(isinstance(each, str) and all(each.split(".")) for each in texts):
        raise DeclarationError(
            f"{where}: {option} must be a dict of tables in the messages to tables of the target.",
            hint='route={"public.orders": "orders", "public.items": "items"}',
        )
    if repeated := [table for table in value.values() if list(value.values()).count(table) > 1]:
        raise DeclarationError(
            f"{where}: {option} leads two tables to {repeated[0]!r}.",
            hint="A mirror is of one table: their keys may be equal, and a truncate of one would empty both.",
        )
    return Settings(value)


def _op_map(value: Any, option: str, where: str) -> Settings:
    if not isinstance(value, Mapping) or not value or not all(isinstance(each, str) and each for each in value):
        raise DeclarationError(
            f"{where}: {option} must be a dict of the words in messages to operations.",
            hint='op_map={"I": "create", "U": "update", "D": "delete"}',
        )
    for word, operation in value.items():
        if not isinstance(operation, str) or operation.lower() not in OPERATIONS:
            raise DeclarationError(
                f"{where}: {option} has {operation!r} for {word!r}.", hint=f"It can be {', '.join(OPERATIONS)}."
            )
    return Settings({word: operation.lower() for word, operation in value.items()})


def _column(value: Any, option: str, where: str) -> str:
    if not isinstance(value, str) or not value or value.startswith(RESERVED_PREFIX):
        raise DeclarationError(f"{where}: {option} must be the name of a column, not {value!r}.")
    return value


@dataclass(frozen=True, kw_only=True)
class CDC(Structure):
    """Applies changes of a table to a mirror of it: `CDC(envelope="debezium", key_field="after.id")`."""

    envelope: Annotated[
        Envelope, Option("The form of the messages: `debezium`, `maxwell`, or `custom`, where each path is named.")
    ]
    key_field: Annotated[
        Columns | Mapping[str, Columns] | None,
        Option(
            'The path of the primary key in a message: `"after.id"`, several in a list or separated by commas. Its '
            "last part is the column. A delete has it in `before`. With `route` a dict has it by table.",
            default="required; with `route` the primary key of each target's table",
            check=_key_paths,
            kinds=("text", "texts", "named_texts"),
        ),
    ] = None
    route: Annotated[
        Mapping[str, str] | None,
        Option(
            "Several tables in one pipeline: by the name of a table in the messages, such as `public.orders`, the "
            "table of the target.",
            default="all changes are of one table",
            check=_route,
            kinds=("types",),
        ),
    ] = None
    unrouted: Annotated[
        Unrouted,
        Option(
            "What happens to changes of tables that `route` does not name: `skip` leaves them out and counts them, "
            "`fail` refuses the batch."
        ),
    ] = "skip"
    table_field: Annotated[
        Columns | None,
        Option(
            "The path of the name of the table in a message, for `route`; the values of several are joined by dots.",
            default="`source.schema` or `source.db`, and `source.table`; of Maxwell `database` and `table`",
            check=_paths,
            kinds=("text", "texts"),
        ),
    ] = None
    snapshot: Annotated[
        Snapshot,
        Option(
            "Where the rows come from that were there before the changes: `debezium`, which reads them and sends them "
            "as messages, or a `copy` of the source's table."
        ),
    ] = "debezium"
    snapshot_connection: Annotated[
        AnyConnection | None,
        Option("The connection to the database of the source, for a copy.", check=connection_option, kinds=("text",)),
    ] = None
    snapshot_table: Annotated[
        str | None,
        Option(
            "The table that is copied: `schema.table`.",
            default="that of `route`, or of a topic of Debezium: `prefix.schema.table`",
        ),
    ] = None
    delete_mode: Annotated[
        DeleteMode, Option("`hard` removes the row, `soft` writes the time into `soft_delete_column`.")
    ] = "hard"
    soft_delete_column: Annotated[
        str | None,
        Option(
            "The column that a soft delete writes, a timestamp or a boolean; null or false while the row is there.",
            check=_column,
        ),
    ] = None
    schema_evolution: Annotated[
        SchemaEvolution,
        Option(
            "What happens to columns that the table does not have: `skip` leaves them out with a warning, `fail` "
            "refuses the batch, `evolve` adds them."
        ),
    ] = "skip"
    out_of_order_tolerance_ms: Annotated[
        int,
        milliseconds(
            "For how many milliseconds behind the newest change of a batch applied changes are remembered. A late or "
            "repeated change within this time is ignored; an older one is applied again."
        ),
    ] = 5000
    op_field: Annotated[
        str | None, Option("The path of the operation.", default="`op`; of Maxwell `type`", check=_path)
    ] = None
    op_map: Annotated[
        Mapping[str, str] | None,
        Option(
            "By the words of that path: `create`, `update`, `delete`, `read` (of a snapshot), `truncate` or `skip`.",
            default="that of the envelope",
            check=_op_map,
            kinds=("types",),
        ),
    ] = None
    before_field: Annotated[
        str | None,
        Option("The path of the row before the change.", default="`before`; of Maxwell `old`", check=_path),
    ] = None
    after_field: Annotated[
        str | None, Option("The path of the row after it.", default="`after`; of Maxwell `data`", check=_path)
    ] = None
    ts_field: Annotated[
        str | None,
        Option(
            "The path of the time of the change: milliseconds since 1970; of others than Debezium also seconds.",
            default="`source.ts_ms`; of Maxwell `ts`",
            check=_path,
        ),
    ] = None
    position_field: Annotated[
        Columns | None,
        Option(
            "The path of what orders the changes: where each is in the log of its database, a number or a text that "
            "sorts; several paths in a list.",
            default="`source.lsn`, `source.file` and `source.pos` …; of Maxwell `position`, `xid`",
            check=_paths,
            kinds=("text", "texts"),
        ),
    ] = None
    time_unit: Annotated[
        TimeUnit | None,
        Option(
            "The unit of times in Debezium's messages without a schema: `ms`, `us` or `ns`.",
            default="by the size of the number; of times of day `us`",
        ),
    ] = None

    row_sql: Annotated[
        str | None,
        Option(
            "A SELECT over the table `source`: the rows of the changes, before they are written. A row that it leaves "
            "out is not in the mirror.",
            default="rows as they are",
        ),
    ] = None

    def check(self) -> None:
        needed = () if self.route is not None else ("key_field",)
        if self.envelope not in _ENVELOPES:
            needed += (*_PATHS, "op_map", *(() if self.route is None else ("table_field",)))
        if missing := [name for name in needed if getattr(self, name) is None]:
            hint = 'key_field="after.id": the path of the primary key in a message.'
            if self.envelope == "custom":
                hint = "A custom envelope has no defaults: name each path, and what each operation is."
            self._refuse(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.", hint)
        if self.row_sql is not None and (name := aggregate_in(self.row_sql)) is not None:
            self._refuse(
                f"row_sql depends on several rows ({name}), and it sees those that changed in one batch.",
                "Let it choose and convert columns.",
            )
        if self.delete_mode == "soft" and self.soft_delete_column is None:
            self._refuse('delete_mode = "soft" requires soft_delete_column.', 'soft_delete_column="deleted_at"')
        if self.delete_mode == "hard" and self.soft_delete_column is not None:
            self._refuse('soft_delete_column is for delete_mode = "soft".')
        self._check_route()
        self._check_snapshot()
        for keys in [self.keys] if self.route is None else map(self.keys_of, self.route):
            if self.soft_delete_column in keys:
                self._refuse(f"{self.soft_delete_column!r} is a key, which a soft delete cannot write.")

    def _check_route(self) -> None:
        by_table = self.key_field if isinstance(self.key_field, Mapping) else {}
        if self.route is None:
            for name, is_said in (
                ("unrouted", self.unrouted != "skip"),
                ("table_field", self.table_field is not None),
                ("key_field by table", isinstance(self.key_field, Mapping)),
            ):
                if is_said:
                    self._refuse(f"{name} is for route, and there is none.", 'route={"public.orders": "orders"}')
            return
        for table in by_table:
            if table not in self.route:
                hint = did_you_mean(table, self.route, f"It names {', '.join(self.route)}.")
                self._refuse(f"key_field has keys of {table!r}, which route does not name.", hint)
        if self.row_sql is not None:
            self._refuse("row_sql is over the rows of one table, and route names several.", "Leave one of them out.")

    def _check_snapshot(self) -> None:
        if self.snapshot != "copy":
            for name in ("snapshot_connection", "snapshot_table"):
                if getattr(self, name) is not None:
                    self._refuse(f'{name} is for snapshot = "copy".')
            return
        if self.snapshot_connection is None:
            self._refuse('snapshot = "copy" requires snapshot_connection.', "The connection to the source's database.")
        if self.row_sql is not None:
            self._refuse('row_sql is over changes, and snapshot = "copy" copies rows.', "Leave one of them out.")
        if self.route is not None and self.snapshot_table is not None:
            self._refuse("snapshot_table is one table, and route names several.", "Leave it out.")

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the primary key; none where `key_field` has them by table."""
        return _columns_of(() if isinstance(self.key_field, Mapping) else self.key_field)

    def keys_of(self, table: str) -> tuple[str, ...]:
        """Return the columns of the key of a table that `route` names; none where the target's table has to say it."""
        return _columns_of(self.key_field.get(table) if isinstance(self.key_field, Mapping) else self.key_field)

    def of_table(self, table: str) -> CDC:
        """Return how the changes of one of the routed tables are read, whose key is known."""
        key = self.key_field[table] if isinstance(self.key_field, Mapping) else self.key_field
        return replace(self, key_field=key, route=None, unrouted="skip", table_field=None, snapshot_table=None)

    def source_of(self, table: str) -> str | None:
        """Return which table of the messages is led to a table of a target; `None` where there is none."""
        return next((source for source, target in (self.route or {}).items() if target == table), None)

    @property
    def paths(self) -> _Paths:
        """Where the messages have their parts."""
        own = _ENVELOPES.get(self.envelope, _Paths("", "", "", (), (), {}))
        return _Paths(
            op=self.op_field or own.op,
            before=self.before_field or own.before,
            after=self.after_field or own.after,
            ts=own.ts if self.ts_field is None else (self.ts_field,),
            positions=own.positions if self.position_field is None else (tuple(self.position_field),),
            ops=own.ops if self.op_map is None else self.op_map,  # type: ignore[arg-type]
            tables=own.tables if self.table_field is None else (tuple(self.table_field),),
        )


def _columns_of(paths: Columns | None) -> tuple[str, ...]:
    return tuple(each.rpartition(".")[2] for each in paths or ())
