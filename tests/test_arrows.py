"""Imports between the packages of weft point one way, as docs/architecture.md draws them, and no modules import each
other in a ring. Imports inside functions count; those for type checkers alone do not."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import weft
from weft.systems.base import systems

ROOT = Path(weft.__file__).parent
# They name every connection for users; and a dialect is of one database.
EXEMPT = {ROOT / "__init__.py", ROOT / "connections.py", *(ROOT / "normalize" / "dialects").glob("*.py")}
# From the top down: a package imports what stands below it, or in its own row itself alone.
ROWS = [
    {"__init__", "__main__"},
    {"cli"},
    {"server", "streaming", "testing"},
    {"operate", "dataframes"},
    {"engine"},
    {"expectations", "transforms", "config", "patterns"},
    {"pipelines", "consumers", "connections"},
    {"streams"},
    {"project"},
    {"normalize", "udfs"},
    {"systems"},
    {"spark_support"},
    {"types"},
    {"column_types"},
    {"columns", "options", "settings"},
    {"errors", "hooks", "tracing"},
]
RANKS = {name: number for number, row in enumerate(ROWS) for name in row}


def _module_name(file: Path) -> str:
    return ".".join(("weft", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


FILES = {_module_name(file): file for file in ROOT.rglob("*.py")}


def test_arrows_point_one_way() -> None:
    upwards = {
        (module, imported)
        for module in FILES
        for imported in _imports(module)
        if _package(module) != _package(imported) and RANKS[_package(module)] >= RANKS[_package(imported)]
    }
    assert upwards == set()


def test_no_ring_of_imports() -> None:
    """A ring is a set of modules each of which reaches every other one by imports."""
    below = {module: _reached_from(module) for module in FILES}
    rings = {frozenset(other for other in below[module] if module in below[other]) for module in FILES}
    assert sorted(map(sorted, filter(None, rings))) == []


def test_no_text_names_a_broker() -> None:
    """Also not in errors and descriptions: a broker that is added has no place there."""
    names = re.compile("rabbit|pika|pub/?sub|kinesis", re.IGNORECASE)
    files = set(ROOT.rglob("*.py")) - set((ROOT / "systems").rglob("*.py")) - EXEMPT
    assert [file for file in files if names.search(file.read_text())] == []


def test_only_its_folder_knows_a_system() -> None:
    """What is of one system is in its folder: the others call capabilities."""
    folders = {each.parent.name for each in (ROOT / "systems").glob("*/connection.py")}
    assert {"kafka", "delta", "redis", "sqlite"} <= folders
    kinds = set(systems())
    for file in set(ROOT.rglob("*.py")) - set((ROOT / "systems").rglob("*.py")) - EXEMPT:
        for node in ast.walk(_parsed(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.systems"):
                named = {*str(node.module).split(".")[2:3], *(alias.name for alias in node.names)}
                assert not named & folders, f"{file}:{node.lineno} imports a system's own module"
            asks = isinstance(node, ast.Compare) or (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            )
            if asks and any(isinstance(each, ast.Constant) and each.value in kinds for each in ast.walk(node)):
                words = ast.unparse(node)
                assert "kind" not in words and "dialect" not in words, (
                    f"{file}:{node.lineno} asks for a system's kind or dialect"
                )


def _package(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def _reached_from(module: str) -> set[str]:
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        new = _imports(waiting.pop()) - reached
        reached |= new
        waiting += new
    return reached


def _parsed(file: Path) -> ast.Module:
    """Parse a file each time it is asked for: to collect garbage beside all of these trees takes longer."""
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _imports(module: str) -> set[str]:
    """The modules of weft that a module imports when it runs, at its beginning or later."""
    return set(_imports_in(_parsed(FILES[module]))) - {module}


def _imports_in(node: ast.AST) -> Iterator[str]:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.If) and getattr(each.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(each, ast.Import):
            yield from (alias.name for alias in each.names if alias.name in FILES)
        elif isinstance(each, ast.ImportFrom) and each.module in FILES:
            for alias in each.names:
                submodule = f"{each.module}.{alias.name}"
                yield submodule if submodule in FILES else str(each.module)
        if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):  # no expression has an import
            yield from _imports_in(each)
