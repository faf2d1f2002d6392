"""The capability to parse messages: bytes to Arrow columns, with bad messages apart, and rows back to bytes.

A codec is of a format, not of a system: every broker can use each. `CODECS` names them by the `payload_format` of a
connection.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

CODECS = {
    "json": "weft.systems.codecs.json:JsonCodec",
    "raw_bytes": "weft.systems.codecs.raw:RawCodec",
    "avro": "weft.systems.codecs.avro:AvroCodec",
    "protobuf": "weft.systems.codecs.protobuf:ProtobufCodec",
}
REGISTERED = ("avro", "protobuf")
"""The formats whose messages name a schema of a registry: their codecs are made of `Schemas`."""


class Registered(NamedTuple):
    """A schema of a registry."""

    number: int
    kind: str
    """AVRO, PROTOBUF or JSON."""
    text: str
    references: tuple[tuple[str, str], ...] = ()
    """The schemas that it uses, as (name, text), each after those that it uses itself."""


class Schemas(Protocol):
    """A schema registry, as codecs need it. It travels to Spark's tasks."""

    def schema(self, number: int) -> Registered | None:
        """Return the schema of an id; `None` where the registry has none. Raise if it cannot be asked."""


class Parsed(NamedTuple):
    """The columns of a batch of messages."""

    columns: dict[str, pa.Array]
    good: Sequence[int]
    """The numbers of the messages that are rows, in the order of the rows."""
    bad: dict[int, str]
    """By the numbers of the others what is wrong with them."""
    kinds: Mapping[str, Any] = MappingProxyType({})
    """By column, in small letters, the kinds of its values, where a codec finds types: `weft.systems.codecs.kinds`."""


class Decoder(Protocol):
    """Parses the messages of one task. It may remember what it saw in earlier batches."""

    def parse(self, values: pa.Array) -> Parsed:
        """Return the rows of messages, none of which is null."""


class Codec(Protocol):
    """One format of messages. It travels to Spark's tasks."""

    is_parsed: ClassVar[bool]
    """Whether values are parsed at all; else a row is the message itself."""

    def decoder(self, known: Mapping[str, pa.DataType]) -> Decoder:
        """Return a decoder for one task. A message with a value that does not fit the type of a known column is bad."""

    def encoded(self, columns: Sequence[str]) -> Column:
        """Return the Spark column that holds the message of each row."""


def codec_of(name: str, *made_of: Any) -> Codec:
    """Return the codec of a format. Those of `REGISTERED` are made of `Schemas` and of the newest schema, if any."""
    module, _, class_name = CODECS[name].partition(":")
    codec: Any = getattr(importlib.import_module(module), class_name)
    opened: Codec = codec(*made_of)
    return opened
