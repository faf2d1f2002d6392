"""A streaming pipeline as the text of its TOML file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from weft.errors import DeclarationError
from weft.options import options_of
from weft.pipelines.streaming.options import FIELD_OPTIONS
from weft.pipelines.streaming.spec import (
    LOAD_OPTIONS,
    DeadLetters,
    Source,
    StreamingPipeline,
    Target,
)
from weft.pipelines.streaming.windows import StateStore
from weft.settings import is_secret_name, redact_url
from weft.streams.declare import Stream
from weft.systems.base import Connection
from weft.systems.endpoint import endpoint_of

_DEFAULT_SCHEMA = next(each.default for each in dataclasses.fields(Stream) if each.name == "schema")


def to_toml(pipeline: StreamingPipeline) -> str:
    """Return the file that declares the same pipeline.

    Secrets must be `${VAR}` references: one that is written out is refused, since the file is meant to be kept.
    """
    where = f"Streaming pipeline {pipeline.name!r}"
    in_window = () if pipeline.window is None else [each for each in pipeline.window.aggregations if each.udaf]
    if pipeline.udfs or pipeline.aggregate_udfs or in_window:
        raise DeclarationError(f"{where} has UDFs, which a TOML file cannot hold.", hint="Keep it in its module.")
    file: dict[str, Any] = {
        **_dead_letters(pipeline.dead_letters, pipeline, where),
        **_one_or_several("source", [_source(each, where) for each in pipeline.sources]),
        **_one_or_several("target", [_target(each, where) for each in pipeline.targets]),
    }
    defaults = {each.name: each.default for each in dataclasses.fields(pipeline)}
    for option in FIELD_OPTIONS.values():
        value = getattr(pipeline, option.field)
        if option.key is None or value is None or value == defaults[option.field]:
            continue
        section, _, key = option.key.rpartition(".")
        table = file.setdefault(section, {}) if section else file
        table[key] = _structures(option.show(value), f"{where}, {option.name}")
    return "\n".join(_lines({"pipeline_name": pipeline.name, **file}, ())).strip("\n") + "\n"


def _structures(value: Any, where: str) -> Any:
    """Return a value, with tables in the place of the structures in it."""
    if isinstance(value, Mapping):
        return {name: _structures(each, where) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_structures(each, where) for each in value]
    if isinstance(value, Connection):
        return _named(value, where)
    if not dataclasses.is_dataclass(value):
        return value
    if isinstance(value, StateStore):
        return {"kind": value.place} if value.place else _connection(value.connection, where)
    keys = {each.field: each.key or each.name for each in options_of(type(value)).values()}
    tables = {keys[name]: _structures(getattr(value, name), where) for name in keys if name != "connection"}
    return {**_connection(value.connection, where), **tables} if hasattr(value, "connection") else tables


def _one_or_several(key: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: tables[0]} if len(tables) == 1 else {f"{key}s": tables}


# --------------------------------------------------------------------------------------------------------------- tables


def _source(source: Source, where: str) -> dict[str, Any]:
    where = f"{where}, source {source.name}"
    start = None if source.start == "earliest" else source.start
    return {
        **_connection(source.connection, where, source.options),
        "query": _stream(source.query, where),
        "start": start,
        "max_rows": source.max_rows,
        "max_files": source.max_files,
        "columns": dict(source.columns) or None,
    }


def _target(target: Target, where: str) -> dict[str, Any]:
    where = f"{where}, target {target.name}"
    if target.declared is not None and target.declared.columns:
        raise DeclarationError(
            f"{where} is a declared table with columns, which a TOML file cannot hold.",
            hint="Name its table in the place of its class: target_table=(schema, table).",
        )
    if target.prefix and isinstance(target.connection, Connection) and getattr(target.connection, "prefix", None):
        raise DeclarationError(
            f"{where}: a TOML file has one prefix, and here the connection has one too.",
            hint="Give the connection none, or register it and name it.",
        )
    options = {name: value for name, value in target.options.items() if name not in LOAD_OPTIONS}
    keys = {
        **_connection(target.connection, where, options),
        "mode": None if target.mode == "append" else target.mode,
        **{name: list(target.options[name]) for name in LOAD_OPTIONS if name in target.options},
    }
    if target.table is not None:
        schema, name = target.table
        return {**keys, "table": {"schema": schema, "name": name, "primary_key": list(target.primary_key)}}
    place = {"prefix": target.prefix} if target.prefix else {"stream": _stream(target.stream, where)}
    return {**keys, **place, "primary_key": list(target.primary_key)}


def _dead_letters(letters: DeadLetters | None, pipeline: StreamingPipeline, where: str) -> dict[str, Any]:
    if letters is None:
        return {}
    keys: dict[str, Any] = {
        "dead_letter_topic": letters.topic,
        "dead_letter_stream": None if letters.stream is None else _stream(letters.stream, where),
        "dead_letter_path": letters.path,
    }
    implied: list[Any] = []
    if letters.topic is not None:
        implied = [each.connection for each in pipeline.sources]
    elif letters.table is not None:
        schema, name = letters.table
        has_dots = "." in f"{schema or ''}{name}"
        keys["dead_letter_table"] = (
            {"schema": schema, "name": name} if has_dots else ".".join(filter(None, letters.table))
        )
        implied = [each.connection for each in pipeline.targets if each.table is not None][:1]
    if not implied or any(each != letters.connection for each in implied):
        described = _connection(letters.connection, f"{where}, dead letters")
        keys["dead_letter_connection"] = described.get("connection", described)
    return keys


def _stream(named: str | Stream | None, where: str) -> str | None:
    if not isinstance(named, Stream):
        return named
    if named.schema != _DEFAULT_SCHEMA:
        raise DeclarationError(f"{where}: a TOML file cannot name a stream in the schema {named.schema!r}.")
    return named.name


def _connection(
    connection: str | Connection | None, where: str, options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the keys of a connection, and the options of its source or target that are no fields of it."""
    if not isinstance(connection, Connection):
        return {**({} if connection is None else {"connection": connection}), **options}
    described = endpoint_of(connection).with_options(connection, options) if options else connection
    keys: dict[str, Any] = {"kind": connection.kind}
    for each in dataclasses.fields(described):
        value = getattr(described, each.name)
        if value is not None and value != each.default:
            _refuse_secret(each, value, connection, where)
            keys[each.name] = _named(value, f"{where}: the {each.name} of {connection.label}")
    return {**{name: value for name, value in options.items() if not hasattr(connection, name)}, **keys}


