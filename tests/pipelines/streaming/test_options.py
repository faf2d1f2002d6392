"""A structure among the options is a table of the TOML file and of its JSON Schema, with nothing more said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from weft import DeclarationError
from weft.options import Option, options_of
from weft.pipelines.streaming import json_schema, options, toml, toml_tables
from weft.pipelines.streaming.toml_text import _structures

pytestmark = pytest.mark.usefixtures("local")


@dataclass(frozen=True, kw_only=True)
class Lateness:
    seconds: Annotated[int, Option("How late an event may come.")]


@dataclass(frozen=True, kw_only=True)
class Window:
    shape: Annotated[Literal["tumbling", "session"], Option("How windows follow each other.")] = "tumbling"
    lateness: Annotated[Lateness | None, Option("What becomes of late events.")] = None


class WithWindow(options.StreamingOptions, total=False):
    window: Annotated[Window | None, Option("The windows of the SQL.", key="transform.window")]


@pytest.fixture(autouse=True)
def option_with_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options.OPTIONS, "window", options_of(WithWindow)["window"])
    monkeypatch.delitem(options.LATER, "window")
    tables = toml_tables._tables()
    for module in (toml, json_schema):
        monkeypatch.setattr(module, "TABLES", tables)


def read(file: dict[str, Any]) -> Any:
    table = toml._Table(file, "pipeline", "pipeline.toml")
    return toml._options(table)["window"]


FILE = {"transform": {"window": {"shape": "session", "lateness": {"seconds": 5}}}}


def test_tables_in_tables_are_read_and_written() -> None:
    window = read(FILE)
    assert window == Window(shape="session", lateness=Lateness(seconds=5))
    assert _structures(window, "") == FILE["transform"]["window"]


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"shpe": "session"}, r"^pipeline\.toml: \[transform\.window\]: unknown key 'shpe'\.\n  Did you mean 'shape'"),
        ({"shape": "sesion"}, r"^pipeline\.toml: \[transform\.window\]: shape is 'sesion'\.\n  Did you mean 'session'"),
        (
            {"lateness": {"seconds": "5"}},
            r"\[transform\.window\.lateness\]: seconds must be a whole number .*, not a te",
        ),
    ],
)
def test_their_errors_name_table_and_key(window: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        read({"transform": {"window": window}})


def test_the_json_schema_has_them() -> None:
    tables = json_schema.schema()["$defs"]
    assert tables["transform"]["properties"]["window"]["$ref"] == "#/$defs/window"
    assert tables["window"]["properties"]["shape"]["enum"] == ["tumbling", "session"]
    assert tables["lateness"]["properties"]["seconds"]["type"] == "integer"
