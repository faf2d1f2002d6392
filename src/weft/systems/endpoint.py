"""What a streaming pipeline can read and write on one system, as far as it is known without opening a connection.

`System.endpoint` names a subclass of `Endpoint`. Its module is imported while pipelines are declared, so it loads
neither Spark nor a client library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from weft.errors import DeclarationError
from weft.systems.base import Connection, System, system_for, systems

Place = Literal["table", "prefix", "stream"]
LetterPlace = Literal["topic", "stream", "table", "path"]


class Endpoint:
    """What sources, targets and dead letters can be on the connections of one system."""

    is_source: bool = False
    limit: Literal["max_rows", "max_files"] = "max_rows"
    """The option that limits a batch of a source."""
    start_forms: ClassVar[Mapping[str, str]] = {"earliest|latest": "a start", r"\d+": "an offset"}
    """The values of `start` as regular expressions, each with what errors call it."""
    places: tuple[Place, ...] = ()
    """The options of a target that name where its rows go; none where no rows can be written."""
    prefix_is_table: bool = False
    """Whether the prefix of a target is the table of that path."""
    dead_letters: tuple[LetterPlace, ...] = ()
    """The options `dead_letter_…` that can name a place on this system."""
    options: ClassVar[Mapping[str, Any]] = {}
    """The options that sources and targets have on this system only, each with its type."""
    holds: str = ""
    """The noun for the options in errors: "files"."""

    def __init__(self, system: System) -> None:
        self.system = system

    def default_query(self, connection: Connection) -> str | None:
        """Return what a source reads that names nothing; `None` where it must name something."""
        return None

    def parse_start(self, start: str, connection: Connection, query: str) -> str:
        """Return `start` in the form that checkpoints keep, or raise `DeclarationError`."""
        if _matches(self, start) is None:
            forms = (_matches(each, start) for each in endpoints().values())
            form = next(filter(None, forms), "unknown")
            raise DeclarationError(
                f"start={start!r} is {form}, and this is {connection.any_such}.",
                hint="One number is an offset, or a version of Delta.",
            )
        return start

    def check_options(self, connection: Connection, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a source or target as they are kept, or raise `DeclarationError`."""
        for name in options:
            if name not in self.options:
                raise DeclarationError(
                    f"{name} is an option of {owner_of(name).holds}, and this is {connection.any_such}."
                )
        return options

    def why_no_columns(self, connection: Connection) -> str | None:
        """Return why a source cannot declare the types of its columns; `None` where it can."""
        return f"{connection.any_such} has types of its own"

    def with_options(self, connection: Connection, options: Mapping[str, Any]) -> Connection:
        """Return the connection with the options of a source or target in the place of its own."""
        return connection

    def nested_option(self, name: str, value: Any, connection: Connection | None, options: Mapping[str, Any]) -> Any:
        """Return the checked value of an option that is a table of a TOML file; `None` where it does not apply."""
        return value


class BrokerEndpoint(Endpoint):
    """A broker: its streams of messages are sources, targets and places of dead letters."""

    is_source = True
    places = ("stream",)
    dead_letters = ("topic",)
    noun: ClassVar[str] = "messages"

    def why_no_columns(self, connection: Any) -> str | None:
        """Return the reason for messages that are not parsed."""
        return None if connection.payload_format == "json" else f"{self.noun} that are raw bytes are not parsed"


class StoreEndpoint(Endpoint):
    """A system that names no endpoint: it has streams where it holds a log, tables where it holds tables."""

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self.is_source = system.log is not None
        tables: tuple[Place, ...] = ("table",) if system.tables is not None else ()
        self.places = (*tables, "stream") if self.is_source else tables
        self.dead_letters = tuple(each for each in self.places if each != "prefix")


def endpoint_of(connection: Connection) -> Endpoint:
    """Return the endpoint of a connection's system."""
    endpoint: Endpoint = system_for(connection.kind).load_endpoint()
    return endpoint


def endpoints() -> dict[str, Endpoint]:
    """Return the endpoint of every installed system by its kind."""
    loaded: dict[str, Endpoint] = {}
    for kind, system in systems().items():
        try:
            loaded[kind] = system.load_endpoint()
        except Exception:
            # A broken package must not keep pipelines on other systems from being declared. A connection of its own
            # kind raises the error.
            continue
    return loaded


def endpoint_options() -> dict[str, Any]:
    """Return what sources and targets take by name on any system, each with its type."""
    return {name: hint for each in endpoints().values() for name, hint in each.options.items()}


def owner_of(option: str) -> Endpoint:
    """Return the endpoint that has an option."""
    return next(each for each in endpoints().values() if option in each.options)


def is_start(text: str) -> bool:
    """Return whether a source of any system could start there."""
    return any(_matches(each, text) for each in endpoints().values())


def _matches(endpoint: Endpoint, start: str) -> str | None:
    """Return what errors call a start that an endpoint has."""
    forms = endpoint.start_forms.items()
    return next((noun for pattern, noun in forms if re.fullmatch(pattern, start)), None)
