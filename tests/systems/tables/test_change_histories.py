"""Histories of a table, drawn by chance and applied as changes in any order: the mirror is what the source has in the
end, and a history has each version once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count as numbers
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from systems.tables.test_changes import UNAVAILABLE, apply, change, milliseconds, mirror, row
from weft.systems.sql.tables import SqlTables

KEYS = st.integers(1, 5)
Batches = list[list[dict[str, Any]]]
Version = tuple[int, int, str | None, float, int, int | None]
"""The number of the change from which a row was so, its id, name and amount, the times of that change and the next."""

_numbers = numbers()


@dataclass
class Source:
    """A table, and what happened to it."""

    stored: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    lsn: int = 0
    ts: int = 0

    def add(self, op: str, before: dict[str, Any] | None = None, after: dict[str, Any] | None = None) -> None:
        self.log.append(change(op, before, after, self.lsn, self.ts))

    def write(self, row: dict[str, Any], before: dict[str, Any] | None = None, unavailable: bool = False) -> None:
        old = before or self.stored.get(row["id"])
        self.end(row["id"])
        self.versions.append((self.lsn, row["id"], row["name"], row["amount"], self.ts, None))
        self.stored[row["id"]] = row
        is_unavailable = unavailable and old is not None and old["name"] == row["name"]
        self.add("u" if old else "c", old, {**row, "name": UNAVAILABLE} if is_unavailable else row)

    def end(self, key: int) -> None:
        self.versions = [
            (*each[:5], max(each[4], self.ts)) if each[1] == key and each[5] is None else each for each in self.versions
        ]

    def delete(self, key: int) -> dict[str, Any]:
        self.end(key)
        return self.stored.pop(key)


@st.composite
def histories(
    draw: st.DrawFn,
    unavailable: bool = False,
    moves: bool = True,
    in_order: bool = False,
    back: bool = False,
    truncates: bool = True,
) -> tuple[Batches, Source]:
    """Batches of messages, repeated and in any order, and the source that they are of. `unavailable`: whether updates
    leave out what they do not change; `back`: whether its clock may go back."""
    source = Source()
    steps = ["write", "write", "write", "delete", *(["truncate"] if truncates else []), *(["move"] if moves else [])]
    for lsn in range(1, draw(st.integers(1, 14)) + 1):
        # Several changes of a millisecond.
        source.lsn, source.ts = lsn, source.ts + draw(st.sampled_from([0, 0, 1, 2, *([-2] if back else [])]))
        key, name = draw(KEYS), draw(st.sampled_from(["a", "b", None]))
        step = draw(st.sampled_from(steps))
        if step == "truncate":
            for each in list(source.stored):
                source.delete(each)
            source.add("t")
        elif step == "write" or key not in source.stored:
            is_unavailable = unavailable and draw(st.booleans())
            if is_unavailable and key in source.stored:
                name = source.stored[key]["name"]
            source.write(row(key, name, draw(st.sampled_from([1.5, 2.5]))), unavailable=is_unavailable)
        elif step == "delete":
            source.add("d", source.delete(key))
        elif (other := draw(KEYS)) not in source.stored:
            before = source.delete(key)
            source.write({**before, "id": other}, before, unavailable=unavailable and draw(st.booleans()))
    messages = source.log
    if in_order:
        # As a producer does that was killed: it goes back, and sends again what comes after.
        back_to = draw(st.integers(0, len(messages)))
        messages = [*messages[: draw(st.integers(back_to, len(messages)))], *messages[back_to:]]
    else:
        repeated = draw(st.lists(st.sampled_from(messages), max_size=4)) if messages else []
        messages = draw(st.permutations(messages + repeated))
    batches: Batches = [[]]
    for each in messages:
        batches[-1].append(each)
        if draw(st.booleans()):
            batches.append([])
    return [each for each in batches if each], source


def checked(examples: int, check: Callable[[Batches, Source], None], **options: bool) -> None:
    """Check so many histories."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(histories(**options))
    def all_of_them(history: tuple[Batches, Source]) -> None:
        check(*history)

    all_of_them()


