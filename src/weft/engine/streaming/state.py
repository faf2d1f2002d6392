"""Where the state of a streaming pipeline is."""

from __future__ import annotations

import socket

from weft.engine.readers import open_tables
from weft.engine.streaming.checkpoint_files import StatePlace
from weft.engine.streaming.files_state import FilesState
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import IN_FILES, IN_MEMORY
from weft.project import current
from weft.spark_support.folder import LocalFolder, Location
from weft.systems.base import Connection, system_for, system_for_url
from weft.systems.remembered_state import RememberedState
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import StateStore

_FILE, _FOLDER = "state.sqlite", "state"


def is_in_memory(pipeline: StreamingPipeline) -> bool:
    """Return whether the state is in the memory of the process that runs the pipeline."""
    return pipeline.state_store is not None and pipeline.state_store.place == IN_MEMORY


def open_state(pipeline: StreamingPipeline, query_id: str, home: Location) -> StateStore:
    """Open the state of a pipeline's checkpoint, which is at `home`."""
    if is_in_memory(pipeline):
        return InMemoryState()
    connection = state_connection(pipeline, home)
    if connection is None:
        StatePlace(home).settle(pipeline.name, query_id, _FOLDER)
        return files_state(home, query_id)
    # The state beside a checkpoint moves with it.
    shown = _FILE if _is_beside(connection, home) else f"{connection.kind} {connection.target}"
    StatePlace(home).settle(pipeline.name, query_id, shown)
    return RememberedState(SqlState(open_tables(connection), pipeline.name, query_id, checkpoint_place(home)))


def files_state(home: Location, query_id: str) -> FilesState:
    """Return the state in the files of a checkpoint."""
    return FilesState(home.at(f"{_FOLDER}/{query_id}"))


def checkpoint_place(home: Location) -> str:
    """Return which checkpoint it is, of those that several machines keep in one database."""
    return f"{socket.gethostname()}:{home.path}" if isinstance(home.folder, LocalFolder) else home.path


def state_connection(pipeline: StreamingPipeline, home: Location) -> Connection | None:
    """Return where the state is: where the pipeline says, in the database of its first table, else in a database of the
    checkpoint; `None` for files of the checkpoint, where that is no folder of this machine, or the pipeline says so."""
    if pipeline.state_store is not None and pipeline.state_store.place == IN_FILES:
        return None
    if pipeline.state_store is not None:
        return current().connection(pipeline.state_store.connection)
    for target in pipeline.targets:
        connection = current().connection(target.connection)
        if target.table is not None and system_for(connection.kind).tables is not None:
            return connection
    if isinstance(home.folder, LocalFolder):
        embedded = system_for_url("sqlite://").load_connection()
        return embedded.from_fields({"path": f"{home.path}/{_FILE}"}, name=None)
    return None


def _is_beside(connection: Connection, home: Location) -> bool:
    return getattr(connection, "path", None) == f"{home.path}/{_FILE}"
