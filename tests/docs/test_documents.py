"""What the documents say is true: every example runs, every link leads somewhere, every copy equals its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from documents import DOCUMENTS, ROOT, Reader, blocks_of
from weft.project import Project, use
from weft.streams import close
from weft.types import BASES, FieldType

# Their examples use Spark, those of `sh` blocks too.
IN_SPARK = {
    "README.md",
    "cdc.md",
    "dead-letters.md",
    "files-and-delta.md",
    "joins.md",
    "operating-streams.md",
    "sql.md",
    "windows.md",
}

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: str(each.relative_to(ROOT)))


@pytest.fixture
def own_project() -> Iterator[Project]:
    with use(Project()) as fresh:
        yield fresh
        close(fresh)


@pytest.mark.parametrize(
    "document",
    [pytest.param(each, marks=[pytest.mark.spark] if each.name in IN_SPARK else []) for each in DOCUMENTS],
    ids=lambda each: str(each.relative_to(ROOT)),
)
def test_examples_run(document: Path, own_project: Project) -> None:
    Reader(document).run()


@by_name
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        file = document if not path else (document.parent / path)
        assert file.exists(), f"{document.name} links to {target}"
        if heading:
            assert heading in _anchors(file), f"{document.name} links to {target}"


def _anchors(document: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


def test_the_readme_shows_the_quickstart() -> None:
    shown = {block.file: block.text for block in blocks_of(ROOT / "README.md") if block.file}
    assert shown["quickstart.py"] == (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")


def test_the_architecture_shows_the_log_protocol_whole() -> None:
    source = (ROOT / "src" / "weft" / "systems" / "log.py").read_text(encoding="utf-8")
    protocol = source[source.index("@dataclass") :]
    shown = [block.text for block in blocks_of(ROOT / "docs" / "architecture.md")]
    assert protocol in shown, "copy src/weft/systems/log.py, from its first @dataclass on, into docs/architecture.md"


def test_the_architecture_names_what_there_is() -> None:
    files = [each for folder in ("src", "tests", "tools") for each in (ROOT / folder).rglob("*.py")]
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"((?:`\w+`(?:, | and | or ))*`\w+`) (?:in|of) `([\w/]+\.py)`", text)
    assert named
    for names, path in named:
        sources = [each.read_text(encoding="utf-8") for each in files if str(each).endswith(f"/{path}")]
        for name in re.findall(r"\w+", re.sub("` (and|or) `", "` `", names)):
            assert any(re.search(rf"\b{name}\b", each) for each in sources), f"{name} is not in {path}"


def test_the_guide_to_systems_shows_the_whole_package() -> None:
    package = ROOT / "tests" / "third_party" / "weft_spool"
    files = [each for each in package.rglob("*") if each.suffix in (".py", ".toml")]
    shown = {block.file: block.text for block in blocks_of(ROOT / "docs" / "systems.md") if block.file}
    assert shown == {str(each.relative_to(package)): each.read_text(encoding="utf-8") for each in files}


def test_the_guide_lists_every_option_of_stream() -> None:
    guide = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", guide, re.M)
    tree = ast.parse((ROOT / "src" / "weft" / "streams" / "declare.py").read_text(encoding="utf-8"))
    declared = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "stream" and not node.decorator_list
    )
    options = [each.arg for each in (*declared.args.args, *declared.args.kwonlyargs)]
    assert [row for row in rows if row in options] == options


def test_the_guide_lists_every_type_and_how_it_is_stored() -> None:
    guide = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
    for base in BASES:
        name = "decimal(p,s)" if base == "decimal" else base
        kind = FieldType(base, *((10, 2) if base == "decimal" else ()))
        for dialect in ("sqlite", "postgres", "mysql"):
            stored = kind.sql(dialect).partition(" CHARACTER")[0].partition(" COMMENT")[0].replace("10,2", "p,s")
            assert re.search(rf"^\| `{re.escape(name)}` \|.*`{re.escape(stored)}`", guide, re.M), f"{name}: {stored}"


def test_every_public_name_is_documented() -> None:
    texts = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert [name for name in weft.__all__ if not re.search(rf"\b{name}\b", texts)] == []
