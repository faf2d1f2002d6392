"""What a load is: rows, a target table, and how the two meet. Systems carry it out; nothing here opens anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict, get_args
from uuid import uuid4

from weft.errors import DeclarationError, LoadRefusedError, did_you_mean, listed
from weft.options import Option, column_names, flag, refuse_unknown, text_option
from weft.systems.changes import Changes
from weft.systems.expectation import Expectation
from weft.systems.watermark import STATE, LoadWatermark

if TYPE_CHECKING:
    import pyarrow as pa

Mode = Literal["append", "truncate", "merge", "scd2"]
MODES: tuple[str, ...] = get_args(Mode)
AnyMode = Mode | Literal["scd1"]
_ALIASES = {"scd1": "merge"}
MODES_OF = {
    "event_timestamp_column": ("scd2",),
    "ttl_seconds": ("scd2",),
    "update_columns": ("merge",),
    "compare_columns": ("merge", "scd2"),
}
"""The options that only some modes have."""

UNNAMED = "once:"
"""The prefix of the names of loads without a commit key."""
MOST_ASIDE = 100_000
"""How many rows a load may reject: they pass through this process. A load with more of them should be looked at."""
KEYED_MODES = ("merge", "scd2")
"""The modes in which source rows are matched with stored ones."""
KEY_LENGTH = 200
"""The length of a text that every database takes as a part of a key."""

LOADED_AT, BATCH_ID = "_loaded_at", "_batch_id"
LOAD_COLUMNS = (LOADED_AT, BATCH_ID)
"""When a row was last written and by which run: a difference in these columns is not a change of the row."""
VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH = "valid_from", "valid_to", "is_current", "row_hash"
SCD2_COLUMNS = (VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH)
"""The columns that scd2 adds to those of the source: timestamp, timestamp or null, boolean, text."""


Columns = str | Sequence[str]
"""One column or several, by name."""


class KeyedOptions(TypedDict, total=False):
    """The options of a merge or a history (scd2) in a table, of rows or of batches."""

    update_columns: Annotated[
        Columns | None,
        Option("The columns that a merge writes to an existing row.", default="all but the keys", check=column_names),
    ]
    compare_columns: Annotated[
        Columns | None,
        Option(
            "The columns that are compared to find changed rows.", default="those that are written", check=column_names
        ),
    ]
    deduplicate_by: Annotated[
        Columns | None,
        Option("Of rows with the same key, a merge keeps the greatest in these columns.", check=column_names),
    ]
    event_timestamp_column: Annotated[
        str | None,
        Option(
            "scd2: the column with the time from which a row is valid.",
            default="the time of the load",
            check=text_option,
        ),
    ]


class TableOptions(KeyedOptions, total=False):
    """The options of any load into a table."""

    handle_deletes: Literal["hard", "soft"] | None
    ttl_seconds: float | timedelta | None
    allow_empty: bool
    on_bad_rows: Literal["fail", "quarantine"]


class LoadOptions(TableOptions, total=False):
    """The options of `weft.load`."""

    pipeline: str | None
    batch_id: int


@dataclass(frozen=True)
class Projected:
    """A column made from those of the source: an expression in the target's SQL over them, as `q`."""

    sql: str
    field: pa.Field


@dataclass(frozen=True)
class Declared:
    """The declaration of a target table."""

    schema: pa.Schema | None = None
    """The columns of the table; a column that is not in it may be null. `None` for the columns of the source."""
    primary_key: tuple[str, ...] = ()
    unique: tuple[tuple[str, ...], ...] = ()
    on_drift: str = "error"
    """How columns are handled that the stored table lacks: `evolve` adds them."""


RowsOf = Literal["source", "table"]
"""The columns that a row has which was put aside: those of the source, or those that the table was to get."""


