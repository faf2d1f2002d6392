"""The changes of several tables in one batch: each goes to the table that `route` leads it to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import python_rows
from weft.engine.streaming import dead_letters
from weft.engine.streaming.cdc import envelopes
from weft.engine.streaming.cdc.applying import ChangeBatch, gathered
from weft.engine.streaming.cdc.json_rows import StoredTable
from weft.engine.streaming.cdc.newest import newest
from weft.engine.streaming.row_origin import ORIGIN, origin_of
from weft.engine.streaming.transform import Transformed, TypedRows
from weft.errors import LoadRefusedError, did_you_mean
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.execution import CdcReport
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.load import Counts

StoredOf = Callable[[str], Sequence[StoredTable]]
"""Returns a table of the targets, if it is there."""
_COUNTED = ("creates", "updates", "deletes", "skipped", "idempotent_skipped")


def _none(table: str) -> Sequence[StoredTable]:
    return ()


@dataclass(frozen=True)
class Routed:
    """The changes of a batch by the table of the targets, and the messages that are no changes."""

    cdc: CDC
    by_table: Mapping[str, ChangeBatch]
    rejected: list[DeadLetter] = field(default_factory=list)
    """The malformed messages."""
    skipped: int = 0
    """Messages of no table that are no change, and those of tables that `route` does not name."""

    def report(self, counts: Mapping[str, Sequence[Counts]], dropped: int = 0) -> CdcReport:
        """Return what the batch did. `counts`: what was done to each table; `dropped`: the messages that went
        nowhere."""
        tables = {name: each.report(counts.get(name, ())) for name, each in self.by_table.items()}
        total = {name: sum(getattr(each, name) for each in tables.values()) for name in _COUNTED}
        total["skipped"] += self.skipped + dropped
        lags = [each.lag_seconds for each in tables.values() if each.lag_seconds is not None]
        return CdcReport(**total, lag_seconds=min(lags, default=None), tables=tables)


@dataclass(frozen=True)
class _Split:
    """Which messages are of which table, by their numbers."""

    tables: dict[str, np.ndarray]
    """By the tables that `route` names."""
    nameless: np.ndarray
    others: dict[str, int]
    """How many messages each table has that `route` does not name."""


def routed(parts: Sequence[tuple[Transformed, TypedRows]], cdc: CDC, stored: StoredOf = _none) -> Routed:
    """Open the messages of a batch, given by source."""
    by_target, skipped, bad = _opened([gathered(transformed.rows, [rows]) for transformed, rows in parts], cdc, stored)
    rejected: list[DeadLetter] = []
    if bad:
        # Again with the origin of each, which takes longer.
        by_target, skipped, bad = _opened([transformed.with_origins() for transformed, _ in parts], cdc, stored)
        unknown = origin_of(", ".join(rows.source for _, rows in parts), None)
        for messages, reasons in bad:
            for row, why in zip(python_rows(messages), reasons, strict=True):
                rejected.append(dead_letters.letter_of({ORIGIN: unknown, **row}, why))
    return Routed(cdc, by_target, rejected, skipped)


def well_formed(messages: pa.Table, cdc: CDC, stored: StoredOf = _none) -> Routed:
    """Return the changes of messages, without the messages that are no changes."""
    by_target, skipped, _ = _opened([messages], cdc, stored)
    return Routed(cdc, by_target, skipped=skipped)


def malformed(messages: pa.Table, cdc: CDC, stored: StoredOf = _none) -> dict[int, str]:
    """Return by the number of each malformed message what is wrong with it."""
    split, bad = _split(messages, cdc), dict[int, str]()
    assert cdc.route is not None
    for table, numbers in split.tables.items():
        own = partial(stored, cdc.route[table])
        unread = envelopes.opened(messages.take(pa.array(numbers)), cdc.of_table(table), own).bad
        bad |= {int(numbers[number]): why for number, why in unread.items()}
    reasons, _ = _nameless(messages.take(pa.array(split.nameless)), cdc)
    return bad | {int(split.nameless[number]): why for number, why in reasons.items()}


def _opened(
    parts: Sequence[pa.Table], cdc: CDC, stored: StoredOf
) -> tuple[dict[str, ChangeBatch], int, list[tuple[pa.Table, list[str]]]]:
    """Return the changes of each table, how many messages are skipped, and the malformed ones with the reasons."""
    of_tables: dict[str, list[pa.Table]] = {}
    bad: list[tuple[pa.Table, list[str]]] = []
    skipped = 0
    for messages in parts:
        split = _split(messages, cdc)
        for table, numbers in split.tables.items():
            of_tables.setdefault(table, []).append(messages.take(pa.array(numbers)))
        nameless = messages.take(pa.array(split.nameless))
        reasons, left_out = _nameless(nameless, cdc)
        bad += [(nameless.take(pa.array(list(reasons))), list(reasons.values()))] if reasons else []
        skipped += left_out + sum(split.others.values())
    by_target: dict[str, ChangeBatch] = {}
    for table, several in of_tables.items():
        messages = _together(several, table)
        own = cdc.of_table(table)
        assert cdc.route is not None
        opened = envelopes.opened(messages, own, partial(stored, cdc.route[table]))
        if opened.bad:
            bad.append((messages.take(pa.array(list(opened.bad))), list(opened.bad.values())))
        by_target[cdc.route[table]] = ChangeBatch(own, opened, newest(opened), [], opened.skipped)
    return by_target, skipped, bad


def _together(parts: Sequence[pa.Table], table: str) -> pa.Table:
    """Return the messages of one table that come from several sources."""
    if len(parts) == 1:
        return parts[0]
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise LoadRefusedError(
            f"The messages of the table {table} come from several sources, in which they have other types: {error}",
            hint="Let one source have the changes of a table. Or declare the types of its columns: "
            "weft.Source(…, columns={…}).",
        ) from None


def _split(messages: pa.Table, cdc: CDC) -> _Split:
    """Return which messages are of which table; an error for other tables, where `unrouted` is "fail"."""
    assert cdc.route is not None
    names, routes = envelopes.table_names(messages, cdc), list(cdc.route)
    _refuse_one_type(messages, names, cdc)
    number = pc.fill_null(pc.index_in(names, value_set=pa.array(routes)), -1).to_numpy(zero_copy_only=False)
    is_named = pc.is_valid(names).to_numpy(zero_copy_only=False)
    others = Counter(names.take(pa.array(np.flatnonzero(is_named & (number < 0)))).to_pylist())
    if others and cdc.unrouted == "fail":
        name, count = others.most_common(1)[0]
        meant = did_you_mean(name, routes, f"It names {', '.join(routes)}.")
        raise LoadRefusedError(
            f"{count:,} messages of the batch are of the table {name}, which route does not name.",
            hint=f"{meant} unrouted='skip' leaves them out.",
        )
    places = {route: np.flatnonzero(number == place) for place, route in enumerate(routes)}
    return _Split(
        {route: numbers for route, numbers in places.items() if len(numbers)}, np.flatnonzero(~is_named), dict(others)
    )


def _nameless(messages: pa.Table, cdc: CDC) -> tuple[dict[int, str], int]:
    """Return what is wrong with messages that name no table, and how many of them are no change at all."""
    if not messages.num_rows:
        return {}, 0
    assert cdc.route is not None
    opened = envelopes.opened(messages, cdc.of_table(next(iter(cdc.route))))
    paths = " and ".join(map(repr, cdc.paths.tables[0]))
    bad = dict.fromkeys(map(int, opened.message), f"It has no table at {paths}.") | opened.bad
    return dict(sorted(bad.items())), opened.skipped


def _refuse_one_type(messages: pa.Table, names: pa.Array, cdc: CDC) -> None:
    """Refuse rows of several tables that were read as one type: each would have the columns of all."""
    for path in (cdc.paths.before, cdc.paths.after):
        root = path.split(".")[0]
        is_one = root in messages.column_names and pa.types.is_struct(messages.schema.field(root).type)
        if is_one and len(tables := names.drop_null().unique()) > 1:
            raise LoadRefusedError(
                f"The rows of {', '.join(map(str, tables.to_pylist()[:5]))} come from one source, which reads them "
                f"with the columns of all of them.",
                hint=f'Send each table to a topic of its own, or send JSON. Files: columns={{"{root}": "json"}}.',
            )