def _named(value: Any, where: str) -> Any:
    """Return the name of a connection that is a field of another one, and any other value as it is."""
    if not isinstance(value, Connection):
        return value
    if value.name is None:
        raise DeclarationError(f"{where} has no name, by which a TOML file could refer to it.")
    return value.name


def _refuse_secret(each: dataclasses.Field[Any], value: Any, connection: Connection, where: str) -> None:
    if each.metadata.get("url"):
        is_written_out = redact_url(value) != value
    elif isinstance(value, Mapping):
        is_written_out = any(is_secret_name(str(name)) and not _is_reference(text) for name, text in value.items())
    else:
        is_written_out = bool(each.metadata.get("secret")) and not _is_reference(value)
    if is_written_out:
        raise DeclarationError(
            f"{where}: the {each.name} of {connection.label} holds a secret that is written out.",
            hint=f'Put it into the environment: {each.name} = "{_example(each)}". Or name a registered connection.',
        )


def _is_reference(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\$\{[^}]*\}", value) is not None


def _example(each: dataclasses.Field[Any]) -> str:
    return "…://user:${PASSWORD}@host/…" if each.metadata.get("url") else f"${{{each.name.upper()}}}"


# ----------------------------------------------------------------------------------------------------------------- text


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return a table as lines: its values, then the tables in it. What is `None` or empty is left out."""
    entries = _without_empty(table)
    lines = [f"{_key(name)} = {_value(value)}" for name, value in entries.items() if not _is_table(value)]
    for name, value in entries.items():
        below = (*path, name)
        header = ".".join(map(_key, below))
        if isinstance(value, Mapping):
            # The tables in a table of nothing else say that it is there.
            only_tables = all(map(_is_table, _without_empty(value).values()))
            lines += [*([] if only_tables else ["", f"[{header}]"]), *_lines(value, below)]
        elif _is_table(value):
            for each in value:
                lines += ["", f"[[{header}]]", *_lines(each, below)]
    return lines


def _without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None and value not in ([], (), {})}


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and isinstance(value[0], Mapping))


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _string(value) if isinstance(value, str) else repr(value)


def _string(text: str) -> str:
    """Return a text in quotes; one of several lines as it reads."""
    if "\n" in text and all(each.isprintable() or each in "\n\t" for each in text):
        escaped = text.replace("\\", "\\\\").replace('"""', '""\\"')
        if escaped.endswith('"'):
            escaped = escaped[:-1] + '\\"'
        return f'"""\n{escaped}"""'
    # TOML takes the escapes of JSON, but not this character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
