"""A mirror is compared with its source while both live: what differs is named, what is on its way is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import weft
from conftest import System
from weft.engine.readers import open_tables
from weft.engine.streaming.cdc import verify
from weft.engine.streaming.cdc.verify import Difference, Side, compare

ALIKE = [("postgres", "postgres"), ("mysql", "mysql")]
PAIRS = [*ALIKE, ("postgres", "duckdb"), ("mysql", "postgres"), ("sqlite", "mysql")]


class Tables:
    """A source and a mirror of it."""

    def __init__(self, source: Any, mirror: Any) -> None:
        self.source, self.mirror = source, mirror

    def sides(self, *keys: str, gone: str = "") -> tuple[Side, Side]:
        return Side(self.source, None, "people", keys), Side(self.mirror, None, "people_mirror", keys, gone)

    def run(self, tables: Any, *statements: str) -> None:
        with tables.driver.session("publish") as session:
            for each in statements:
                session.run(each)


@pytest.fixture(params=PAIRS, ids="-".join)
def tables(
    request: pytest.FixtureRequest,
    open_system: Callable[[str], AbstractContextManager[System]],
    tmp_path: Path,
) -> Iterator[Tables]:
    with ExitStack() as stack:
        opened = []
        for kind in request.param:
            if kind == "duckdb":
                connection = weft.connect(url=f"duckdb:///{tmp_path / 'mirror.duckdb'}")
            else:
                connection = stack.enter_context(open_system(kind)).connection
            opened.append(stack.enter_context(closing(open_tables(connection))))
        yield Tables(*opened)


def _columns(tables: Any) -> str:
    real = "DOUBLE" if tables.dialect == "mysql" else "DOUBLE PRECISION"
    return f"a INTEGER NOT NULL, b VARCHAR(40) NOT NULL, n NUMERIC(12,3), d DATE, f {real}, PRIMARY KEY (a, b)"


def _values(row: int, text: str = "é z") -> str:
    return f"({row}, '{'aBÄ'[row % 3]}{row}', {row}.5, '2024-02-29', 0.1)"


def _fill(tables: Tables, rows: int) -> None:
    for each, name in ((tables.source, "people"), (tables.mirror, "people_mirror")):
        values = ", ".join(_values(row) for row in range(rows))
        tables.run(each, f"CREATE TABLE {name} ({_columns(each)})", f"INSERT INTO {name} VALUES {values}")


@pytest.mark.brief("sqlite-mysql", "postgres-postgres")
def test_differences_are_named_and_mended(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ROWS_A_RANGE", 7)
    _fill(tables, 30)
    source, mirror = tables.sides("a", "b")
    found = compare(source, mirror, settle_seconds=0)
    assert (found.rows, found.differences) == (30, [])
    tables.run(
        tables.mirror,
        "DELETE FROM people_mirror WHERE a IN (3, 29)",
        "UPDATE people_mirror SET n = 1.001, d = NULL WHERE a = 11",
        "INSERT INTO people_mirror VALUES (99, 'more', 1, NULL, NULL)",
    )
    found = compare(source, mirror, settle_seconds=0, mend=True, wait=lambda _: None)
    assert found.differences == [
        Difference((11, "Ä11"), "different", ("n", "d")),
        Difference((29, "Ä29"), "missing"),
        Difference((3, "a3"), "missing"),
        Difference((99, "more"), "extra"),
    ]
    assert found.mended == 4
    assert compare(source, mirror, settle_seconds=0).differences == []


@pytest.mark.brief("postgres-postgres", "mysql-mysql")
def test_only_ranges_whose_checksums_differ_are_read(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ROWS_A_RANGE", 7)
    _fill(tables, 30)
    tables.run(
        tables.mirror, "UPDATE people_mirror SET d = NULL WHERE a = 11", "DELETE FROM people_mirror WHERE a = 29"
    )
    source, mirror = tables.sides("a", "b")
    read: list[verify.Key | None] = []
    after = source.after
    monkeypatch.setattr(source, "after", lambda key: read.append(key) or after(key))  # type: ignore[func-returns-value]
    found = compare(source, mirror, settle_seconds=0)
    assert (found.rows, [each.key[0] for each in found.differences]) == (30, [11, 29])
    is_alike = (tables.source.dialect, tables.mirror.dialect) in ALIKE
    assert [each and each[0] for each in read] == ([6, 27] if is_alike else [None, 6, 13, 20, 27])


@pytest.mark.brief("postgres-duckdb")
def test_changes_on_their_way_are_no_differences(tables: Tables) -> None:
    _fill(tables, 5)
    tables.run(tables.source, "UPDATE people SET n = 7 WHERE a = 1", "DELETE FROM people WHERE a = 2")
    source, mirror = tables.sides("a", "b")
    waits = []

    def arrive(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:  # one arrives; the other is changed again before it does
            tables.run(tables.mirror, "UPDATE people_mirror SET n = 7 WHERE a = 1")
            tables.run(tables.source, "INSERT INTO people VALUES (2, 'Ä2', 3, NULL, NULL)")
        else:
            tables.run(tables.mirror, "UPDATE people_mirror SET n = 3, d = NULL, f = NULL WHERE a = 2")

    found = compare(source, mirror, settle_seconds=2, wait=arrive)
    assert (found.differences, found.changing, waits) == ([], [], [2, 2])


@pytest.mark.brief("postgres-duckdb")
def test_a_change_between_the_two_reads_is_no_difference(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tables, 2)
    tables.run(tables.source, "UPDATE people SET n = 7 WHERE a = 1")
    source, mirror = tables.sides("a", "b")
    read = mirror.rows

    def change_then(keys: Sequence[verify.Key]) -> dict[verify.Key, verify.Values]:
        for each, name in ((tables.source, "people"), (tables.mirror, "people_mirror")):
            tables.run(each, f"UPDATE {name} SET n = 8 WHERE a = 1")
        return read(keys)

    monkeypatch.setattr(mirror, "rows", change_then)
    monkeypatch.setattr(verify, "MOST_DIFFERENCES", 0)  # those that stay count, not those on their way
    assert compare(source, mirror, settle_seconds=0).differences == []


@pytest.mark.brief("postgres-duckdb")
def test_single_precision_is_no_difference_and_binary_keys_are_refused(tables: Tables) -> None:
    _fill(tables, 2)
    tables.run(tables.mirror, "ALTER TABLE people_mirror DROP COLUMN f", "ALTER TABLE people_mirror ADD COLUMN f REAL")
    tables.run(tables.mirror, "UPDATE people_mirror SET f = 0.1")
    assert compare(*tables.sides("a", "b"), settle_seconds=0).differences == []
    kind = {"postgres": "bytea", "mysql": "varbinary(9)"}.get(tables.source.dialect, "blob")
    tables.run(tables.source, f"ALTER TABLE people ADD COLUMN k {kind}")
    with pytest.raises(weft.DeclarationError, match=r"'k' of .* is binary"):
        tables.sides("k")


@pytest.mark.brief("postgres-postgres")
def test_a_row_that_always_changes_is_not_called_different(tables: Tables) -> None:
    _fill(tables, 3)
    tables.run(tables.source, "UPDATE people SET n = 0 WHERE a = 1")
    waits = iter(range(1, 100))

    def change(_: float) -> None:
        tables.run(tables.source, f"UPDATE people SET n = {next(waits)} WHERE a = 1")

    found = compare(*tables.sides("a", "b"), settle_seconds=0, wait=change)
    assert (found.differences, found.changing) == ([], [(1, "B1")])


@pytest.mark.brief("mysql-postgres")
def test_rows_that_are_marked_as_deleted_are_none(tables: Tables) -> None:
    _fill(tables, 4)
    tables.run(tables.mirror, "ALTER TABLE people_mirror ADD COLUMN gone TIMESTAMP")
    tables.run(tables.mirror, "UPDATE people_mirror SET gone = CURRENT_TIMESTAMP WHERE a IN (0, 1)")
    tables.run(tables.source, "DELETE FROM people WHERE a IN (0, 3)")
    source, mirror = tables.sides("a", "b", gone="gone")
    found = compare(source, mirror, settle_seconds=0, mend=True, wait=lambda _: None)
    assert found.differences == [Difference((1, "B1"), "missing"), Difference((3, "a3"), "extra")]
    assert (found.mended, compare(source, mirror, settle_seconds=0).differences) == (2, [])


@pytest.mark.brief("sqlite-mysql")
def test_a_table_or_a_key_that_is_not_there_is_named(tables: Tables) -> None:
    with pytest.raises(weft.NotFoundError, match="no table people of"):
        tables.sides("a")
    _fill(tables, 1)
    with pytest.raises(weft.DeclarationError, match="no column 'c'"):
        tables.sides("c")
