"""The file of `weft consume pipeline.toml`: read into the specification; every error names file, table and key."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.errors import DeclarationError, NotFoundError, SettingsError, nearest
from weft.options import Option, errors_at, one_of, options_of
from weft.pipelines.streaming.declare import DEAD_LETTERS, assemble, connection_fields
from weft.pipelines.streaming.endpoints import checked, connection_of
from weft.pipelines.streaming.options import OPTIONS
from weft.pipelines.streaming.spec import LOAD_OPTIONS, SOURCE_OPTIONS, Source, StreamingPipeline, Target
from weft.pipelines.streaming.toml_tables import TABLES, WORDS, structure_of
from weft.pipelines.streaming.toml_text import to_toml as to_toml
from weft.pipelines.streaming.windows import NO_CONNECTION, StateStore
from weft.project import build_connection, short_path
from weft.settings import parse_toml
from weft.systems.base import Connection, system_for, systems
from weft.systems.endpoint import endpoint_of, endpoint_options, owner_of


def read(path: str | os.PathLike[str]) -> StreamingPipeline:
    """Return the pipeline that a file declares."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        close = nearest(file.name, [each.name for each in file.parent.glob("*.toml")])
        hint = f"Did you mean {str(file.with_name(close))!r}?" if close else None
        raise NotFoundError(f"There is no file {str(file)!r}.", hint=hint) from None
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{file} is not UTF-8 text.") from None
    return parse(text, short_path(str(file)))


def parse(text: str, shown: str = "pipeline.toml") -> StreamingPipeline:
    """Return the pipeline that a text declares; errors call the file as it is `shown`."""
    file = _Table(_parsed(text, shown), "pipeline", shown)
    file.check()
    sources = file.one_or_several("source")
    targets = file.one_or_several("target")
    pipeline = assemble(
        {
            **_options(file),
            "sources": [_source(each, file) for each in sources],
            "targets": [target for each in targets for target in _targets(each, _routed(file))],
            **_dead_letters(file, sources),
        },
        shown,
        WORDS,
    )
    return replace(pipeline, declared_at=shown)


def _options(file: _Table) -> dict[str, Any]:
    """Return the options but for those of sources, targets and dead letters."""
    options: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.key is None or option.key.startswith(("source", "target", "dead_letter")):
            continue
        section, _, key = option.key.rpartition(".")
        table = file.inside(section) if section else file
        if section:
            table.check()
        if key in table.values:
            options[name] = _value(option, table, key)
    return options


def _value(option: Option, table: _Table, key: str) -> Any:
    """Return what stands under a key: a plain value, or what a table, an array of tables or named tables declare."""
    structure = structure_of(option.type)
    if structure is None:
        return table.values[key]
    kind, cls = structure
    if kind == "named":
        return {name: _structure(cls, each) for name, each in table.named(key)}
    if kind == "tables":
        return [_structure(cls, each) for each in table.several(key)]
    return _structure(cls, table.inside(key))


def _structure(cls: type, table: _Table) -> Any:
    options = options_of(cls)
    if cls is StateStore:
        kind = table.values.get("kind")
        table.check(() if kind in (None, *NO_CONNECTION) else connection_fields(kind, table.where))
        with errors_at(table.where):
            return StateStore(**table.values)
    values: dict[str, Any] = {"connection": _connection(table)} if "connection" in options else {}
    if not values:
        table.check()
    for name, option in options.items():
        key = option.key or name
        if key in table.values and name != "connection":
            values[name] = _value(option, table, key)
    with errors_at(table.where):
        return cls(**values)


def _parsed(text: str, shown: str) -> dict[str, Any]:
    try:
        return parse_toml(text, shown)
    except SettingsError as error:
        last = f"at line {text.rstrip().count(chr(10)) + 1}, the last one"
        raise SettingsError(error.what.replace("at end of document", last), hint=error.hint) from None


