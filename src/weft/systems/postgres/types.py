"""Types of PostgreSQL as canonical Arrow fields, and back."""

from __future__ import annotations

import re

import pyarrow as pa

from weft.columns import LOCAL_TIME, UTC_TIME, hint_of, hinted, is_nested
from weft.systems.postgres import copy

# A numeric without a precision, which may hold more digits than Arrow's decimals.
ANY_NUMERIC = pa.decimal128(38, 18)

_PLAIN: tuple[tuple[int, str, pa.DataType], ...] = (
    (copy.BOOL, "boolean", pa.bool_()),
    (copy.INT2, "smallint", pa.int16()),
    (copy.INT4, "integer", pa.int32()),
    (copy.INT8, "bigint", pa.int64()),
    (copy.FLOAT4, "real", pa.float32()),
    (copy.FLOAT8, "double precision", pa.float64()),
    (copy.DATE, "date", pa.date32()),
    (copy.TIMESTAMP, "timestamp without time zone", LOCAL_TIME),
    (copy.TIMESTAMPTZ, "timestamp with time zone", UTC_TIME),
    (copy.TEXT, "text", pa.string()),
    (copy.BYTEA, "bytea", pa.binary()),
)
_HINTED = (
    (copy.UUID_, "uuid", "uuid"),
    (copy.JSON, "json", "json"),
    (copy.TIME, "time without time zone", "time"),
)
_KINDS: dict[int, pa.DataType] = {oid: kind for oid, _, kind in _PLAIN} | {26: pa.int64()}  # 26: oid
_HINTS = {oid: hint for oid, _, hint in _HINTED} | {copy.JSONB: "json"}
# Arrays of these become lists; the others are texts, as PostgreSQL writes them.
_ARRAYS: dict[int, int] = {
    1000: copy.BOOL,
    1001: copy.BYTEA,
    1016: copy.INT8,
    1005: copy.INT2,
    1007: copy.INT4,
    1009: copy.TEXT,
    1014: copy.BPCHAR,
    1015: copy.VARCHAR,
    1021: copy.FLOAT4,
    1022: copy.FLOAT8,
    1115: copy.TIMESTAMP,
    1182: copy.DATE,
    1185: copy.TIMESTAMPTZ,
    1231: copy.NUMERIC,
    2951: copy.UUID_,
}


def field_of(name: str, oid: int, modifier: int, *, nullable: bool = True) -> pa.Field:
    """The canonical field of a column of this type. What has no such type is read as PostgreSQL writes it."""
    if oid in _HINTS:
        return hinted(name, _HINTS[oid], nullable=nullable)
    if oid in _ARRAYS:
        return pa.field(name, pa.list_(pa.field("element", _kind(_ARRAYS[oid], modifier))), nullable=nullable)
    return pa.field(name, _kind(oid, modifier), nullable=nullable)


def _kind(oid: int, modifier: int) -> pa.DataType:
    return _decimal(modifier) if oid == copy.NUMERIC else _KINDS.get(oid, pa.string())


def _decimal(modifier: int) -> pa.DataType:
    if modifier < 0:
        return ANY_NUMERIC
    precision = ((modifier - 4) >> 16) & 0xFFFF
    # Eleven bits with a sign: since PostgreSQL 15 a scale may be negative, or more than the precision.
    scale = (((modifier - 4) & 0x7FF) ^ 1024) - 1024
    precision = max(precision, scale) if scale >= 0 else precision - scale
    scale = max(scale, 0)
    return pa.decimal128(min(precision, 38), min(scale, 38))


_SQL: dict[pa.DataType, str] = {kind: sql for _, sql, kind in _PLAIN} | {pa.int8(): "smallint"}
_HINTED_SQL = {hint: sql for _, sql, hint in _HINTED}


def sql_type(field: pa.Field) -> str:
    """The type of a new column, spelled as PostgreSQL's catalogue spells it.

    json, not jsonb: that one refuses some texts, and changes numbers and the order of keys.
    """
    if is_nested(field.type):
        return "json"
    if pa.types.is_decimal(field.type):
        return f"numeric({field.type.precision},{field.type.scale})"
    hint = hint_of(field)
    return _HINTED_SQL[hint] if hint in _HINTED_SQL else _SQL[field.type]


_OIDS = {sql: oid for oid, sql, _ in (*_PLAIN, *_HINTED)} | {
    "character": copy.BPCHAR,
    "character varying": copy.VARCHAR,
    "numeric": copy.NUMERIC,
    "jsonb": copy.JSONB,
}


def takes(sql: str, field: pa.Field) -> bool:
    """Whether a column of this type takes a field's values by COPY, all of them unchanged or with an error."""
    base, numbers = parse(sql)
    oid = _OIDS.get(base)
    if oid is None or not copy.writes(field, oid):
        return False
    if oid == copy.NUMERIC:
        # It would round what has more decimals.
        return not numbers or numbers[-1] >= field.type.scale
    return oid in (copy.VARCHAR, copy.BPCHAR) or not numbers


