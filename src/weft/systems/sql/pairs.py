"""The statement that joins the stored rows of two sides, in the database that has them."""

from __future__ import annotations

from collections.abc import Callable

from weft.systems.state_store import BATCH, CHECK, END, KEY, SIDE, TIME, Pairs


def pairs_sql(wanted: Pairs, table: str, quote: Callable[[str], str]) -> str:
    """Return the statement for what a batch emits. The columns of the left side come first."""
    key, check, side, time, batch, end = map(quote, (KEY, CHECK, SIDE, TIME, BATCH, END))
    # Both bounds, whichever side a database begins with: an index on key and time then limits the other one.
    fits = (
        f"r.{key} = l.{key} AND r.{check} = l.{check} AND r.{side} = 1 AND l.{side} = 0 "
        f"AND r.{time} >= l.{time} + ({wanted.least}) AND r.{time} <= l.{time} + ({wanted.most}) "
        f"AND l.{time} >= r.{time} - ({wanted.most}) AND l.{time} <= r.{time} - ({wanted.least})"
    )
    left = [f"l.{quote(name)}" for name in wanted.left]
    right = [f"r.{quote(name)}" for name in wanted.right]
    names = ", ".join([*left, *right])
    # Statements without OR: a database finds the few rows of a batch first, and then their partners.
    selects = [
        f"SELECT {names} FROM {table} l JOIN {table} r ON {fits} WHERE l.{batch} = {wanted.batch}",
        f"SELECT {names} FROM {table} r JOIN {table} l ON {fits} "
        f"WHERE r.{batch} = {wanted.batch} AND l.{batch} <> {wanted.batch}",
    ]
    for number, due in wanted.alone.items():
        own, other = ("l", "r") if number == 0 else ("r", "l")
        older = f"{own}.{batch} <> {wanted.batch} AND {own}.{end} <= {due.end_upto}"
        if due.after is not None:
            older += f" AND {own}.{time} > {due.after} AND {own}.{end} > {due.end_after}"
        chosen = [*left, *("NULL" for _ in right)] if number == 0 else [*("NULL" for _ in left), *right]
        selects += [
            f"SELECT {', '.join(chosen)} FROM {table} {own} WHERE {own}.{side} = {number} AND {which} "
            f"AND {own}.{time} <= {due.upto} AND NOT EXISTS (SELECT 1 FROM {table} {other} WHERE {fits})"
            for which in (f"{own}.{batch} = {wanted.batch}", older)
        ]
    return " UNION ALL ".join(selects)
