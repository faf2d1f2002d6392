"""A value may have 8 MiB, whether it has a column or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import weft
from weft.testing import MemoryProject
from weft.types import MAX_VALUE_BYTES


@pytest.fixture
def memory() -> Iterator[MemoryProject]:
    with weft.testing.project() as inner:

        @weft.stream(fields={"text": "string", "number": "int64"})
        def notes() -> None: ...

        yield inner


def test_the_longest_is_stored(memory: MemoryProject) -> None:
    weft.publish_sync("notes", {"text": "x" * MAX_VALUE_BYTES})
    assert memory.events("notes")[0]["text"] == "x" * MAX_VALUE_BYTES


@pytest.mark.parametrize("field", ["text", "number", "undeclared"])
def test_a_longer_one_is_refused(memory: MemoryProject, field: str) -> None:
    with pytest.raises(weft.SchemaError, match="bytes long") as caught:
        weft.publish_sync("notes", [{"text": "a"}, {field: "x" * (MAX_VALUE_BYTES + 1)}])
    assert (caught.value.index, caught.value.field) == (1, field)
    assert memory.events("notes") == []


def test_what_has_no_column_is_measured_together(memory: MemoryProject) -> None:
    half = "x" * (MAX_VALUE_BYTES * 2 // 3)
    with pytest.raises(weft.SchemaError, match="bytes long"):
        weft.publish_sync("notes", {"number": half, "1": half})
    assert memory.events("notes") == []
