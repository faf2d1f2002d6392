"""Compare a mirror with its source, key range by key range, while both live.

Both tables are read in the order of the key, so many rows at a time, and compared here. In two databases of one system
checksums are compared first, and only ranges that differ are read: two systems write a value differently, and have no
checksum in common. A row that differs may be a change on its way, so it is asked for again. It is named only where the
source still has what it had, and the mirror had time to get it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import pyarrow as pa

from weft.columns import LOCAL_TIME, UTC_TIME, hint_of, is_nested, nested_to_json
from weft.engine.load import load
from weft.engine.readers import stored_columns
from weft.errors import DeclarationError, NotFoundError, WeftError, did_you_mean
from weft.systems.load import full_name
from weft.systems.sql.literals import literal
from weft.systems.sql.tables import Slice, SqlTables

ROWS_A_RANGE = 20_000
ROUNDS = 5
"""How often a row that keeps changing is asked for, and how often one is mended that a batch changed again."""
MOST_DIFFERENCES = 100_000
AT_ONCE = 500
Key = tuple[Any, ...]
Values = tuple[Any, ...]
Kind = Literal["missing", "extra", "different"]


@dataclass(frozen=True)
class Difference:
    """A row that the mirror has otherwise than the source."""

    key: Key
    kind: Kind
    """`missing` in the mirror, `extra` there, or `different`."""
    columns: tuple[str, ...] = ()


@dataclass
class Comparison:
    """What was found."""

    keys: tuple[str, ...]
    rows: int = 0
    """How many the source has."""
    differences: list[Difference] = field(default_factory=list)
    changing: list[Key] = field(default_factory=list)
    """Keys of rows that changed each time they were looked at."""
    mended: int = 0


class Side:
    """One of the two tables."""

    can_mend: ClassVar[bool] = True

    def __init__(self, tables: SqlTables, schema: str | None, name: str, keys: Sequence[str], gone: str = "") -> None:
        self.tables, self.schema, self.name = tables, schema, name
        stored = stored_columns(tables, schema, name)
        fields = None if stored is None else [each.field.with_name(each.name) for each in stored]
        self._sql_columns = {each.name: each for each in stored or ()}
        self._describe(f"{full_name(schema, name)} of {tables.connection.label}", fields, keys, gone)
        self._order = ", ".join(self._ordered(key) for key in self.keys)

    def _describe(self, label: str, fields: Sequence[pa.Field] | None, keys: Sequence[str], gone: str) -> None:
        """Note the columns, and refuse keys that cannot be compared."""
        self.label, self.keys = label, tuple(keys)
        if fields is None:
            raise NotFoundError(f"There is no table {self.label}.", hint="Name it with --table SCHEMA.NAME.")
        self.columns = {each.name: each for each in fields}
        self.selected = tuple(self.columns)
        self.rounded: frozenset[str] = frozenset()
        """Columns that one of the sides has in single precision."""
        for key in self.keys:
            if key not in self.columns:
                hint = did_you_mean(key, self.columns, f"Its columns: {', '.join(self.columns)}.")
                raise DeclarationError(f"{self.label} has no column {key!r}, which is a key of the mirror.", hint=hint)
            if pa.types.is_binary(self.columns[key].type):
                raise DeclarationError(f"{key!r} of {self.label} is binary: such keys cannot be compared.")
        self.gone = gone
        """The column that a soft delete writes."""

    def _ordered(self, key: str) -> str:
        """Return a key as all systems order it: a text by its bytes."""
        name, kind = self.tables.quote(key), self.columns[key]
        is_text = pa.types.is_string(kind.type)
        return self.tables.by_bytes(name, kind) if is_text else self.tables.ordered(name, kind)

    def _literals(self, key: Key) -> str:
        return ", ".join(literal(each, self.tables.dialect) for each in key)

    def after(self, key: Key | None) -> dict[Key, Values]:
        """Return the next rows behind a key, by key."""
        return self._read(self._behind(key), f" ORDER BY {self._order} LIMIT {ROWS_A_RANGE}")

    def _behind(self, key: Key | None) -> list[str]:
        return [] if key is None else [f"({self._order}) > ({self._literals(key)})"]

    def end(self, key: Key | None) -> Key | None:
        """Return the last key of the next rows behind a key; `None` where these are the last rows."""
        end = f" ORDER BY {self._order} LIMIT 1 OFFSET {ROWS_A_RANGE - 1}"
        return next(iter(self._read(self._behind(key), end, self.keys)), None)

    def has_checksums_of(self, other: Side) -> bool:
        """Whether equal rows have one checksum in both tables: systems write a value differently, and so do types."""
        if self.tables.checksum("") is None or self.tables.dialect != other.tables.dialect:
            return False
        # Not all systems write all digits of single precision.
        kinds = {each: self.columns[each].type for each in self.selected}
        return pa.float32() not in kinds.values() and all(
            self._sql_columns[each].sql == other._sql_columns[each].sql and kind == other.columns[each].type
            for each, kind in kinds.items()
        )

    def checksum(self, key: Key | None, end: Key | None) -> tuple[Any, ...]:
        """Return how many rows there are behind a key, up to an end if there is one, and their checksum."""
        tables = self.tables
        hashed = tables.row_hash(
            [tables.as_hashed(tables.quote(each), self._sql_columns[each]) for each in self.selected]
        )
        upto = [] if end is None else [f"({self._order}) <= ({self._literals(end)})"]
        sql = self._select(f"count(*), {tables.checksum(hashed)}", [*self._behind(key), *upto])
        with tables.driver.session("read") as session:
            (found,) = session.rows(sql)
        return tuple(found)

    def rows(self, keys: Sequence[Key]) -> dict[Key, Values]:
        rows: dict[Key, Values] = {}
        for start in range(0, len(keys), AT_ONCE):
            rows |= self._read([self.has_keys(keys[start : start + AT_ONCE])])
        return rows

    def has_keys(self, keys: Sequence[Key]) -> str:
        """Return the condition that a row has one of these keys."""
        if len(self.keys) == 1:
            return f"{self._order} IN ({', '.join(map(self._literals, keys))})"
        # SQLite takes no list of pairs.
        return f"({' OR '.join(f'(({self._order}) = ({self._literals(key)}))' for key in keys)})"

    def table(self, keys: Sequence[Key]) -> pa.Table:
        """Return the rows with these keys as a load takes them."""
        sql = self._query([self.has_keys(keys)])
        schema = self.tables.describe(sql)
        return pa.Table.from_batches(list(self.tables.read(Slice(sql), schema)), schema)

    def _query(self, conditions: Sequence[str], end: str = "", names: Sequence[str] = ()) -> str:
        return self._select(self.tables.listed(names or self.selected), conditions) + end

    def _select(self, what: str, conditions: Sequence[str]) -> str:
        conditions = list(conditions)
        if self.gone:
            name = self.tables.quote(self.gone)
            is_flag = pa.types.is_boolean(self.columns[self.gone].type)
            conditions.append(f"({name} IS NULL OR {name} = {self.tables.false})" if is_flag else f"{name} IS NULL")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        table = self.tables.table(self.schema, self.name)
        return f"SELECT {what} FROM {table}{where}"

    def _read(self, conditions: Sequence[str], end: str = "", names: Sequence[str] = ()) -> dict[Key, Values]:
        sql = self._query(conditions, end, names)
        return self._by_key(self.tables.read(Slice(sql), self.tables.describe(sql)), names)

    def _by_key(self, batches: Iterable[pa.RecordBatch], names: Sequence[str] = ()) -> dict[Key, Values]:
        rows: dict[Key, Values] = {}
        places = [(names or self.selected).index(key) for key in self.keys]
        for batch in batches:
            columns = [
                _plain(array.cast(pa.float32(), safe=False) if each.name in self.rounded else array, each)
                for array, each in zip(batch.columns, batch.schema, strict=True)
            ]
            for row in zip(*columns, strict=True):
                rows[tuple(row[place] for place in places)] = row
        return rows

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove rows, or mark them as removed where the mirror keeps them."""
        table, tables = self.tables.table(self.schema, self.name), self.tables
        with tables.driver.session("publish") as session:
            for start in range(0, len(keys), AT_ONCE):
                condition = self.has_keys(keys[start : start + AT_ONCE])
                if not self.gone:
                    session.run(f"DELETE FROM {table} WHERE {condition}")
                    continue
                is_flag = pa.types.is_boolean(self.columns[self.gone].type)
                value = tables.true if is_flag else tables.moment(datetime.now(UTC))
                session.run(f"UPDATE {table} SET {tables.quote(self.gone)} = {value} WHERE {condition}")


