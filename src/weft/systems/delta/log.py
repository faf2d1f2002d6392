"""The log of a Delta table, read without Spark: which columns the table has, and what a writer of loads keeps in it.

A load names itself in its commit (`txn`), and what it keeps is in the information about that commit (`commitInfo`).
Delta removes commits that are older than a month once a checkpoint has what they say, without such information.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq

from weft.systems.delta.table import writer
from weft.systems.load import Load
from weft.systems.objects.paths import LogFiles
from weft.systems.target import Kept

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\.[\w.-]+)?\.parquet")


def label_of(load: Load) -> str:
    """Return a text for the information about the commit of a load, which no other one has."""
    named = {"weft": str(uuid4())}
    return json.dumps(named if load.state is None else {**named, "state": load.state})


def kept(files: LogFiles, path: str, load: Load, *, with_columns: bool) -> Kept | None:
    """Return what the log of the table at a path says; `None` where there is no table."""
    log = f"{path}/_delta_log"
    names = files.files_in(log)
    commits = sorted((int(found[1]) for found in map(_COMMIT.fullmatch, names) if found), reverse=True)
    checkpoint = max((found[1] for found in map(_CHECKPOINT.fullmatch, names) if found), default=None)
    if not commits:
        return None
    columns: str | None = None
    last: tuple[int, str | None, datetime | None] | None = None
    forgotten = -1
    for version in commits:
        if checkpoint is not None and version <= int(checkpoint):
            # What is older than it is looked through only for the commit that it knows to be there.
            in_checkpoint, batch = _in_checkpoint(files, log, sorted(names), checkpoint, load)
            columns, checkpoint = columns or in_checkpoint, None
            last = last or (None if batch >= 0 else (-1, None, None))
            forgotten = batch
        if last is not None and (columns is not None or not with_columns):
            break
        info: dict[str, Any] = {}
        batch = -1
        for action in _actions(files.read(f"{log}/{version:020}.json")):
            columns = columns or (action.get("metaData") or {}).get("schemaString")
            info = action.get("commitInfo") or info
            mark = action.get("txn") or {}
            batch = int(mark["version"]) if mark.get("appId") == writer(load) else batch
        if last is None and batch >= 0:
            moment = datetime.fromtimestamp(int(info.get("timestamp", 0)) / 1000, UTC)
            last = batch, _state(info.get("userMetadata")), moment
    return Kept(commits[0], columns, None, *(last or (forgotten, None, None)))


def _actions(data: bytes | None) -> Iterator[dict[str, Any]]:
    return map(json.loads, (data or b"").splitlines())


def _state(text: str | None) -> str | None:
    try:
        state = json.loads(text or "null")["state"]
    except (ValueError, TypeError, KeyError):  # what somebody else wrote there
        return None
    return str(state)


def _in_checkpoint(files: LogFiles, log: str, names: list[str], version: str, load: Load) -> tuple[str | None, int]:
    """Return the columns that a checkpoint has, and the last batch of the load's writer."""
    columns, batch = None, -1
    for name in names:
        if not name.startswith(f"{version}.checkpoint"):
            continue
        file = pq.ParquetFile(io.BytesIO(files.read(f"{log}/{name}") or b""))
        found = file.read(columns=["metaData.schemaString", "txn.appId", "txn.version"])
        for row in found.to_pylist():
            columns = (row["metaData"] or {}).get("schemaString") or columns
            if (row["txn"] or {}).get("appId") == writer(load):
                batch = int(row["txn"]["version"])
    return columns, batch
