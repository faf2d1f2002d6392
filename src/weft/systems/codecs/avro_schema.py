"""Schemas of Avro: parsed from their JSON, and the Arrow type that holds their values."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from weft.columns import UTC_TIME
from weft.systems.codecs.registered import SchemaProblem, checked_columns

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_ARROW = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "fixed": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
}
_LOGICAL = {
    ("int", "date"): pa.date32(),
    # Times of day are text, as in every table of Weft.
    ("int", "time-millis"): pa.string(),
    ("long", "time-micros"): pa.string(),
    **{("long", f"timestamp-{unit}"): UTC_TIME for unit in ("millis", "micros", "nanos")},
    **{("long", f"local-timestamp-{unit}"): pa.timestamp("us") for unit in ("millis", "micros", "nanos")},
    ("string", "uuid"): pa.string(),
}
# What Debezium calls types of which Kafka Connect knows no logical one, and what they are in Avro.
_OF_DEBEZIUM = {
    "io.debezium.time.Date": "date",
    "io.debezium.time.Time": "time-millis",
    "io.debezium.time.MicroTime": "time-micros",
    "io.debezium.time.Timestamp": "local-timestamp-millis",
    "io.debezium.time.MicroTimestamp": "local-timestamp-micros",
    "io.debezium.time.NanoTimestamp": "local-timestamp-nanos",
    "io.debezium.data.Uuid": "uuid",
}
DURATION = pa.struct([(name, pa.int64()) for name in ("months", "days", "millis")])
_MAX_DIGITS = 38
_NUMBERS = ("int", "long", "float", "double")


@dataclass(eq=False)
class AvroField:
    name: str
    type: AvroType
    aliases: tuple[str, ...] = ()
    has_default: bool = False
    default: Any = None


@dataclass(eq=False)
class AvroType:
    """A type of Avro. A named one may hold itself."""

    kind: str
    """A primitive, or record, enum, fixed, array, map, union."""
    name: str = ""
    aliases: tuple[str, ...] = ()
    logical: str = ""
    """The logical type, where it is one that this kind can have."""
    digits: tuple[int, int] = (0, 0)
    """Precision and scale of a decimal."""
    size: int = 0
    symbols: tuple[str, ...] = ()
    default: str | None = None
    fields: list[AvroField] = field(default_factory=list)
    inner: list[AvroType] = field(default_factory=list)
    """The branches of a union, or what an array or map is of."""

    @property
    def short_name(self) -> str:
        """The name without its namespace; of what has none its kind."""
        return self.name.rpartition(".")[2] or self.kind

    def present(self) -> list[AvroType]:
        """Return the branches of a union that are not null; of another type itself."""
        return [each for each in self.inner if each.kind != "null"] if self.kind == "union" else [self]


def parse(text: str, references: Iterable[str] = ()) -> AvroType:
    """Return the type that a schema says. `references`: the schemas whose names it uses, each after those it uses."""
    names: dict[str, AvroType] = {}
    for each in references:
        _parse(_loaded(each), "", names)
    return _parse(_loaded(text), "", names)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # the name of a primitive, without quotes


def _parse(said: Any, space: str, names: dict[str, AvroType]) -> AvroType:
    if isinstance(said, list):
        if not said:
            raise SchemaProblem("its schema has a union without branches")
        return AvroType("union", inner=[_parse(each, space, names) for each in said])
    if isinstance(said, str):
        if said in PRIMITIVES:
            return AvroType(said)
        named = names.get(said if "." in said else f"{space}.{said}".lstrip(".")) or names.get(said)
        if named is None:
            raise SchemaProblem(f"its schema names the type {said!r}, which it does not have")
        return named
    if not isinstance(said, dict) or "type" not in said:
        raise SchemaProblem("its schema is not one of Avro")
    kind = said["type"]
    if kind in ("record", "error", "enum", "fixed"):
        return _named(said, "record" if kind == "error" else kind, space, names)
    if kind in ("array", "map"):
        return AvroType(kind, inner=[_parse(said["items" if kind == "array" else "values"], space, names)])
    if kind not in PRIMITIVES:
        return _parse(kind, space, names)  # {"type": {"type": …}}, or a name
    return _with_logical(AvroType(kind), said)


def _named(said: dict[str, Any], kind: str, space: str, names: dict[str, AvroType]) -> AvroType:
    name = said["name"]
    if "." not in name and (space := said.get("namespace", space)):
        name = f"{space}.{name}"
    space = name.rpartition(".")[0]
    named = names[name] = AvroType(kind, name, aliases=tuple(said.get("aliases", ())))
    if kind == "enum":
        named.symbols, named.default = tuple(said["symbols"]), said.get("default")
        if not named.symbols:
            raise SchemaProblem(f"{name} has no symbols")
    elif kind == "fixed":
        named.size = said["size"]
        _with_logical(named, said)
    else:
        named.fields = [
            AvroField(
                each["name"],
                _parse(each["type"], space, names),
                tuple(each.get("aliases", ())),
                "default" in each,
                each.get("default"),
            )
            for each in said["fields"]
        ]
    return named


def _with_logical(of: AvroType, said: dict[str, Any]) -> AvroType:
    """Give a type its logical one. One that Avro does not have, or not for this type, is ignored, as Avro says."""
    logical = said.get("logicalType") or _OF_DEBEZIUM.get(said.get("connect.name", ""), "")
    if logical == "decimal" and of.kind in ("bytes", "fixed"):
        precision, scale = said.get("precision", 0), said.get("scale", 0)
        if "connect.name" in said:  # which says 64 where it does not know
            precision = min(precision, _MAX_DIGITS)
        if 0 < precision <= _MAX_DIGITS and 0 <= scale <= precision:
            of.logical, of.digits = logical, (precision, scale)
    elif (of.kind, logical) in _LOGICAL or (of.kind, logical, of.size) in (
        ("fixed", "uuid", 16),
        ("fixed", "duration", 12),
    ):
        of.logical = logical
    return of


def arrow_type(schema: AvroType, inside: tuple[AvroType, ...] = ()) -> pa.DataType:
    """Return the type of a column that holds the values of a schema."""
    if schema in inside:
        raise SchemaProblem(f"{schema.name} holds itself, and no column has a type for that")
    within = (*inside, schema)
    if schema.logical == "decimal":
        return pa.decimal128(*schema.digits)
    if schema.logical:
        special = {"uuid": pa.string(), "duration": DURATION}.get(schema.logical)
        return special or _LOGICAL[schema.kind, schema.logical]
    if schema.kind == "record":
        return pa.struct([(each.name, arrow_type(each.type, within)) for each in schema.fields])
    if schema.kind == "array":
        return pa.list_(arrow_type(schema.inner[0], within))
    if schema.kind == "map":
        return pa.map_(pa.string(), arrow_type(schema.inner[0], within))
    if schema.kind == "union":
        return _of_union(schema, within)
    return _ARROW[schema.kind]


def _of_union(schema: AvroType, within: tuple[AvroType, ...]) -> pa.DataType:
    present = schema.present()
    kinds = [arrow_type(each, within) for each in present]
    if not kinds:
        return pa.null()
    if all(each.equals(kinds[0]) for each in kinds):
        return kinds[0]
    for numbers, kind in ((("int", "long"), pa.int64()), (_NUMBERS[2:], pa.float64())):
        if all(each.kind in numbers and not each.logical for each in present):
            return kind
    return pa.struct([(each.short_name, kind) for each, kind in zip(present, kinds, strict=True)])


def is_choice(schema: AvroType) -> bool:
    """Return whether values of a union are objects with a key for each branch, one of which has the value."""
    if schema.kind != "union" or len(schema.present()) < 2:
        return False
    kind = arrow_type(schema)
    return pa.types.is_struct(kind) and not all(arrow_type(each).equals(kind) for each in schema.present())


def columns_of(schema: AvroType) -> dict[str, pa.DataType]:
    """Return the columns of a schema's messages. What is no record is one column."""
    kind = arrow_type(schema)
    return checked_columns({each.name: each.type for each in kind} if schema.kind == "record" else {"value": kind})


def longest_fixed(schema: AvroType, seen: set[int] | None = None) -> int:
    """Return the size of the longest value of a fixed size."""
    seen = set() if seen is None else seen
    if id(schema) in seen:
        return 0
    seen.add(id(schema))
    below = [*schema.inner, *(each.type for each in schema.fields)]
    return max([schema.size, *(longest_fixed(each, seen) for each in below)])