def _plain(array: pa.Array, kind: pa.Field) -> list[Any]:
    """Return values in a form in which equal ones are equal, whichever system they are from."""
    hint = hint_of(kind)
    if is_nested(array.type):
        array, hint = nested_to_json(array), "json"
    if array.type.equals(UTC_TIME):
        array = array.cast(LOCAL_TIME)
    values: list[Any] = array.to_pylist()
    if hint == "json":
        return [None if each is None else _normal_json(each) for each in values]
    if hint == "time":
        return [None if each is None else each.rstrip("0").rstrip(".") if "." in each else each for each in values]
    if hint == "uuid":
        return [None if each is None else each.lower() for each in values]
    if pa.types.is_floating(array.type):
        return ["NaN" if each != each else each for each in values]
    return values


def _normal_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def compare(
    source: Side,
    mirror: Side,
    *,
    settle_seconds: float = 5.0,
    mend: bool = False,
    wait: Callable[[float], None] = time.sleep,
) -> Comparison:
    """Compare all rows of two tables, and on request write the source's rows where they differ."""
    if mend and not mirror.can_mend:
        raise DeclarationError(
            f"{mirror.label} cannot be mended: only rows of a SQL database can.",
            hint="Update these rows in the source, so that their changes come again.",
        )
    shared = [name for name in source.columns if name in mirror.columns and name != mirror.gone]
    source.selected = mirror.selected = tuple(shared)
    source.rounded = mirror.rounded = frozenset(
        name for name in shared if pa.float32() in (source.columns[name].type, mirror.columns[name].type)
    )
    compared = Comparison(source.keys)
    suspects: dict[Key, Values | None] = {}
    for count, ours, theirs in _ranges(source, mirror):
        compared.rows += count
        if ours != theirs:
            for key in ours.keys() | theirs.keys():
                if ours.get(key) != theirs.get(key):
                    suspects[key] = ours.get(key)
        if len(suspects) + len(compared.differences) > MOST_DIFFERENCES:
            wait(settle_seconds)
            suspects = _asked_again(source, mirror, suspects, compared)
        if len(suspects) + len(compared.differences) > MOST_DIFFERENCES:
            raise WeftError(
                f"More than {MOST_DIFFERENCES:,} rows of {mirror.label} differ from {source.label}.",
                hint="Copy the table again rather than mend it, or see whether these are the right tables.",
            )
    for _ in range(ROUNDS):
        if not suspects:
            break
        wait(settle_seconds)
        suspects = _asked_again(source, mirror, suspects, compared)
    compared.changing = sorted(suspects, key=repr)
    compared.differences.sort(key=lambda each: repr(each.key))
    if mend and compared.differences:
        compared.mended = _mended(source, mirror, [each.key for each in compared.differences], settle_seconds, wait)
    return compared