@dataclass(frozen=True)
class QuarantinedRows:
    """Rows that an earlier load put aside and another one takes out of the quarantine, in the same commit."""

    checkpoint_id: str
    batch_id: int
    rows_of: RowsOf | None
    errors: tuple[str, ...]
    """The rows with one of these errors are taken."""
    count: int
    """How many rows these are: if there are more or fewer by now, nothing is done."""
    returned: tuple[tuple[str, str], ...] = ()
    """Errors and payloads of those that stay in the quarantine, now as rows of the load that takes the others."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One load into one table: picklable, and equal in every retry, so that a retry is not a new load."""

    schema: str | None = None
    table: str
    mode: Mode = "append"
    keys: tuple[str, ...] = ()
    update_columns: tuple[str, ...] | None = None
    compare_columns: tuple[str, ...] | None = None
    """`None` is for the updated columns (scd2: all but keys and event time)."""
    event_timestamp_column: str | None = None
    """scd2: the column with the time from which a row is valid; the moment of the load where `None`."""
    handle_deletes: Literal["hard", "soft"] | None = None
    """Rows whose key the source no longer has: `hard` removes them (merge), `soft` closes their version (scd2)."""
    deleted_keys: tuple[Mapping[str, int | str], ...] = ()
    """Values of columns, each time of the same ones: a merge removes the rows that have them, in the same commit."""
    deduplicate_by: tuple[str, ...] = ()
    ttl_seconds: float | None = None
    """scd2: close current versions that began longer ago than this."""
    allow_empty: bool = False
    on_bad_rows: Literal["fail", "quarantine"] = "fail"
    pipeline: str = ""
    checkpoint_id: str = ""
    batch_id: int = 0
    positions: str | None = None
    """How far a batch of a streaming pipeline reads its sources. The ledger has it, so that a batch of the same number
    with other rows is noticed."""
    declared: Declared | None = None
    replaces: str | None = None
    """The table whose place this one will take: errors name that, and rejected rows are put aside next to it."""
    replaces_all: bool = False
    """Whether the rows replace all that the table has, in the same commit, in a mode other than truncate too."""
    is_recorded: bool = True
    """Whether a database notes it in its ledger, so that a second try at it does nothing."""
    null_is_default: bool = False
    """Whether a null in a column that may not be null stands for the column's default; a merge keeps what a row has."""
    projection: tuple[Projected, ...] | None = None
    """How the columns of the target are made; those of the source as they are where `None`."""
    checks: tuple[Expectation, ...] = ()
    """What must hold for the rows, each with its reaction."""
    changes: Changes | None = None
    """What changes say besides their rows, in a merge of changes."""
    watermark: LoadWatermark | None = None
    """How far the source was read: stored in the same commit."""
    from_quarantine: QuarantinedRows | None = None
    """What it takes out of the table's quarantine."""
    events_after: tuple[tuple[str, int], ...] = ()
    """Streams of the target's database (`events.orders`) of which the query reads all events after an offset: refused
    where retention has removed some of them before it did."""
    moment: datetime
    """When the load began, in UTC: one value for all of its rows and attempts."""

    @classmethod
    def declare(
        cls,
        *,
        target: str | tuple[str, str] | tuple[str | None, str],
        mode: str = "append",
        keys: object = (),
        commit_key: str | None = None,
        moment: datetime | None = None,
        **options: Any,
    ) -> Self:
        """A load from what a user wrote, or `DeclarationError` for what cannot be, before anything runs."""
        refuse_unknown(options, LoadOptions.__annotations__, "A load", "Its options")
        schema, table = _target(target)
        if commit_key is not None and not (
            isinstance(commit_key, str) and 0 < len(commit_key) <= KEY_LENGTH and not commit_key.startswith(UNNAMED)
        ):
            raise DeclarationError(
                f"A commit_key has 1 to {KEY_LENGTH} characters, and does not begin with {UNNAMED!r}."
            )
        mode = _ALIASES.get(mode, mode)
        if mode not in MODES:
            raise DeclarationError(
                f"There is no mode {mode!r}.", hint=listed(str(mode), MODES, f"Modes: {', '.join(MODES)}.")
            )
        if isinstance(options.get("ttl_seconds"), timedelta):
            options["ttl_seconds"] = options["ttl_seconds"].total_seconds()
        for name in ("update_columns", "compare_columns"):
            if options.get(name) is not None:
                options[name] = column_names(options[name], name)
        options["deduplicate_by"] = column_names(options.get("deduplicate_by") or (), "deduplicate_by")
        load = cls(
            schema=schema,
            table=table,
            mode=mode,  # type: ignore[arg-type]
            keys=column_names(keys or (), "keys"),
            pipeline=options.pop("pipeline", None) or full_name(schema, table),
            # A load without a commit key still has a name: a task that Spark retries must find the first try.
            checkpoint_id=commit_key if commit_key is not None else f"{UNNAMED}{uuid4()}",
            moment=moment or datetime.now(UTC),
            **options,
        )
        load._check()
        return load

    @property
    def name(self) -> str:
        """How errors call the target."""
        return full_name(self.schema, self.replaces or self.table)

    @property
    def tracks_rows(self) -> bool:
        """Whether source rows are matched with stored ones."""
        return self.mode in KEYED_MODES

    @property
    def replaces_rows(self) -> bool:
        """Whether none of the rows stays that the table has."""
        return self.replaces_all or self.mode == "truncate"

    @property
    def state(self) -> str | None:
        """What a model has read of its inputs, which a table keeps that has no other place for watermarks."""
        return self.watermark.text if self.watermark is not None and self.watermark.column == STATE else None

    def overtaken(self) -> LoadRefusedError:
        """Return the error of a load that follows a watermark which is not the last one any more."""
        return LoadRefusedError(
            f"Another run of {self.pipeline} has loaded {self.name} meanwhile; nothing of this one was written.",
            hint="Let them share one run log: it lets one run at a time.",
        )

    def _check(self) -> None:
        if self.tracks_rows and not self.keys:
            raise DeclarationError(f"The mode {self.mode!r} needs keys.", hint='For example keys=["id"].')
        if self.keys and not self.tracks_rows and not self.deduplicate_by:
            raise DeclarationError(
                f"The mode {self.mode!r} takes no keys.", hint="Modes with keys: merge, scd2. Or add deduplicate_by."
            )
        if self.deduplicate_by and not self.keys:
            raise DeclarationError("deduplicate_by needs keys.", hint='For example keys=["id"].')
        if self.handle_deletes not in (None, "hard", "soft"):
            raise DeclarationError(f"handle_deletes is 'hard' or 'soft', not {self.handle_deletes!r}.")
        wanted = {"merge": "hard", "scd2": "soft"}.get(self.mode)
        if self.handle_deletes is not None and self.handle_deletes != wanted:
            raise DeclarationError(
                f"The mode {self.mode!r} cannot handle deletes {self.handle_deletes!r}.",
                hint="merge removes missing rows (hard), scd2 closes their version (soft).",
            )
        for name, modes in MODES_OF.items():
            if getattr(self, name) is not None and self.mode not in modes:
                raise DeclarationError(f"{name} is an option of {' and '.join(modes)}, not of {self.mode}.")
        if self.on_bad_rows not in ("fail", "quarantine"):
            raise DeclarationError(f"on_bad_rows is 'fail' or 'quarantine', not {self.on_bad_rows!r}.")
        if self.ttl_seconds is not None and not (_is_number(self.ttl_seconds, int | float) and self.ttl_seconds > 0):
            raise DeclarationError(f"ttl_seconds must be a number of seconds above 0, not {self.ttl_seconds!r}.")
        if not (_is_number(self.batch_id, int) and abs(self.batch_id) < 2**63):
            raise DeclarationError(f"batch_id must be a number of 64 bits, not {self.batch_id!r}.")
        # A text such as "no" would count as true, and the load would empty its table.
        flag(self.allow_empty, "allow_empty", "A load")

    def refuse_repeated(self, columns: list[str], *, folds: bool = False) -> None:
        """Refuse a source with two columns of one name. `folds`: upper and lower case are one where they go."""
        repeated = {name for name in columns if columns.count(name) > 1}
        if repeated:
            raise DeclarationError(
                f"The source of {self.name} has more than one column {sorted(repeated)[0]!r}.",
                hint="Give each a name of its own: SELECT a.id AS id, b.id AS other_id …",
            )
        if folds:
            seen: dict[bytes, str] = {}
            for name in columns:
                # Of bytes, only ASCII has cases: É and é are two columns of SQLite and DuckDB.
                if (other := seen.setdefault(name.encode("utf-8", "surrogatepass").lower(), name)) != name:
                    raise DeclarationError(
                        f"The source of {self.name} has the columns {other!r} and {name!r}, which are one column "
                        "there: its names do not differ in upper and lower case alone.",
                        hint=f"Leave one of them out, or give it another name: SELECT … AS other_{name.lower()} …",
                    )

    def check_source(self, columns: list[str], *, folds: bool = False) -> None:
        """Refuse a load that names columns which the source does not have. `folds`: see `refuse_repeated`."""
        if not columns:
            raise DeclarationError(f"The source of {self.name} has no columns.")
        self.refuse_repeated(columns, folds=folds)
        for option in ("keys", "update_columns", "compare_columns", "deduplicate_by", "event_timestamp_column"):
            names = getattr(self, option) or ()
            for name in (names,) if isinstance(names, str) else names:
                if name not in columns:
                    hint = did_you_mean(name, columns, f"Its columns: {', '.join(columns[:30])}.")
                    raise DeclarationError(f"The source of {self.name} has no column {name!r} ({option}).", hint=hint)
        if self.mode == "scd2":
            for name in SCD2_COLUMNS:
                if name in columns:
                    raise DeclarationError(
                        f"The source of {self.name} has a column {name!r}, which scd2 keeps itself.",
                        hint="Leave it out of the SELECT, or give it another name.",
                    )

    def no_column(self, name: str, present: Sequence[str]) -> LoadRefusedError:
        """Return the error of a column that the source has and the table does not."""
        hint = did_you_mean(name, present, f"Its columns: {', '.join(present[:30])}.")
        return LoadRefusedError(f"The table {self.name} has no column {name!r}, which the source has.", hint=hint)

    @property
    def about_nulls(self) -> str:
        """What else a hint says where a column is null that may not be."""
        if self.projection is None or self.declared is None or self.declared.schema is None:
            return ""
        return " A normalizer makes null of a value that it cannot parse: with on_failure='error' it fails there."

    def written(self, source: pa.Schema) -> pa.Schema:
        """Return the columns that are written, of a source with these."""
        import pyarrow as pa

        return source if self.projection is None else pa.schema([each.field for each in self.projection])

    def stored(self, written: pa.Schema) -> pa.Schema:
        """Return the written columns that the table has, without those about changes."""
        import pyarrow as pa

        if self.changes is None:
            return written
        return pa.schema([field for field in written if field.name not in self.changes.own])

    def updated(self, columns: list[str]) -> list[str]:
        """Return the columns that a merge writes to a row that is there."""
        chosen = columns if self.update_columns is None else self.update_columns
        return [name for name in chosen if name not in self.keys]

    def compared(self, columns: list[str]) -> list[str]:
        """Return the columns in which a changed row differs."""
        if self.compare_columns is not None:
            return [name for name in self.compare_columns if name not in self.keys]
        if self.mode == "merge":
            return [name for name in self.updated(columns) if name not in LOAD_COLUMNS]
        return [name for name in columns if name not in (*self.keys, self.event_timestamp_column, *LOAD_COLUMNS)]