@cache
def together(examples: int, **options: bool) -> tuple[Batches, Source]:
    """So many histories without truncates as one, each with its own keys: where a batch takes a second, as in Delta,
    these take as long as one of them."""
    drawn: list[tuple[Batches, Source]] = []
    checked(examples, lambda *history: drawn.append(history), **options, truncates=False)
    batches: Batches = []
    whole = Source()
    for number, (own, source) in enumerate(drawn):
        first = 1000 + 10 * number
        for place, each in enumerate(own):
            batches += [[]] if place == len(batches) else []
            batches[place] += [_of_others(message, first) for message in each]
        whole.log += [_of_others(message, first) for message in source.log]
        whole.stored |= {first + key: {**row, "id": first + key} for key, row in source.stored.items()}
        whole.versions += [(each[0], first + each[1], *each[2:]) for each in source.versions]
    return batches, whole


def _of_others(message: dict[str, Any], first: int) -> dict[str, Any]:
    rows = {
        name: each and {**each, "id": first + each["id"]} for name in ("before", "after") for each in [message[name]]
    }
    return {**message, **rows}


WAYS = pytest.mark.parametrize(
    "options",
    [{}, {"unavailable": True, "moves": False}, {"unavailable": True, "in_order": True}],
    ids=["whole", "unavailable", "moved"],
)


def _check_mirror(tables: SqlTables, batches: Batches, source: Source) -> None:
    table = f"mirror_{next(_numbers)}"
    apply(tables, [change("c", None, row(100, "x", 1.5), 0), change("d", row(100), None, 0, 1)], table=table)
    wanted = sorted(source.stored.values(), key=lambda each: each["id"])
    for each in batches:
        _, report = apply(tables, each, table=table)
        told = (report.creates, report.updates, report.deletes, report.idempotent_skipped)
        assert sum(told) == sum(one["op"] != "t" for one in each)
    assert mirror(tables, table) == wanted
    # All of it again: nothing is counted as a change twice.
    _, report = apply(tables, source.log, table=table)
    assert (report.creates, report.updates, report.deletes) == (0, 0, 0)
    assert mirror(tables, table) == wanted


def _check_history(tables: SqlTables, batches: Batches, source: Source, *, back: bool) -> None:
    table = f"history_{next(_numbers)}"
    apply(tables, [change("c", None, row(100, "x", 1.5), 0)], table=table, mode="scd2")
    for each in batches:
        apply(tables, each, table=table, mode="scd2")
    # All of it again: no version is there twice.
    _, report = apply(tables, source.log, table=table, mode="scd2")
    assert (report.creates, report.updates, report.deletes) == (0, 0, 0)
    check_versions(mirror(tables, table), source, back=back)


@WAYS
def test_the_mirror_is_what_the_source_has(
    tables: SqlTables, count: Callable[..., int], options: dict[str, bool]
) -> None:
    checked(count(2000, 6 if tables.dialect == "sqlite" else 2), partial(_check_mirror, tables), **options)


@pytest.mark.parametrize("back", [False, True])
def test_a_history_has_every_version(tables: SqlTables, count: Callable[..., int], back: bool) -> None:
    check = partial(_check_history, tables, back=back)
    checked(count(2000, 6 if tables.dialect == "sqlite" else 2), check, back=back)


@pytest.mark.full
@WAYS
def test_the_mirror_of_many_at_once(tables: SqlTables, count: Callable[..., int], options: dict[str, bool]) -> None:
    """Large batches, in a minute: one by one the databases take hours for as many."""
    _check_mirror(tables, *together(count(2000), **options))


@pytest.mark.full
@pytest.mark.parametrize("back", [False, True])
def test_a_history_of_many_at_once(tables: SqlTables, count: Callable[..., int], back: bool) -> None:
    batches, source = together(count(2000), back=back)
    _check_history(tables, batches, source, back=back)


def check_versions(rows: list[dict[str, Any]], source: Source, *, back: bool) -> None:
    """Check that a history has the versions of its source. `back`: whether the clock of that went back."""
    found = [each for each in rows if each["id"] != 100]
    assert all(each["is_current"] == (each["valid_to"] is None) for each in found)
    versions = sorted(
        (
            int(each["_weft_position"]),
            *(each[name] for name in ("id", "name", "amount")),
            milliseconds(each["valid_from"]),
            milliseconds(each["valid_to"]),
        )
        for each in found
    )
    wanted = sorted(source.versions)
    if back:
        # When a version ended is not known then, but that it did.
        versions, wanted = ([(*each[:5], each[5] is None) for each in all_] for all_ in (versions, wanted))
    assert versions == wanted
