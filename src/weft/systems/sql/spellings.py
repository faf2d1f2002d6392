"""How texts of booleans, numbers and times are spelled that a column of these takes: alike in every database, each of
which would read others in its own way (`20260131`, `yes`, `1_000`), or as another value each day (`today`)."""

from __future__ import annotations

import pyarrow as pa

from weft.columns import hint_of

_NUMBER = "([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?"
_BOOLEAN = "[tT]([rR][uU][eE])?|[fF]([aA][lL][sS][eE])?|[01]"
_NOT_FINITE = "[nN][aA][nN]|[+-]?[iI][nN][fF]([iI][nN][iI][tT][yY])?"
_CLOCK = "[0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6}0*)?)?"
_MOMENT = f"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}([T ]{_CLOCK}(Z|[+-][0-9]{{2}}(:?[0-9]{{2}})?)?)?"


def pattern_of(kind: pa.DataType) -> str | None:
    """Return the regular expression of the whole text of a value of this type; `None` where any text may be one."""
    types = pa.types
    if types.is_boolean(kind):
        return f"^({_BOOLEAN})$"
    if types.is_integer(kind):
        return "^ *[+-]?[0-9]+ *$"
    if types.is_decimal(kind):
        return f"^ *[+-]?{_NUMBER} *$"
    if types.is_floating(kind):
        return f"^ *([+-]?{_NUMBER}|{_NOT_FINITE}) *$"
    return f"^{_MOMENT}$" if types.is_timestamp(kind) or types.is_date(kind) else None


def pattern_between(field: pa.Field, stored: pa.Field) -> str | None:
    """Return the same for a column, of the texts of another one; `None` where that has no texts."""
    is_text = pa.types.is_string(field.type) and hint_of(field) is None
    return pattern_of(stored.type) if is_text else None