@dataclass
class _Table:
    """A table of the file: what it holds, which keys it may have, and how errors call it."""

    values: Mapping[str, Any]
    kind: str
    """The name of the table in `TABLES`."""
    file: str
    path: str = ""
    label: str = ""
    """The path in the brackets that the file has, and a number where several tables have this path."""

    @property
    def where(self) -> str:
        """What an error about it begins with."""
        return f"{self.file}: {self.label}" if self.label else self.file

    def check(self, more: tuple[str, ...] = ()) -> None:
        """Raise for a key that there is not, a value that does not fit, and a key that is missing."""
        known = TABLES[self.kind]
        for name, value in self.values.items():
            if name in more:
                continue
            if name not in known:
                raise DeclarationError(f"{self.where}: unknown key {name!r}.", hint=self._meant(name, more))
            key = known[name]
            if not key.fits(value):
                # Show the type, not the value: a value in the wrong place may be a URL with a password.
                kind = "an empty text" if value == "" else _TYPES[type(value)]
                if "number" in key.wanted and type(value) in (int, float):
                    kind = str(value)
                raise DeclarationError(f"{self.where}: {name} must be {key.wanted}, not {kind}.")
            if key.choices:
                one_of(value, key.choices, name, self.where)
        for name, key in known.items():
            if key.needed and name not in self.values:
                raise DeclarationError(f"{self.where}: {name} is missing.", hint=key.description)

    def _meant(self, name: str, more: tuple[str, ...]) -> str:
        known = (*TABLES[self.kind], *more)
        if close := nearest(name, known):
            return f"Did you mean {close!r}?"
        if "kind" in known and "kind" not in self.values:
            owners = [kind for kind in systems() if name in connection_fields(kind, self.where)]
            if owners:
                return f"It is a field of a connection, whose kind is said too: kind = {owners[0]!r}."
        return f"Keys: {', '.join(known)}."

    def only(self, *names: str) -> dict[str, Any]:
        """Return the values under these keys."""
        return {name: self.values[name] for name in names if name in self.values}

    def inside(self, key: str) -> _Table:
        """Return the table under a key; an empty one where there is none."""
        path = self._path(key)
        return _Table(self.values.get(key, {}), TABLES[self.kind][key].inside or key, self.file, path, f"[{path}]")

    def several(self, key: str) -> list[_Table]:
        """Return the tables of the array under a key."""
        path, listed = self._path(key), self.values[key]
        numbers = [f" no. {number}" if len(listed) > 1 else "" for number in range(1, len(listed) + 1)]
        return [
            _Table(each, TABLES[self.kind][key].inside or key, self.file, path, f"[[{path}]]{number}")
            for each, number in zip(listed, numbers, strict=True)
        ]

    def one_or_several(self, key: str) -> list[_Table]:
        """Return the table under a key, or those of the array that is called by its plural."""
        plural = f"{key}s"
        if (key in self.values) == (plural in self.values):
            said = "both" if key in self.values else "neither"
            raise DeclarationError(f"{self.where}: [{key}] or [[{plural}]] is needed, and there is {said}.")
        return [self.inside(key)] if key in self.values else self.several(plural)

    def named(self, key: str) -> Iterator[tuple[str, _Table]]:
        """Yield the tables under a key, by their names."""
        for name, each in self.values.get(key, {}).items():
            path = f"{self._path(key)}.{name}"
            yield name, _Table(each, TABLES[self.kind][key].inside or key, self.file, path, f"[{path}]")

    def _path(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


_TYPES: Mapping[type, str] = defaultdict(
    lambda: "a time",
    {str: "a text", int: "a number", float: "a number", bool: "a flag", list: "a list", dict: "a table"},
)


# --------------------------------------------------------------------------------------------------------------- parts


def _source(table: _Table, file: _Table) -> Source:
    connection = _connection(table)
    query = file.values.get("source_query")
    if query is not None and ("sources" in file.values or "query" in table.values):
        raise DeclarationError(
            f"{file.where}: source_query is for [source] without a query.", hint="Leave source_query out."
        )
    query = table.values.get("query", query)
    if query is None and (handle := connection_of(connection)) is not None:
        query = endpoint_of(handle).default_query(handle)
    if query is None:
        raise DeclarationError(
            f"{table.where}: query is missing.",
            hint='The topic, prefix, table or stream that is read: query = "orders".',
        )
    own = [name for name in SOURCE_OPTIONS if name not in ("connection", "query")]
    options = {**table.only(*own), **_endpoint_options(table, connection)}
    with errors_at(table.where):
        return checked(Source(connection=connection, query=query, **options))


def _routed(file: _Table) -> list[str]:
    """Return the tables that `[transform.cdc]` leads changes to."""
    return list(file.inside("transform").inside("cdc").values.get("route", {}).values())


def _targets(table: _Table, routed: list[str]) -> Iterator[Target]:
    """One target, or one for each of `[[target.table]]`, or of the tables to which changes are led."""
    connection = _connection(table)
    options = {**table.only("stream", "mode", *LOAD_OPTIONS), **_endpoint_options(table, connection)}
    if not _is_of_connection("prefix", table):
        options |= table.only("prefix")
    places: list[_Table | None] = [None]
    if isinstance(table.values.get("table"), str):
        options |= table.only("table")
    elif "table" in table.values:
        is_array = isinstance(table.values["table"], list)
        places = [*table.several("table")] if is_array else [table.inside("table")]
    has_place = any(each in table.values for each in ("table", "prefix", "stream"))
    named: list[dict[str, Any]] = [{}] if has_place or not routed else [{"table": each} for each in routed]
    for place, name in ((place, name) for place in places for name in named):
        key = table.values.get("primary_key", ())
        if place is not None:
            place.check()
            if "primary_key" in place.values and "primary_key" in table.values:
                raise DeclarationError(f"{place.where}: primary_key is said here and in the table above.")
            key = place.values.get("primary_key", key)
            options["table"] = (place.values.get("schema"), place.values["name"])
        with errors_at(table.where):
            yield checked(Target(connection=connection, primary_key=key, **options, **name))


def _dead_letters(file: _Table, sources: list[_Table]) -> dict[str, Any]:
    options = tuple(f"dead_letter_{each}" for each in DEAD_LETTERS)
    values = file.only(*options)
    topics = {each.values["dead_letter_topic"] for each in (file, *sources) if "dead_letter_topic" in each.values}
    if len(topics) > 1:
        raise DeclarationError(f"{file.where}: dead_letter_topic is said more than once, and differently.")
    values |= {"dead_letter_topic": topics.pop()} if topics else {}
    if isinstance(values.get("dead_letter_table"), dict):
        table = file.inside("dead_letter_table")
        table.check()
        values["dead_letter_table"] = (table.values.get("schema"), table.values["name"])
    connection = file.values.get("dead_letter_connection")
    if isinstance(connection, dict):
        connection = _connection(file.inside("dead_letter_connection"))
    return {**values, "dead_letter_connection": connection}


def _connection(table: _Table) -> str | Connection | None:
    """Return the connection that a table names or describes."""
    kind = table.values.get("kind")
    if kind is None:
        table.check(tuple(endpoint_options()) if table.kind in ("source", "target") else ())
        connection: str | None = table.values.get("connection")
        return connection
    own = connection_fields(kind, table.where)
    table.check((*own, *system_for(kind).load_endpoint().options))
    if "connection" in table.values:
        raise DeclarationError(
            f"{table.where}: connection names one that is known, kind describes one.", hint="Leave one of them out."
        )
    values = {name: value for name, value in table.values.items() if _is_of_connection(name, table)}
    return build_connection(values.pop("name", None), {"kind": kind, **values}, table.where)


def _is_of_connection(name: str, table: _Table) -> bool:
    """Return whether a key is a field of the connection that the table describes."""
    kind = table.values.get("kind")
    if kind is None or name not in connection_fields(kind, table.where):
        return False
    # The prefix of a connection is the folder of its tables; without a table it is where the rows go.
    return name != "prefix" or table.kind != "target" or "table" in table.values


def _endpoint_options(table: _Table, connection: str | Connection | None) -> dict[str, Any]:
    """Return what a source or target says by name besides its own options, as far as its connection does not say it."""
    of_connection = {each.name for each in fields(connection)} if isinstance(connection, Connection) else set()
    options = table.only(*(name for name in endpoint_options() if name not in of_connection))
    reading = table.inside("read_options")
    reading.check()
    for name, value in reading.values.items():
        option = f"{name}_read_options"
        if option in table.values:
            raise DeclarationError(f"{table.where}: {option} and [….read_options.{name}] say the same.")
        with errors_at(reading.where):
            checked = owner_of(option).nested_option(option, value, connection_of(connection), table.values)
        if checked is not None:
            options[option] = checked
    return options
