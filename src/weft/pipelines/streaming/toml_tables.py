"""The tables of a pipeline's TOML file, made of the options: what the parser takes, and what the JSON Schema says."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.options import Option, choices, options_of, variants
from weft.pipelines.streaming.options import OPTIONS
from weft.pipelines.streaming.spec import LOAD_OPTIONS, SOURCE_OPTIONS, TARGET_OPTIONS
from weft.systems.base import system_for

Kind = Literal[
    "text",
    "count",
    "number",
    "integer",
    "fraction",
    "texts",
    "table",
    "tables",
    "named",
    "object",
    "types",
    "named_texts",
]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# The values that a key of each kind takes: in words, and as a check.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str) and value != ""),
    "count": ("a whole number of at least 1", lambda value: type(value) is int and value >= 1),
    "number": ("a whole number of at least 0", lambda value: type(value) is int and value >= 0),
    "integer": ("a whole number", lambda value: type(value) is int),
    "fraction": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "texts": ("a list of texts", _is_texts),
    "table": ("a table", _is_table),
    "tables": (
        "a list of tables",
        lambda value: isinstance(value, list) and value != [] and all(map(_is_table, value)),
    ),
    "named": ("a table of tables", lambda value: _is_table(value) and all(map(_is_table, value.values()))),
    "object": ("a table", _is_table),
    "types": ("a table of texts", lambda value: _is_table(value) and all(isinstance(e, str) for e in value.values())),
    "named_texts": (
        "a table of texts and lists of texts",
        lambda value: _is_table(value) and all(_is_texts(e) or isinstance(e, str) for e in value.values()),
    ),
}


@dataclass(frozen=True)
class Key:
    """What one key takes. `inside` names its table in `TABLES`."""

    description: str
    kinds: tuple[str, ...] = ("text",)
    inside: str | None = None
    choices: tuple[str, ...] = ()
    needed: bool = False

    def fits(self, value: object) -> bool:
        """Return whether this key takes a value of TOML; choices are not looked at."""
        return any(_KINDS[kind][1](value) for kind in self.kinds)

    @property
    def wanted(self) -> str:
        """What it takes, in words."""
        return " or ".join(_KINDS[kind][0] for kind in self.kinds)


# ------------------------------------------------------------------------------------------------- keys made of options


def structure_of(hint: Any) -> tuple[Kind, type] | None:
    """Return the class with options that a type holds, and how a file has it: as a table, several, or by name."""
    for variant in variants(hint):
        arguments = typing.get_args(variant)
        kinds: dict[Any, Kind] = {Sequence: "tables", Mapping: "named"}
        kind = kinds.get(typing.get_origin(variant), "table")
        held = arguments[-1] if arguments else variant
        if dataclasses.is_dataclass(held) and options_of(held):
            return kind, held if isinstance(held, type) else type(held)
    return None


def _kind_of(variant: Any) -> Kind | None:
    if variant is str or typing.get_origin(variant) is Literal:
        return "text"
    if variant is int:
        return "count"
    return "texts" if variant == Sequence[str] else None


def _key(option: Option, needed: bool = False) -> Key:
    # A link leads nowhere outside the docs.
    description = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", option.description)
    if option.kinds:
        return Key(description, option.kinds, option.inside, needed=needed)
    if structure := structure_of(option.type):
        kind, held = structure
        return Key(description, (kind,), held.__name__.lower(), needed=needed)
    kinds = tuple(filter(None, map(_kind_of, variants(option.type))))
    assert kinds, f"What a file has for {option.name}, a {option.type}, must be said by the kinds of its Option."
    return Key(description, kinds, choices=choices(option.type), needed=needed)


def _keys(options: Mapping[str, Option]) -> dict[str, Key]:
    return {each.key or name: _key(each) for name, each in options.items() if name != "connection"}


# ----------------------------------------------------------------------------------------------- what only the file has

_CONNECTION = {
    "connection": Key("The name of a connection that is registered or in weft.toml; `default` where it is left out."),
    "kind": Key("The kind of a connection whose fields are in this table: kafka, postgres, object_store_local …"),
}
_READ_OPTIONS = {"read_options": Key("How files are read.", ("table",), "read_options")}
_TABLE_NAME = {"schema": Key("Its schema."), "name": Key("Its name.", needed=True)}
_PARTS = {
    "source": {
        **_CONNECTION,
        **_keys(SOURCE_OPTIONS),
        "dead_letter_topic": _key(OPTIONS["dead_letter_topic"]),
        **_READ_OPTIONS,
    },
    "target": {**_CONNECTION, **_keys(TARGET_OPTIONS), **_keys(LOAD_OPTIONS), **_READ_OPTIONS},
    "table": {**_TABLE_NAME, "primary_key": Key("The columns that identify a row.", ("text", "texts"))},
    "dead_letter_table": _TABLE_NAME,
    "dead_letter_connection": {"kind": replace(_CONNECTION["kind"], needed=True)},
    "read_options": {
        "csv": Key("How CSV files are read: has_header, delimiter, quote …", ("object",)),
        "json": Key("How files of JSON lines are read.", ("object",)),
    },
}
_SECTIONS = {"transform": "SQL over each batch."}
"""Tables that only group options, each with its sentence."""


def _tables() -> dict[str, dict[str, Key]]:
    tables: dict[str, dict[str, Key]] = {"pipeline": {}, **_PARTS}
    for option in OPTIONS.values():
        section, _, key = (option.key or "").rpartition(".")
        if not key or section.partition(".")[0] in ("source", "target"):
            continue
        if section:
            tables["pipeline"].setdefault(section, Key(_SECTIONS[section], ("table",), section))
        tables.setdefault(section or "pipeline", {})[key] = _key(option, needed=option.name == "name")
        _add_structures(option, tables)
    return tables


def _add_structures(option: Option, tables: dict[str, dict[str, Key]]) -> None:
    """Add the tables of the structure that an option is, and of those in it."""
    structure = None if option.kinds else structure_of(option.type)
    if structure is not None and (name := structure[1].__name__.lower()) not in tables:
        options = options_of(structure[1])
        tables[name] = {**(_CONNECTION if "connection" in options else {}), **_keys(options)}
        for each in options.values():
            _add_structures(each, tables)


TABLES = _tables()


def _word(key: str, hint: Any) -> str:
    return f"[{key}]" if structure_of(hint) else re.sub(r"^(.+)\.(\w+)$", r"[\1] \2", key)


WORDS = {option.name: _word(option.key, option.type) for option in OPTIONS.values() if option.key is not None}
"""How errors about a file call each option."""


def connection_hints(kind: str) -> dict[str, Any]:
    """Return the fields of a connection of this kind, with their types."""
    cls = system_for(kind).load_connection()
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}
