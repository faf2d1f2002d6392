"""Texts as decimals. Arrow's own cast returns another number, without an error, where it rescales a large one."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import pyarrow as pa
import pyarrow.compute as pc


def from_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse decimal numbers; raise `pa.ArrowInvalid` where one does not fit."""
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if longest + kind.scale <= 38 and not _has_exponents(texts):
        return texts.cast(kind)
    if longest + kind.scale <= 76 and not _has_exponents(texts):
        # Wide enough for whatever these texts can say. The second cast is checked.
        return texts.cast(pa.decimal256(76, kind.scale)).cast(kind)
    try:
        return pa.array([None if text is None else Decimal(text) for text in texts.to_pylist()], kind)
    except InvalidOperation:
        raise pa.ArrowInvalid("a text is not a decimal number") from None


def _has_exponents(texts: pa.Array) -> bool:
    return bool(pc.any(pc.match_substring(texts, "e", ignore_case=True)).as_py())