def parse(sql: str) -> tuple[str, list[int]]:
    """A type's name without its modifiers, and those: `timestamp(3) with time zone`."""
    match = re.search(r"\(([-0-9, ]+)\)", sql)
    if match is None:
        return sql, []
    numbers = [int(number) for number in match[1].split(",")]
    if sql.startswith("numeric") and len(numbers) == 1:
        numbers.append(0)
    return sql.replace(match[0], "", 1), numbers


# ---------------------------------------------------------------------------------------------------------------- casts


def cast(expression: str, field: pa.Field, sql: str) -> str:
    """A value of a field as another type, or an error where it would be altered.

    An explicit cast rounds, cuts off or drops the time of day without a word. So what comes back from the cast is
    compared with what went in, and where it differs, a text that says so is cast: no type can be read from that.
    """
    own = sql_type(field)
    base, numbers = parse(sql)
    if base.endswith("[]"):
        return _array(expression, base[:-2] if not numbers else sql[:-2])
    if is_nested(field.type) and base in ("json", "jsonb", "text"):
        # A list of the same database is an array, a staged one JSON, which stays as it is.
        return f"to_jsonb({expression})" if base == "jsonb" else f"CAST(to_json({expression}) AS {sql})"
    if sql == own and field.type != ANY_NUMERIC:
        # A column that is read as text may be of another type in its database: an interval, say, or an address.
        return f"CAST({expression} AS text)" if own == "text" else expression
    if base == "character varying":
        # Without the length: the assignment to the column checks it.
        return f"CAST({expression} AS character varying)"
    if base == "bit" and pa.types.is_boolean(field.type):
        return f"CAST(CAST({expression} AS integer) AS {sql})"  # there is no cast in one step
    if own == "text" and sql == "bit(1)":
        # Changes have it as a boolean, which is a text for a column that is read as one.
        expression = f"CASE {expression} WHEN 'true' THEN '1' WHEN 'false' THEN '0' ELSE {expression} END"
    there = f"CAST({expression} AS {sql})"
    if own == "text" and base in _MOMENTS:
        whole, kind = f"CAST({expression} AS timestamp with time zone)", "timestamp with time zone"
        if base != kind:
            # PostgreSQL would leave the zone of a text out.
            whole, kind = f"CAST({whole} AS timestamp)", "timestamp"
        there = f"CAST({whole} AS {sql})"
        is_cut = base == "date" or numbers
        return checked(expression, there, f"CAST({there} AS {kind}) = {whole}", sql) if is_cut else there
    if base == "character":
        return checked(expression, there, f"CAST({there} AS text) = rtrim(CAST({expression} AS text), ' ')", sql)
    back = own
    if own == "text":
        back = "numeric" if base == "numeric" else ""
    elif (base, own) in _WIDER or base not in _NARROW or (base == "numeric" and not numbers):
        back = ""
    if field.type == ANY_NUMERIC:
        back = "numeric"
    if not back:
        return there
    same = f"CAST({there} AS {back}) = CAST({expression} AS {back})"
    if base == "numeric" and numbers:
        same += f" AND {there} <> 'NaN'"  # which decimals of Arrow lack: nobody could read the table
    return checked(expression, there, same, sql)


_MOMENTS = ("date", "timestamp without time zone", "timestamp with time zone")


def checked(expression: str, there: str, same: str, sql: str) -> str:
    """A value as it is `there`, or an error where the condition that it is the `same` does not hold."""
    wrong = f"CAST(CAST({expression} AS text) || ' does not fit {sql}' AS {sql.partition('(')[0]})"
    if sql.startswith(("character", "text")):
        # These types take every text: fail on the way, by casting a text that is not a number.
        wrong = f"CAST(CAST(CAST({expression} AS text) || ' does not fit {sql}' AS integer) AS text)"
    return f"CASE WHEN {expression} IS NULL OR {same} THEN {there} ELSE {wrong} END"


# Casts to these may lose something (a float's digits are not among it), unless the type of the value is narrower.
_NARROW = {
    "boolean",
    "smallint",
    "integer",
    "bigint",
    "numeric",
    "date",
    "time without time zone",
    "timestamp without time zone",
    "timestamp with time zone",
}
_WIDER = {("bigint", "integer"), ("bigint", "smallint"), ("integer", "smallint"), ("integer", "bigint")} | {
    (whole, "boolean") for whole in ("smallint", "integer", "bigint")
}


def _array(expression: str, element: str) -> str:
    """A staged list is JSON; in the same database it is an array. Both are JSON by to_jsonb."""
    item = f"CAST(item AS {element})"
    if element == "bytea":
        item = "decode(ltrim(item, '\\x'), 'hex')"
    return (
        f"CASE WHEN {expression} IS NOT NULL THEN ARRAY(SELECT {item} "
        f"FROM jsonb_array_elements_text(to_jsonb({expression})) WITH ORDINALITY AS e (item, place) ORDER BY place) END"
    )
