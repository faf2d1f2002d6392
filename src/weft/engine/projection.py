"""From the columns that a source has to those that a declared table wants: names, normalizers, drift."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from weft.columns import hint_of, hinted, length_of
from weft.errors import LoadRefusedError, did_you_mean
from weft.pipelines.declare import PipelineTarget
from weft.pipelines.table import Table, TableColumn
from weft.spark_support import sessions
from weft.systems.expectation import Expectation, Reaction
from weft.systems.load import LOAD_COLUMNS, Declared, Load, Projected
from weft.systems.sql.literals import literal
from weft.systems.sql.tables import SqlTables

Quote = Callable[[str], str]

_log = logging.getLogger("weft.engine")


@dataclass(frozen=True)
class TableProjection:
    """Maps the columns that a source turns out to have to those of a declared table."""

    target: PipelineTarget

    def __call__(self, load: Load, source: pa.Schema, tables: SqlTables | None) -> Load:
        """Return the load with the table's declaration and, where columns are not taken as they are, a projection."""
        quote = sessions.quoted if tables is None else tables.quote
        load.refuse_repeated(source.names, folds=tables is not None and tables.folds_columns)
        if not self.target.table.columns:
            return self._renamed(load, source, quote)
        dialect = "spark" if tables is None else tables.dialect
        columns = [*self._declared(source, dialect, quote), *self._undeclared(source, quote)]
        if self.target.table.load_columns:
            columns += _load_columns(load, dialect)
        if tables is None:
            # Files have no types of their own to convert to.
            columns = [_converted(each, self.target.table) for each in columns]
        names = [each.field.name for each in columns]
        is_plain = source.names == names and all(each.sql == f"q.{quote(each.field.name)}" for each in columns)
        lengths = () if tables is None or tables.enforces_lengths else self._lengths(load, names)
        return replace(
            load,
            declared=self._declaration(columns),
            projection=None if is_plain else tuple(columns),
            checks=(*load.checks, *lengths),
        )

    def _lengths(self, load: Load, written: list[str]) -> Iterator[Expectation]:
        """Yield how long texts may be, where the database stores longer ones without an error."""
        reaction: Reaction = "quarantine" if load.on_bad_rows == "quarantine" else "fail"
        for column in self.target.table.columns:
            length = length_of(column.field)
            if length is not None and column.name in written:
                yield Expectation("length", (column.name,), (length,), reaction=reaction)

    def written_to(self, name: str) -> tuple[str, pa.Field | None]:
        """Return the column that a source's column is written to, and its declaration where it is written as it is."""
        name = next((new for new, old in self.target.column_map.items() if old == name), name)
        declared = [each.field for each in self.target.table.columns if each.name == name and not each.normalizers]
        return name, declared[0] if declared else None

    @property
    def has_normalizers(self) -> bool:
        return any(column.normalizers for column in self.target.table.columns)

    def runs_in(self, dialect: str) -> bool:
        """Return whether a database can apply all normalizers itself; else Spark does."""
        if not self.has_normalizers:
            return True
        from weft.normalize import supports

        return all(supports(column.normalizers, dialect) for column in self.target.table.columns)

    def _declaration(self, columns: list[Projected]) -> Declared:
        table = self.target.table
        more = [each.field for each in columns if each.field.name not in table.names]
        return Declared(
            schema=pa.schema([*(column.field for column in table.columns), *more]),
            primary_key=table.primary_key,
            unique=table.natural_keys,
            on_drift=self.target.on_drift,
        )

    def _renamed(self, load: Load, source: pa.Schema, quote: Quote) -> Load:
        """Return the load into a table by name alone: the columns of its source, renamed by `column_map`."""
        declared = Declared(schema=None, on_drift=self.target.on_drift)
        if not self.target.column_map:
            return replace(load, declared=declared)
        renamed = {old: new for new, old in self.target.column_map.items()}
        for old in renamed:
            _refuse_missing(old, source, self.target.name, "column_map")
        projection = tuple(
            Projected(f"q.{quote(field.name)}", field.with_name(renamed.get(field.name, field.name)))
            for field in source
        )
        return replace(load, declared=declared, projection=projection)

    def _declared(self, source: pa.Schema, dialect: str, quote: Quote) -> Iterator[Projected]:
        for column in self.target.table.columns:
            name = self.target.column_map.get(column.name, column.name)
            if name not in source.names and not _is_derived(column):
                if column.name in self.target.column_map or not column.nullable:
                    _refuse_missing(name, source, self.target.name, f"for {column.name!r}")
                continue
            yield _projected(column, name, source, dialect, quote)

    def _undeclared(self, source: pa.Schema, quote: Quote) -> list[Projected]:
        """Return the columns that the source has beyond the declaration, where the table gets them too."""
        table = self.target.table
        used = {self.target.column_map.get(name, name) for name in table.names}
        more = [field for field in source if field.name not in used]
        if not more:
            return []
        names = ", ".join(repr(field.name) for field in more[:5])
        if self.target.on_drift == "error":
            raise LoadRefusedError(
                f"The source of {self.target.name} has columns that the table does not declare: {names}.",
                hint="Declare them, leave them out of the source, or say on_drift='evolve' (or 'warn', 'ignore').",
            )
        if self.target.on_drift == "warn":
            _log.warning(
                "The source of %s has columns that the table does not declare, which are left out: %s.",
                self.target.name,
                names,
            )
        if self.target.on_drift != "evolve":
            return []
        return [Projected(f"q.{quote(field.name)}", field) for field in more]


def _converted(column: Projected, table: Table) -> Projected:
    declared = next((each.field for each in table.columns if each.name == column.field.name), None)
    if declared is None or declared.type.equals(column.field.type):
        return column
    from pyspark.sql.pandas.types import from_arrow_type

    kind = from_arrow_type(declared.type, prefer_timestamp_ntz=True).simpleString()
    return Projected(f"CAST({column.sql} AS {kind})", declared)


def _projected(column: TableColumn, name: str, source: pa.Schema, dialect: str, quote: Quote) -> Projected:
    if not column.normalizers:
        # The value as the source has it: the target's column decides its type.
        return Projected(f"q.{quote(name)}", source.field(name).with_name(column.name))
    from weft.normalize import expression

    field = column.field
    sql, kind = expression(
        column.normalizers,
        name,
        dialect,
        kind=source.field(name).type if name in source.names else pa.null(),
        quote=lambda each: f"q.{quote(each)}",
        target=field.type,
    )
    hint = hint_of(field) if kind.equals(field.type) else None
    return Projected(sql, pa.field(column.name, kind) if hint is None else hinted(column.name, hint))


def _is_derived(column: TableColumn) -> bool:
    if not column.normalizers:
        return False
    from weft.normalize import needs_no_input

    return needs_no_input(column.normalizers)


def _load_columns(load: Load, dialect: str) -> list[Projected]:
    loaded_at, batch_id = LOAD_COLUMNS
    return [
        Projected(literal(load.moment, dialect), pa.field(loaded_at, pa.timestamp("us", "UTC"))),
        Projected(literal(load.checkpoint_id, dialect), pa.field(batch_id, pa.string())),
    ]


def _refuse_missing(name: str, source: pa.Schema, target: str, what: str) -> None:
    if name in source.names:
        return
    raise LoadRefusedError(
        f"The source of {target} has no column {name!r} ({what}).",
        hint=did_you_mean(name, source.names, f"Its columns: {', '.join(source.names[:30])}."),
    )
