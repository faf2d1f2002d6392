"""Public functions have real signatures: a type checker takes what they take, and refuses a wrong name or type."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from mypy import api

from weft.operate.run_options import RunKeywords, Running
from weft.pipelines.streaming.options import FIELD_OPTIONS, OPTIONS
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.systems.file_options import FileKeywords
from weft.systems.load import Load, LoadOptions
from weft.systems.objects.connection import FileFields
from weft.systems.objects.options import FileOptions

ROOT = Path(__file__).parents[1]
TYPED = Path(__file__).with_name("typed_options.py")


def test_mypy_refuses_exactly_these_lines() -> None:
    # The cache of the check of all types, which is done long before: without it mypy reads all of Weft.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    out, trouble, _ = api.run([*options, str(TYPED)])
    errors = {int(line) for line in re.findall(rf"{re.escape(TYPED.name)}:(\d+): error", out)}
    lines = TYPED.read_text(encoding="utf-8").splitlines()
    refused = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert (errors, trouble) == (refused, ""), out


def test_keywords_are_the_fields_behind_them() -> None:
    assert set(RunKeywords.__annotations__) == {each.name for each in fields(Running)}
    assert list(FileKeywords.__annotations__) == [each.name for each in fields(FileOptions)]
    assert set(FileKeywords.__annotations__) <= {each.name for each in fields(FileFields)}
    assert set(LoadOptions.__annotations__) <= {each.name for each in fields(Load)}


def test_every_field_of_a_streaming_pipeline_is_said_by_an_option() -> None:
    names = {each.name for each in fields(StreamingPipeline)}
    assert names - {each.field for each in FIELD_OPTIONS.values()} == {
        "sources",
        "targets",
        "dead_letters",
        "declared_at",
        "origin",
    }
    # An option without a field would be accepted, and then ignored, but for these: they make sources and targets.
    assert OPTIONS.keys() - FIELD_OPTIONS.keys() == {
        *("source", "source_kind", "source_query", "sources"),
        *("target", "target_table", "target_primary_key", "targets", "mode", "keys", "deduplicate_by"),
        *(f"dead_letter_{each}" for each in ("connection", "path", "stream", "table", "topic")),
    }
    assert all(option.description.endswith(".") for option in OPTIONS.values())
