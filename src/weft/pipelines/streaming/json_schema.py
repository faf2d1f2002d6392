"""A JSON Schema of a pipeline's TOML file, for editors: made of the tables that the parser takes."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from weft.options import variants
from weft.pipelines.streaming.toml_tables import TABLES, Key, connection_hints
from weft.systems.base import system_for, systems
from weft.systems.endpoint import endpoint_options

_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    (list, tuple): "array",
}


def schema() -> dict[str, Any]:
    """Return the schema, with the kinds of connections that are installed."""
    kinds = list(systems())
    tables = {name: _table(name, kinds) for name in TABLES if name != "pipeline"}
    of_kinds = {f"{kind}_connection": {"properties": _fields(connection_hints(kind))} for kind in kinds}
    pipeline = _table("pipeline", kinds)
    either = (
        [{"required": [key]} for key in ("source", "sources")],
        [{"required": [key]} for key in ("target", "targets")],
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A streaming pipeline of Weft",
        **pipeline,
        "allOf": [{"oneOf": each} for each in either],
        "$defs": {**tables, **of_kinds, "file_options": {"properties": _fields(endpoint_options())}},
    }


def _table(name: str, kinds: list[str]) -> dict[str, Any]:
    keys = TABLES[name]
    properties = {key: _key(each) for key, each in keys.items()}
    table: dict[str, Any] = {"type": "object", "properties": properties}
    if needed := [key for key, each in keys.items() if each.needed]:
        table["required"] = needed
    if "kind" not in keys:
        return {**table, "additionalProperties": False}
    usable = [kind for kind in kinds if _can_be(name, kind)]
    properties["kind"] = {**properties["kind"], "enum": usable}
    table["allOf"] = [_when_kind(kind, has_options=name in ("source", "target")) for kind in usable]
    if "connection" in keys:
        table["not"] = {"required": ["kind", "connection"]}
    if name in ("source", "target"):
        without = {"if": {"not": {"required": ["kind"]}}, "then": {"$ref": "#/$defs/file_options"}}
        table["allOf"].append(without)
    return {**table, "unevaluatedProperties": False}


def _can_be(table: str, kind: str) -> bool:
    endpoint = system_for(kind).load_endpoint()
    if table == "source":
        return bool(endpoint.is_source)
    return table != "target" or bool(endpoint.places)


def _when_kind(kind: str, *, has_options: bool) -> dict[str, Any]:
    system = system_for(kind)
    own = dataclasses.fields(system.load_connection())
    needed = [each.name for each in own if _has_no_default(each)]
    then: dict[str, Any] = {"$ref": f"#/$defs/{kind}_connection"}
    if needed:
        then["required"] = needed
    options = {name: hint for name, hint in system.load_endpoint().options.items() if has_options}
    if more := _fields({name: hint for name, hint in options.items() if name not in {each.name for each in own}}):
        then["properties"] = more
    return {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": then}


def _has_no_default(each: dataclasses.Field[Any]) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING


def _key(key: Key) -> dict[str, Any]:
    inside = {"$ref": f"#/$defs/{key.inside}"}
    text, texts = {"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string"}}
    kinds: dict[str, dict[str, Any]] = {
        "text": {"enum": list(key.choices)} if key.choices else text,
        "count": {"type": "integer", "minimum": 1},
        "number": {"type": "integer", "minimum": 0},
        "integer": {"type": "integer"},
        "fraction": {"type": "number", "minimum": 0, "maximum": 1},
        "texts": texts,
        "table": inside,
        "tables": {"type": "array", "minItems": 1, "items": inside},
        "named": {"type": "object", "additionalProperties": inside},
        "object": {"type": "object"},
        "types": {"type": "object", "additionalProperties": text},
        "named_texts": {"type": "object", "additionalProperties": _any_of([text, texts])},
    }
    return {"description": key.description, **_any_of([kinds[kind] for kind in key.kinds])}


def _fields(hints: dict[str, Any]) -> dict[str, Any]:
    return {name: _type(hint) for name, hint in hints.items()}


def _type(hint: Any) -> dict[str, Any]:
    """Return what a field of a connection takes, in the words of JSON."""
    return _any_of([_variant(each) for each in variants(hint)])


def _variant(hint: Any) -> dict[str, Any]:
    plain = typing.get_origin(hint) or hint
    if plain is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    names = (name for kind, name in _TYPES.items() if isinstance(plain, type) and issubclass(plain, kind))
    return {"type": name} if (name := next(names, None)) else {}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def text() -> str:
    """Return the schema as it is kept in docs/streaming.schema.json."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
