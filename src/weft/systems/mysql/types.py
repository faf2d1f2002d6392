"""Types of MySQL and MariaDB as canonical Arrow fields, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa
from pymysql.constants import FIELD_TYPE, FLAG

from weft.columns import LOCAL_TIME, UTC_TIME, hint_of, hinted, is_nested
from weft.errors import SchemaError
from weft.systems.mysql.results import ResultField

_BINARY = 63
_GEOMETRY, _VECTOR = 255, 242
_INTEGERS: dict[int, tuple[pa.DataType, pa.DataType]] = {
    FIELD_TYPE.TINY: (pa.int8(), pa.int16()),
    FIELD_TYPE.SHORT: (pa.int16(), pa.int32()),
    FIELD_TYPE.INT24: (pa.int32(), pa.int32()),
    FIELD_TYPE.LONG: (pa.int32(), pa.int64()),
    FIELD_TYPE.LONGLONG: (pa.int64(), pa.decimal128(20, 0)),
    FIELD_TYPE.YEAR: (pa.int16(), pa.int16()),
}
_HINTS = ("uuid", "json", "time")


@dataclass(frozen=True)
class StoredType:
    """What the catalogue has on a column beyond its type."""

    type: str = ""
    comment: str = ""
    is_json: bool = False
    """Whether the table checks that it is JSON, as MariaDB's JSON columns do."""
    in_stream: bool = False
    """Whether it is of a stream, whose times are all in UTC."""


def field_of(field: ResultField, stored: StoredType) -> pa.Field:
    """The canonical field of a result's column."""
    name, kind = field.name, field.type
    if kind in _INTEGERS:
        if stored.comment == "bool":
            return pa.field(name, pa.bool_())
        return pa.field(name, _INTEGERS[kind][bool(field.flags & FLAG.UNSIGNED)])
    if kind == FIELD_TYPE.FLOAT or (kind == FIELD_TYPE.DOUBLE and stored.comment == "float32"):
        return pa.field(name, pa.float32())
    if kind == FIELD_TYPE.DOUBLE:
        return pa.field(name, pa.float64())
    if kind in (FIELD_TYPE.DECIMAL, FIELD_TYPE.NEWDECIMAL):
        return pa.field(name, _decimal(field))
    if kind in (FIELD_TYPE.DATE, FIELD_TYPE.NEWDATE):
        return pa.field(name, pa.date32())
    if kind in (FIELD_TYPE.TIMESTAMP, FIELD_TYPE.DATETIME):
        is_instant = kind == FIELD_TYPE.TIMESTAMP or stored.in_stream or stored.comment == "timestamptz"
        return pa.field(name, UTC_TIME if is_instant else LOCAL_TIME)
    if kind == FIELD_TYPE.TIME:
        return hinted(name, "time")
    if kind == FIELD_TYPE.BIT:
        if field.length == 1:
            return pa.field(name, pa.bool_())
        return pa.field(name, pa.int64() if field.length < 64 else pa.decimal128(20, 0))
    if kind in (_GEOMETRY, _VECTOR):
        raise SchemaError(
            f"Column {name!r} is a {'geometry' if kind == _GEOMETRY else 'vector'}, which no other system holds.",
            field=name,
            hint=f"Leave it out of the query, or read it as text: ST_AsText({name}).",
        )
    if kind == FIELD_TYPE.JSON or stored.is_json:
        return hinted(name, "json")
    if stored.comment in _HINTS or stored.type == "uuid":
        return hinted(name, stored.comment if stored.comment in _HINTS else "uuid")
    # Of NULL itself nothing is known.
    is_bytes = field.charset == _BINARY and kind != FIELD_TYPE.NULL
    return pa.field(name, pa.binary() if is_bytes else pa.string())


def _decimal(field: ResultField) -> pa.DataType:
    # The length counts the sign and the point.
    precision = field.length - (field.decimals > 0) - (not field.flags & FLAG.UNSIGNED)
    if field.decimals > 38:
        raise SchemaError(
            f"Column {field.name!r} has {field.decimals} decimals; a decimal may have 38 digits.",
            field=field.name,
            hint=f"Say in the query how many it should have: CAST({field.name} AS DECIMAL(38, 10)).",
        )
    # A sum has more than any of its terms; what does not fit is an error when it is read.
    return pa.decimal128(max(min(precision, 38), field.decimals, 1), field.decimals)


