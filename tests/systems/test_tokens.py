"""Queries as tokens: where one ends."""

from __future__ import annotations

import pytest

from weft.systems.sql import tokens


@pytest.mark.parametrize(
    ("sql", "without"),
    [
        ("SELECT 1", "SELECT 1"),
        ("SELECT 1 ;\n", "SELECT 1"),
        ("SELECT 1; -- the end", "SELECT 1"),
        ("SELECT 1;; /* ; */ ;", "SELECT 1"),
        ("SELECT ';--' ;", "SELECT ';--'"),
        ('SELECT 1 AS "a;"; --', 'SELECT 1 AS "a;"'),
        ("SELECT E'it\\'s; --'", "SELECT E'it\\'s; --'"),
        ("SELECT 1; SELECT 2;", "SELECT 1; SELECT 2"),
    ],
)
def test_the_end_of_a_query(sql: str, without: str) -> None:
    assert tokens.without_end(sql) == without
