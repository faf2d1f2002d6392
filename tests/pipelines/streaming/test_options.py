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
class Pane:
    shape: Annotated[Literal["tumbling", "session"], Option("How panes follow each other.")] = "tumbling"
    lateness: Annotated[Lateness | None, Option("What becomes of late events.")] = None


class WithPane(options.StreamingOptions, total=False):
    pane: Annotated[Pane | None, Option("The panes of the SQL.", key="transform.pane")]


@pytest.fixture(autouse=True)
def option_with_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options.OPTIONS, "pane", options_of(WithPane)["pane"])
    tables = toml_tables._tables()
    for module in (toml, json_schema):
        monkeypatch.setattr(module, "TABLES", tables)


def read(file: dict[str, Any]) -> Any:
    table = toml._Table(file, "pipeline", "pipeline.toml")
    return toml._options(table)["pane"]


FILE = {"transform": {"pane": {"shape": "session", "lateness": {"seconds": 5}}}}


def test_tables_in_tables_are_read_and_written() -> None:
    pane = read(FILE)
    assert pane == Pane(shape="session", lateness=Lateness(seconds=5))
    assert _structures(pane, "") == FILE["transform"]["pane"]


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"shpe": "session"}, r"^pipeline\.toml: \[transform\.pane\]: unknown key 'shpe'\.\n  Did you mean 'shape'"),
        ({"shape": "sesion"}, r"^pipeline\.toml: \[transform\.pane\]: shape is 'sesion'\.\n  Did you mean 'session'"),
        (
            {"lateness": {"seconds": "5"}},
            r"\[transform\.pane\.lateness\]: seconds must be a whole number .*, not a te",
        ),
    ],
)
def test_their_errors_name_table_and_key(window: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        read({"transform": {"pane": window}})


def test_the_json_schema_has_them() -> None:
    tables = json_schema.schema()["$defs"]
    assert tables["transform"]["properties"]["pane"]["$ref"] == "#/$defs/pane"
    assert tables["pane"]["properties"]["shape"]["enum"] == ["tumbling", "session"]
    assert tables["lateness"]["properties"]["seconds"]["type"] == "integer"
