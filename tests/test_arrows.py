"""Imports between the packages of weft point one way, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weft
from weft.systems.base import systems

ROOT = Path(weft.__file__).parent
# From the top down: a package imports what stands below it, or in its own row itself alone.
ROWS = [
    {"__init__", "__main__"},
    {"cli"},
    {"server", "streaming", "testing"},
    {"operate", "dataframes"},
    {"engine"},
    {"expectations", "transforms"},
    {"pipelines", "consumers", "connections"},
    {"streams"},
    {"project"},
    {"normalize", "udfs"},
    {"systems"},
    {"spark_support"},
    {"types"},
    {"column_types"},
    {"columns", "settings"},
    {"errors"},
]
RANKS = {name: number for number, row in enumerate(ROWS) for name in row}
# A connection opens its own consumer: only when somebody asks for one is that imported.
UPWARDS = {("systems/base.py", "consumers")}


def test_arrows_point_one_way() -> None:
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in ROOT.rglob("*.py")
        for name in _imported(ast.parse(file.read_text(encoding="utf-8")))
        if (own := file.relative_to(ROOT).parts[0].removesuffix(".py")) != name and RANKS[own] >= RANKS[name]
    }
    assert found == UPWARDS


def test_the_engine_knows_no_system() -> None:
    """What is of one system is in its folder: the engine calls capabilities."""
    folders = {each.parent.name for each in (ROOT / "systems").glob("*/connection.py")}
    assert {"kafka", "delta", "redis", "sqlite"} <= folders
    kinds = set(systems())
    for file in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.systems"):
                named = {*str(node.module).split(".")[2:3], *(alias.name for alias in node.names)}
                assert not named & folders, f"{file}:{node.lineno} imports a system's own module"
            if isinstance(node, ast.Compare | ast.Call) and "kind" in ast.unparse(node):
                texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not texts & kinds, f"{file}:{node.lineno} asks for a system's kind"


def _imported(node: ast.AST) -> Iterator[str]:
    """The packages of weft that a module imports when it runs, at its beginning or later."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.If) and getattr(each.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(each, ast.ImportFrom) and each.module == "weft":
            yield from (alias.name for alias in each.names if alias.name in RANKS)
        elif isinstance(each, ast.ImportFrom) and (each.module or "").startswith("weft."):
            yield str(each.module).split(".")[1]
        yield from _imported(each)