def _ranges(source: Side, mirror: Side) -> Iterator[tuple[int, dict[Key, Values], dict[Key, Values]]]:
    """Yield of each range of keys how many rows the source has, and the rows of both, unless their checksums agree."""
    has_checksums = mirror.has_checksums_of(source)
    after: Key | None = None
    while True:
        if has_checksums:
            end = source.end(after)
            if (checksum := source.checksum(after, end)) == mirror.checksum(after, end):
                yield int(checksum[0]), {}, {}
                if end is None:
                    return
                after = end
                continue
        ours, theirs = source.after(after), mirror.after(after)
        # A range that is full may have more behind its last key, which the other side may have already.
        ends = [max(rows) for rows in (ours, theirs) if len(rows) == ROWS_A_RANGE]
        if not ends:
            yield len(ours), ours, theirs
            return
        after = last = min(ends)
        ours, theirs = ({key: row for key, row in rows.items() if key <= last} for rows in (ours, theirs))
        yield len(ours), ours, theirs


def _asked_again(
    source: Side, mirror: Side, suspects: dict[Key, Values | None], compared: Comparison
) -> dict[Key, Values | None]:
    """Note the rows that differ although the mirror had time; return those that the source has changed meanwhile."""
    keys = list(suspects)
    # The mirror first: what it has then, the source had before. The other way a change between is a difference.
    theirs = mirror.rows(keys)
    ours = source.rows(keys)
    changed: dict[Key, Values | None] = {}
    for key, before in suspects.items():
        wanted, got = ours.get(key), theirs.get(key)
        if wanted == got:
            continue
        if wanted != before:
            changed[key] = wanted
        elif wanted is None:
            compared.differences.append(Difference(key, "extra"))
        elif got is None:
            compared.differences.append(Difference(key, "missing"))
        else:
            pairs = zip(source.selected, wanted, got, strict=True)
            columns = tuple(name for name, one, other in pairs if one != other)
            compared.differences.append(Difference(key, "different", columns))
    return changed


def _mended(source: Side, mirror: Side, keys: list[Key], settle_seconds: float, wait: Callable[[float], None]) -> int:
    """Write the rows that the source has now; again where a batch of the pipeline came between. Return how many are
    equal then."""
    left = keys
    for _ in range(ROUNDS):
        for start in range(0, len(left), AT_ONCE):
            part = left[start : start + AT_ONCE]
            rows = source.table(part)
            present = source.rows(part)
            if len(rows):
                if mirror.gone:  # what was removed may be back
                    is_flag = pa.types.is_boolean(mirror.columns[mirror.gone].type)
                    back = pa.array([False if is_flag else None] * len(rows), mirror.columns[mirror.gone].type)
                    rows = rows.append_column(mirror.columns[mirror.gone], back)
                load(
                    rows,
                    target=(mirror.schema, mirror.name),
                    connection=mirror.tables.connection,
                    mode="merge",
                    keys=list(mirror.keys),
                )
            mirror.remove([key for key in part if key not in present])
        wait(min(settle_seconds, 1.0))
        ours, theirs = source.rows(left), mirror.rows(left)
        left = [key for key in left if ours.get(key) != theirs.get(key)]
        if not left:
            break
    return len(keys) - len(left)