def selected(quoted: str, field: ResultField) -> str | None:
    """Return what to select in place of a column whose text is not its value."""
    if field.type == FIELD_TYPE.FLOAT:
        return f"({quoted} + 0e0)"  # as a FLOAT it has six digits
    return f"({quoted} + 0)" if field.type == FIELD_TYPE.BIT else None


# ------------------------------------------------------------------------------------------------------------ to MySQL

FLOAT32 = " COMMENT 'float32'"
"""After the type of a column of 32 bits: a FLOAT has six digits."""
_TYPES: dict[pa.DataType, str] = {
    pa.bool_(): "TINYINT(1) COMMENT 'bool'",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): f"DOUBLE{FLOAT32}",
    pa.float64(): "DOUBLE",
    pa.date32(): "DATE",
    LOCAL_TIME: "DATETIME(6)",
    UTC_TIME: "DATETIME(6) COMMENT 'timestamptz'",
}


def sql_type(field: pa.Field, *, key: bool, collation: str) -> str:
    """The type of a new column; comments carry what a type cannot say. `collation`: bytewise and without padding."""
    text = f"CHARACTER SET utf8mb4 COLLATE {collation}"
    hint = "json" if is_nested(field.type) else hint_of(field)
    if hint == "uuid":
        return "CHAR(36) CHARACTER SET ascii COLLATE ascii_general_ci COMMENT 'uuid'"
    if hint == "time":
        return "TIME(6)"
    if hint == "json":
        return f"LONGTEXT {text} COMMENT 'json'"
    if pa.types.is_string(field.type):
        return f"{'VARCHAR(255)' if key else 'LONGTEXT'} {text}"
    if pa.types.is_binary(field.type):
        return "VARBINARY(255)" if key else "LONGBLOB"
    if pa.types.is_decimal(field.type):
        return f"DECIMAL({field.type.precision},{field.type.scale})"
    return _TYPES[field.type]


def takes(sql: str, stored: pa.Field, field: pa.Field) -> bool:
    """Whether a column takes a field's texts in an INSERT, all of them unchanged or with an error."""
    base, numbers = parse(sql)
    if is_nested(field.type):
        return hint_of(stored) == "json" and base == "longtext"
    # To a shorter value of a BINARY column, the server would append zeros.
    if not stored.type.equals(field.type) or hint_of(stored) != hint_of(field) or base in ("bit", "binary"):
        return False
    if base in ("datetime", "timestamp", "time"):
        return numbers == [6]
    # It would cut off spaces (char), or letters that its character set lacks.
    return not pa.types.is_string(field.type) or hint_of(field) is not None or "collate utf8mb4" in sql


def parse(sql: str) -> tuple[str, list[int]]:
    """A type's name, and the numbers behind it."""
    match = re.match(r"([a-z ]+?)(?:\(([\d, ]+)\)|$|\s+(?:unsigned|zerofill|collate|character|comment))", sql)
    if match is None:
        return sql, []
    return match[1], [int(number) for number in (match[2] or "").split(",") if number.strip()]


def key_type(sql: str, field: pa.Field) -> str | None:
    """The type of a text's column, where a staged text may be of it too: both then take the same texts for equal."""
    base, _ = parse(sql)
    if not pa.types.is_string(field.type) or hint_of(field) is not None or "collate" not in sql:
        return None
    # A CHAR would cut off spaces.
    return f"var{sql}" if base == "char" else sql if base == "varchar" or base.endswith("text") else None


def prefix(sql: str) -> str:
    """Return how much of a column goes into an index: a part of texts and bytes."""
    base, numbers = parse(sql.lower())
    if base.endswith(("text", "blob")) or (base in ("varchar", "varbinary") and numbers[0] > _PREFIX):
        return f"({_PREFIX})"
    return ""


_PREFIX = 190


def inner_query(sql: str) -> str | None:
    """Return the query in `SELECT * FROM (…) AS q …`, which has the same columns; `None` for any other query."""
    if not re.match(r"\s*SELECT\s+\*\s+FROM\s*\(", sql, re.IGNORECASE):
        return None
    import sqlglot
    from sqlglot import expressions as exp

    try:
        tree = sqlglot.parse_one(sql, read="mysql")
    except sqlglot.errors.SqlglotError:
        return None
    source = tree.args.get("from_")
    inner = None if source is None else source.this
    if not isinstance(tree, exp.Select) or tree.args.get("joins") or not isinstance(inner, exp.Subquery):
        return None
    return str(inner.this.sql("mysql"))


# ---------------------------------------------------------------------------------------------------------------- casts

