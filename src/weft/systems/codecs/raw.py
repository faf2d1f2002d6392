"""Messages as they are: bytes that nobody parses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from weft.spark_support.lazy import F
from weft.systems.codec import Decoder, Parsed

if TYPE_CHECKING:
    from pyspark.sql import Column


class RawCodec:
    """Leaves values alone."""

    is_parsed: ClassVar[bool] = False

    def decoder(self, known: Mapping[str, pa.DataType]) -> Decoder:
        return _RawDecoder()

    def encoded(self, columns: Sequence[str]) -> Column:
        return F.col("value")


class _RawDecoder:
    def parse(self, values: pa.Array) -> Parsed:
        return Parsed({"value": values}, range(len(values)), {})
