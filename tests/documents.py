"""The code blocks of the documents, and how each kind is run.

| block | what happens |
| --- | --- |
| `python` | run; blocks of one document share their names, and `await` works |
| `python FILE` | written to FILE in the project's folder and run |
| `sh` | run by bash in the project's folder; `weft` and `python` are those of `warm_python`, with the test's Spark |
| `output` | must be what the block before it printed |
| `toml FILE` | written to FILE; `toml` alone must be valid |
| `json` | must be valid |
| `py`, `console`, `text`, `sql`, none | shown only: signatures, and commands of a user's machine |
| `py FILE` | written to FILE, for an `sh` block to run |
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm_python
from lent_session import lent_session

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN_ONLY = {"py", "console", "text", "sql", ""}


@dataclass
class Block:
    """A fenced block: its language, the file it is written to, its text and the line of the document it begins on."""

    language: str
    file: str
    text: str
    line: int


def blocks_of(document: Path) -> list[Block]:
    """Every fenced block, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.M | re.S):
        language, _, file = match[2].strip().partition(" ")
        body = re.sub(f"^{match[1]}", "", match[3], flags=re.M)
        found.append(Block(language, file, body, text.count("\n", 0, match.start()) + 1))
    return found


class Reader:
    """Does with a document what its reader would, in the current folder."""

    def __init__(self, document: Path) -> None:
        self.document = document
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed: str | None = None

    def run(self) -> None:
        """Run every block; an error names the document and the line."""
        with asyncio.Runner() as runner:
            for block in blocks_of(self.document):
                where = f"{self.document.name}, line {block.line}"
                assert block.language in SHOWN_ONLY or hasattr(self, f"_{block.language}"), (
                    f"{where}: what kind of block is it? See {__file__}"
                )
                if block.file:
                    Path(block.file).parent.mkdir(parents=True, exist_ok=True)
                    Path(block.file).write_text(block.text, encoding="utf-8")
                if block.language in SHOWN_ONLY:
                    continue
                try:
                    getattr(self, f"_{block.language}")(block, runner)
                except BaseException as error:
                    error.add_note(f"in {where}")
                    raise

    def _python(self, block: Block, runner: asyncio.Runner) -> None:
        # Blank lines in front make tracebacks show the document's own line numbers.
        code = compile(
            "\n" * block.line + block.text,
            str(self.document),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )

        async def run() -> None:
            waiting = eval(code, self.names)
            if waiting is not None:
                await waiting

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runner.run(asyncio.wait_for(run(), 60))
        self.printed = printed.getvalue()

    def _sh(self, block: Block, _: asyncio.Runner) -> None:
        # Python's imports would take most of the time of a command.
        path = os.pathsep.join([os.path.dirname(warm_python.launcher()), os.environ["PATH"]])
        with lent_session() as variables:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                env={**os.environ, "PATH": path, **variables},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        self.printed = done.stdout

    def _output(self, block: Block, _: asyncio.Runner) -> None:
        assert self.printed is not None
        # "…" stands for what differs from run to run.
        pattern = ".*".join(map(re.escape, block.text.rstrip().split("…")))
        assert re.fullmatch(pattern, self.printed.rstrip()), (
            f"printed:\n{self.printed}\nthe document says:\n{block.text}"
        )

    def _toml(self, block: Block, _: asyncio.Runner) -> None:
        tomllib.loads(block.text)

    def _json(self, block: Block, _: asyncio.Runner) -> None:
        json.loads(block.text)