TOO_LARGE = "9223372036854775807"
_WHOLE = ("tinyint", "smallint", "mediumint", "int", "bigint", "year")
_TIMES = ("datetime", "timestamp", "time")
_MOST_BYTES = {
    f"{size}{kind}": 2**bits - 1 for kind in ("text", "blob") for size, bits in (("tiny", 8), ("", 16), ("medium", 24))
}


def cast(expression: str, field: pa.Field, sql: str) -> str:
    """A staged value as a column takes it, or an error where it would be altered.

    Strict mode refuses what is out of range or too long, but it rounds decimals and fractions of seconds and drops the
    time of day without a word. What comes back from such a cast is compared with what went in.
    """
    kind, hint = field.type, hint_of(field)
    base, numbers = parse(sql)
    if base in _WHOLE and not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return _checked(expression, f"CAST({expression} AS DECIMAL(65,0)) = {expression}")
    if base == "decimal":
        precision, scale = (*numbers, 10, 0)[:2] if numbers else (10, 0)
        is_narrower = pa.types.is_decimal(kind) and kind.scale <= scale
        if not is_narrower and not pa.types.is_integer(kind) and not pa.types.is_boolean(kind):
            same = f"CAST({expression} AS DECIMAL({precision},{scale})) = {expression}"
            if pa.types.is_string(kind):
                # A text and a number are compared as floats, which have fewer digits.
                same = f"{same} AND {_fits_scale(expression, scale)}"
            return _checked(expression, same)
    if base in ("float", "double") and pa.types.is_temporal(kind):
        return _checked(expression, "1 = 0")  # the digits of a time are no number
    if base == "date" and not pa.types.is_date(kind):
        day, moment = f"CAST(CAST({expression} AS DATE) AS DATETIME(6))", f"CAST({expression} AS DATETIME(6))"
        return _checked(expression, f"{day} = {moment}", "DATE")
    if base in _TIMES and not pa.types.is_date(kind):
        unit = 10 ** (6 - (numbers[0] if numbers else 0))
        if (base == "time") != (hint == "time") and not (pa.types.is_string(kind) and hint is None):
            # A moment has no place in a time of day, and a time of day is no moment.
            return _checked(expression, "1 = 0")
        if unit > 1:
            as_type = "TIME(6)" if base == "time" else "DATETIME(6)"
            return _checked(expression, f"MICROSECOND(CAST({expression} AS {as_type})) % {unit} = 0", as_type)
    if base == "char" and pa.types.is_string(kind) and hint is None:
        # As the column has it: one with spaces at its end would differ from that each time.
        expression = f"TRIM(TRAILING ' ' FROM {expression})"
    if base == "binary":
        return _checked(expression, f"LENGTH({expression}) = {numbers[0]}")
    collation = re.search(r"collate (utf8mb4_\w+)", sql)
    if base in _MOST_BYTES and (collation or base.endswith("blob")):
        # From a longer column of these MariaDB copies what is left of its length, without a word.
        expression = _checked(expression, f"LENGTH({expression}) <= {_MOST_BYTES[base]}")
    if pa.types.is_string(kind) and hint is None and collation:
        # Compare by the column's collation, so that its index can be used. A UUID of a subquery is ASCII.
        return f"(CONVERT({expression} USING utf8mb4) COLLATE {collation[1]})"
    return expression


def readable(text: str, stored: pa.Field) -> str:
    """A text as a column takes it: MySQL knows no words for true and false, and no zones."""
    if pa.types.is_boolean(stored.type):
        return f"IF(LOWER({text}) IN ('true', 't', '1'), '1', IF({text} IS NULL, NULL, '0'))"
    is_time = pa.types.is_timestamp(stored.type) or pa.types.is_date(stored.type)
    return _without_zone(text) if is_time else text


def _without_zone(text: str) -> str:
    """A text of a time with a zone as its time in UTC; any other text as it is, also that of no time, to be rejected.
    Not by CONVERT_TZ, which leaves times before 1970 and after 2038 as they are."""
    zone = f"REGEXP_SUBSTR({text}, '{_ZONE}$')"
    local = f"CAST(LEFT({text}, CHAR_LENGTH({text}) - CHAR_LENGTH({zone})) AS DATETIME(6))"
    hours, minutes = (f"CONCAT('0', SUBSTR(REPLACE({zone}, ':', ''), {first}, 2))" for first in (2, 4))
    offset = f"IF({zone} LIKE '-%', -1, 1) * ({hours} * 60 + {minutes})"
    converted = f"COALESCE({local} - INTERVAL {offset} MINUTE, {text})"
    return f"CASE WHEN {text} REGEXP '{_INSTANT}' THEN {converted} ELSE {text} END"


