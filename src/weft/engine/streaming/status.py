"""How streaming pipelines stand: their checkpoints, and what holds the watermark of a window or join. It is what
`weft checkpoints`, `weft state` and the page of the service show; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.readers import open_tables, opened_tables
from weft.engine.streaming.checkpoint import Checkpoint, CheckpointState
from weft.engine.streaming.state import checkpoint_place, files_state, is_in_memory, state_connection
from weft.engine.streaming.stateful import NEVER, PARTITION
from weft.errors import DeclarationError, NotFoundError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import Watermark
from weft.systems.base import Connection
from weft.systems.sql.state_store import SqlState, StoredState, stored_states
from weft.systems.sql.tables import SqlTables
from weft.systems.state_store import Selection, StateStore

_FIRST_MOMENT = -62_135_596_800_000_000
"""The beginning of the year 1."""

# ---------------------------------------------------------------------------------------------------------- checkpoints


def checkpoint_status(checkpoint: Checkpoint, pipeline: StreamingPipeline | None) -> dict[str, Any]:
    """Return how far a pipeline has come."""
    state = checkpoint.state()
    return {
        "pipeline": checkpoint.name,
        "running": checkpoint.lock.holder(),
        "committed": state.committed,
        "planned": state.planned,
        "last_batch": state.moment,
        "offsets": offsets_by_source(state, pipeline),
        "query_id": state.query_id,
        "location": checkpoint.location,
    }


def offsets_by_source(state: CheckpointState, pipeline: StreamingPipeline | None) -> dict[str, Any]:
    """Return the position of each source by its name; where the pipeline is not declared here, by its number."""
    names = [each.name for each in pipeline.sources] if pipeline is not None else []
    if len(names) != len(state.offsets):
        names = [str(number) for number in range(1, len(state.offsets) + 1)]
    return dict(zip(names, state.offsets, strict=True))


# ---------------------------------------------------------------------------------------------------------------- state


def refuse_without_state(pipeline: StreamingPipeline) -> None:
    """Raise where a pipeline has no state that other processes can read."""
    if pipeline.step is None:
        raise DeclarationError(f"{pipeline.name} has neither a window nor a join, and so no state.")
    if is_in_memory(pipeline):
        raise DeclarationError(f"The state of {pipeline.name} is in the memory of the process that runs it.")


@contextmanager
def opened_state(pipeline: StreamingPipeline) -> Iterator[tuple[SqlTables | None, str | None]]:
    """Yield the tables of a pipeline's state, `None` for files, and the id of its checkpoint's query."""
    checkpoint = Checkpoint.of(pipeline)
    connection = state_connection(pipeline, checkpoint.home)
    if connection is None:
        yield None, checkpoint.state().query_id
        return
    with closing(open_tables(connection)) as tables:
        yield tables, checkpoint.state().query_id


def state_in_files(pipeline: StreamingPipeline, query_id: str | None) -> list[StoredState]:
    """Return the state that a checkpoint has in its own files; those of others are in theirs."""
    home = Checkpoint.of(pipeline).home
    stored = None if query_id is None else files_state(home, query_id)
    last = None if stored is None else stored.last()
    if stored is None or last is None or query_id is None:
        return []
    place = files_state(home, query_id).path
    return [StoredState(pipeline.name, query_id, place, last, checkpoint_place(home), stored.counts())]


@contextmanager
def current_state(pipeline: StreamingPipeline, hint: str) -> Iterator[StateStore]:
    """Yield the state of a pipeline's checkpoint. `hint`: what makes one where there is none yet."""
    refuse_without_state(pipeline)
    with opened_state(pipeline) as (tables, query_id):
        states = state_in_files(pipeline, query_id) if tables is None else stored_states(tables, pipeline.name)
        if query_id is None or query_id not in {each.query_id for each in states}:
            raise NotFoundError(f"{pipeline.name} has no state yet.", hint=hint)
        stored: StateStore
        if tables is None:
            stored = files_state(Checkpoint.of(pipeline).home, query_id)
        else:
            stored = SqlState(tables, pipeline.name, query_id)
        stored.last()
        yield stored


def state_status(each: StoredState, query_id: str | None) -> dict[str, Any]:
    """Return how much a state holds."""
    done = -NEVER if each.batch.watermark is None else each.batch.watermark
    waiting = {end: rows for end, rows in each.counts.items() if end > done}
    return {
        "pipeline": each.pipeline,
        "of": "this checkpoint" if each.query_id == query_id else "an earlier one",
        "batch": each.batch.number,
        "watermark": None if each.batch.watermark is None else moment(each.batch.watermark),
        "windows": len(waiting),
        "rows": sum(waiting.values()),
        "oldest": moment(min(waiting)) if waiting else None,
        "query_id": each.query_id,
        "table": each.table,
    }


