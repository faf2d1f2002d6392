"""What each mode of a load must leave behind, said in plain Python over lists of dicts."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from weft.systems.load import Counts, Load

Row = dict[str, Any]
NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)


class RefusedError(Exception):
    """The load must be refused, and change nothing."""


def apply(table: list[Row], source: list[Row], load: Load) -> tuple[list[Row], Counts]:
    """The table after the load, and the counts that it must report. `row_hash` is left out."""
    rows = [dict(row) for row in table]
    if load.keys and any(row[key] is None for row in source for key in load.keys):
        raise RefusedError("null key")
    if not source and (load.mode == "truncate" or load.handle_deletes) and not load.allow_empty:
        raise RefusedError("empty source")
    given = _unique(source, load)
    changed = {"append": _append, "truncate": _truncate, "merge": _merge, "scd2": _scd2}[load.mode]
    rows, inserted, updated, deleted = changed(rows, given, load)
    unchanged = len(given) - inserted - updated if load.mode in ("merge", "scd2") else 0
    return rows, Counts(rows_read=len(source), inserted=inserted, updated=updated, unchanged=unchanged, deleted=deleted)


def _key(row: Row, load: Load) -> tuple[Any, ...]:
    return tuple(row[key] for key in load.keys)


def _unique(source: list[Row], load: Load) -> list[Row]:
    if not load.keys:
        return source
    groups: dict[tuple[Any, ...], list[Row]] = {}
    event = load.event_timestamp_column if not load.deduplicate_by else None
    for row in source:
        groups.setdefault((*_key(row, load), row[event] if event else None), []).append(row)
    if any(len(group) > 1 for group in groups.values()) and not load.deduplicate_by:
        raise RefusedError("shared key")

    def rank(row: Row) -> tuple[Any, ...]:
        return tuple((row[name] is not None, row[name]) for name in load.deduplicate_by)

    return [max(group, key=rank) for group in groups.values()]


def _append(rows: list[Row], source: list[Row], load: Load) -> tuple[list[Row], int, int, int]:
    return rows + source, len(source), 0, 0


def _truncate(rows: list[Row], source: list[Row], load: Load) -> tuple[list[Row], int, int, int]:
    return list(source), len(source), 0, len(rows)


def _merge(rows: list[Row], source: list[Row], load: Load) -> tuple[list[Row], int, int, int]:
    names = list(source[0]) if source else []
    stored = {_key(row, load): row for row in rows}
    inserted = updated = 0
    for row in source:
        there = stored.get(_key(row, load))
        if there is None:
            stored[_key(row, load)] = dict(row)
            inserted += 1
        elif any(there[name] != row[name] for name in load.compared(names)):
            there.update({name: row[name] for name in load.updated(names)})
            updated += 1
    deleted = 0
    if load.handle_deletes == "hard":
        present = {_key(row, load) for row in source}
        gone = [key for key in stored if key not in present]
        deleted = len(gone)
        for key in gone:
            del stored[key]
    return list(stored.values()), inserted, updated, deleted


def instant(value: date | datetime) -> datetime:
    """A date or a time without a zone, as UTC."""
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _scd2(rows: list[Row], source: list[Row], load: Load) -> tuple[list[Row], int, int, int]:
    names = list(source[0]) if source else []
    compared = load.compared(names)
    event = load.event_timestamp_column
    # Without event times a key that had gone is new again.
    known = {_key(row, load) for row in rows if event or row["is_current"]}
    inserted = updated = 0

    def same(one: Row, other: Row) -> bool:
        return all(one[name] == other[name] for name in compared)

    for row in sorted(source, key=lambda row: instant(row[event])) if event else source:
        began = instant(row[event]) if event else load.moment
        versions = [version for version in rows if _key(version, load) == _key(row, load)]
        versions.sort(key=lambda version: (version["valid_from"], version["valid_to"] or NEVER))
        if event and any(version["valid_from"] == began and same(version, row) for version in versions):
            continue
        if event:
            before = next((version for version in reversed(versions) if version["valid_from"] <= began), None)
            covers = before is not None and (before["valid_to"] is None or before["valid_to"] > began)
        else:
            before = next((version for version in versions if version["is_current"]), None)
            covers = before is not None
        if before is not None and covers and same(before, row):
            continue
        new = {**row, "valid_from": began, "valid_to": None}
        if before is not None and covers:
            new["valid_to"] = before["valid_to"]
            before.update(valid_to=began, is_current=False)
        if event:
            after = next((version for version in versions if version["valid_from"] > began), None)
            if after is not None and (new["valid_to"] is None or after["valid_from"] < new["valid_to"]):
                new["valid_to"] = after["valid_from"]
        new["is_current"] = new["valid_to"] is None
        rows.append(new)
        if _key(row, load) in known:
            updated += 1
        else:
            inserted += 1
    closed = 0
    if load.handle_deletes == "soft":
        present = {_key(row, load) for row in source}
        for version in rows:
            if version["is_current"] and _key(version, load) not in present:
                version.update(valid_to=max(load.moment, version["valid_from"]), is_current=False)
                closed += 1
    if load.ttl_seconds is not None:
        lifetime = timedelta(seconds=load.ttl_seconds)
        for version in rows:
            if version["is_current"] and version["valid_from"] < load.moment - lifetime:
                version.update(valid_to=version["valid_from"] + lifetime, is_current=False)
                closed += 1
    return rows, inserted, updated, closed
