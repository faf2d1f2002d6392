"""Which databases a test has in `make test`: one, unless its marks say otherwise."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import selection

KINDS = ("sqlite", "postgres", "mysql", "duckdb", "redis")


class Item(SimpleNamespace):
    """As much of a collected test as the selection looks at."""

    def __hash__(self) -> int:
        return id(self)

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None


def items(name: str, *ids: str, marks: tuple[str, ...] = ()) -> list[Any]:
    return [Item(nodeid=f"{name}[{each}]", callspec=SimpleNamespace(id=each), marks=marks) for each in ids]


def left(found: list[Any]) -> list[str]:
    others = selection._on_other_databases(found)
    return [each.callspec.id for each in found if each not in others]


def test_each_test_has_one_database_and_each_database_many_tests() -> None:
    chosen: Counter[str] = Counter()
    for number in range(200):
        (one,) = left(items(f"test_{number}", *(f"{kind}-merge" for kind in KINDS)))
        chosen[one] += 1
    assert len(chosen) == 5 and min(chosen.values()) > 20
    both = items("test", "redis-merge", "sqlite-merge")
    assert selection._on_other_databases(both, "sqlite") == {both[0]}
    assert len(selection._on_other_databases(both, "duckdb")) == 1


def test_what_has_one_database_or_says_itself_which_keeps_it() -> None:
    assert left(items("test", "append-postgres", "merge-mysql", "postgresql")) == [
        "append-postgres",
        "merge-mysql",
        "postgresql",
    ]
    for mark in ("brief", "every_system"):
        assert left(items("test", *KINDS, marks=(mark,))) == [*KINDS]