@dataclass(frozen=True)
class Counts:
    """What a load did to its target."""

    rows_read: int = 0
    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    quarantined: int = 0
    bytes: int = 0
    replayed: bool = False
    """Whether the ledger had it already, so that nothing was done."""
    late: tuple[int, ...] = ()
    """Counts of creates, updates and deletes that did nothing: the table has newer changes of their keys."""
    warnings: tuple[str, ...] = ()
    """The expectations that the rows did not meet and whose reaction is `warn`."""

    def __add__(self, other: Counts) -> Counts:
        both = ((each.name, getattr(self, each.name) + getattr(other, each.name)) for each in fields(self))
        return replace(Counts(**dict(both)), replayed=self.replayed or other.replayed)


def full_name(schema: str | None, table: str) -> str:
    """Return how errors and commands call a table."""
    return f"{schema}.{table}" if schema else table


def refuse_own(schema: str | None, table: str, where: str = "") -> None:
    """Refuse the schema of a database in which Weft keeps its own tables."""
    name = full_name(schema, table)
    if name.lower().startswith("weft."):
        raise DeclarationError(
            f"{where}{name} cannot be written: the schema weft has the tables that Weft itself needs.",
            hint="Name another schema.",
        )


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _target(target: object) -> tuple[str | None, str]:
    if isinstance(target, str):
        target = target.split(".", 1) if "." in target else (None, target)
    match target:
        case (None | str() as schema, str() as table):
            names = [table] if schema is None else [schema, table]
        case _:
            raise DeclarationError('A target is ("schema", "table") or "schema.table".')
    if not all(names) or any("\0" in name for name in names):
        raise DeclarationError("A target's schema and table must have a name.", hint='("analytics", "orders")')
    return schema, table
