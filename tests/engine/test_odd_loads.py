"""Odd rows of this process into every database: each load stores exactly what it was given, or is refused and leaves
no row."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import weft
from odd_values import BYTES, DAYS, DECIMALS, FIELDS, FLOATS, INTEGERS, MOMENTS, NOT_FINITE, TEXTS, UUIDS, Odd
from systems.tables.conftest import database_url  # noqa: F401 - fixture
from weft.engine.load import open_tables
from weft.systems.sql.tables import Slice

FAMILIES: list[list[Any]] = [DECIMALS, DAYS, MOMENTS, BYTES, UUIDS, TEXTS, INTEGERS, FLOATS, [*FLOATS, *NOT_FINITE]]
Rows = list[dict[str, Any]]


@pytest.fixture
def connection(database_url: str) -> Any:  # noqa: F811
    return weft.connect(url=database_url)


def odd_rows(odd: Odd) -> Rows:
    """Rows of a few columns, each of one type, or of several where the dice say so."""
    dice = odd.dice
    columns: dict[str, Callable[[], Any]] = {}
    for name in "abc":
        family, kind = dice.choice(FAMILIES), dice.choice(list(FIELDS.values()))
        columns[name] = dice.choice([lambda family=family: dice.choice(family), lambda kind=kind: odd.of_type(kind)])
    rows: Rows = [
        {name: make() for name, make in columns.items() if dice.random() < 0.9} for _ in range(dice.randrange(1, 6))
    ]
    if dice.random() < 0.3:
        dice.choice(rows)[dice.choice("abc")] = odd.value()
    return rows


def stored_rows(connection: Any, table: str) -> Rows:
    tables = open_tables(connection)
    try:
        sql = f"SELECT * FROM {tables.table(None, table)} ORDER BY n"
        return [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
    finally:
        tables.close()


def is_same(stored: Any, given: Any) -> bool:
    """Whether a table holds the value that it was given. Where it has no objects and arrays, they are JSON."""
    if given is None or given is True or given is False or stored is None:
        return stored is given
    if isinstance(given, float) and given != given:
        return isinstance(stored, float) and stored != stored
    if isinstance(given, int | float | Decimal):
        is_number = isinstance(stored, int | float | Decimal) and not isinstance(stored, bool)
        return is_number and (stored == given or (isinstance(given, float) and Decimal(stored) == Decimal(repr(given))))
    if isinstance(given, datetime):
        if not isinstance(stored, datetime):
            return False
        return stored == given if stored.tzinfo and given.tzinfo else stored.replace(tzinfo=None) == _in_utc(given)
    if isinstance(given, dict | list | tuple):
        found = json.loads(stored) if isinstance(stored, str) else stored
        if isinstance(given, dict):
            names = {*given, *found} if isinstance(found, dict) else {None}
            return None not in names and all(is_same(found.get(each), given.get(each)) for each in names)
        is_list = isinstance(found, list) and len(found) == len(given)
        return is_list and all(map(is_same, found, given))
    if isinstance(given, UUID):
        return bool(stored == str(given))
    if isinstance(given, date):
        return type(stored) is date and stored == given
    return type(stored) is type(given) and bool(stored == given)


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)


def test_what_was_loaded_is_what_was_given(connection: Any, count: Callable[..., int]) -> None:
    for seed in range(count(200, brief=4)):
        rows = [{"n": n, **row} for n, row in enumerate(odd_rows(Odd(seed)))]
        table = f"odd{seed}"
        try:
            weft.load(rows, target=table, connection=connection)
        except weft.WeftError:
            # The table may be there: some databases commit what creates one.
            weft.load([{"n": -1}], target=table, connection=connection)
            assert [row["n"] for row in stored_rows(connection, table)] == [-1], (seed, rows)
            continue
        found = stored_rows(connection, table)
        assert len(found) == len(rows), seed
        for stored, given in zip(found, rows, strict=True):
            for name in "abc":
                assert is_same(stored.get(name), given.get(name)), (seed, name, stored.get(name), given.get(name))


@pytest.mark.parametrize(
    "values",
    [
        [date(2026, 1, 31), datetime(2026, 1, 31, 12)],
        ["a", b"a"],
        [1.5, True],
        [datetime(2026, 1, 31, 12), datetime(2026, 1, 31, 12, tzinfo=UTC)],
        [{"a": [date(2026, 1, 31)]}, {"a": [datetime(2026, 1, 31, 12)]}],
        ["\ud800"],
    ],
)
@pytest.mark.parametrize("lazily", [False, True])
def test_values_of_several_types_are_refused(values: list[Any], lazily: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.engine import inputs

    monkeypatch.setattr(inputs, "BATCH_ROWS", 1)
    rows = [{"n": n, "a": value} for n, value in enumerate(values)]
    with pytest.raises(weft.DeclarationError, match="column 'a"):
        weft.load(iter(rows) if lazily else rows, target="copies")