_ZONE = "([Zz]|[+-][0-9]{2}(:?[0-9]{2})?)"
_INSTANT = f"^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[Tt ][0-9]{{2}}:[0-9]{{2}}(:[0-9]{{2}}([.][0-9]+)?)?{_ZONE}$"


def spelled(text: str, there: str, pattern: str) -> str:
    """A text as it is `there`, or an error where it does not match a pattern. As in other databases, capitals are no
    small letters, and it ends at the end of the text, not before the end of its last line."""
    is_spelled = f"{text} REGEXP '(?-i){pattern.removesuffix('$')}(?!.|[^.])'"
    return f"CASE WHEN {text} IS NULL OR {is_spelled} THEN {there} ELSE {_beyond('CHAR_LENGTH', text)} END"


def of_hint(expression: str, converted: str, field: pa.Field, stored: pa.Field) -> str:
    """A value for a column of JSON or UUIDs, which are texts here: the column itself would take any text."""
    hint = hint_of(stored)
    if hint not in ("json", "uuid") or hint_of(field) == hint or is_nested(field.type):
        return converted
    fits = f"JSON_VALID({expression})" if hint == "json" else f"{expression} REGEXP '{_UUID}'"
    wrong = _beyond("CHAR_LENGTH", expression)
    return f"CASE WHEN {expression} IS NULL OR {fits} THEN {converted} ELSE {wrong} END"


_UUID = "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"


def _fits_scale(text: str, scale: int) -> str:
    """The condition that a number in a text has no more digits behind the point than a column, but for zeros."""
    lower = f"LOWER(TRIM({text}))"
    mantissa, exponent = (f"SUBSTRING_INDEX({lower}, 'e', {part})" for part in (1, -1))
    fraction = f"IF(LOCATE('.', {mantissa}) = 0, 0, CHAR_LENGTH({mantissa}) - LOCATE('.', {mantissa}))"
    digits = f"REPLACE({mantissa}, '.', '')"
    zeros = f"(CHAR_LENGTH({digits}) - CHAR_LENGTH(TRIM(TRAILING '0' FROM {digits})))"
    return (
        f"CASE WHEN NOT ({text} REGEXP '[eE]') THEN NOT ({text} REGEXP '[.][0-9]{{{scale}}}[0-9]*[1-9]') "
        f"WHEN NOT ({mantissa} REGEXP '[1-9]') THEN 1 "
        f"ELSE {fraction} - {zeros} - CAST({exponent} AS SIGNED) <= {scale} END"
    )


def as_stored(expression: str, sql: str) -> str:
    """A value of a column, or one that goes into it, as the same text."""
    base, numbers = parse(sql)
    if base == "float":
        return f"(CAST({expression} AS FLOAT) + 0e0)"  # as a FLOAT it has six digits
    if base == "double":
        return f"({expression} + 0e0)"
    if base == "decimal":
        precision, scale = (*numbers, 10, 0)[:2] if numbers else (10, 0)
        return f"CAST({expression} AS DECIMAL({precision},{scale}))"
    if base in _WHOLE:
        return f"CAST({expression} AS {'UNSIGNED' if 'unsigned' in sql else 'SIGNED'})"
    if base == "bit":
        return f"({expression} + 0)"
    if base == "date":
        return f"CAST({expression} AS DATE)"
    if base in _TIMES:
        return f"CAST({expression} AS {'TIME' if base == 'time' else 'DATETIME'}({numbers[0] if numbers else 0}))"
    if base == "json":
        return f"CAST({expression} AS JSON)"
    # A letter has as many bytes as its character set says.
    return f"CONVERT({expression} USING utf8mb4)" if "collate" in sql else expression


def _beyond(function: str, expression: str) -> str:
    """A number beyond the largest: an error wherever it is computed, not only where it is stored. A text may be empty.
    The name of the function in the error says what is wrong with it."""
    return f"{TOO_LARGE} + ({function}({expression}) + 1)"


def _checked(expression: str, same: str, kind: str | None = None) -> str:
    wrong = _beyond("LENGTH", expression)
    if kind is not None:
        wrong = f"CAST({wrong} AS {kind})"
    return f"CASE WHEN {expression} IS NULL OR {same} THEN {expression} ELSE {wrong} END"
