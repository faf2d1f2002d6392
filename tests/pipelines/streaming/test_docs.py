"""The guide lists every option, every key of the TOML file and every word that is refused, and its file is one."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from documents import ROOT, blocks_of
from tools import docs_tables
from weft.pipelines.streaming.options import OPTIONS
from weft.pipelines.streaming.spec import LOAD_OPTIONS, Lookup, Source
from weft.pipelines.streaming.toml import parse
from weft.pipelines.streaming.toml_tables import TABLES
from weft.systems.endpoint import endpoint_options

DOCUMENT = ROOT / "docs" / "streaming.md"
GUIDE = DOCUMENT.read_text(encoding="utf-8")


def section(title: str) -> str:
    return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def words_of(text: str) -> set[str]:
    return set(re.findall(r"`\[*([\w.]+)\]*`", text))


@pytest.mark.parametrize("file", docs_tables.files(), ids=lambda file: file.name)
def test_tables_and_schema_are_those_of_the_options(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == docs_tables.files()[file], "Write it again: make docs"


def test_every_option_in_its_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section("Options"), re.M)
    assert rows == list(OPTIONS)


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Sources", {each.name for each in fields(Source)} - {"options"}),
        ("Targets", {"connection", "table", "prefix", "stream", "mode", "primary_key", *LOAD_OPTIONS}),
        ("Files", set(endpoint_options())),
        ("SQL, lookups, UDFs", {each.name for each in fields(Lookup)}),
        ("The TOML file", {key for table in TABLES.values() for key in table} - {"connection", "kind"}),
    ],
)
def test_every_name(title: str, names: set[str]) -> None:
    assert names - words_of(section(title)) == set()


@pytest.mark.usefixtures("local")
def test_the_file_of_the_guide() -> None:
    (file,) = (block.text for block in blocks_of(DOCUMENT) if block.file == "pipeline.toml")
    assert parse(file).name == "clicks_to_wh"
