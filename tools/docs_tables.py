"""What docs/ has of the options in src/: the tables of its pages and docs/streaming.schema.json.

`make docs` writes them; tests/pipelines/streaming/test_docs.py compares them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.options import Option, options_of
from weft.pipelines.models import OPTIONS as MODEL_OPTIONS
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.json_schema import text as schema_text
from weft.pipelines.streaming.options import OPTIONS
from weft.pipelines.streaming.spec import (
    LOAD_OPTIONS,
    LOOKUP_OPTIONS,
    SOURCE_OPTIONS,
    TARGET_OPTIONS,
    StreamingPipeline,
)
from weft.pipelines.streaming.windows import Aggregation, StateStore, Watermark, Window

DOCS = Path(__file__).parents[1] / "docs"
TABLES = {
    "option": OPTIONS,
    "`weft.Source(…)`": SOURCE_OPTIONS,
    "`weft.Target(…)`": {**TARGET_OPTIONS, **LOAD_OPTIONS},
    "`weft.Lookup(…)`": LOOKUP_OPTIONS,
    "`@weft.model(…)`": MODEL_OPTIONS,
    "`weft.Window(…)`": options_of(Window),
    "`weft.Join(…)`": options_of(Join),
    "`weft.CDC(…)`": options_of(CDC),
    "`weft.Aggregation(…)`": options_of(Aggregation),
    "`weft.Watermark(…)`": options_of(Watermark),
    "`weft.StateStore(…)`": options_of(StateStore),
}
"""The options of each table in the docs, by the title of its first column."""
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(StreamingPipeline)}


def table(title: str, options: Mapping[str, Option]) -> str:
    """Return options as a table of Markdown."""
    lines = [f"| {title} | says | default |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {each.description} | {_default(each)} |" for name, each in options.items()]
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def _default(option: Option) -> str:
    value: Any = _DEFAULTS.get(option.field) if option.value is None else option.value
    if option.default is not None or not isinstance(value, str | int | float):
        return option.default or ""
    shown = option.show(value)
    return f"`{shown}`" if isinstance(shown, str) else str(shown)


def files() -> dict[Path, str]:
    """Return the text that each of these files has, its tables as the options say them."""
    pages = {}
    for file in (DOCS / "streaming.md", DOCS / "windows.md", DOCS / "joins.md", DOCS / "cdc.md", DOCS / "models.md"):
        page = file.read_text(encoding="utf-8")
        for title, options in TABLES.items():
            old = re.compile(rf"^\| {re.escape(title)} \| says \| default \|\n(\|.*\n)+", re.MULTILINE)
            page = old.sub(table(title, options).replace("\\", r"\\"), page)
        pages[file] = page
    return {**pages, DOCS / "streaming.schema.json": schema_text()}


if __name__ == "__main__":
    for file, content in files().items():
        file.write_text(content, encoding="utf-8")
