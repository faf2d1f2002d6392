"""Where the state of a streaming pipeline is, and the batches of one that has windows."""

from __future__ import annotations

from weft.engine.readers import open_tables
from weft.errors import DeclarationError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import build_connection, current
from weft.spark_support.folder import LocalFolder, Location
from weft.systems.base import Connection, system_for
from weft.systems.sql.state_store import SqlState
from weft.systems.state_store import InMemoryState, StateStore

_FILE = "state.sqlite"


def open_state(pipeline: StreamingPipeline, query_id: str, home: Location) -> StateStore:
    """Open the state of a pipeline's checkpoint, which is at `home`."""
    if pipeline.state_store is not None and pipeline.state_store.is_in_memory:
        return InMemoryState()
    return SqlState(open_tables(state_connection(pipeline, home)), pipeline.name, query_id)


def state_connection(pipeline: StreamingPipeline, home: Location) -> Connection:
    """Return where the state is: where the pipeline says, in the database of its first table, else in a file of the
    checkpoint."""
    if pipeline.state_store is not None:
        return current().connection(pipeline.state_store.connection)
    for target in pipeline.targets:
        connection = current().connection(target.connection)
        if target.table is not None and system_for(connection.kind).tables is not None:
            return connection
    if isinstance(home.folder, LocalFolder):
        return build_connection(None, {"url": f"sqlite:///{home.path}/{_FILE}"}, pipeline.name)
    raise DeclarationError(
        f"{pipeline.name} has a window, and neither a target nor state_store is a database that can keep it.",
        hint='Name one: state_store=weft.StateStore(kind="postgres", url="postgres://…").',
    )