def states_of(pipeline: StreamingPipeline) -> list[dict[str, Any]]:
    """Return the states of a pipeline: that of its checkpoint first, then those of checkpoints before it."""
    with opened_state(pipeline) as (tables, query_id):
        if tables is None:
            states = state_in_files(pipeline, query_id)
        else:
            states = sorted(stored_states(tables, pipeline.name), key=lambda each: each.query_id != query_id)
        # A join has no windows.
        windows = {"windows": None} if pipeline.join is not None else {}
        return [{**state_status(each, query_id), **windows} for each in states]


def states_in(connection: Connection) -> list[dict[str, Any]]:
    """Return all states in a database, also those of pipelines that are declared nowhere."""
    with opened_tables(connection) as tables:
        return [{**state_status(each, None), "of": each.checkpoint} for each in stored_states(tables)]


def waiting_in(pipeline: StreamingPipeline, stored: StateStore, key: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return what waits, the oldest first: when each window begins and ends, or until when rows of a join are kept, and
    how many rows the state has of it. A session begins when it does. `key`: of one group, or of one key of a join."""
    last = stored.last()
    done = -NEVER if last is None or last.watermark is None else last.watermark
    length = None if pipeline.window is None else pipeline.window.duration_ms
    end_column = "kept_until" if pipeline.window is None else "window_end"
    wanted = _wanted(pipeline, stored, key) if key else []
    windows = []
    for end, rows in sorted(stored.counts().items()):
        if end > done and (rows := _rows_of(stored, end, wanted) if key else rows):
            start = {} if length is None else {"window_start": moment(end) - timedelta(milliseconds=length)}
            windows.append({**start, end_column: moment(end), "rows": rows})
    return windows


def _wanted(pipeline: StreamingPipeline, stored: StateStore, key: Sequence[str]) -> list[dict[str, pa.Scalar]]:
    """Return the values that rows of a key have: of a join, those of each side that can have it."""
    if pipeline.join is not None:
        names = [[prefix + name for name in keys] for _, keys, _, prefix in pipeline.join.sides]
    else:
        assert pipeline.window is not None
        names = [list(pipeline.window.group_by)]
    if len(key) != len(names[0]):
        raise DeclarationError(
            f"The key of {pipeline.name} has {len(names[0])} columns, not {len(key)}: {', '.join(names[0]) or 'none'}.",
            hint="Give a --key for each, in this order.",
        )
    schema, wanted, why = stored.schema(), [], ""
    for columns in names:
        if schema is None or not {*columns} <= {*schema.names}:
            continue  # that side has had no rows
        try:
            texts = zip(columns, key, strict=True)
            wanted.append({name: pa.scalar(text).cast(schema.field(name).type) for name, text in texts})
        except pa.ArrowInvalid as error:
            why = f"{', '.join(columns)}: {error}"
    if not wanted and why:
        raise DeclarationError(f"No row of {pipeline.name} has such a key: {why}.")
    return wanted


def _rows_of(stored: StateStore, end: int, wanted: Sequence[dict[str, pa.Scalar]]) -> int:
    rows, count = stored.read(Selection(ends=(end,))), 0  # an end at a time: a process need not hold them all
    for values in wanted:
        matching = rows
        for name, value in values.items():
            matching = matching.filter(pc.equal(matching[name], value))
        count += len(matching)
    return count


def watermark_status(pipeline: StreamingPipeline, stored: StateStore) -> dict[str, Any]:
    """Return why the next window has not closed, or why rows of a join still wait: how far each source has come, and
    which one holds the watermark."""
    last, ends = stored.last(), sorted(stored.counts())
    assert last is not None
    lateness = (pipeline.watermark or Watermark()).lateness_ms * 1000
    sources: dict[str, int | None] = {name.replace(PARTITION, " "): newest for name, newest in last.sources.items()}
    for each in pipeline.sources:
        if not any(name.partition(PARTITION)[0] == each.name for name in last.sources):
            sources[each.name] = None
    waiting = [end for end in ends if last.watermark is None or end > last.watermark]
    missing = [name for name, newest in sources.items() if newest is None]
    known = {name: newest for name, newest in sources.items() if newest is not None}
    # One that is behind the watermark was idle, and does not count.
    counts = {
        name: newest for name, newest in known.items() if newest - lateness >= (last.watermark or -NEVER)
    } or known
    holds = missing if last.watermark is None and missing else [min(counts, key=lambda name: counts[name])]
    return {
        "pipeline": pipeline.name,
        "watermark": None if last.watermark is None else moment(last.watermark),
        "next_window_ends": moment(waiting[0]) if waiting else None,
        "held_by": holds,
        "sources": {name: None if newest is None else moment(newest) for name, newest in sources.items()},
        "lateness_ms": lateness // 1000,
    }


def moment(microseconds: int) -> datetime:
    """Return the time that a watermark stands for, or the first one there is: it can be before the year 1."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=max(microseconds, _FIRST_MOMENT))
