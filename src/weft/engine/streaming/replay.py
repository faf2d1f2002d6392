"""The replay of dead letters: through the SQL into all targets, or into the one target that rejected them.

Letters are replayed in sets. A note with the letters of a set is stored among the letters before anything is done, and
the loads of the set are committed under the note's id. So the next replay finishes one that was interrupted, whatever
letters it is for, and targets with a ledger get the rows once:

1. the note is stored
2. letters that cannot be read or transformed again are stored again, one replay older
3. the others are loaded; what a target rejects is stored again too
4. the letters of the set are removed, then the note
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from heapq import nsmallest
from itertools import groupby
from typing import Any
from uuid import uuid4

import pyarrow as pa

from weft.columns import hint_of, hinted, is_nested, shows_bytes, without_voids
from weft.engine import connectors, frame_projection, session, spark_io
from weft.engine.payload_rows import SHOWN, is_of_json, parsed_rows, rejected_rows, row_of
from weft.engine.readers import opened_tables, stored_columns, stream_reader
from weft.engine.streaming.batch import Batches
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.cdc import envelopes, routing
from weft.engine.streaming.cdc.routes import resolved
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Columns
from weft.engine.streaming.dead_letters import DeadLetterBox, note_of
from weft.engine.streaming.failing_rows import without_rows
from weft.engine.streaming.functions import called_by, selecting_also
from weft.engine.streaming.lock import opened
from weft.engine.streaming.row_origin import ORIGIN, origin_of
from weft.engine.streaming.sources import open_source
from weft.engine.streaming.target_streams import topic_target
from weft.engine.streaming.transform import WithOrigins, memory_of
from weft.errors import BusyError, ConnectionFailedError, NotFoundError, WeftError
from weft.pipelines.streaming.endpoints import label_of
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import system_for
from weft.systems.codecs.columns import WHOLE, message_type, storable
from weft.systems.codecs.json import documents_of
from weft.systems.dead_letter_store import Stage, StoredLetter, digest
from weft.systems.load import KEYED_MODES
from weft.systems.log import EXTRA, RESERVED_PREFIX, ROWID
from weft.systems.payloads import encode, loads
from weft.systems.stream_source import EVENT_TIME, Documents, StreamSource
from weft.types import FieldType

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.streaming")

MAX_REPLAYS = 3
"""How often a letter is replayed, by default."""
# The letters of one set: their ids must fit a message of Kafka's and a text of MySQL's.
_SET = 1000
# The letters that are held in memory at once.
_LETTERS = 20_000


@dataclass
class ReplayResult:
    """What a replay did."""

    letters: int = 0
    """How many were tried."""
    finished: int = 0
    """How many of them an earlier replay had begun with."""
    again: int = 0
    """How many rows failed again, and are letters."""
    held: dict[str, str] = field(default_factory=dict)
    """The letters that were not replayed, and why."""


class Replay:
    """Replays the letters of a pipeline that a caller chooses."""

    def __init__(
        self, pipeline: StreamingPipeline, wanted: Callable[[StoredLetter], bool], *, max_replays: int = MAX_REPLAYS
    ) -> None:
        self.pipeline, self._wanted, self._max = resolved(pipeline), wanted, max_replays
        self.box = DeadLetterBox(pipeline)
        self.done = ReplayResult()
        self.exhausted = False
        """Whether letters were left alone because they had failed in `max_replays` replays."""
        self._own: set[str] = set()
        """Letters that came back: one replay tries each row once."""

    def plan(self) -> ReplayResult:
        """Return what `run` would do, as far as that can be known."""
        for letter in self.box.letters():
            if self._is_next(letter):
                self.done.letters += 1
        return self.done

    def run(self) -> ReplayResult:
        with alone(self.pipeline), outcome.calling(called_by(self.pipeline)):
            self._finish()
            while waiting := nsmallest(_LETTERS, filter(self._is_next, self.box.letters()), key=self._order):
                for _, group in groupby(waiting, key=self._together):
                    letters = list(group)
                    for first in range(0, len(letters), _SET):
                        self._begin(letters[first : first + _SET])
        return self.done

    # ------------------------------------------------------------------------------------------------------- which ones

    def _is_next(self, letter: StoredLetter) -> bool:
        if letter.stage == "replay" or letter.letter_id in self._own or not self._wanted(letter):
            return False
        why = self._why_not(letter)
        if why is not None:
            self.done.held[letter.letter_id] = why
        return why is None

    def _why_not(self, letter: StoredLetter) -> str | None:
        if letter.replays >= self._max:
            self.exhausted = True
            return f"it failed in {letter.replays} replay{'' if letter.replays == 1 else 's'}"
        if self.pipeline.step is not None and letter.stage != "store":
            return "its windows may have closed: publish the event again"
        if self.pipeline.cdc is not None and letter.stage == "store":
            return "a newer change of its row may be in the table: update the row in the source again"
        if shows_bytes(letter.error):
            return SHOWN
        if letter.stage == "store" and not self._targets(letter):
            return f"the pipeline has no target {letter.target!r}"
        if letter.stage == "read" and letter.source in self._sources:
            return self._sources[letter.source].why_not_replayed(letter.offset)
        return None

    @cached_property
    def _sources(self) -> dict[str, StreamSource]:
        """The opened sources. What a target rejected needs none of them."""
        return {each.name: open_source(each) for each in self.pipeline.sources}

    def _together(self, letter: StoredLetter) -> tuple[Any, ...]:
        """Letters that can be one set: alike in where they go and in how often they went there. Where a target merges
        they are also of one batch, since no key can be twice in a load."""
        batch = ""
        if any(each.mode in KEYED_MODES for each in self.pipeline.targets):
            batch = letter.letter_id if letter.batch is None else f"{letter.batch:020}"
        return batch, letter.stage == "store", letter.target or "", letter.replays

    def _order(self, letter: StoredLetter) -> tuple[Any, ...]:
        """Return the place of a letter: the oldest first, those that can be one set next to each other."""
        return *self._together(letter), letter.failed_at, letter.letter_id

    # ------------------------------------------------------------------------------------------------------------- sets

    def _begin(self, letters: Sequence[StoredLetter]) -> None:
        note = note_of("replay", [each.letter_id for each in letters], uuid4().hex, self.pipeline.name)
        self.box.put_stored([note])
        _steps.debug("noted")
        self._carry_out(note, letters)

    def _finish(self) -> None:
        """Carry out what earlier replays began and did not end."""
        notes = [each for each in self.box.letters() if each.stage == "replay"]
        for note in notes:
            named = set(json.loads(note.payload))
            letters = [each for each in self.box.letters() if each.letter_id in named]
            back = {_id_again(each) for each in letters}
            returned = {each.letter_id for each in self.box.letters() if each.letter_id in back}
            self._own |= returned
            self.done.finished += len(letters)
            self._carry_out(note, letters, returned, is_begun=True)

    def _carry_out(
        self,
        note: StoredLetter,
        letters: Sequence[StoredLetter],
        returned: Collection[str] = (),
        *,
        is_begun: bool = False,
    ) -> None:
        """Replay a set. `is_begun`: some of its targets may have it already."""
        # A letter that was stored again before the replay was interrupted is not tried again: its row would be loaded
        # and still be a letter.
        tried = [each for each in letters if _id_again(each) not in returned]
        if tried:
            batch = BatchId(f"replay {note.letter_id}", 0)
            box = DeadLetterBox(self.pipeline, replays=tried[0].replays + 1)
            batches = Batches(self.pipeline, (), self._columns(), box)
            targets = self._targets(tried[0])
            try:
                rows, failed, placed = self._rows(tried, targets, batches)
                if failed and is_begun and self._is_done(failed, targets, batches, batch):
                    failed, targets = [], ()
                box.put_stored(failed)
                _steps.debug("given back")
                changes = None
                if self.pipeline.cdc is not None and len(rows):
                    changes = batches.changes_in(rows, session.spark().newSession())
                left = targets if len(failed) < len(tried) else ()
                for _ in batches.load(left, memory_of(rows), batch, placed, changes):
                    is_begun = True
                    _steps.debug("loaded")
            except WeftError as error:
                # A load that could not be reached may have been committed. One that was refused was not: then nothing
                # is left to be finished.
                if not is_begun and not isinstance(error, ConnectionFailedError):
                    box.remove(box.put_ids)
                    box.remove([note.letter_id])
                raise
            finally:
                batches.close()
            self._own |= box.put_ids
            self.done.again += len(box.put_ids)
        self.done.letters += len(letters)
        self.box.remove([each.letter_id for each in letters])
        _steps.debug("removed")
        self.box.remove([note.letter_id])

    def _is_done(
        self, failed: Sequence[StoredLetter], targets: Sequence[Target], batches: Batches, batch: BatchId
    ) -> bool:
        """Return whether all targets have a set of which some letters fail now. Where only some targets have it, these
        letters can be neither loaded nor stored again."""
        having = [each.name for each in targets if batches.targets.has(each, batch)]
        if having and not batches.targets.finish(targets, batch):
            raise WeftError(
                f"A replay that was interrupted cannot be finished: {', '.join(having)} has its rows already, and of "
                f"its letters {len(failed):,} now fail, the first with: {failed[0].error}",
                hint="Have transform_sql take them as before, and replay again: the other targets get them then.",
            )
        return bool(having)

    def _columns(self) -> Columns:
        return Columns(Checkpoint.of(self.pipeline).home, self.pipeline.sources)

    def _targets(self, letter: StoredLetter) -> Sequence[Target]:
        """Return where the row of a letter goes."""
        if letter.stage != "store":
            return self.pipeline.targets
        return [each for each in self.pipeline.targets if label_of(self.pipeline, each) == letter.target]

    def _rows(
        self, letters: Sequence[StoredLetter], targets: Sequence[Target], batches: Batches
    ) -> tuple[pa.Table, list[StoredLetter], WithOrigins]:
        """Return the rows of a set for its targets, the letters that failed, and what makes the rows with origins."""
        if letters[0].stage == "store":
            rows, numbers, bad = _rejected_rows(letters, targets[0])
            placed = _with_origins(rows, [letters[number] for number in numbers])
            return rows, [_again(letters[number], "store", why) for number, why in bad.items()], lambda: placed
        rows, numbers, bad = _source_rows(
            self.pipeline, self._columns(), letters, batches.documents, partial(_growing, batches)
        )
        failed = [_again(letters[number], "read", why) for number, why in bad.items()]
        if self.pipeline.cdc is not None and len(rows):
            if self.pipeline.cdc.route is None:
                stored = batches.targets.stored if self.pipeline.cdc.row_sql is None else tuple
                malformed = envelopes.opened(rows, self.pipeline.cdc, stored).bad
            else:
                malformed = routing.malformed(rows, self.pipeline.cdc, batches.targets.stored)
            failed += [_again(letters[numbers[number]], "transform", why) for number, why in malformed.items()]
            kept = [number for number in range(len(rows)) if number not in malformed]
            rows, numbers = rows.take(pa.array(kept, pa.int64())), [numbers[number] for number in kept]
        sql, placed = self.pipeline.transform_sql, _with_origins(rows, [letters[number] for number in numbers])
        if sql is not None and len(rows):
            used = [each.connection for each in self.pipeline.sources]
            used += [each.connection for each in self.pipeline.targets]
            spark = connectors.ready(session.spark().newSession(), *map(current().connection, used))
            attempts = batches.transform.over(sql, spark)
            # SQL that fails over no rows lacks a column or a lookup: no row is to blame.
            attempts.attempt(rows.slice(0, 0))
            result, blame = attempts.split(rows)
            failed += [_again(letters[numbers[number]], "transform", why) for number, why in blame.items()]
            named = batches.transform.over(selecting_also(sql, ORIGIN), spark)
            return without_voids(result), failed, lambda: named.attempt(without_rows(placed, blame))
        return rows, failed, lambda: placed


def _id_again(letter: StoredLetter) -> str:
    return digest(f"{letter.letter_id} again")


def _again(letter: StoredLetter, stage: Stage, why: str) -> StoredLetter:
    """Return a letter that failed again. Its id follows from that of the letter, so that it is stored once."""
    return replace(
        letter,
        stage=stage,
        error=why,
        failed_at=datetime.now(UTC),
        letter_id=_id_again(letter),
        replays=letter.replays + 1,
    )


@contextmanager
def alone(pipeline: StreamingPipeline) -> Iterator[None]:
    """Keep others of this machine from replaying and removing a pipeline's letters. It may run meanwhile."""
    path = Checkpoint.of(pipeline).path
    with opened(path.with_name(f"{path.name}~dlq")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(
                f"Letters of {pipeline.name} are being replayed or removed by another process.",
                hint="Try again when it is done.",
            ) from None
        yield


# ----------------------------------------------------------------------------------------------------- payloads as rows


def _source_rows(
    pipeline: StreamingPipeline,
    columns: Columns,
    letters: Sequence[StoredLetter],
    documents: Documents | None,
    growing: Callable[[Mapping[str, pa.DataType]], Collection[str]],
) -> tuple[pa.Table, Sequence[int], dict[int, str]]:
    """Return the table `source` of the SQL: the rows of letters, the numbers of these letters, and why the others
    cannot be parsed. `growing` chooses the columns whose types may become wider."""
    schemas, are_exact = _source_columns(pipeline, columns)
    known = {each.name: each for each in schemas}
    types = _source_types(pipeline, columns)
    payloads: list[str | dict[str, Any]] = []
    extras, times = [], []
    for letter in letters:
        row = row_of(letter.payload)
        times.append(_moment(None if row is None else row.pop(EVENT_TIME, None)) or letter.failed_at)
        if row is not None and letter.stage == "transform":
            row = {name: _sent(value, types.get(name)) for name, value in row.items()}
        # Values without a field in the stream go into its column for extra fields.
        more = {name: row.pop(name) for name in list(row) if name not in known} if row and are_exact else {}
        extras.append(encode(more).decode() if more else None)
        payloads.append(letter.payload if row is None else row)
    widens = pipeline.on_drift == "evolve"
    rows, numbers, bad = parsed_rows(payloads, known, types, growing(types), widens=widens)
    nested = [each.name for each in rows.schema if is_nested(each.type)]
    if documents is not None and nested:
        good = [payloads[number] for number in numbers]
        texts = pa.array([each.encode() if isinstance(each, str) else encode(each) for each in good], pa.binary())
        for name, column in documents_of(texts, nested, {each.lower() for each in documents(nested)}).items():
            rows = rows.set_column(rows.schema.get_field_index(name), hinted(name, "json"), column)
    for name, values in (
        (EVENT_TIME, times),
        (EXTRA, extras),
        (ROWID, [_offset(each) for each in letters]),
    ):
        if name in known:
            array = pa.array([values[number] for number in numbers], known[name].type)
            rows = rows.append_column(known[name], array)
    for each in schemas:
        if each.name not in rows.column_names:
            rows = rows.append_column(each, pa.nulls(len(numbers), each.type))
    return rows, numbers, bad


def _growing(batches: Batches, types: Mapping[str, pa.DataType]) -> Collection[str]:
    """Return those of these columns of the sources whose objects may have more keys than before, or wider numbers, as
    in a batch. A table whose own objects lack a key would refuse all rows; so would one of Spark with its numbers."""
    declared = {name for each in batches.pipeline.sources for name in each.columns}
    objects = [name for name, kind in types.items() if is_nested(kind) and name not in declared]
    numbers = [name for name, kind in types.items() if kind.equals(pa.int64()) and name not in declared]
    if batches.pipeline.cdc is not None or not batches.targets.are_in_databases:
        return ()
    # A target that is away is not asked for what only objects need: the others get the rows.
    if objects and not all(each.makes_documents for each in batches.targets.stored()):
        return [*numbers, *(batches.documents(objects) if batches.documents is not None and objects else ())]
    return [*numbers, *objects]


def _source_columns(pipeline: StreamingPipeline, columns: Columns) -> tuple[list[pa.Field], bool]:
    """Return the columns that the sources have, and whether all of them store rows of exact types."""
    fields: dict[str, pa.Field] = {EVENT_TIME: pa.field(EVENT_TIME, pa.timestamp("us", "UTC"))}
    are_exact = True
    for source in pipeline.sources:
        stored = open_source(source).stored_schema()
        if stored is None:
            are_exact = False
        for each in storable(pa.schema(columns.kept(source.name))) if stored is None else stored:
            fields.setdefault(each.name, each)
    return list(fields.values()), are_exact


def _source_types(pipeline: StreamingPipeline, columns: Columns) -> dict[str, pa.DataType]:
    """Return the types under which the rows of all sources were parsed, but of columns that have several."""
    by_name: dict[str, list[pa.DataType]] = {}
    for source in pipeline.sources:
        stored = open_source(source).stored_schema()
        types = {each.name: each.type for each in (columns.kept(source.name) if stored is None else stored)}
        types |= {name: message_type(FieldType.parse(kind)) for name, kind in source.columns.items()}
        for name, kind in types.items():
            by_name.setdefault(name, []).append(kind)
    return {name: kinds[0] for name, kinds in by_name.items() if all(each.equals(kinds[0]) for each in kinds)}


def _sent(value: Any, kind: pa.DataType | None) -> Any:
    """Return a value of a row as its message had it: in letters of rows, JSON and large integers are texts."""
    if not isinstance(value, str) or kind is None:
        return value
    if isinstance(kind, pa.JsonType) or is_nested(kind):
        return loads(value)
    return int(value) if kind.equals(WHOLE) else value


def _with_origins(rows: pa.Table, letters: Sequence[StoredLetter]) -> pa.Table:
    """Return rows with their origins, which the letters name."""
    return rows.append_column(ORIGIN, pa.array([origin_of(each.source, each.offset) for each in letters], pa.string()))


def _rejected_rows(letters: Sequence[StoredLetter], target: Target) -> tuple[pa.Table, Sequence[int], dict[int, str]]:
    """Return the rows that a target rejected, the numbers of their letters, and why the others cannot be parsed."""
    known = _columns_of(target)
    types = None
    if target.stream is not None:
        # Documents may differ in all their keys: they are no structs of one type.
        documents = {name: pa.json_() for name, each in known.items() if hint_of(each) == "json"}
        types = documents | {name: each.type for name, each in known.items() if not is_of_json(each.type)}
    return rejected_rows([each.payload for each in letters], known, types)


def _columns_of(target: Target) -> dict[str, pa.Field]:
    """Return the columns that a target has now, without those that a normalizer makes: their values may be anything."""
    connection = current().connection(target.connection)
    if target.stream is not None:
        stored = () if topic_target(target) is not None else stream_reader(target.stream, connection).schema
        return {each.name: each for each in stored if not each.name.startswith(RESERVED_PREFIX)}
    assert target.table is not None
    normalized = {each.name for each in target.declared.columns if each.normalizers} if target.declared else set()
    if system_for(connection.kind).tables is None:
        path = "/".join(part for part in target.table if part)
        with suppress(NotFoundError):  # a table whose first rows all were rejected
            frame = spark_io.read(session.spark(), path, connection)
            return {each.name: each for each in frame_projection.schema_of(frame) if each.name not in normalized}
        return {}
    with opened_tables(connection) as tables:
        columns = stored_columns(tables, *target.table) or []
    return {each.name: each.field for each in columns if not each.generated and each.name not in normalized}


def _moment(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _offset(letter: StoredLetter) -> int | None:
    return int(letter.offset) if letter.offset is not None and letter.offset.isdecimal() else None


def chosen(ids: Iterable[str], letters: Iterable[StoredLetter]) -> dict[str, list[StoredLetter]]:
    """Return, by each of these ids, the letters whose ids begin with it."""
    wanted = list(ids)
    matches: dict[str, list[StoredLetter]] = {each: [] for each in wanted}
    for letter in letters:
        for each in wanted:
            if letter.letter_id.startswith(each) and letter.stage != "replay":
                matches[each].append(letter)
    return matches
